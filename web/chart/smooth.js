// Exponential moving average over steps, corrected for the bias of its start. The weight decays per step, not per value, so that a
// downsampled series is smoothed like the full one.

/** Smooths `y` over the ascending steps `x`. `strength` is from 0 (unchanged) to less than 1. NaN in `y` marks a missing value. */
export function smooth(x, y, strength) {
  const out = new Float64Array(y.length).fill(NaN);
  let [sum, weight, previous] = [0, 0, NaN];
  for (let index = 0; index < y.length; index++) {
    const value = y[index];
    if (value !== value) continue;
    const decay = previous === previous ? strength ** (x[index] - previous) : 0;
    sum = sum * decay + value * (1 - strength);
    weight = weight * decay + (1 - strength);
    out[index] = sum / weight;
    previous = x[index];
  }
  return out;
}
