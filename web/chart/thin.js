// What of a long course is drawn: of every stretch the lowest and the highest value of each series, so that no outlier is lost.

/**
 * Indices to draw of `x`, ascending: the ends, and of each stretch of `width` steps and of each column where its lowest and its
 * highest value stand. The stretches lie on a fixed grid: a window that moves over it finds the same points again, so they are
 * looked for once a width.
 */
export function extremes(x, columns, width) {
  const marks = new Uint8Array(x.length);
  marks[0] = marks[x.length - 1] = 1;
  for (const column of columns) {
    let [end, lowest, highest] = [-Infinity, -1, -1];
    for (let index = 0; index < x.length; index++) {
      const value = column[index];
      if (value !== value) continue;
      if (x[index] >= end) {
        if (lowest >= 0) marks[lowest] = marks[highest] = 1;
        lowest = highest = index;
        end = (Math.floor(x[index] / width) + 1) * width;
      } else if (value < column[lowest]) lowest = index;
      else if (value > column[highest]) highest = index;
    }
    if (lowest >= 0) marks[lowest] = marks[highest] = 1;
  }
  return Int32Array.from(marks.keys()).filter((index) => marks[index]);
}

/** Of ascending `indices` into `x` those from `min` to `max`, with a neighbour beyond each end. */
export function within(indices, x, min, max) {
  const below = (value) => {
    let [low, high] = [0, indices.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (x[indices[middle]] < value) low = middle + 1;
      else high = middle;
    }
    return low;
  };
  return indices.subarray(Math.max(0, below(min) - 1), below(max) + 2);
}
