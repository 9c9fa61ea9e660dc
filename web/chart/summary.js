// A text summary of a chart, for screen readers.
import { number } from "../core/format.js";

/** "Reward: 40 values from step 1 to 40, first 0.66, last 1, lowest 0.55 at step 3, highest 1 at step 38. …" */
export function summarize(title, x, series) {
  const sentences = series.map(({ label, values }) => summarizeSeries(label, x, values)).filter(Boolean);
  return sentences.length ? `${title}. ${sentences.join(" ")}` : `${title}. No values yet.`;
}

function summarizeSeries(label, x, values) {
  let [count, first, last, lowest, highest] = [0, -1, -1, -1, -1];
  for (let index = 0; index < values.length; index++) {
    if (values[index] !== values[index]) continue;
    count++;
    if (first < 0) first = lowest = highest = index;
    last = index;
    if (values[index] < values[lowest]) lowest = index;
    if (values[index] > values[highest]) highest = index;
  }
  if (!count) return "";
  if (count === 1) return `${label}: ${number(values[first])} at step ${x[first]}.`;
  return `${label}: ${count} values from step ${x[first]} to ${x[last]}, first ${number(values[first])}, last ${number(values[last])}, ` +
    `lowest ${number(values[lowest])} at step ${x[lowest]}, highest ${number(values[highest])} at step ${x[highest]}.`;
}
