// Where a job stands: a shape and a word, so that colour is never the only sign.
import { words } from "../core/format.js";
import { cls, html } from "../core/ui.js";

const GLYPHS = { queued: "◌", running: "▶", paused: "Ⅱ", succeeded: "✓", failed: "✕", cancelled: "–" };

export const isOver = (job) => ["succeeded", "failed", "cancelled"].includes(job.state);

export function State({ job }) {
  const word = job.requested ? `${job.requested === "cancel" ? "cancelling" : "pausing"}` : job.state;
  return html`<span class=${cls("state", job.state)}><span aria-hidden="true">${GLYPHS[job.state]}</span> ${word}</span>`;
}

/** What it does right now, in words: "Rollout", "3rd in the queue", "Reward outage". */
export function doing(job) {
  if (job.status_reason === "model_downloading") return "Waiting: its model is being downloaded";
  if (job.status_reason === "server_error") return "Waiting: the server could not start it; it tries again";
  if (job.state === "queued") return job.queue_position ? `#${job.queue_position} in the queue` : "in the queue";
  if (job.status_reason) return words(job.status_reason);
  if (job.state === "running") return words(job.phase ?? "starting");
  if (job.state === "failed") return job.failure?.message ?? "";
  if (job.ending) return words(job.ending.code);
  return "";
}

export function Progress({ job }) {
  const done = job.total_steps ? job.step / job.total_steps : 0;
  return html`<span class="progress"><progress value=${job.step} max=${job.total_steps || 1} aria-label="Steps done"></progress>
    <span class="num">${job.step} / ${job.total_steps}</span>${job.state === "running" && html`<span class="dim num"> ${Math.floor(done * 100)} %</span>`}</span>`;
}
