// The live list of jobs, with state, progress, reward, time left and device; and the welcome page of a server without jobs.
import { get, post } from "../core/api.js";
import { count, duration, number, plural, signed } from "../core/format.js";
import { EventStream } from "../core/events.js";
import { hrefOf, navigate, useFilters } from "../core/router.js";
import { hasScope } from "../core/session.js";
import { Signal, useSignal } from "../core/signal.js";
import { html, useEffect, useMemo, useState } from "../core/ui.js";
import { useAction } from "../core/action.js";
import { Loading, ProblemBox } from "../parts/problem.js";
import { Spark } from "../parts/spark.js";
import { describeActivity, Progress, State } from "../parts/state.js";
import { Select } from "../parts/switch.js";
import { Ago } from "../parts/text.js";

const STATES = ["queued", "running", "paused", "succeeded", "failed", "cancelled"];
const PAGE_SIZE = 50;
/** Number of jobs that are loaded at first, and by each press of "Show more jobs". */
const LOAD_SIZE = 200;
const MAX_COMPARED = 8;
/** Time between updates of the sparklines of running jobs, in ms. */
const SPARKLINE_INTERVAL_MS = 2000;

/** The list of jobs: loaded page by page, then kept up to date by a stream of changes. */
class JobList {
  jobs = new Signal(null);
  /** Sparklines by job id. */
  sparklines = new Signal(new Map());
  error = new Signal(null);
  next = new Signal(null);
  limit = LOAD_SIZE;
  #abort = null;
  #timer = 0;
  /** The step of each job when its sparkline was loaded. */
  #steps = new Map();

  constructor(filter) {
    this.filter = filter;
    this.load();
    let opened = 0;
    // The stream does not replay changes that happened while it was disconnected, so a reconnect loads the list again.
    this.stream = new EventStream("/jobs/changes", { onEvent: (event) => this.#handleEvent(event), onOpen: () => opened++ && this.load() });
  }

  stop() {
    this.#abort?.abort();
    clearTimeout(this.#timer);
    this.stream.stop();
  }

  async load() {
    this.#abort?.abort();
    const { signal } = (this.#abort = new AbortController());
    try {
      let loaded = [];
      let after;
      do {
        const page = await get("/jobs", { ...this.filter, limit: PAGE_SIZE, after }, signal);
        loaded = [...loaded, ...page.data];
        after = page.next;
        // The first load shows each page as it arrives. A reload must not shorten the list while its pages arrive.
        if (loaded.length >= (this.jobs.value?.length ?? 0) || !after) this.jobs.set(loaded);
        this.next.set(after);
        this.#scheduleSparklines(0);
      } while (after && loaded.length < this.limit);
      this.error.set(null);
    } catch (error) {
      if (signal.aborted) return;
      this.error.set(error);
      if (error.retryable) setTimeout(() => signal.aborted || this.load(), 2000);
    }
  }

  loadMore() {
    this.limit += LOAD_SIZE;
    this.load();
  }

  #handleEvent({ type, data }) {
    if (type === "reload") this.load();
    const jobs = this.jobs.value;
    if (!jobs) return;
    if (type === "gone") this.jobs.set(jobs.filter(({ id }) => id !== data.id));
    if (type === "job") this.#updateJob(jobs, data);
  }

  #updateJob(jobs, job) {
    const { state, model } = this.filter;
    const matches = (!state || job.state === state) && (!model || job.plan.model.id === model);
    const index = jobs.findIndex(({ id }) => id === job.id);
    if (index >= 0) this.jobs.set(matches ? jobs.with(index, job) : jobs.toSpliced(index, 1));
    else if (matches) this.jobs.set([job, ...jobs].sort((a, b) => (a.created_at < b.created_at ? 1 : -1)));
    this.#scheduleSparklines(SPARKLINE_INTERVAL_MS);
  }

  /** Loads, after `ms`, the sparklines of jobs that have taken a step since theirs was loaded. */
  #scheduleSparklines(ms) {
    if (this.#timer) return;
    this.#timer = setTimeout(async () => {
      const stale = this.jobs.value.filter(({ id, step }) => step > 0 && this.#steps.get(id) !== step).slice(0, PAGE_SIZE);
      try {
        if (stale.length) {
          const { data } = await get("/jobs/courses", { ids: stale.map(({ id }) => id).join(",") });
          const sparklines = new Map(this.sparklines.value);
          for (const sparkline of data) sparklines.set(sparkline.id, sparkline);
          for (const { id, step } of stale) this.#steps.set(id, step);
          this.sparklines.set(sparklines);
        }
      } catch {
        // The steps are not recorded, so these jobs stay stale: the next change of any job retries them.
      }
      this.#timer = 0;
      if (stale.length === PAGE_SIZE) this.#scheduleSparklines(0);
    }, ms);
  }
}

export default function Jobs() {
  const [{ state, model, q }, set] = useFilters();
  const list = useMemo(() => new JobList({ state, model }), [state, model]);
  useEffect(() => () => list.stop(), [list]);
  const jobs = useSignal(list.jobs);
  const error = useSignal(list.error);
  const next = useSignal(list.next);
  const connection = useSignal(list.stream.state);
  const [chosen, setChosen] = useState([]);
  if (!jobs) return html`<h1>Jobs</h1><${Loading} error=${error} retry=${() => list.load()} />`;
  if (!jobs.length && !state && !model) return html`<${Welcome} />`;
  const text = (q ?? "").toLowerCase();
  const shown = text ? jobs.filter(({ id, name, plan }) => `${id} ${name ?? ""} ${plan.model.id}`.toLowerCase().includes(text)) : jobs;
  return html`<div class="row between wrap"><h1>Jobs <span class="dim small num">${next ? `${count(shown.length)}+ jobs` : plural(shown.length, "job")}</span></h1>
      <div class="filters">
        <input type="search" aria-label="Search jobs by name, ID or model" placeholder="Name, ID or model" value=${q ?? ""} onInput=${(event) => set({ q: event.target.value })} />
        <label class="inline">State <${Select} value=${state ?? ""} options=${[["", "all"], ...STATES.map((name) => [name, name])]} set=${(state) => set({ state })} /></label>
        ${model && html`<button aria-label=${`Remove the filter for the model ${model}`} onClick=${() => set({ model: null })}>${model} ✕</button>`}
        <button disabled=${chosen.length < 2} onClick=${() => navigate("/compare", { ids: chosen.join(",") })}>Compare${chosen.length ? ` ${chosen.length}` : ""}</button>
      </div></div>
    ${connection === "lost" && html`<p class="warn" data-connection="lost">Connection lost. Reconnecting… This list may be out of date.</p>`}
    <${ProblemBox} error=${error} />
    ${shown.length ? html`<${JobTable} list=${list} jobs=${shown} chosen=${chosen} setChosen=${setChosen} setModel=${(model) => set({ model })} />` : html`<p class="empty">No matching jobs.</p>`}
    ${next && html`<p class="more"><button onClick=${() => list.loadMore()}>Show more jobs</button></p>`}`;
}

function JobTable({ list, jobs, chosen, setChosen, setModel }) {
  const sparklines = useSignal(list.sparklines);
  const toggle = (id) => setChosen(chosen.includes(id) ? chosen.filter((one) => one !== id) : [...chosen, id].slice(-MAX_COMPARED));
  return html`<div class="scroll"><table class="list cards">
    <thead><tr><td><span class="unseen">Compare</span></td><th scope="col">Job</th><th scope="col">State</th><th scope="col">Steps</th><th scope="col">Reward</th>
      <th scope="col" class="num">Latest</th><th scope="col" class="num">Change</th><th scope="col" class="num">Time left</th><th scope="col">Device</th><th scope="col">Submitted</th></tr></thead>
    <tbody>${jobs.map((job) => html`<${JobRow} key=${job.id} job=${job} sparkline=${sparklines.get(job.id)} isChosen=${chosen.includes(job.id)} toggle=${toggle} setModel=${setModel} />`)}</tbody>
  </table></div>`;
}

function JobRow({ job, sparkline, isChosen, toggle, setModel }) {
  const change = sparkline && sparkline.first !== null ? sparkline.last - sparkline.first : null;
  const alerts = job.alerts.length;
  const name = job.name ?? job.id;
  return html`<tr>
    <td class="tick"><input type="checkbox" aria-label=${`Compare ${name}`} checked=${isChosen} onChange=${() => toggle(job.id)} /></td>
    <th scope="row"><a href=${hrefOf(`/jobs/${job.id}`)}>${name}</a>${alerts > 0 && html` <span class="flag" title=${job.alerts.map(({ rule }) => rule).join(", ")}>! ${plural(alerts, "alert")}</span>`}
      <div><button class="link dim small" title="Show only jobs with this model" onClick=${() => setModel(job.plan.model.id)}>${job.plan.model.id}</button></div></th>
    <td><${State} job=${job} /><div class="dim small clip" title=${describeActivity(job)}>${describeActivity(job)}</div></td>
    <td><${Progress} job=${job} /></td>
    <td>${sparkline?.points.length > 1 ? html`<${Spark} points=${sparkline.points} label=${`Reward from ${number(sparkline.first, 3)} to ${number(sparkline.last, 3)}`} />` : html`<span class="dim">–</span>`}</td>
    <td class="num" data-label="Reward">${number(sparkline?.last, 3)}</td>
    <td class="num" data-label="Change">${signed(change)}</td>
    <td class="num" data-label="Time left">${job.state === "running" ? duration(job.eta_s) : html`<span class="dim">–</span>`}</td>
    <td data-label="Device">${job.device ?? html`<span class="dim">–</span>`}</td>
    <td data-label="Submitted"><${Ago} time=${job.created_at} /></td>
  </tr>`;
}

/** The page of a server without jobs. */
function Welcome() {
  const { busy, error, run } = useAction();
  const startDemo = () => run(async () => navigate(`/jobs/${(await post("/demo")).id}`));
  return html`<div class="welcome">
    <h1>No jobs yet</h1>
    <p>rlood samples completions from a language model, scores them with your rewards, and trains the model with RLOO: a completion is reinforced if its reward is above the mean of the other completions for the same prompt.</p>
    <div class="welcome-options">
      <section class="panel"><h2>Run the demo</h2><p>A tiny model that ships with the server learns to add and subtract. This takes less than a minute on a CPU and needs no setup.</p>
        ${hasScope("submit") ? html`<button class="primary" disabled=${busy} onClick=${startDemo}>${busy ? "Starting…" : "Run the demo job"}</button>` : html`<p class="dim">Your API key is read-only. To run jobs, sign in with a key that has the <code>submit</code> scope.</p>`}</section>
      <section class="panel"><h2>Train your model</h2><p>Choose a model, a dataset of prompts, and one or more rewards: built-in rewards or your own web service.</p>
        <p class="row">${hasScope("submit") && html`<a class="button" href="#/new">New job</a> `}<a href="/docs/">API reference</a></p></section>
    </div>
    <${ProblemBox} error=${error} />
  </div>`;
}
