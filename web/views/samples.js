// The samples of a job: as groups (a prompt with its completions), as a table, or for one prompt over the steps. The address holds the
// filters.
import { Chart } from "../chart/chart.js";
import { ChartGroup } from "../chart/group.js";
import { get, getAll, urlOf } from "../core/api.js";
import { count, number, plural } from "../core/format.js";
import { useLoad, usePages } from "../core/load.js";
import { hrefOf, navigate, useFilters } from "../core/router.js";
import { useSignal } from "../core/signal.js";
import { cls, html, useEffect, useMemo, useRef, useState } from "../core/ui.js";
import { Advantage, Group, groupsOf, maxAdvantage, rewardStats } from "../parts/group.js";
import { jobView } from "../parts/job-page.js";
import { ProblemBox } from "../parts/problem.js";
import { Select, Switch } from "../parts/switch.js";
import { Table } from "../parts/table.js";
import { truncate } from "../parts/text.js";

/** Maximum number of samples of one prompt in its chart; the latest are used. */
const MAX_PROMPT_SAMPLES = 3000;
const FILTER_NAMES = ["step", "phase", "prompt_id", "group_id", "finish_reason", "min_reward", "max_reward", "sort", "q"];

const Samples = jobView("/samples", SamplesOf);
export default Samples;

/** Converts the query of the address to the parameters of the API. By default, groups show only training samples. */
function apiFilters(query) {
  const out = Object.fromEntries(FILTER_NAMES.map((name) => [name, query[name]]));
  const phase = query.phase ?? (query.group_id || query.as === "table" ? "all" : "train");
  return { ...out, phase: phase === "all" ? undefined : phase };
}

function SamplesOf({ run, job }) {
  const [query, set] = useFilters();
  const path = `${run.path}/samples`;
  const filters = apiFilters(query);
  const list = usePages(path, { ...filters, limit: 100 });
  const isTable = query.as === "table";
  const showsPromptChart = query.prompt_id && !query.step && !query.q && !isTable;
  const { rows, next, page, error, loading, isOutdated } = list;
  return html`
    <${Filters} run=${run} query=${query} set=${set} filters=${filters} path=${path} />
    <${NewSamples} run=${run} query=${query} rows=${rows} reload=${list.reload} />
    <${ProblemBox} error=${error} retry=${list.reload} />
    ${page?.removed && html`<p class="dim small">${plural(page.removed.samples, "older sample")}, up to step ${page.removed.to_step ?? 0}, ${page.removed.samples === 1 ? "was" : "were"} deleted to make room for newer ones.</p>`}
    ${showsPromptChart && html`<${PromptChart} path=${path} phase=${filters.phase} prompt=${query.prompt_id} />`}
    <div class=${cls(isOutdated && "stale")} aria-busy=${loading}>
      ${!rows.length && !loading && !error && html`<p class="empty">${next ? "No matching samples so far. Press More to continue the search." : FILTER_NAMES.some((name) => query[name]) ? "No samples match these filters." : "No samples yet. The first rollout creates them."}</p>`}
      ${isTable ? html`<${SampleTable} rows=${rows} job=${job} />` : html`<${Groups} rows=${rows} job=${job} next=${next} />`}
    </div>
    ${next && html`<p class="more"><button disabled=${loading} onClick=${list.loadMore}>More</button></p>`}`;
}

function Groups({ rows, job, next }) {
  const groups = useMemo(() => groupsOf(rows), [rows]);
  const groupSize = (group) => (group.phase === "train" ? job.plan.rloo.num_generations : (job.plan.eval?.num_generations ?? null));
  // The last group of a page may continue on the next page, so it is left out until that page is loaded.
  const isLastPartial = next && groups.length > 1 && groups.at(-1).samples.length < groupSize(groups.at(-1));
  const largest = maxAdvantage(rows);
  return (isLastPartial ? groups.slice(0, -1) : groups).map((group) => html`<${Group} key=${group.key} group=${group} job=${job} size=${groupSize(group)} largest=${largest} />`);
}

/** A text filter. The address changes when typing pauses; at all other times the field shows the value of the address. */
function TextFilter({ label, name, query, set, ...rest }) {
  const timer = useRef(0);
  const [draft, setDraft] = useState(null);
  useEffect(() => () => clearTimeout(timer.current), []);
  const onInput = (event) => {
    const { value } = event.target;
    setDraft(value);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => {
      set({ [name]: value });
      setDraft(null);
    }, 350);
  };
  return html`<label class="inline">${label} <input ...${rest} name=${name} value=${draft ?? query[name] ?? ""} onInput=${onInput} /></label>`;
}

function SelectFilter({ label, name, query, set, options, first = "" }) {
  return html`<label class="inline">${label} <${Select} name=${name} value=${query[name] ?? first} options=${options} set=${(value) => set({ [name]: value })} /></label>`;
}

function Filters({ run, query, set, filters, path }) {
  const isTable = query.as === "table";
  const isSet = FILTER_NAMES.some((name) => query[name]);
  const downloadUrl = (format) => urlOf(path, { ...filters, format });
  return html`<form class="filters" role="search" aria-label="Samples" onSubmit=${(event) => event.preventDefault()}>
    <${Switch} label="Show as" options=${[["", "Groups"], ["table", "Table"]]} value=${query.as ?? ""} set=${(as) => set({ as })} />
    <${TextFilter} label="Search" name="q" type="search" maxlength="1000" placeholder="Prompts and completions" query=${query} set=${set} />
    <${StepFilter} run=${run} path=${path} query=${query} set=${set} phase=${filters.phase} />
    <${SelectFilter} label="Phase" name="phase" query=${query} set=${set} first=${filters.phase ?? "all"} options=${[["all", "all"], ["train", "training"], ["eval", "evaluation"]]} />
    <${SelectFilter} label="Finish" name="finish_reason" query=${query} set=${set} options=${[["", "any"], ["stop", "stop"], ["length", "truncated"]]} />
    <${TextFilter} label="Reward from" name="min_reward" type="number" step="any" query=${query} set=${set} />
    <${TextFilter} label="to" name="max_reward" type="number" step="any" query=${query} set=${set} aria-label="Reward to" />
    <${TextFilter} label="Prompt ID" name="prompt_id" placeholder="row_0" query=${query} set=${set} />
    <${SelectFilter} label="Order" name="sort" query=${query} set=${set} options=${[["", "latest first"], ["best", "best first"], ["worst", "worst first"]]} />
    ${isSet && html`<button class="quiet" onClick=${() => navigate(`/jobs/${run.id}/samples`, { as: query.as })}>Clear filters</button>`}
    ${isTable && html`<span class="small">Download: <a href=${downloadUrl("csv")} download>CSV</a> · <a href=${downloadUrl("ndjson")} download>NDJSON</a></span>`}
  </form>`;
}

/** The filter by step, with buttons for the previous and the next step that have samples. */
function StepFilter({ run, path, query, set, phase }) {
  const step = query.step === undefined ? null : Number(query.step);
  const neighbors = useLoad(async (signal) => {
    const latestStep = async (more) => (await get(path, { phase, limit: 1, ...more }, signal)).data[0]?.step ?? null;
    if (step === null) return { previous: await latestStep({}), next: null };
    // Samples are returned latest first, so the next step is found by searching ranges that double in size. The search ends after ten
    // rollouts: evaluations may be rarer than rollouts.
    const searchEnd = step + stepsPerRollout(run.job.value) * 10;
    const findNext = async () => {
      for (let to = step + 1; to <= searchEnd; to += to - step) {
        const found = await latestStep({ min_step: step + 1, max_step: to });
        if (found !== null) return found;
      }
      return null;
    };
    return { previous: step > 0 ? await latestStep({ max_step: step - 1 }) : null, next: await findNext() };
  }, [path, step, phase]);
  const { previous = null, next = null } = neighbors.data ?? {};
  return html`<span class="row">
    <${TextFilter} label="Step" name="step" type="number" min="0" step="1" query=${query} set=${set} />
    <button class="mini" type="button" aria-label="Previous step with samples" disabled=${previous === null} onClick=${() => set({ step: previous })}>◀</button>
    <button class="mini" type="button" aria-label="Next step with samples" disabled=${next === null} onClick=${() => set({ step: next })}>▶</button>
  </span>`;
}

/** Offers the new samples of a running job. They are not added automatically, so that the page does not move while it is read. */
function NewSamples({ run, query, rows, reload }) {
  useSignal(run.metrics);
  const { steps, size } = run.table;
  const latest = size ? steps[size - 1] : 0;
  const shown = rows.length ? Math.max(...rows.map(({ step }) => step)) : 0;
  const isFiltered = FILTER_NAMES.some((name) => name !== "phase" && query[name]) || query.phase === "eval";
  if (isFiltered || !rows.length || latest < shown + stepsPerRollout(run.job.value)) return null;
  return html`<p class="notice"><button onClick=${reload}>Show new samples</button> <span class="num">The run is at step ${count(latest)}. This list ends at step ${count(shown)}.</span></p>`;
}

/** Number of steps between two rollouts. */
const stepsPerRollout = ({ plan: { rloo } }) => rloo.num_iterations * rloo.steps_per_generation;

/** A chart of the rewards of one prompt over the steps. */
function PromptChart({ path, phase, prompt }) {
  const group = useMemo(() => new ChartGroup(), []);
  const { data, error } = useLoad((signal) => getAll(path, { prompt_id: prompt, phase }, MAX_PROMPT_SAMPLES, signal), [path, prompt, phase]);
  const { x, series } = useMemo(() => rewardSeries(data ?? []), [data]);
  if (error) return html`<${ProblemBox} error=${error} />`;
  if (!data || x.length < 2) return null;
  group.extent = [x[0], x.at(-1)];
  return html`<h2 class="unseen">Rewards over the steps</h2><${Chart} title=${`Reward of ${prompt}`} note=${`over its completions at ${plural(x.length, "step")}`} group=${group} x=${x} series=${series} version=${data} />`;
}

/** Computes the mean, best and worst reward of each step. */
function rewardSeries(samples) {
  const groups = groupsOf(samples).sort((a, b) => a.step - b.step);
  const steps = [...new Set(groups.map(({ step }) => step))];
  const at = (step) => groups.filter((group) => group.step === step).flatMap((group) => group.samples);
  const column = (value) => Float64Array.from(steps, (step) => value(at(step)));
  const rewards = (members) => members.map(({ reward }) => reward).filter((reward) => reward !== null);
  const series = [
    { label: "mean", key: "mean", values: column((members) => rewardStats(members).mean), points: true },
    { label: "best", key: "best", values: column((members) => (rewards(members).length ? Math.max(...rewards(members)) : NaN)), tint: 2 },
    { label: "worst", key: "worst", values: column((members) => (rewards(members).length ? Math.min(...rewards(members)) : NaN)), tint: 1 },
  ];
  return { x: Float64Array.from(steps), series };
}

function SampleTable({ rows, job }) {
  if (!rows.length) return null;
  const names = [...new Set(rows.flatMap(({ rewards }) => Object.keys(rewards)))];
  const largest = maxAdvantage(rows);
  return html`<${Table} label="Samples" name="samples" head=${["Step", "Prompt", "Completion", "#Reward", ...names.map((name) => `#${name}`), "#Advantage", "#KL", "#Tokens", "Finish"]}>${rows.map((sample, index) => html`<tr key=${index}>
      <td class="num"><a href=${hrefOf(`/jobs/${job.id}/samples`, { group_id: sample.group_id, phase: sample.phase })} aria-label=${`Group of ${sample.prompt_id} at step ${sample.step}`}>${sample.step}</a>${sample.phase === "eval" && html`<div class="dim small">evaluation</div>`}</td>
      <td class="words"><a class="small" href=${hrefOf(`/jobs/${job.id}/samples`, { prompt_id: sample.prompt_id, phase: sample.phase })}>${sample.prompt_id}</a> ${truncate(sample.prompt, 160)}</td>
      <td class="words text">${truncate(sample.completion, 240)}</td>
      <td class="num">${number(sample.reward)}</td>
      ${names.map((name) => html`<td key=${name} class="num">${number(sample.rewards[name])}</td>`)}
      <td class="num"><${Advantage} value=${sample.advantage} largest=${largest} /></td><td class="num">${number(sample.kl, 3)}</td><td class="num">${sample.num_tokens}</td>
      <td>${sample.finish_reason === "length" ? "truncated" : sample.finish_reason}</td></tr>`)}<//>`;
}
