// Downsampling of long series: each interval keeps the lowest and the highest value of every series, so that no outlier is lost.

/**
 * Returns the indices of `x` to draw, in ascending order: both ends, and for each interval of `width` steps the minimum and maximum of
 * each column. Intervals start at multiples of `width`, so that moving the range does not change the result, which can be cached.
 */
export function extremeIndices(x, columns, width) {
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

/** Selects from the ascending `indices` those whose `x` is between `min` and `max`, and one more at each end. */
export function indicesWithin(indices, x, min, max) {
  const countBelow = (value) => {
    let [low, high] = [0, indices.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (x[indices[middle]] < value) low = middle + 1;
      else high = middle;
    }
    return low;
  };
  return indices.subarray(Math.max(0, countBelow(min) - 1), countBelow(max) + 2);
}
