// Compares runs: a summary, charts over the same steps, and the settings that differ. The address holds the ids of the runs.
import { Chart } from "../chart/chart.js";
import { ChartControls } from "../chart/controls.js";
import { ChartGroup } from "../chart/group.js";
import { color, dash } from "../chart/palette.js";
import { get, getAll } from "../core/api.js";
import { number, plural, signed } from "../core/format.js";
import { useLoad } from "../core/load.js";
import { hrefOf, useFilters } from "../core/router.js";
import { useSignal } from "../core/signal.js";
import { theme } from "../core/theme.js";
import { html, useMemo, useState } from "../core/ui.js";
import { Loading, ProblemBox } from "../parts/problem.js";
import { State } from "../parts/state.js";
import { Select } from "../parts/switch.js";
import { Table } from "../parts/table.js";

const MAX_RUNS = 8;
const MAX_LISTED = 60;
const CHARTS = [["reward", "Reward"], ["eval_reward", "Evaluation"], ["kl", "KL"], ["entropy", "Entropy"], ["completions/mean_length", "Length"], ["loss", "Loss"], ["grad_norm", "Gradient norm"], ["reward_std", "Reward std"]];

export default function Compare() {
  const [query, set] = useFilters();
  const ids = (query.ids ?? "").split(",").filter(Boolean);
  const choose = (chosen) => set({ ids: chosen.join(",") }, { replace: false });
  return html`
    <h1>Compare runs</h1>
    <${Chooser} ids=${ids} onChoose=${choose} />
    ${ids.length > 0 && html`<${Comparison} key=${ids.join()} ids=${ids} keys=${query.keys} align=${query.by === "share" ? "share" : "step"} set=${set} />`}`;
}

/** The list from which runs are chosen: those already chosen, and the latest others. */
function Chooser({ ids, onChoose }) {
  const [text, setText] = useState("");
  const [isOpen] = useState(ids.length < 2);
  const { data, error, reload } = useLoad((signal) => getAll("/jobs", {}, 1000, signal), []);
  const jobs = data ?? [];
  const matches = (job) => `${job.name ?? ""} ${job.id} ${job.plan.model.id}`.toLowerCase().includes(text.toLowerCase());
  const shown = jobs.filter((job) => ids.includes(job.id) || matches(job));
  const toggle = (id) => onChoose(ids.includes(id) ? ids.filter((other) => other !== id) : [...ids, id]);
  return html`<details class="panel chooser" open=${isOpen}>
    <summary>${ids.length ? `${plural(ids.length, "run")} chosen, maximum ${MAX_RUNS}` : `Choose up to ${MAX_RUNS} runs`}</summary>
    <${ProblemBox} error=${error} retry=${reload} />
    <label class="inline">Search <input type="search" value=${text} onInput=${(event) => setText(event.target.value)} /></label>
    <fieldset><legend class="unseen">Runs</legend>
      ${shown.slice(0, MAX_LISTED).map((job) => html`<label key=${job.id} class="pick"><input type="checkbox" checked=${ids.includes(job.id)} disabled=${!ids.includes(job.id) && ids.length >= MAX_RUNS} onChange=${() => toggle(job.id)} />
        <span>${job.name ?? job.id}</span> <span class="dim small">${job.plan.model.id} · step ${job.step}</span></label>`)}
      ${shown.length > MAX_LISTED && html`<p class="dim small">Showing the latest ${MAX_LISTED} of ${jobs.length < 1000 ? shown.length : "all"} runs. Search to find others.</p>`}
      ${data && !shown.length && html`<p class="dim">No matching runs.</p>`}
    </fieldset>
  </details>`;
}

function Comparison({ ids, keys, align, set }) {
  const extra = keys ? keys.split(",").filter(Boolean) : [];
  const charts = [...CHARTS, ...extra.map((key) => [key, key])];
  const { data, error, reload } = useLoad((signal) => get("/jobs/compare", { ids: ids.join(","), keys: charts.map(([key]) => key).join(","), max_points: 2000 }, signal), [ids.join(), keys], { every: 10_000 });
  if (!data) return html`<${Loading} error=${error} retry=${reload} />`;
  return html`
    <${ProblemBox} error=${error} retry=${reload} />
    <${Summary} data=${data} />
    <${Curves} data=${data} charts=${charts} align=${align} extra=${extra} set=${set} />
    <${Settings} data=${data} />`;
}

/** Returns a unique label for each job: its name, with the end of its id if another job has the same name. */
function uniqueLabels(jobs) {
  const name = (job) => job.name ?? job.model;
  return jobs.map((job) => (jobs.filter((other) => name(other) === name(job)).length > 1 ? `${name(job)} (${job.id.slice(-6)})` : name(job)));
}

function Line({ index }) {
  const mode = useSignal(theme);
  return html`<svg class="line" viewBox="0 0 22 8" aria-hidden="true"><path d="M0 4H22" stroke=${color(index, mode)} stroke-width="2.5" stroke-dasharray=${dash(index).join(" ")} /></svg>`;
}

function Summary({ data }) {
  const names = uniqueLabels(data.jobs);
  const valuesOf = (key, index) => data.metrics.map((row) => row[key]?.[index]).filter((value) => typeof value === "number");
  return html`<${Table} label="Summary of the compared runs" head=${["Run", "State", "#Step", "#First reward", "#Last reward", "#Change", "#Last evaluation", "Best checkpoint"]}>${data.jobs.map((job, index) => {
      const reward = valuesOf("reward", index);
      const [first, last] = [reward[0], reward.at(-1)];
      return html`<tr key=${job.id}>
        <th scope="row"><${Line} index=${index} /> <a href=${hrefOf(`/jobs/${job.id}`)}>${names[index]}</a><div class="dim small">${job.model}</div></th>
        <td><${State} job=${job} /></td><td class="num">${job.step} / ${job.total_steps}</td>
        <td class="num">${number(first)}</td><td class="num">${number(last)}</td><td class="num">${signed(last - first)}</td>
        <td class="num">${number(job.evals.at(-1)?.metrics.eval_reward)}</td>
        <td>${job.best_checkpoint ? html`<a href=${hrefOf(`/jobs/${job.id}/checkpoints`, { checkpoint: job.best_checkpoint.id })}>step ${job.best_checkpoint.step}</a>` : "–"}</td></tr>`;
    })}<//>`;
}

/** The charts, over the steps or, for runs of different lengths, over the progress in percent. */
function Curves({ data, charts, align, extra, set }) {
  const group = useMemo(() => new ChartGroup(), [align]);
  const [key, setKey] = useState("");
  const names = uniqueLabels(data.jobs);
  const drawn = useMemo(() => alignCurves(data, charts.map(([key]) => key), align), [data, align]);
  group.extent = drawn.x.length ? [drawn.x[0], Math.max(drawn.x.at(-1), drawn.x[0] + 1)] : [0, 1];
  const add = (event) => {
    event.preventDefault();
    if (key.trim() && !charts.some(([known]) => known === key.trim())) set({ keys: [...extra, key.trim()].join(",") });
    setKey("");
  };
  const present = charts.filter(([key]) => drawn.columns.get(key)?.some((column) => column.some((value) => value === value)));
  return html`
    <h2 class="unseen">Curves</h2>
    <${ChartControls} group=${group}>
      <label class="inline">Align by <${Select} value=${align} options=${[["step", "step"], ["share", "progress, %"]]} set=${(by) => set({ by: by === "share" ? by : "" })} /></label>
      <form class="row" onSubmit=${add}><label class="inline">Metric <input value=${key} placeholder="rewards/NAME/mean" class="key" maxlength="200" onInput=${(event) => setKey(event.target.value)} /></label><button class="mini">Add chart</button></form>
    <//>
    ${data.unknown_keys.filter((key) => extra.includes(key)).map((key) => html`<p key=${key} class="warn small">None of these runs has the metric ${key}.</p>`)}
    <div class="charts">${present.map(([key, title]) => html`<${Chart} key=${key} title=${title} note=${align === "share" && "by progress"} group=${group} x=${drawn.x} version=${data}
      series=${drawn.columns.get(key).map((values, index) => ({ label: names[index], key, values, tint: index, points: key.startsWith("eval_") }))} />`)}</div>`;
}

/** Returns `{x, columns}`: for each key, one column per job; NaN marks a missing value. */
function alignCurves({ jobs, metrics }, keys, align) {
  const position = (step, job) => (align === "step" ? step : (100 * step) / (job.total_steps || 1));
  const x = Float64Array.from(new Set(metrics.flatMap(({ step }) => (align === "step" ? [step] : jobs.filter((job) => step <= job.total_steps).map((job) => position(step, job)))))).sort();
  const indexOf = new Map([...x].map((value, index) => [value, index]));
  const columns = new Map();
  for (const key of keys) {
    columns.set(key, jobs.map((job, index) => {
      const column = new Float64Array(x.length).fill(NaN);
      for (const row of metrics) {
        const value = row[key]?.[index];
        if (typeof value === "number") column[indexOf.get(position(row.step, job))] = value;
      }
      return column;
    }));
  }
  return { x, columns };
}

/** The settings that differ, one column per run. */
function Settings({ data }) {
  const names = uniqueLabels(data.jobs);
  if (data.jobs.length < 2) return html`<p class="dim">Choose a second run to see which settings differ.</p>`;
  const config = data.config.filter(({ pointer }) => pointer !== "/name");
  if (!config.length) return html`<h2>Settings</h2><p class="dim">The runs have the same settings.</p>`;
  return html`<h2>Settings that differ <span class="dim small">${config.length}</span></h2>
    <${Table} label="Settings that differ" name="settings" head=${["Setting", ...names.map((name, index) => html`<${Line} index=${index} /> ${name}`)]}>${config.map(({ pointer, values }) => html`<tr key=${pointer}><th scope="row"><code>${pointer.slice(1).replaceAll("/", ".")}</code></th>
        ${values.map((value, index) => html`<td key=${index}><code>${value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value)}</code></td>`)}</tr>`)}<//>`;
}
