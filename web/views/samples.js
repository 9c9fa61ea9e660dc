// Groups: a prompt with its completions; one prompt over the steps; and the table of all samples. What is shown stands in the address.
import { Chart } from "../chart/chart.js";
import { ChartGroup } from "../chart/group.js";
import { all, get, urlOf } from "../core/api.js";
import { count, number, plural } from "../core/format.js";
import { useLoad } from "../core/load.js";
import { usePages } from "../core/pages.js";
import { go, hrefOf, useFilters } from "../core/router.js";
import { useSignal } from "../core/signal.js";
import { cls, html, useEffect, useMemo, useRef, useState } from "../core/ui.js";
import { Advantage, Group, groupsOf, reach, spread } from "../parts/group.js";
import { jobView } from "../parts/job-page.js";
import { beginning } from "../parts/long.js";
import { ProblemBox } from "../parts/problem.js";
import { Select, Switch } from "../parts/switch.js";
import { Table } from "../parts/table.js";

/** Samples of a prompt that its course is drawn from, at most: the latest. */
const MOST_OF_A_PROMPT = 3000;
const NAMES = ["step", "phase", "prompt_id", "group_id", "finish_reason", "min_reward", "max_reward", "sort", "q"];

const Samples = jobView("/samples", SamplesOf);
export default Samples;

/** The filters as the API takes them. Groups are those of the training unless somebody says otherwise. */
function filtersOf(query) {
  const out = Object.fromEntries(NAMES.map((name) => [name, query[name]]));
  const phase = query.phase ?? (query.group_id || query.as === "table" ? "all" : "train");
  return { ...out, phase: phase === "all" ? undefined : phase };
}

function SamplesOf({ run, job }) {
  const [query, set] = useFilters();
  const path = `${run.path}/samples`;
  const wanted = filtersOf(query);
  const list = usePages(path, { ...wanted, limit: 100 });
  const isTable = query.as === "table";
  const isFollowed = query.prompt_id && !query.step && !query.q && !isTable;
  const { rows, next, page, error, loading, isOld } = list;
  return html`
    <${Filters} run=${run} query=${query} set=${set} wanted=${wanted} path=${path} />
    <${Newer} run=${run} query=${query} rows=${rows} reload=${list.reload} />
    <${ProblemBox} error=${error} retry=${list.reload} />
    ${page?.removed && html`<p class="dim small">${plural(page.removed.samples, "older sample")}, up to step ${page.removed.to_step ?? 0}, made room for newer ones.</p>`}
    ${isFollowed && html`<${Followed} path=${path} phase=${wanted.phase} prompt=${query.prompt_id} />`}
    <div class=${cls(isOld && "stale")} aria-busy=${loading}>
      ${!rows.length && !loading && !error && html`<p class="empty">${next ? "No matching samples so far. Press More to search on." : NAMES.some((name) => query[name]) ? "No sample fits these filters." : "No samples yet: they come with the first rollout."}</p>`}
      ${isTable ? html`<${SampleTable} rows=${rows} job=${job} />` : html`<${Groups} rows=${rows} job=${job} next=${next} />`}
    </div>
    ${next && html`<p class="more"><button disabled=${loading} onClick=${list.more}>More</button></p>`}`;
}

function Groups({ rows, job, next }) {
  const groups = useMemo(() => groupsOf(rows), [rows]);
  const whole = (group) => (group.phase === "train" ? job.plan.rloo.num_generations : (job.plan.eval?.num_generations ?? null));
  // The last group of a page may go on in the next one.
  const cut = next && groups.length > 1 && groups.at(-1).samples.length < whole(groups.at(-1));
  const most = reach(rows);
  return (cut ? groups.slice(0, -1) : groups).map((group) => html`<${Group} key=${group.key} group=${group} job=${job} whole=${whole(group)} most=${most} />`);
}

/** A search that waits until the typing pauses; otherwise its value follows the address. */
function Typed({ label, name, query, set, ...rest }) {
  const timer = useRef(0);
  const [typed, type] = useState(null);
  useEffect(() => () => clearTimeout(timer.current), []);
  const change = (event) => {
    const { value } = event.target;
    type(value);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => {
      set({ [name]: value });
      type(null);
    }, 350);
  };
  return html`<label class="inline">${label} <input ...${rest} name=${name} value=${typed ?? query[name] ?? ""} onInput=${change} /></label>`;
}

function Choice({ label, name, query, set, options, first = "" }) {
  return html`<label class="inline">${label} <${Select} name=${name} value=${query[name] ?? first} options=${options} set=${(value) => set({ [name]: value })} /></label>`;
}

function Filters({ run, query, set, wanted, path }) {
  const isTable = query.as === "table";
  const isSet = NAMES.some((name) => query[name]);
  const download = (format) => urlOf(path, { ...wanted, format });
  return html`<form class="filters" role="search" aria-label="Samples" onSubmit=${(event) => event.preventDefault()}>
    <${Switch} label="Show as" options=${[["", "Groups"], ["table", "Table"]]} value=${query.as ?? ""} set=${(as) => set({ as })} />
    <${Typed} label="Search" name="q" type="search" maxlength="1000" placeholder="in prompts and completions" query=${query} set=${set} />
    <${Step} run=${run} path=${path} query=${query} set=${set} phase=${wanted.phase} />
    <${Choice} label="Of" name="phase" query=${query} set=${set} first=${wanted.phase ?? "all"} options=${[["all", "everything"], ["train", "training"], ["eval", "evaluation"]]} />
    <${Choice} label="End" name="finish_reason" query=${query} set=${set} options=${[["", "any"], ["stop", "stop"], ["length", "cut"]]} />
    <${Typed} label="Reward from" name="min_reward" type="number" step="any" query=${query} set=${set} />
    <${Typed} label="to" name="max_reward" type="number" step="any" query=${query} set=${set} aria-label="Reward to" />
    <${Typed} label="Prompt" name="prompt_id" placeholder="row_0" query=${query} set=${set} />
    <${Choice} label="Order" name="sort" query=${query} set=${set} options=${[["", "latest first"], ["best", "best first"], ["worst", "worst first"]]} />
    ${isSet && html`<button class="quiet" onClick=${() => go(`/jobs/${run.id}/samples`, { as: query.as })}>Clear</button>`}
    ${isTable && html`<span class="small"><a href=${download("csv")} download>CSV</a> · <a href=${download("ndjson")} download>NDJSON</a></span>`}
  </form>`;
}

/** The step, and the neighbours that have samples. */
function Step({ run, path, query, set, phase }) {
  const step = query.step === undefined ? null : Number(query.step);
  const near = useLoad(async (signal) => {
    const one = async (more) => (await get(path, { phase, limit: 1, ...more }, signal)).data[0]?.step ?? null;
    if (step === null) return { before: await one({}), after: null };
    // Evaluations may lie farther apart than rollouts: the next one within ten.
    const far = step + stride(run.job.value) * 10;
    const after = async () => {
      for (let to = step + 1; to <= far; to += to - step) {
        const found = await one({ min_step: step + 1, max_step: to });
        if (found !== null) return found;
      }
      return null;
    };
    return { before: step > 0 ? await one({ max_step: step - 1 }) : null, after: await after() };
  }, [path, step, phase]);
  const { before = null, after = null } = near.data ?? {};
  return html`<span class="row">
    <${Typed} label="Step" name="step" type="number" min="0" step="1" query=${query} set=${set} />
    <button class="mini" aria-label="Samples of the step before" disabled=${before === null} onClick=${() => set({ step: before })}>◀</button>
    <button class="mini" aria-label="Samples of the step after" disabled=${after === null} onClick=${() => set({ step: after })}>▶</button>
  </span>`;
}

/** While a run goes on: newer samples are offered, so that nothing moves under the reader's eyes. */
function Newer({ run, query, rows, reload }) {
  useSignal(run.metrics);
  const { steps, size } = run.table;
  const latest = size ? steps[size - 1] : 0;
  const shown = rows.length ? Math.max(...rows.map(({ step }) => step)) : 0;
  const isFiltered = NAMES.some((name) => name !== "phase" && query[name]) || query.phase === "eval";
  if (isFiltered || !rows.length || latest < shown + stride(run.job.value)) return null;
  return html`<p class="notice"><button onClick=${reload}>Show what is new</button> <span class="num">The run is at step ${count(latest)}, these are up to step ${count(shown)}.</span></p>`;
}

/** Steps from one rollout to the next. */
const stride = ({ plan: { rloo } }) => rloo.num_iterations * rloo.steps_per_generation;

/** How the rewards of one prompt went. */
function Followed({ path, phase, prompt }) {
  const group = useMemo(() => new ChartGroup(), []);
  const { data, error } = useLoad((signal) => all(path, { prompt_id: prompt, phase }, MOST_OF_A_PROMPT, signal), [path, prompt, phase]);
  const course = useMemo(() => courseOf(data ?? []), [data]);
  if (error) return html`<${ProblemBox} error=${error} />`;
  if (!data || course.x.length < 2) return null;
  group.extent = [course.x[0], course.x.at(-1)];
  return html`<h2 class="unseen">Over the steps</h2><${Chart} title=${`Reward of ${prompt}`} note=${`${plural(course.x.length, "visit")}, mean of its completions`} group=${group} x=${course.x} series=${course.series} version=${data} />`;
}

function courseOf(samples) {
  const groups = groupsOf(samples).sort((a, b) => a.step - b.step);
  const steps = [...new Set(groups.map(({ step }) => step))];
  const at = (step) => groups.filter((group) => group.step === step).flatMap((group) => group.samples);
  const column = (value) => Float64Array.from(steps, (step) => value(at(step)));
  const rewards = (found) => found.map(({ reward }) => reward).filter((reward) => reward !== null);
  const series = [
    { label: "mean", key: "mean", values: column((found) => spread(found).mean), points: true },
    { label: "best", key: "best", values: column((found) => (rewards(found).length ? Math.max(...rewards(found)) : NaN)), tint: 2 },
    { label: "worst", key: "worst", values: column((found) => (rewards(found).length ? Math.min(...rewards(found)) : NaN)), tint: 1 },
  ];
  return { x: Float64Array.from(steps), series };
}

function SampleTable({ rows, job }) {
  if (!rows.length) return null;
  const names = [...new Set(rows.flatMap(({ rewards }) => Object.keys(rewards)))];
  const most = reach(rows);
  return html`<${Table} label="Samples" name="samples" head=${["Step", "Prompt", "Completion", "#Reward", ...names.map((name) => `#${name}`), "#Advantage", "#KL", "#Tokens", "End"]}>${rows.map((sample, index) => html`<tr key=${index}>
      <td class="num"><a href=${hrefOf(`/jobs/${job.id}/samples`, { group_id: sample.group_id, phase: sample.phase })} aria-label=${`Group of ${sample.prompt_id} at step ${sample.step}`}>${sample.step}</a>${sample.phase === "eval" && html`<div class="dim small">evaluation</div>`}</td>
      <td class="words"><a class="small" href=${hrefOf(`/jobs/${job.id}/samples`, { prompt_id: sample.prompt_id, phase: sample.phase })}>${sample.prompt_id}</a> ${beginning(sample.prompt, 160)}</td>
      <td class="words text">${beginning(sample.completion, 240)}</td>
      <td class="num">${number(sample.reward)}</td>
      ${names.map((name) => html`<td key=${name} class="num">${number(sample.rewards[name])}</td>`)}
      <td class="num"><${Advantage} value=${sample.advantage} most=${most} /></td><td class="num">${number(sample.kl, 3)}</td><td class="num">${sample.num_tokens}</td>
      <td>${sample.finish_reason === "length" ? "cut" : sample.finish_reason}</td></tr>`)}<//>`;
}
