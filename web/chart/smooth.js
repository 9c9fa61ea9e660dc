// Exponential moving average over steps, with the bias of its beginning taken out. Its weight falls per step, not per value, so
// that a thinned-out course is smoothed like the whole one.

/** `strength` in [0, 1): 0 = as it is. `x` ascending; NaN in `y` = no value. */
export function smoothed(x, y, strength) {
  const out = new Float64Array(y.length).fill(NaN);
  let [sum, weight, before] = [0, 0, NaN];
  for (let index = 0; index < y.length; index++) {
    const value = y[index];
    if (value !== value) continue;
    const decay = before === before ? strength ** (x[index] - before) : 0;
    sum = sum * decay + value * (1 - strength);
    weight = weight * decay + (1 - strength);
    out[index] = sum / weight;
    before = x[index];
  }
  return out;
}
