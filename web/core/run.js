// One job that is followed: the job itself, its metrics, its events. Several components may look at the same run.
import { all, get } from "./api.js";
import { EventStream } from "./events.js";
import { useLoad } from "./load.js";
import { lowerBound } from "./search.js";
import { Signal, useSignal } from "./signal.js";
import { MetricTable } from "./table.js";
import { useEffect, useState } from "./ui.js";

/** Steps of the overview; more are thinned out by the server, which keeps every stretch's lowest and highest values. */
const OVERVIEW_POINTS = 4000;
/** Between the first news and the request that asks for all of it, ms. */
const GATHER_MS = 150;
/** A run that nobody looks at any more is followed for this long, ms: tabs of one job share it. */
const LINGER_MS = 5000;
/** A job that is over is looked at this often, ms: it may be deleted. */
const LOOK_MS = 10_000;
/** Events that are kept for the logs. */
const KEPT_EVENTS = 500;

const runs = new Map();

class Run {
  users = 0;
  /** The job as the API shows it; null before the first answer. */
  job = new Signal(null);
  /** All metrics by step. */
  table = new MetricTable();
  /** Changes with the table. */
  metrics = new Signal(0);
  /** The latest events, oldest first. */
  events = new Signal([]);
  alerts = new Signal([]);
  error = new Signal(null);
  /** It was deleted while it was looked at. */
  isGone = new Signal(false);
  connection = new Signal("connecting");
  #stream = null;
  #look = 0;
  #pending = { job: false, alerts: false, fromStep: Infinity, timer: 0 };
  #stopped = false;
  /** How often the run went back: what was asked before and is answered after may hold steps that are no more. */
  #rewinds = 0;

  constructor(id) {
    this.id = id;
    this.path = `/jobs/${encodeURIComponent(id)}`;
    this.#look = setInterval(() => this.connection.value === "ended" && !document.hidden && this.refresh(), LOOK_MS);
    this.#begin();
  }

  async #begin() {
    try {
      const job = await get(this.path);
      this.job.set(job);
      // What is read now holds everything up to this event, and perhaps more; the stream goes on after it, and a step that
      // comes again replaces itself.
      const after = job.last_seq ?? 0;
      const [metrics, alerts] = await Promise.all([
        get(`${this.path}/metrics`, { max_points: OVERVIEW_POINTS }),
        all(`${this.path}/alerts`, { limit: undefined }),
      ]);
      if (this.#stopped) return;
      this.table.merge(metrics.data);
      this.alerts.set(alerts);
      this.metrics.set(this.metrics.value + 1);
      this.error.set(null);
      const stream = new EventStream(`${this.path}/events`, { after, onEvent: (event) => this.#take(event), onBehind: () => this.#again() });
      this.#stream = stream;
      stream.state.watch((state) => {
        if (stream !== this.#stream) return;
        this.connection.set(state);
        // The job may be gone.
        if (state === "refused") this.refresh();
      });
    } catch (error) {
      this.error.set(error);
      if (error.status === 404 && this.job.value) this.#end();
      if (!this.#stopped && error.retryable) setTimeout(() => this.#stopped || this.#begin(), 2000);
    }
  }

  stop() {
    this.#stopped = true;
    clearTimeout(this.#pending.timer);
    clearInterval(this.#look);
    this.#stream?.stop();
  }

  #end() {
    this.stop();
    this.isGone.set(true);
  }

  /** Begins anew: what is shown did not happen in the backup that the server went back to. */
  #again() {
    this.#stream.stop();
    this.#stream = null;
    this.#rewinds++;
    this.table.rewind(-1);
    this.events.set([]);
    this.#begin();
  }

  /** Cuts the connection, for tests: it must come back without gap. */
  cut() {
    this.#stream?.cut();
  }

  /** Asks for the job again, after something was done to it. */
  refresh() {
    this.#pending.job = true;
    this.#gather();
  }

  #take({ type, data: event }) {
    if (type === "removed") return;
    if (type !== "end") this.events.set([...this.events.value.slice(1 - KEPT_EVENTS), event]);
    const pending = this.#pending;
    if (type === "step") {
      const { step, metrics, kind } = event.data;
      // The headlines at once, the rest with the next request.
      if (kind === "train") this.#merge([{ step, ...metrics }]);
      pending.fromStep = Math.min(pending.fromStep, step);
    } else if (type === "rewind") {
      this.#rewinds++;
      this.table.rewind(event.data.step);
      this.metrics.set(this.metrics.value + 1);
    } else if (type === "phase") {
      this.job.set({ ...this.job.value, phase: event.data.phase });
    }
    if (type.startsWith("alert")) pending.alerts = true;
    if (type !== "phase") pending.job = true;
    this.#gather();
  }

  /** Reads the steps from `min` to `max` closer, if the overview left some out. */
  async detail(min, max) {
    const { steps } = this.table;
    const [begin, end] = [lowerBound(steps, min), lowerBound(steps, max + 1)];
    const [first, last] = [Math.max(0, Math.floor(min)), Math.ceil(max)];
    const held = end - begin;
    if (!steps.length || held >= Math.min(last, steps[steps.length - 1]) - Math.max(first, steps[0]) || held >= OVERVIEW_POINTS) return;
    try {
      await this.#read({ min_step: first, max_step: last });
    } catch {
      // The overview stays.
    }
  }

  /** Reads steps into the table; false, and nothing is read, where the run went back meanwhile. */
  async #read(range) {
    const rewinds = this.#rewinds;
    const { data } = await get(`${this.path}/metrics`, { ...range, max_points: OVERVIEW_POINTS });
    if (rewinds !== this.#rewinds) return false;
    this.#merge(data);
    return true;
  }

  #merge(rows) {
    this.table.merge(rows);
    this.metrics.set(this.metrics.value + 1);
  }

  #gather() {
    const pending = this.#pending;
    if (pending.timer || this.#stopped) return;
    pending.timer = setTimeout(async () => {
      const { job, alerts, fromStep } = pending;
      Object.assign(pending, { job: false, alerts: false, fromStep: Infinity });
      const wanted = [];
      if (job) wanted.push(get(this.path).then((job) => this.job.set(job)));
      if (alerts) wanted.push(all(`${this.path}/alerts`, { limit: undefined }).then((alerts) => this.alerts.set(alerts)));
      if (fromStep < Infinity) {
        const again = (read) => read || (pending.fromStep = Math.min(pending.fromStep, fromStep));
        wanted.push(this.#read({ min_step: fromStep }).then(again));
      }
      const done = await Promise.allSettled(wanted);
      pending.timer = 0;
      if (done.some(({ reason }) => reason?.status === 404)) {
        this.#end();
      } else if (done.some(({ status }) => status === "rejected")) {
        Object.assign(pending, { job: true, alerts: true, fromStep: Math.min(pending.fromStep, fromStep) });
        setTimeout(() => this.#gather(), 1000);
      } else if (pending.job || pending.alerts || pending.fromStep < Infinity) this.#gather();
    }, GATHER_MS);
  }
}

/** The run of a job, followed while a component shows it. */
export function useRun(id) {
  const [run] = useState(() => {
    if (!runs.has(id)) runs.set(id, new Run(id));
    return runs.get(id);
  });
  useEffect(() => {
    run.users++;
    return () => {
      run.users--;
      setTimeout(() => {
        if (run.users > 0 || runs.get(id) !== run) return;
        run.stop();
        runs.delete(id);
      }, LINGER_MS);
    };
  }, [run]);
  return run;
}

/** The checkpoints of a run, newest first, as `useLoad` gives them; read again when one is published. */
export function useCheckpoints(run) {
  const published = run.events.value.findLast(({ type }) => type === "checkpoint.saved")?.seq;
  return useLoad((signal) => all(`${run.path}/checkpoints`, {}, 1000, signal), [run, run.job.value.state, published]);
}

/** The job of a run; null before the first answer. */
export const useJob = (run) => useSignal(run.job);
