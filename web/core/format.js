// Formats numbers, times and sizes for people. A missing value becomes an en dash.

export const NONE = "–";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** Formats a number with `digits` significant digits: 0.1234, 12.35, 1.2e-5. */
export function number(value, digits = 4) {
  if (!isNumber(value)) return NONE;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(Math.max(0, digits - 2)).replace("e+", "e");
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return String(Number(value.toPrecision(size >= 1000 ? 6 : digits)));
}

/** Formats a number with its sign: +0.25, −0.1, ±0. */
export const signed = (value, digits = 3) =>
  isNumber(value) ? `${value > 0 ? "+" : value < 0 ? "−" : "±"}${number(Math.abs(value), digits)}` : NONE;

export const percent = (value, digits = 0) => (isNumber(value) ? `${(value * 100).toFixed(digits)}%` : NONE);

export const count = (value) => (isNumber(value) ? value.toLocaleString("en-US") : NONE);

/** Formats a time span: 45 s, 3 min 20 s, 2 h 05 min, 3 d 4 h. */
export function duration(seconds) {
  if (!isNumber(seconds)) return NONE;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${Number(seconds.toFixed(1))} s`;
  const s = Math.round(seconds);
  const pad = (value) => String(value).padStart(2, "0");
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${pad(s % 60)} s`;
  if (s < 86_400) return `${Math.floor(s / 3600)} h ${pad(Math.floor((s % 3600) / 60))} min`;
  return `${Math.floor(s / 86_400)} d ${Math.floor((s % 86_400) / 3600)} h`;
}

/** Formats a size in bytes: 12 KiB, 3.4 GiB. */
export function bytes(value) {
  if (!isNumber(value)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  let size = value;
  while (size >= 1024 && unit < units.length - 1) (size /= 1024), unit++;
  return `${unit && size < 10 ? size.toFixed(1) : Math.round(size)} ${units[unit]}`;
}

/** Formats the age of a time: just now, 5 min ago, 3 h ago; after 30 days, the date. */
export function timeAgo(time, now = Date.now()) {
  if (!time) return NONE;
  const s = (now - new Date(time)) / 1000;
  if (s < 45) return "just now";
  if (s < 3600) return `${Math.max(1, Math.round(s / 60))} min ago`;
  if (s < 86_400) return `${Math.round(s / 3600)} h ago`;
  if (s < 30 * 86_400) return `${Math.round(s / 86_400)} d ago`;
  return formatDate(time);
}

export const formatDate = (time) => (time ? new Date(time).toLocaleDateString(undefined, { year: "numeric", month: "short", day: "numeric" }) : NONE);
export const formatTime = (time) => (time ? new Date(time).toLocaleTimeString(undefined, { hour12: false }) : NONE);
export const formatDateTime = (time) => (time ? new Date(time).toLocaleString(undefined, { hour12: false }) : NONE);

/** Shortens an id to job_…x7k2p9: its first 4 and last 6 characters, since ids differ mostly at their end. */
export const shortId = (id) => (id && id.length > 14 ? `${id.slice(0, 4)}…${id.slice(-6)}` : (id ?? NONE));

const ACRONYMS = /\b(api|gpu|http|id|json|kl|llm|sft|url)\b/gi;

/** Converts a snake_case name to text: "waiting_for_reward" becomes "Waiting for reward", "kl_explosion" becomes "KL explosion". */
export function sentenceCase(text) {
  const plain = String(text ?? "").replaceAll("_", " ").replace(ACRONYMS, (acronym) => acronym.toUpperCase());
  return plain.charAt(0).toUpperCase() + plain.slice(1);
}

export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;

/** Formats how often a job saves a checkpoint: "20 steps", "20 steps or 60 seconds". */
export const checkpointInterval = ({ every_steps: steps, every_seconds: seconds }) =>
  plural(steps, "step") + (seconds ? ` or ${plural(seconds, "second")}` : "");
