// A run: where it stands, what the doctor says, its charts.
import { html } from "../core/ui.js";
import { useSignal } from "../core/signal.js";
import { number } from "../core/format.js";
import { JobPage } from "../parts/job-page.js";

export default function RunView({ params }) {
  return html`<${JobPage} id=${params.id} tab="">${(run, job) => html`<${Latest} run=${run} />`}</${JobPage}>`;
}

function Latest({ run }) {
  useSignal(run.metrics);
  const keys = ["reward", "kl", "entropy", "loss"];
  return html`<dl class="stats">${keys.map((key) => html`<div key=${key}><dt>${key}</dt><dd>${number(run.table.last(key))}</dd></div>`)}</dl>`;
}
