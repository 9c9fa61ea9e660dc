// The verdict: whether the trained model is better than the base model on the same rows, with a confidence interval and the rows.
import { announce } from "../core/announce.js";
import { get, post } from "../core/api.js";
import { number, plural, signed } from "../core/format.js";
import { useLoad, usePages } from "../core/load.js";
import { hrefOf } from "../core/router.js";
import { useSignal } from "../core/signal.js";
import { hasScope } from "../core/session.js";
import { cls, html, useState } from "../core/ui.js";
import { useAction } from "../core/action.js";
import { ProblemBox } from "./problem.js";
import { Select } from "./switch.js";
import { Facts, LongText } from "./text.js";

/** Polling interval for a verdict that is not finished, in ms. */
const POLL_INTERVAL_MS = 2000;
/** Titles by the API's `verdict`, with the CSS class of their color. */
const TITLES = {
  better: ["Better than the base model", "good"],
  no_difference: ["No clear difference from the base model", ""],
  worse: ["Worse than the base model", "bad"],
  guard_fell: ["Worse on the guard dataset, where the reward must not fall", "bad"],
  too_few_rows: ["Too few rows to compare with the base model", ""],
};
const ROW_SOURCES = { test_fraction: "held out for the verdict", test_dataset: "from the test dataset", eval: "from the evaluation" };
const isOver = ({ state }) => !["queued", "running"].includes(state);

/** Reads the newest verdict of the job; null if there is none. */
async function readNewest(run, signal) {
  const { verdict } = await get(`${run.path}/summary`, undefined, signal);
  return verdict && get(`/verdicts/${verdict.id}`, undefined, signal);
}

export function Verdict({ run, job }) {
  const [isActive, setActive] = useState(false);
  const load = async (signal) => {
    const verdict = await readNewest(run, signal);
    setActive(!!verdict && !isOver(verdict));
    return verdict;
  };
  // Read again when the job's state changes: the server may start a verdict when a job ends.
  const { data, error, reload } = useLoad(load, [run, job.state], { every: isActive ? POLL_INTERVAL_MS : 0 });
  if (error) return html`<${ProblemBox} error=${error} retry=${reload} />`;
  if (!data) return html`<${CompareButton} run=${run} job=${job} onStarted=${reload} />`;
  return html`<section class="verdict panel" aria-label="Verdict">
    ${isOver(data) ? html`<${Result} verdict=${data} />` : html`<${VerdictProgress} verdict=${data} onCancelled=${reload} />`}
    ${isOver(data) && html`<${CompareButton} run=${run} job=${job} onStarted=${reload} isRepeat />`}
  </section>`;
}

/** The button that starts a verdict, if the job has evaluation rows and a checkpoint. */
function CompareButton({ run, job, onStarted, isRepeat }) {
  const { busy, error, run: runAction } = useAction();
  const events = useSignal(run.events);
  const hasCheckpoint = job.state === "succeeded" || events.some(({ type }) => type === "checkpoint.saved");
  if (!job.plan.eval || !hasCheckpoint || !hasScope("submit")) return null;
  const start = () => runAction(async () => {
    await post(`${run.path}/verdict`, {});
    announce("Comparison queued");
    onStarted();
  });
  return html`<div class=${isRepeat ? "row end" : "notice row between wrap"}>
    ${!isRepeat && html`<span>Is the trained model better? Compare the best checkpoint with the base model on the same rows.</span>`}
    <button class=${isRepeat && "mini"} disabled=${busy} onClick=${start}>${isRepeat ? "Compare again" : "Compare"}</button>
    <${ProblemBox} error=${error} />
  </div>`;
}

function VerdictProgress({ verdict, onCancelled }) {
  const { state, progress, step } = verdict;
  const { busy, error, run: runAction } = useAction();
  const cancel = () => runAction(async () => {
    await post(`/verdicts/${verdict.id}/cancel`, {});
    onCancelled();
  });
  return html`<div class="row between wrap"><h2>Verdict</h2>${hasScope("submit") && html`<button class="mini" disabled=${busy} onClick=${cancel}>Cancel</button>`}</div>
    <p>${state === "queued" ? "The comparison is queued." : `Comparing the checkpoint of step ${step} with the base model.`}</p>
    ${progress.total > 0 && html`<progress max=${progress.total} value=${progress.done} aria-label="Progress"></progress>`}
    <${ProblemBox} error=${error} />`;
}

function Result({ verdict }) {
  const { state, error, result, step, job_id } = verdict;
  if (!result) {
    return html`<h2>Verdict</h2><p>${state === "cancelled" ? "The comparison was cancelled." : error?.message}</p>
      ${error && html`<p class="dim small">${error.code}</p>`}`;
  }
  const [title, tone] = TITLES[result.verdict] ?? [result.verdict, ""];
  const { base, trained, difference, interval, rows, won, lost, tied, missing_rows, method, p_value, guard, note, sampling } = result;
  const intervalText = interval ? `95% interval ${signed(interval[0])} to ${signed(interval[1])}` : "no confidence interval";
  const facts = [
    ["Base model", number(base.mean), "mean reward"],
    ["Trained model", number(trained.mean), html`<a href=${hrefOf(`/jobs/${job_id}/checkpoints`)}>step ${step}</a>`],
    ["Difference", signed(difference), intervalText],
    ["Rows", String(rows), ROW_SOURCES[result.rows_from]],
    ["Rows won, lost, tied", `${won}, ${lost}, ${tied}`, missing_rows > 0 && `${missing_rows} without a reward`],
    ["Sampling", sampling.temperature === 0 ? "greedy" : `${plural(sampling.num_generations, "completion")} per row`, method === "exact" ? `exact test, p = ${number(p_value, 2)}` : sampling.temperature > 0 && `temperature ${number(sampling.temperature)}`],
  ];
  return html`<h2 class=${cls(tone)} data-verdict=${result.verdict}>${title}</h2>
    <p>${result.summary}</p>
    ${note && html`<p class="warn">${note[0].toUpperCase() + note.slice(1)}.</p>`}
    <${Facts} facts=${facts} />
    ${trained.pass_at && html`<${PassAt} base=${base.pass_at} trained=${trained.pass_at} />`}
    ${guard && html`<p><strong>Guard dataset (the reward must not fall):</strong> ${number(guard.base.mean)} → ${number(guard.trained.mean)} on ${plural(guard.rows, "row")}, difference ${signed(guard.difference)}${guard.interval &&
      ` (95% interval ${signed(guard.interval[0])} to ${signed(guard.interval[1])})`}. Allowed drop: ${number(guard.margin)}. ${guard.fell === null ? "Too few guard rows for a conclusion." : guard.fell ? html`<span class="bad">The reward may have fallen by more than allowed.</span>` : "The reward did not fall by more than allowed."}</p>`}
    <${RowsSection} id=${verdict.id} won=${won} lost=${lost} />`;
}

function PassAt({ base, trained }) {
  return html`<table class="small"><caption class="unseen">Probability that at least one of k completions passes</caption>
    <thead><tr><th scope="col">pass@k</th>${trained.map(({ k }) => html`<th key=${k} scope="col" class="num">${k}</th>`)}</tr></thead>
    <tbody>${[["base model", base], ["trained model", trained]].map(([name, values]) => html`<tr key=${name}><th scope="row">${name}</th>${(values ?? []).map(({ k, chance }) => html`<td key=${k} class="num">${number(chance, 3)}</td>`)}</tr>`)}</tbody></table>`;
}

/** The rows with the answers of both models, loaded when the section is opened. */
function RowsSection({ id, won, lost }) {
  const [isOpen, setOpen] = useState(false);
  return html`<details onToggle=${({ target }) => setOpen(target.open)}><summary>Compare the answers (${won} rows won, ${lost} lost)</summary>
    ${isOpen && html`<${RowList} id=${id} first=${lost > 0 ? "lost" : "won"} />`}</details>`;
}

function RowList({ id, first }) {
  const [outcome, setOutcome] = useState(first);
  const { rows, next, error, loading, loadMore } = usePages(`/verdicts/${id}/rows`, { outcome: outcome || undefined, limit: 10 });
  const options = [["won", "won"], ["lost", "lost"], ["tied", "tied"], ["missing", "without a reward"], ["", "all"]];
  return html`<div class="stack"><div class="filters"><label class="inline">Rows <${Select} value=${outcome} options=${options} set=${setOutcome} /></label></div>
    <${ProblemBox} error=${error} />
    ${!loading && !rows.length && html`<p class="dim">No matching rows.</p>`}
    ${rows.map((row) => html`<${Row} key=${row.set + row.row} row=${row} />`)}
    ${next && html`<button disabled=${loading} onClick=${loadMore}>Show more rows</button>`}</div>`;
}

function Row({ row }) {
  const { set, row: index, outcome, difference, prompt, base, trained } = row;
  return html`<article class="panel" aria-label=${`Row ${index}`}>
    <h3>${set === "guard" ? "Row of the guard dataset" : "Row"} ${index} <span class="dim small">${outcome}${difference !== null && `, ${signed(difference)}`}</span></h3>
    <${LongText} text=${prompt} label="Prompt" class="prompt" shown=${600} />
    <div class="beside">${[["Base model", base], ["Trained model", trained]].map(([title, answers]) => html`<div key=${title} class="completion panel">
      <h4>${title} <span class="dim small">reward ${number(answers.reward)}</span></h4>
      ${answers.completions.map((one, position) => html`<div key=${position}><${LongText} text=${one.completion} label="Completion" />
        ${answers.completions.length > 1 && html`<p class="dim small">reward ${number(one.reward)}</p>`}</div>`)}</div>`)}</div>
  </article>`;
}
