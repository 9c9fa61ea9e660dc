// The events of a job and the log of its workers, live.
import { get, getAll } from "../core/api.js";
import { formatTime, number, plural, sentenceCase } from "../core/format.js";
import { useFilters } from "../core/router.js";
import { useSignal } from "../core/signal.js";
import { cls, html, useEffect, useLayoutEffect, useRef, useState } from "../core/ui.js";
import { jobView } from "../parts/job-page.js";
import { ProblemBox } from "../parts/problem.js";
import { isOver } from "../parts/state.js";
import { Select, Switch } from "../parts/switch.js";

/** Maximum number of log lines kept in memory. */
const MAX_LINES = 5000;
/** Number of older events that one request loads. */
const EARLIER_EVENTS = 500;
/** Polling interval for new log lines, in ms. */
const POLL_INTERVAL_MS = 1500;
/** Maximum number of lines shown: the latest that match the search. */
const MAX_SHOWN_LINES = 1000;

const Logs = jobView("/logs", LogsOf);
export default Logs;

function LogsOf({ run, job }) {
  const [query, set] = useFilters();
  const [follows, setFollows] = useState(true);
  const { events, loadEarlier } = useEvents(run);
  const isLog = query.of === "log";
  return html`
    <form class="filters" role="search" aria-label="Events and logs" onSubmit=${(event) => event.preventDefault()}>
      <${Switch} label="Show" options=${[["", "Events"], ["log", "Worker log"]]} value=${query.of ?? ""} set=${(of) => set({ of, type: "" })} />
      <label class="inline">Search <input type="search" value=${query.q ?? ""} onInput=${(event) => set({ q: event.target.value })} /></label>
      ${!isLog && html`<label class="inline">Events <${Select} name="type" value=${query.type ?? ""} set=${(type) => set({ type })}
        options=${[["", "all"], ["!", "all except steps and phases"], ...[...new Set(events.map(({ type }) => type))].sort().map((type) => [type, eventTitle(type)])]} /></label>`}
      <label class="inline"><input type="checkbox" checked=${follows} onChange=${(event) => setFollows(event.target.checked)} /> Scroll to new lines</label>
    </form>
    ${isLog ? html`<${Log} run=${run} job=${job} q=${query.q ?? ""} follows=${follows} />` : html`<${Events} events=${events} loadEarlier=${loadEarlier} q=${query.q ?? ""} type=${query.type} follows=${follows} />`}`;
}

/** Shows lines, `{key, time, attempt, tag, text, level}`. With `follows`, the view scrolls to each new line. */
function Lines({ lines, label, follows, empty }) {
  const container = useRef(null);
  useLayoutEffect(() => {
    if (follows && container.current) container.current.scrollTop = container.current.scrollHeight;
  }, [lines.length, lines.at(-1)?.key, follows]);
  const hidden = Math.max(0, lines.length - MAX_SHOWN_LINES);
  return html`<div class="lines" ref=${container} tabindex="0" role="log" aria-live="off" aria-label=${label}>
    ${hidden > 0 && html`<p class="dim small">${plural(hidden, "earlier line")} not shown. Search to find them.</p>`}
    ${!lines.length && html`<p class="dim">${empty}</p>`}
    ${lines.slice(-MAX_SHOWN_LINES).map(({ key, time, attempt, tag, text, level }) => html`<div key=${key} class=${cls("line", level)}>
      <time class="dim" datetime=${time} title=${`${time}, attempt ${attempt}`}>${formatTime(time)}</time>${tag && html`<b>${tag}</b>`}<span class="text">${text}</span></div>`)}
  </div>`;
}

const LEVELS = { warning: "warn", alert: "warn", rewind: "warn", "job.paused": "warn", "job.requeued": "warn", "samples.removed": "warn", "job.failed": "bad", diverged: "bad" };
/** Metrics that come first in the text of a step. */
const FIRST_METRICS = ["reward", "eval_reward", "kl", "entropy", "loss"];

/** Describes the data of an event in one line. */
function describeEvent(type, data) {
  if (type === "phase") return `${data.phase}, step ${data.step}`;
  if (type === "step") {
    const { step, kind, metrics } = data;
    const rank = ([key]) => (FIRST_METRICS.indexOf(key) + 1 || 99);
    const values = Object.entries(metrics).sort((a, b) => rank(a) - rank(b)).map(([key, value]) => `${key} ${number(value)}`);
    return `${step}${kind === "eval" ? ", evaluation" : ""}: ${values.join(", ")}`;
  }
  const message = data?.message ?? data?.alert?.message ?? data?.failure?.message;
  if (typeof message === "string") return message;
  return Object.entries(data ?? {}).filter(([, value]) => value !== null).map(([key, value]) => `${key} ${typeof value === "string" ? value : JSON.stringify(value)}`).join(", ");
}

/** Converts an event type to a title: "job.paused" becomes "Job paused". */
const eventTitle = (type) => sentenceCase(type.replaceAll(".", " "));

/** Returns `{events, loadEarlier}`: the loaded and the live events, and a function that loads older ones; null if there are none. */
function useEvents(run) {
  const live = useSignal(run.events);
  // The sequence number at which the live events start. Older events are loaded page by page.
  const first = useRef(live[0]?.seq ?? (run.job.value.last_seq ?? 0) + 1);
  const received = useRef([]);
  const [older, setOlder] = useState([]);
  const last = received.current.at(-1)?.seq ?? first.current - 1;
  for (const event of live) if (event.seq > last) received.current.push(event);
  const loadEarlier = async () => {
    const end = older[0]?.seq ?? first.current;
    const page = await getAll(`${run.path}/events`, { after: Math.max(0, end - 1 - EARLIER_EVENTS) || undefined }, EARLIER_EVENTS);
    setOlder([...page.filter(({ seq }) => seq < end), ...older]);
  };
  useEffect(() => void (first.current > 1 && loadEarlier().catch(() => {})), [run]);
  const events = [...older, ...received.current];
  return { events, loadEarlier: events[0]?.seq > 1 ? loadEarlier : null };
}

function Events({ events, q, type, follows, loadEarlier }) {
  const matches = (line) => !q || `${line.tag} ${line.text}`.toLowerCase().includes(q.toLowerCase());
  const lines = events
    .filter((event) => (type === "!" ? !["step", "phase"].includes(event.type) : !type || event.type === type))
    .map(({ seq, time, attempt, type, data }) => ({ key: seq, time, attempt, tag: eventTitle(type), text: describeEvent(type, data), level: LEVELS[type] }))
    .filter(matches);
  return html`${loadEarlier && html`<p class="more"><button onClick=${loadEarlier}>Show earlier events</button></p>`}
    <${Lines} lines=${lines} label="Events" follows=${follows} empty=${q || type ? "No matching events." : "No events yet."} />`;
}

function Log({ run, job, q, follows }) {
  const { lines, error } = useLog(run, isOver(job));
  const matches = ({ text }) => !q || text.toLowerCase().includes(q.toLowerCase());
  return html`<${ProblemBox} error=${error} /><${Lines} lines=${lines.filter(matches)} label="Worker log" follows=${follows} empty=${q ? "No matching log lines." : "No log lines yet."} />`;
}

/** Reads the log, and polls for new lines until the job is over. */
function useLog(run, isDone) {
  const [state, setState] = useState({ lines: [], error: null });
  const position = useRef({ after: undefined, seen: 0, count: 0 });
  useEffect(() => {
    let timer;
    const abort = new AbortController();
    const poll = async () => {
      const at = position.current;
      try {
        let page;
        do {
          page = await get(`${run.path}/logs`, { after: at.after, limit: 100 }, abort.signal);
          // The last page has no cursor, so it is read again, and the lines that were already read are skipped.
          const fresh = page.data.slice(at.seen);
          if (page.next) Object.assign(at, { after: page.next, seen: 0 });
          else at.seen = page.data.length;
          const lines = fresh.map(({ time, attempt, line }) => ({ key: at.count++, time, attempt, text: line, level: /\b(ERROR|panicked)\b/.test(line) ? "bad" : /\bWARN\b/.test(line) ? "warn" : "" }));
          if (lines.length) setState((old) => ({ lines: [...old.lines, ...lines].slice(-MAX_LINES), error: null }));
        } while (page.next);
      } catch (error) {
        if (!abort.signal.aborted) setState((old) => ({ ...old, error }));
      }
      if (!isDone && !abort.signal.aborted) timer = setTimeout(poll, document.hidden ? POLL_INTERVAL_MS * 4 : POLL_INTERVAL_MS);
    };
    poll();
    return () => (abort.abort(), clearTimeout(timer));
  }, [run, isDone]);
  return state;
}
