// The state of a job, as a symbol and a word, so that color is never the only sign.
import { sentenceCase } from "../core/format.js";
import { cls, html } from "../core/ui.js";

const GLYPHS = { queued: "◌", running: "▶", paused: "Ⅱ", succeeded: "✓", failed: "✕", cancelled: "–" };

export const isOver = (job) => ["succeeded", "failed", "cancelled"].includes(job.state);

export function State({ job }) {
  const text = job.requested ? `${job.requested === "cancel" ? "cancelling" : "pausing"}` : job.state;
  return html`<span class=${cls("state", job.state)}><span aria-hidden="true">${GLYPHS[job.state]}</span> ${text}</span>`;
}

/** Describes what a job is doing: "Rollout", "#3 in the queue", "Reward outage". */
export function describeActivity(job) {
  const [, part] = job.status_reason?.match(/^(model|dataset)_downloading$/) ?? [];
  if (part) return `Waiting for the ${part} download`;
  if (job.status_reason === "server_error") return "Waiting: the server could not start the job and will retry";
  if (job.state === "queued") return job.queue_position ? `#${job.queue_position} in the queue` : "in the queue";
  if (job.status_reason) return sentenceCase(job.status_reason);
  if (job.state === "running") return sentenceCase(job.phase ?? "starting");
  if (job.state === "failed") return job.failure?.message ?? "";
  if (job.ending) return sentenceCase(job.ending.code);
  return "";
}

export function Progress({ job }) {
  const done = job.total_steps ? job.step / job.total_steps : 0;
  return html`<span class="progress"><progress value=${job.step} max=${job.total_steps || 1} aria-label="Steps done"></progress>
    <span class="num">${job.step} / ${job.total_steps}</span>${job.state === "running" && html`<span class="dim num"> ${Math.floor(done * 100)}%</span>`}</span>`;
}
