// A sparkline. The numbers next to it carry the same information as text.
import { html } from "../core/ui.js";

const SPARK_WIDTH = 96;
const SPARK_HEIGHT = 22;

/** A sparkline of `points`, `[[step, value | null]]`. */
export function Spark({ points, label }) {
  const known = points.filter(([, value]) => typeof value === "number");
  if (known.length < 2) return html`<span class="dim">–</span>`;
  const [first, last] = [known[0][0], known.at(-1)[0]];
  const values = known.map(([, value]) => value);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const x = (step) => (1 + ((step - first) / (last - first || 1)) * (SPARK_WIDTH - 4)).toFixed(1);
  const y = (value) => (SPARK_HEIGHT - 2 - ((value - low) / (high - low || 1)) * (SPARK_HEIGHT - 4)).toFixed(1);
  const path = known.map(([step, value], index) => `${index ? "L" : "M"}${x(step)} ${y(value)}`).join("");
  return html`<svg class="spark" viewBox=${`0 0 ${SPARK_WIDTH} ${SPARK_HEIGHT}`} role="img" aria-label=${label}>
    <path d=${path} /><circle cx=${x(last)} cy=${y(values.at(-1))} r="2" />
  </svg>`;
}
