// The verdict: is the trained model better than the base model on the same rows? With the interval, and rows won and lost.
import { announce } from "../core/announce.js";
import { get, post } from "../core/api.js";
import { number, plural, signed } from "../core/format.js";
import { useLoad } from "../core/load.js";
import { usePages } from "../core/pages.js";
import { hrefOf } from "../core/router.js";
import { useSignal } from "../core/signal.js";
import { may } from "../core/session.js";
import { cls, html, useState } from "../core/ui.js";
import { useWork } from "../core/work.js";
import { Long } from "./long.js";
import { ProblemBox } from "./problem.js";
import { Select } from "./switch.js";
import { Facts } from "./text.js";

/** How often a verdict that is under way is looked at, ms. */
const LOOK_MS = 2000;
/** Word, title, and the class that colours it. */
const TITLES = {
  better: ["Better than the base model", "good"],
  no_difference: ["No difference shown", ""],
  worse: ["Worse than the base model", "bad"],
  guard_fell: ["The guard fell", "bad"],
  too_few_rows: ["Too few rows to tell", ""],
};
const ROWS_FROM = { test_fraction: "rows set aside for the verdict", test_dataset: "the test dataset", eval: "the evaluation's rows" };
const isOver = ({ state }) => !["queued", "running"].includes(state);

/** The newest verdict of the job, whole; null without one. */
async function newest(run, signal) {
  const { verdict } = await get(`${run.path}/summary`, undefined, signal);
  return verdict && get(`/verdicts/${verdict.id}`, undefined, signal);
}

export function Verdict({ run, job }) {
  const [isUnderWay, setUnderWay] = useState(false);
  const load = async (signal) => {
    const verdict = await newest(run, signal);
    setUnderWay(!!verdict && !isOver(verdict));
    return verdict;
  };
  // Each end of the job may begin a verdict.
  const { data, error, reload } = useLoad(load, [run, job.state], { every: isUnderWay ? LOOK_MS : 0 });
  if (error) return html`<${ProblemBox} error=${error} retry=${reload} />`;
  if (!data) return html`<${Ask} run=${run} job=${job} onAsked=${reload} />`;
  return html`<section class="verdict panel" aria-label="Verdict">
    ${isOver(data) ? html`<${Ended} verdict=${data} />` : html`<${UnderWay} verdict=${data} onCancelled=${reload} />`}
    ${isOver(data) && html`<${Ask} run=${run} job=${job} onAsked=${reload} again />`}
  </section>`;
}

/** The button that begins one, where there are rows and a checkpoint. */
function Ask({ run, job, onAsked, again }) {
  const { busy, error, run: work } = useWork();
  const events = useSignal(run.events);
  const hasCheckpoint = job.state === "succeeded" || events.some(({ type }) => type === "checkpoint.saved");
  if (!job.plan.eval || !hasCheckpoint || !may("submit")) return null;
  const ask = () => work(async () => {
    await post(`${run.path}/verdict`, {});
    announce("The comparison waits for its turn");
    onAsked();
  });
  return html`<div class=${again ? "row end" : "notice row between wrap"}>
    ${!again && html`<span>Is it better than the base model? Compare the best checkpoint with it on the same rows.</span>`}
    <button class=${again && "mini"} disabled=${busy} onClick=${ask}>${again ? "Compare again" : "Compare"}</button>
    <${ProblemBox} error=${error} />
  </div>`;
}

function UnderWay({ verdict, onCancelled }) {
  const { state, progress, step } = verdict;
  const { busy, error, run: work } = useWork();
  const cancel = () => work(async () => {
    await post(`/verdicts/${verdict.id}/cancel`, {});
    onCancelled();
  });
  return html`<div class="row between wrap"><h2>Verdict</h2>${may("submit") && html`<button class="mini" disabled=${busy} onClick=${cancel}>Cancel</button>`}</div>
    <p>${state === "queued" ? "Waiting for its turn." : `Comparing the checkpoint of step ${step} with the base model.`}</p>
    ${progress.total > 0 && html`<progress max=${progress.total} value=${progress.done} aria-label="Progress"></progress>`}
    <${ProblemBox} error=${error} />`;
}

function Ended({ verdict }) {
  const { state, error, result, step, job_id } = verdict;
  if (!result) {
    return html`<h2>Verdict</h2><p>${state === "cancelled" ? "The comparison was cancelled." : error?.message}</p>
      ${error && html`<p class="dim small">${error.code}</p>`}`;
  }
  const [title, tone] = TITLES[result.verdict] ?? [result.verdict, ""];
  const { base, trained, difference, interval, rows, won, lost, tied, missing_rows, method, p_value, guard, note, sampling } = result;
  const between = interval ? `95 %: ${signed(interval[0])} to ${signed(interval[1])}` : "no interval";
  const facts = [
    ["Base model", number(base.mean), "mean reward"],
    ["Trained", number(trained.mean), html`<a href=${hrefOf(`/jobs/${job_id}/checkpoints`)}>step ${step}</a>`],
    ["Difference", signed(difference), between],
    ["Rows", String(rows), ROWS_FROM[result.rows_from]],
    ["Won, lost, tied", `${won}, ${lost}, ${tied}`, missing_rows > 0 && `${missing_rows} without a reward`],
    ["Sampled", sampling.temperature === 0 ? "greedy" : `${plural(sampling.num_generations, "completion")} a row`, method === "exact" ? `exact test, p ${number(p_value, 2)}` : sampling.temperature > 0 && `temperature ${number(sampling.temperature)}`],
  ];
  return html`<h2 class=${cls(tone)} data-verdict=${result.verdict}>${title}</h2>
    <p>${result.summary}</p>
    ${note && html`<p class="warn">${note[0].toUpperCase() + note.slice(1)}.</p>`}
    <${Facts} facts=${facts} />
    ${trained.pass_at && html`<${PassAt} base=${base.pass_at} trained=${trained.pass_at} />`}
    ${guard && html`<p><strong>Guard:</strong> ${number(guard.base.mean)} → ${number(guard.trained.mean)} on ${plural(guard.rows, "row")}, difference ${signed(guard.difference)}${guard.interval &&
      ` (95 %: ${signed(guard.interval[0])} to ${signed(guard.interval[1])})`}; it may fall by ${number(guard.margin)}. ${guard.fell === null ? "Too few rows to tell." : guard.fell ? html`<span class="bad">It may have fallen further.</span>` : "It did not fall further."}</p>`}
    <${Rows} id=${verdict.id} won=${won} lost=${lost} />`;
}

function PassAt({ base, trained }) {
  return html`<table class="small"><caption class="unseen">Chance that at least one of k completions passes</caption>
    <thead><tr><th scope="col">pass@k</th>${trained.map(({ k }) => html`<th key=${k} scope="col" class="num">${k}</th>`)}</tr></thead>
    <tbody>${[["base", base], ["trained", trained]].map(([name, values]) => html`<tr key=${name}><th scope="row">${name}</th>${(values ?? []).map(({ k, chance }) => html`<td key=${k} class="num">${number(chance, 3)}</td>`)}</tr>`)}</tbody></table>`;
}

/** The rows, with what both models said. */
function Rows({ id, won, lost }) {
  const [isOpen, open] = useState(false);
  return html`<details onToggle=${({ target }) => open(target.open)}><summary>${won} rows won, ${lost} lost: see what both models said</summary>
    ${isOpen && html`<${RowList} id=${id} first=${lost > 0 ? "lost" : "won"} />`}</details>`;
}

function RowList({ id, first }) {
  const [outcome, choose] = useState(first);
  const { rows, next, error, loading, more } = usePages(`/verdicts/${id}/rows`, { outcome: outcome || undefined, limit: 10 });
  const options = [["won", "won"], ["lost", "lost"], ["tied", "tied"], ["missing", "without a reward"], ["", "all"]];
  return html`<div class="stack"><div class="filters"><label class="inline">Rows <${Select} value=${outcome} options=${options} set=${choose} /></label></div>
    <${ProblemBox} error=${error} />
    ${!loading && !rows.length && html`<p class="dim">No such rows.</p>`}
    ${rows.map((row) => html`<${Row} key=${row.set + row.row} row=${row} />`)}
    ${next && html`<button disabled=${loading} onClick=${more}>More rows</button>`}</div>`;
}

function Row({ row }) {
  const { set, row: index, outcome, difference, prompt, base, trained } = row;
  return html`<article class="panel" aria-label=${`Row ${index}`}>
    <h3>Row ${index}${set === "guard" && " of the guard"} <span class="dim small">${outcome}${difference !== null && `, ${signed(difference)}`}</span></h3>
    <${Long} text=${prompt} label="Prompt" class="prompt" shown=${600} />
    <div class="beside">${[["Base model", base], ["Trained", trained]].map(([title, answers]) => html`<div key=${title} class="completion panel">
      <h4>${title} <span class="dim small">reward ${number(answers.reward)}</span></h4>
      ${answers.completions.map((one, place) => html`<div key=${place}><${Long} text=${one.completion} label="Completion" />
        ${answers.completions.length > 1 && html`<p class="dim small">reward ${number(one.reward)}</p>`}</div>`)}</div>`)}</div>
  </article>`;
}
