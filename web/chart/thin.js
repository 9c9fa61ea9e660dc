// What of a long course is drawn: of every stretch the lowest and the highest value of each series, so that no outlier is lost.

import { lowerBound } from "../core/search.js";

/**
 * Indices to draw of `x` from `min` to `max`, ascending, with a neighbour beyond each end: of each of about `buckets` stretches
 * and of each column where its lowest and its highest value stand. The stretches lie on a fixed grid, so that a moving window
 * chooses the same points again. Everything, if that is not more.
 */
export function kept(x, columns, min, max, buckets) {
  const begin = Math.max(0, lowerBound(x, min) - 1);
  const end = Math.min(x.length, lowerBound(x, max) + 2);
  if (end - begin <= buckets * 2) return Int32Array.from({ length: end - begin }, (_, index) => begin + index);
  const width = (max - min) / buckets || 1;
  const marks = new Uint8Array(end - begin);
  marks[0] = marks[end - begin - 1] = 1;
  for (const column of columns) {
    let [bucket, lowest, highest] = [NaN, -1, -1];
    const flush = () => {
      if (lowest >= 0) marks[lowest - begin] = marks[highest - begin] = 1;
      lowest = highest = -1;
    };
    for (let index = begin; index < end; index++) {
      const value = column[index];
      if (value !== value) continue;
      const here = Math.floor(x[index] / width);
      if (here !== bucket) {
        flush();
        bucket = here;
      }
      if (lowest < 0 || value < column[lowest]) lowest = index;
      if (highest < 0 || value > column[highest]) highest = index;
    }
    flush();
  }
  let count = 0;
  for (let index = 0; index < marks.length; index++) count += marks[index];
  const indices = new Int32Array(count);
  for (let index = 0, next = 0; index < marks.length; index++) if (marks[index]) indices[next++] = begin + index;
  return indices;
}
