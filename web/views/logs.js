// Events and the workers' log, as they come.
import { all, get } from "../core/api.js";
import { clock, number, plural, words } from "../core/format.js";
import { useFilters } from "../core/router.js";
import { useSignal } from "../core/signal.js";
import { cls, html, useEffect, useLayoutEffect, useRef, useState } from "../core/ui.js";
import { jobView } from "../parts/job-page.js";
import { ProblemBox } from "../parts/problem.js";
import { isOver } from "../parts/state.js";
import { Select, Switch } from "../parts/switch.js";

/** Lines that are kept. */
const KEPT = 5000;
/** Older events that are asked for at once. */
const OLDER = 500;
/** Between two looks for new lines, ms. */
const EVERY_MS = 1500;
/** Lines that are drawn: the latest that fit the search. */
const DRAWN = 1000;

const Logs = jobView("/logs", LogsOf);
export default Logs;

function LogsOf({ run, job }) {
  const [query, set] = useFilters();
  const [follows, follow] = useState(true);
  const { events, earlier } = useEvents(run);
  const isLog = query.of === "log";
  return html`
    <form class="filters" role="search" aria-label="Events and logs" onSubmit=${(event) => event.preventDefault()}>
      <${Switch} label="Show" options=${[["", "Events"], ["log", "Worker's log"]]} value=${query.of ?? ""} set=${(of) => set({ of, type: "" })} />
      <label class="inline">Search <input type="search" value=${query.q ?? ""} onInput=${(event) => set({ q: event.target.value })} /></label>
      ${!isLog && html`<label class="inline">Events <${Select} name="type" value=${query.type ?? ""} set=${(type) => set({ type })}
        options=${[["", "all"], ["!", "without steps and phases"], ...[...new Set(events.map(({ type }) => type))].sort().map((type) => [type, eventTitle(type)])]} /></label>`}
      <label class="inline"><input type="checkbox" checked=${follows} onChange=${(event) => follow(event.target.checked)} /> Follow the end</label>
    </form>
    ${isLog ? html`<${Log} run=${run} job=${job} q=${query.q ?? ""} follows=${follows} />` : html`<${Events} events=${events} earlier=${earlier} q=${query.q ?? ""} type=${query.type} follows=${follows} />`}`;
}

/** Lines `{key, time, attempt, tag, text, level}`, at the end of which the view stays while it follows. */
function Lines({ lines, label, follows, empty }) {
  const place = useRef(null);
  useLayoutEffect(() => {
    if (follows && place.current) place.current.scrollTop = place.current.scrollHeight;
  }, [lines.length, lines.at(-1)?.key, follows]);
  const hidden = Math.max(0, lines.length - DRAWN);
  return html`<div class="lines" ref=${place} tabindex="0" role="log" aria-live="off" aria-label=${label}>
    ${hidden > 0 && html`<p class="dim small">${plural(hidden, "earlier line")} not drawn; search to find them.</p>`}
    ${!lines.length && html`<p class="dim">${empty}</p>`}
    ${lines.slice(-DRAWN).map(({ key, time, attempt, tag, text, level }) => html`<div key=${key} class=${cls("line", level)}>
      <time class="dim" datetime=${time} title=${`${time}, attempt ${attempt}`}>${clock(time)}</time>${tag && html`<b>${tag}</b>`}<span class="text">${text}</span></div>`)}
  </div>`;
}

const LEVELS = { warning: "warn", alert: "warn", rewind: "warn", "job.paused": "warn", "job.requeued": "warn", "samples.removed": "warn", "job.failed": "bad", diverged: "bad" };
/** Of a step's headlines: what is told first. */
const FIRST_METRICS = ["reward", "eval_reward", "kl", "entropy", "loss"];

/** An event's data in a line. */
function told(type, data) {
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

/** job.paused: "Job paused". */
const eventTitle = (type) => words(type.replaceAll(".", " "));

/** The events from the latest back to where somebody stopped asking, and those that come: `{events, earlier}`. */
function useEvents(run) {
  const live = useSignal(run.events);
  // What the stream began after, page by page.
  const first = useRef(live[0]?.seq ?? (run.job.value.last_seq ?? 0) + 1);
  const seen = useRef([]);
  const [before, setBefore] = useState([]);
  const last = seen.current.at(-1)?.seq ?? first.current - 1;
  for (const event of live) if (event.seq > last) seen.current.push(event);
  const earlier = async () => {
    const end = before[0]?.seq ?? first.current;
    const older = await all(`${run.path}/events`, { after: Math.max(0, end - 1 - OLDER) || undefined }, OLDER);
    setBefore([...older.filter(({ seq }) => seq < end), ...before]);
  };
  useEffect(() => void (first.current > 1 && earlier().catch(() => {})), [run]);
  const events = [...before, ...seen.current];
  return { events, earlier: events[0]?.seq > 1 ? earlier : null };
}

function Events({ events, q, type, follows, earlier }) {
  const fits = (line) => !q || `${line.tag} ${line.text}`.toLowerCase().includes(q.toLowerCase());
  const lines = events
    .filter((event) => (type === "!" ? !["step", "phase"].includes(event.type) : !type || event.type === type))
    .map(({ seq, time, attempt, type, data }) => ({ key: seq, time, attempt, tag: eventTitle(type), text: told(type, data), level: LEVELS[type] }))
    .filter(fits);
  return html`${earlier && html`<p class="more"><button onClick=${earlier}>Earlier events</button></p>`}
    <${Lines} lines=${lines} label="Events" follows=${follows} empty=${q || type ? "No event fits." : "No events yet."} />`;
}

function Log({ run, job, q, follows }) {
  const { lines, error } = useLog(run, isOver(job));
  const fits = ({ text }) => !q || text.toLowerCase().includes(q.toLowerCase());
  return html`<${ProblemBox} error=${error} /><${Lines} lines=${lines.filter(fits)} label="Worker's log" follows=${follows} empty=${q ? "No line fits." : "Nothing logged yet."} />`;
}

/** The whole log, and what comes, until the job is over. */
function useLog(run, isDone) {
  const [state, setState] = useState({ lines: [], error: null });
  const place = useRef({ after: undefined, seen: 0, count: 0 });
  useEffect(() => {
    let timer;
    const abort = new AbortController();
    const look = async () => {
      const at = place.current;
      try {
        let page;
        do {
          page = await get(`${run.path}/logs`, { after: at.after, limit: 100 }, abort.signal);
          // The last page has no cursor: it is read again, and what is known of it left out.
          const fresh = page.data.slice(at.seen);
          if (page.next) Object.assign(at, { after: page.next, seen: 0 });
          else at.seen = page.data.length;
          const lines = fresh.map(({ time, attempt, line }) => ({ key: at.count++, time, attempt, text: line, level: /\b(ERROR|panicked)\b/.test(line) ? "bad" : /\bWARN\b/.test(line) ? "warn" : "" }));
          if (lines.length) setState((old) => ({ lines: [...old.lines, ...lines].slice(-KEPT), error: null }));
        } while (page.next);
      } catch (error) {
        if (!abort.signal.aborted) setState((old) => ({ ...old, error }));
      }
      if (!isDone && !abort.signal.aborted) timer = setTimeout(look, document.hidden ? EVERY_MS * 4 : EVERY_MS);
    };
    look();
    return () => (abort.abort(), clearTimeout(timer));
  }, [run, isDone]);
  return state;
}
