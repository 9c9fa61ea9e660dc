// All jobs, live: state, progress, how the reward went, time to go, device. The first page of an empty server.
import { get, post } from "../core/api.js";
import { duration, number, plural, signed } from "../core/format.js";
import { EventStream } from "../core/events.js";
import { go, hrefOf, useFilters } from "../core/router.js";
import { may } from "../core/session.js";
import { Signal, useSignal } from "../core/signal.js";
import { html, useEffect, useMemo, useState } from "../core/ui.js";
import { useWork } from "../core/work.js";
import { Loading, ProblemBox } from "../parts/problem.js";
import { Spark } from "../parts/spark.js";
import { doing, Progress, State } from "../parts/state.js";
import { Select } from "../parts/switch.js";
import { Ago } from "../parts/text.js";

const STATES = ["queued", "running", "paused", "succeeded", "failed", "cancelled"];
const PAGE = 50;
/** More are shown when asked for. */
const AT_FIRST = 200;
const MAX_COMPARED = 8;
/** Between two looks at the courses of jobs that go on, ms. */
const COURSES_MS = 2000;

/** The list as it is now: loaded page by page, then told what changes. */
class JobList {
  jobs = new Signal(null);
  courses = new Signal(new Map());
  error = new Signal(null);
  next = new Signal(null);
  wanted = AT_FIRST;
  #abort = null;
  #timer = 0;
  #steps = new Map();

  constructor(filter) {
    this.filter = filter;
    this.load();
    let opened = 0;
    // What happened while the stream was cut stands in the list.
    this.stream = new EventStream("/jobs/changes", { onEvent: (event) => this.#take(event), onOpen: () => opened++ && this.load() });
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
      let found = [];
      let after;
      do {
        const page = await get("/jobs", { ...this.filter, limit: PAGE, after }, signal);
        found = [...found, ...page.data];
        after = page.next;
        // The first page is shown at once; later ones do not take away what is shown already.
        if (found.length >= (this.jobs.value?.length ?? 0) || !after) this.jobs.set(found);
        this.next.set(after);
        this.#look(0);
      } while (after && found.length < this.wanted);
      this.error.set(null);
    } catch (error) {
      if (signal.aborted) return;
      this.error.set(error);
      if (error.retryable) setTimeout(() => signal.aborted || this.load(), 2000);
    }
  }

  more() {
    this.wanted += AT_FIRST;
    this.load();
  }

  #take({ type, data }) {
    if (type === "reload") this.load();
    const jobs = this.jobs.value;
    if (!jobs) return;
    if (type === "gone") this.jobs.set(jobs.filter(({ id }) => id !== data.id));
    if (type === "job") this.#put(jobs, data);
  }

  #put(jobs, job) {
    const { state, model } = this.filter;
    const fits = (!state || job.state === state) && (!model || job.plan.model.id === model);
    const at = jobs.findIndex(({ id }) => id === job.id);
    if (at >= 0) this.jobs.set(fits ? jobs.with(at, job) : jobs.toSpliced(at, 1));
    else if (fits) this.jobs.set([job, ...jobs].sort((a, b) => (a.created_at < b.created_at ? 1 : -1)));
    this.#look(COURSES_MS);
  }

  /** Asks for the courses of jobs that went on since. */
  #look(ms) {
    if (this.#timer) return;
    this.#timer = setTimeout(async () => {
      const stale = this.jobs.value.filter(({ id, step }) => step > 0 && this.#steps.get(id) !== step).slice(0, PAGE);
      try {
        if (stale.length) {
          const { data } = await get("/jobs/courses", { ids: stale.map(({ id }) => id).join(",") });
          const courses = new Map(this.courses.value);
          for (const course of data) courses.set(course.id, course);
          for (const { id, step } of stale) this.#steps.set(id, step);
          this.courses.set(courses);
        }
      } catch {
        // They come with the next news.
      }
      this.#timer = 0;
      if (stale.length === PAGE) this.#look(0);
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
  const [chosen, choose] = useState([]);
  if (!jobs) return html`<h1>Jobs</h1><${Loading} error=${error} retry=${() => list.load()} />`;
  if (!jobs.length && !state && !model) return html`<${Welcome} />`;
  const text = (q ?? "").toLowerCase();
  const shown = text ? jobs.filter(({ id, name, plan }) => `${id} ${name ?? ""} ${plan.model.id}`.toLowerCase().includes(text)) : jobs;
  return html`<div class="row between wrap"><h1>Jobs <span class="dim small num">${plural(shown.length, "job")}${next ? " and more" : ""}</span></h1>
      <div class="filters">
        <input type="search" aria-label="Search jobs by name, id or model" placeholder="Name, id, model" value=${q ?? ""} onInput=${(event) => set({ q: event.target.value })} />
        <label class="inline">State <${Select} value=${state ?? ""} options=${[["", "all"], ...STATES.map((name) => [name, name])]} set=${(state) => set({ state })} /></label>
        ${model && html`<button onClick=${() => set({ model: null })}>${model} ✕</button>`}
        <button disabled=${chosen.length < 2} onClick=${() => go("/compare", { ids: chosen.join(",") })}>Compare${chosen.length ? ` ${chosen.length}` : ""}</button>
      </div></div>
    ${connection === "lost" && html`<p class="warn" data-connection="lost">Connection lost, trying again: this is how the jobs stood.</p>`}
    <${ProblemBox} error=${error} />
    ${shown.length ? html`<${JobTable} list=${list} jobs=${shown} chosen=${chosen} choose=${choose} setModel=${(model) => set({ model })} />` : html`<p class="dim">None of them.</p>`}
    ${next && html`<p><button onClick=${() => list.more()}>More jobs</button></p>`}`;
}

function JobTable({ list, jobs, chosen, choose, setModel }) {
  const courses = useSignal(list.courses);
  const toggle = (id) => choose(chosen.includes(id) ? chosen.filter((one) => one !== id) : [...chosen, id].slice(-MAX_COMPARED));
  return html`<div class="scroll"><table class="list cards">
    <thead><tr><td><span class="unseen">Compare</span></td><th scope="col">Job</th><th scope="col">State</th><th scope="col">Steps</th><th scope="col">Reward</th>
      <th scope="col" class="num">Now</th><th scope="col" class="num">Change</th><th scope="col" class="num">To go</th><th scope="col">Device</th><th scope="col">Submitted</th></tr></thead>
    <tbody>${jobs.map((job) => html`<${Row} key=${job.id} job=${job} course=${courses.get(job.id)} isChosen=${chosen.includes(job.id)} toggle=${toggle} setModel=${setModel} />`)}</tbody>
  </table></div>`;
}

function Row({ job, course, isChosen, toggle, setModel }) {
  const change = course && course.first !== null ? course.last - course.first : null;
  const alerts = job.alerts.length;
  const name = job.name ?? job.id;
  return html`<tr>
    <td class="tick"><input type="checkbox" aria-label=${`Compare ${name}`} checked=${isChosen} onChange=${() => toggle(job.id)} /></td>
    <th scope="row"><a href=${hrefOf(`/jobs/${job.id}`)}>${name}</a>${alerts > 0 && html` <span class="flag" title=${job.alerts.map(({ rule }) => rule).join(", ")}>! ${plural(alerts, "alert")}</span>`}
      <div><button class="link dim small" title="Only this model" onClick=${() => setModel(job.plan.model.id)}>${job.plan.model.id}</button></div></th>
    <td><${State} job=${job} /><div class="dim small clip" title=${doing(job)}>${doing(job)}</div></td>
    <td><${Progress} job=${job} /></td>
    <td>${course?.points.length > 1 ? html`<${Spark} points=${course.points} label=${`Reward from ${number(course.first, 3)} to ${number(course.last, 3)}`} />` : html`<span class="dim">–</span>`}</td>
    <td class="num" data-label="Reward">${number(course?.last, 3)}</td>
    <td class="num" data-label="Change">${signed(change)}</td>
    <td class="num" data-label="To go">${job.state === "running" ? duration(job.eta_s) : html`<span class="dim">–</span>`}</td>
    <td data-label="Device">${job.device ?? html`<span class="dim">–</span>`}</td>
    <td data-label="Submitted"><${Ago} time=${job.created_at} /></td>
  </tr>`;
}

/** Nothing was ever trained here. */
function Welcome() {
  const { busy, error, run } = useWork();
  const start = () => run(async () => go(`/jobs/${(await post("/demo")).id}`));
  return html`<div class="welcome">
    <h1>Nothing has been trained here yet</h1>
    <p>rlood samples completions from a model, has them scored by your rewards, and trains an adapter by RLOO: each completion is held against the others of its prompt.</p>
    <div class="welcome-ways">
      <section class="panel"><h2>See it work</h2><p>A tiny model that comes with the server learns to add and subtract. Less than a minute on a CPU; nothing to prepare.</p>
        ${may("submit") ? html`<button class="primary" disabled=${busy} onClick=${start}>${busy ? "Starting…" : "Run the demo job"}</button>` : html`<p class="dim">Your key may only read.</p>`}</section>
      <section class="panel"><h2>Train your own</h2><p>A model on this server, prompts as a file, and one or more rewards: a web service of yours, or built-in ones.</p>
        <p class="row"><a class="button" href="#/new">New job</a> <a href="/docs/">API</a></p></section>
    </div>
    <${ProblemBox} error=${error} />
  </div>`;
}
