// The live state of one job: the job, its metrics, its events and its alerts. Components that show the same job share one `Run`.
import { get, getAll } from "./api.js";
import { EventStream } from "./events.js";
import { useLoad } from "./load.js";
import { lowerBound } from "./search.js";
import { Signal, useSignal } from "./signal.js";
import { MetricTable } from "./table.js";
import { useEffect, useState } from "./ui.js";

/** Number of steps to read for the overview. The server downsamples longer runs and keeps the minimum and maximum of each interval. */
const OVERVIEW_POINTS = 4000;
/** Time for which events are collected before one request reads everything they changed, in ms. */
const REFRESH_DELAY_MS = 150;
/** Time after which an unused run stops being followed, in ms. The tabs of a job share its run, so changing tabs must not end it. */
const UNUSED_TIMEOUT_MS = 5000;
/** Polling interval for a job that has ended, in ms: it can still be deleted. */
const POLL_INTERVAL_MS = 10_000;
/** Number of events kept for the logs. */
const MAX_EVENTS = 500;

const runs = new Map();

class Run {
  /** Number of mounted components that use this run. */
  users = 0;
  /** The job as returned by the API; null before the first response. */
  job = new Signal(null);
  /** Metrics by step. */
  table = new MetricTable();
  /** A counter that increases with every change of `table`. */
  metrics = new Signal(0);
  /** The latest events, oldest first. */
  events = new Signal([]);
  alerts = new Signal([]);
  error = new Signal(null);
  /** Whether the job was deleted after it was first read. */
  isDeleted = new Signal(false);
  connection = new Signal("connecting");
  #stream = null;
  #pollTimer = 0;
  #pending = { job: false, alerts: false, fromStep: Infinity, timer: 0 };
  #stopped = false;
  /** Number of rewinds. A response to a request that was sent before a rewind is dropped: it may contain removed steps. */
  #rewinds = 0;

  constructor(id) {
    this.id = id;
    this.path = `/jobs/${encodeURIComponent(id)}`;
    this.#pollTimer = setInterval(() => this.connection.value === "ended" && !document.hidden && this.refresh(), POLL_INTERVAL_MS);
    this.#load();
  }

  async #load() {
    try {
      const job = await get(this.path);
      this.job.set(job);
      // The metrics and alerts read below contain everything up to this event, and maybe more. The stream resumes after it; a step
      // that arrives twice replaces itself in the table.
      const after = job.last_seq ?? 0;
      const [metrics, alerts] = await Promise.all([
        get(`${this.path}/metrics`, { max_points: OVERVIEW_POINTS }),
        getAll(`${this.path}/alerts`, { limit: undefined }),
      ]);
      if (this.#stopped) return;
      this.table.merge(metrics.data);
      this.alerts.set(alerts);
      this.metrics.set(this.metrics.value + 1);
      this.error.set(null);
      const stream = new EventStream(`${this.path}/events`, { after, onEvent: (event) => this.#handleEvent(event), onInvalidCursor: () => this.#restart() });
      this.#stream = stream;
      stream.state.watch((state) => {
        if (stream !== this.#stream) return;
        this.connection.set(state);
        // The server may refuse because the job was deleted: read it again to find out.
        if (state === "refused") this.refresh();
      });
    } catch (error) {
      this.error.set(error);
      if (error.status === 404 && this.job.value) this.#markDeleted();
      if (!this.#stopped && error.retryable) setTimeout(() => this.#stopped || this.#load(), 2000);
    }
  }

  stop() {
    this.#stopped = true;
    clearTimeout(this.#pending.timer);
    clearInterval(this.#pollTimer);
    this.#stream?.stop();
  }

  #markDeleted() {
    this.stop();
    this.isDeleted.set(true);
  }

  /** Discards all data and loads it again: the server was restored from a backup that does not contain the latest events shown. */
  #restart() {
    this.#stream.stop();
    this.#stream = null;
    this.#rewinds++;
    this.table.rewind(-1);
    this.events.set([]);
    this.#load();
  }

  /** Reads the job again, for example after an action changed it. */
  refresh() {
    this.#pending.job = true;
    this.#scheduleRefresh();
  }

  #handleEvent({ type, data: event }) {
    if (type === "removed") return;
    if (type !== "end") this.events.set([...this.events.value.slice(1 - MAX_EVENTS), event]);
    const pending = this.#pending;
    if (type === "step") {
      const { step, metrics, kind } = event.data;
      // The event has only the main metrics; the next request reads the others.
      if (kind === "train") this.#mergeRows([{ step, ...metrics }]);
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
    this.#scheduleRefresh();
  }

  /** Reads the steps from `min` to `max` in more detail, if the overview left some of them out. */
  async loadDetail(min, max) {
    const { steps } = this.table;
    const [begin, end] = [lowerBound(steps, min), lowerBound(steps, max + 1)];
    const [first, last] = [Math.max(0, Math.floor(min)), Math.ceil(max)];
    const loaded = end - begin;
    if (!steps.length || loaded >= Math.min(last, steps[steps.length - 1]) - Math.max(first, steps[0]) || loaded >= OVERVIEW_POINTS) return;
    try {
      await this.#readMetrics({ min_step: first, max_step: last });
    } catch {
      // The chart keeps showing the downsampled overview.
    }
  }

  /** Reads steps into the table. Returns false, and changes nothing, if the run was rewound in the meantime. */
  async #readMetrics(range) {
    const rewinds = this.#rewinds;
    const { data } = await get(`${this.path}/metrics`, { ...range, max_points: OVERVIEW_POINTS });
    if (rewinds !== this.#rewinds) return false;
    this.#mergeRows(data);
    return true;
  }

  #mergeRows(rows) {
    this.table.merge(rows);
    this.metrics.set(this.metrics.value + 1);
  }

  #scheduleRefresh() {
    const pending = this.#pending;
    if (pending.timer || this.#stopped) return;
    pending.timer = setTimeout(async () => {
      const { job, alerts, fromStep } = pending;
      Object.assign(pending, { job: false, alerts: false, fromStep: Infinity });
      const requests = [];
      if (job) requests.push(get(this.path).then((job) => this.job.set(job)));
      if (alerts) requests.push(getAll(`${this.path}/alerts`, { limit: undefined }).then((alerts) => this.alerts.set(alerts)));
      if (fromStep < Infinity) {
        const retryUnlessRead = (isRead) => isRead || (pending.fromStep = Math.min(pending.fromStep, fromStep));
        requests.push(this.#readMetrics({ min_step: fromStep }).then(retryUnlessRead));
      }
      const results = await Promise.allSettled(requests);
      pending.timer = 0;
      if (results.some(({ reason }) => reason?.status === 404)) {
        this.#markDeleted();
      } else if (results.some(({ status }) => status === "rejected")) {
        Object.assign(pending, { job: true, alerts: true, fromStep: Math.min(pending.fromStep, fromStep) });
        setTimeout(() => this.#scheduleRefresh(), 1000);
      } else if (pending.job || pending.alerts || pending.fromStep < Infinity) this.#scheduleRefresh();
    }, REFRESH_DELAY_MS);
  }
}

/** Returns the run of a job, which is followed while a component uses it. */
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
      }, UNUSED_TIMEOUT_MS);
    };
  }, [run]);
  return run;
}

/** Loads the checkpoints of a run, newest first, with `useLoad`; reads them again when one is published. */
export function useCheckpoints(run) {
  const published = run.events.value.findLast(({ type }) => type === "checkpoint.saved")?.seq;
  return useLoad((signal) => getAll(`${run.path}/checkpoints`, {}, 1000, signal), [run, run.job.value.state, published]);
}

/** Returns the job of a run; null before the first response. */
export const useJob = (run) => useSignal(run.job);
