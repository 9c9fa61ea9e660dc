// All jobs: state, course, change of the reward, time to go, device.
import { ago, duration, signed } from "../core/format.js";
import { useLoad } from "../core/load.js";
import { get } from "../core/api.js";
import { hrefOf, useFilters } from "../core/router.js";
import { html } from "../core/ui.js";
import { Empty } from "../parts/empty.js";
import { ProblemBox } from "../parts/problem.js";
import { doing, Progress, State } from "../parts/state.js";

const STATES = ["queued", "running", "paused", "succeeded", "failed", "cancelled"];

export default function Jobs() {
  const [{ state, model }, set] = useFilters();
  const { data, error, loading, reload } = useLoad((signal) => get("/jobs", { state, model, limit: 50 }, signal), [state, model], { every: 3000 });
  if (error && !data) return html`<h1>Jobs</h1><${ProblemBox} error=${error} retry=${reload} />`;
  if (!data) return html`<h1>Jobs</h1><div class="loading" aria-busy=${loading}>Loading…</div>`;
  return html`<div class="row between wrap"><h1>Jobs</h1>
      <label class="inline">State <select value=${state ?? ""} onChange=${(event) => set({ state: event.target.value })}>
        <option value="">all</option>${STATES.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label></div>
    ${data.data.length ? html`<${Table} jobs=${data.data} />` : html`<${Empty} title="No jobs yet"><p>Start with <a href="#/new">a new job</a>.</p></${Empty}>`}`;
}

function Table({ jobs }) {
  return html`<div class="scroll"><table class="list">
    <thead><tr><th scope="col">Job</th><th scope="col">State</th><th scope="col">Steps</th><th scope="col">To go</th><th scope="col">Submitted</th></tr></thead>
    <tbody>${jobs.map((job) => html`<tr key=${job.id}>
      <th scope="row"><a href=${hrefOf(`/jobs/${job.id}`)}>${job.name ?? job.id}</a><div class="dim small">${job.plan.model.id}</div></th>
      <td><${State} job=${job} /><div class="dim small">${doing(job)}</div></td>
      <td><${Progress} job=${job} /></td>
      <td class="num">${job.state === "running" ? duration(job.eta_s) : "–"}</td>
      <td>${ago(job.created_at)}</td>
    </tr>`)}</tbody></table></div>`;
}
