// Checkpoints: metrics at the step, hashes, sizes, downloads, and the lines that use one.
import { all, del, post } from "../core/api.js";
import { bytes, number, plural } from "../core/format.js";
import { useLoad } from "../core/load.js";
import { useFilters } from "../core/router.js";
import { may, session } from "../core/session.js";
import { cls, html, useEffect, useState } from "../core/ui.js";
import { Empty } from "../parts/empty.js";
import { JobPage } from "../parts/job-page.js";
import { ProblemBox } from "../parts/problem.js";
import { Ago, Code, Copy } from "../parts/text.js";
import { usage } from "../parts/usage.js";

/** The metrics of the list; the rest stands with the checkpoint. */
const HEADLINES = ["reward", "eval_reward", "kl", "entropy"];

export default function Checkpoints({ params }) {
  return html`<${JobPage} id=${params.id} tab="/checkpoints">${(run, job) => html`<${CheckpointsOf} run=${run} job=${job} />`}<//>`;
}

function CheckpointsOf({ run, job }) {
  const [query, set] = useFilters();
  const { data, error, reload } = useLoad((signal) => all(`${run.path}/checkpoints`, {}, 1000, signal), [run]);
  const published = run.events.value.findLast(({ type }) => type === "checkpoint.saved")?.seq;
  useEffect(() => void (data && reload()), [published, job.state]);
  if (!data) return error ? html`<${ProblemBox} error=${error} retry=${reload} />` : html`<div class="loading" aria-busy="true">Loading…</div>`;
  if (!data.length) return html`<${Empty} title="No checkpoint yet"><p>This job saves one every ${plural(job.plan.checkpoints.every_steps, "step")}, and its last.</p><//>`;
  const chosen = data.find(({ id }) => id === query.checkpoint) ?? resultOf(job, data);
  return html`
    <${ProblemBox} error=${error} retry=${reload} />
    <${List} checkpoints=${data} chosen=${chosen} onChoose=${(id) => set({ checkpoint: id })} reload=${reload} />
    <${One} key=${chosen.id} job=${job} checkpoint=${chosen} isResult=${chosen === resultOf(job, data)} />`;
}

/** What GET /jobs/{id}/adapter gives: the newest, unless the job ended early and names another. */
function resultOf(job, checkpoints) {
  const named = job.ending?.checkpoint?.step;
  return checkpoints.find(({ step }) => step === named) ?? checkpoints[0];
}

function List({ checkpoints, chosen, onChoose, reload }) {
  const keys = HEADLINES.filter((key) => checkpoints.some(({ metrics }) => key in metrics));
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Checkpoints"><table class="list">
    <thead><tr><th scope="col">Step</th>${keys.map((key) => html`<th key=${key} scope="col" class="num">${key}</th>`)}<th scope="col" class="num">Size</th><th scope="col">Published</th><th scope="col"><span class="unseen">Actions</span></th></tr></thead>
    <tbody>${checkpoints.map((one) => html`<tr key=${one.id} class=${cls(one === chosen && "chosen")}>
      <th scope="row"><button class="link" aria-pressed=${one === chosen ? "true" : "false"} onClick=${() => onChoose(one.id)}>step ${one.step}</button>
        ${one.best && html` <span class="tag good">★ best</span>`}${one.pinned && html` <span class="tag">pinned</span>`}</th>
      ${keys.map((key) => html`<td key=${key} class="num">${number(one.metrics[key])}</td>`)}
      <td class="num">${bytes(sizeOf(one))}</td><td><${Ago} time=${one.created_at} /></td>
      <td><div class="row end"><a class="button mini" href=${`/checkpoints/${one.id}/archive.tar`} download aria-label=${`Download the checkpoint of step ${one.step}`}>Download</a><${Pin} checkpoint=${one} reload=${reload} /></div></td>
    </tr>`)}</tbody></table></div>`;
}

const sizeOf = ({ files }) => files.reduce((sum, { size_bytes }) => sum + size_bytes, 0);

function Pin({ checkpoint, reload }) {
  const [error, setError] = useState(null);
  if (!may("submit")) return null;
  const { id, step, pinned } = checkpoint;
  const press = async () => {
    setError(null);
    try {
      await (pinned ? del(`/checkpoints/${id}/pin`) : post(`/checkpoints/${id}/pin`));
      reload();
    } catch (problem) {
      setError(problem);
    }
  };
  return html`<button class="mini" aria-pressed=${pinned ? "true" : "false"} aria-label=${`Pin the checkpoint of step ${step}`} title="Kept whatever the rotation says" onClick=${press}>Pin</button>
    <${ProblemBox} error=${error} />`;
}

function One({ job, checkpoint, isResult }) {
  const { id, step, files, metrics } = checkpoint;
  const [chosen, choose] = useState(null);
  const [download, ...ways] = usage({ job, checkpoint, origin: location.origin, needsKey: session.value.state === "in" });
  const way = ways.find(([title]) => title === chosen) ?? ways[0];
  return html`<section class="panel checkpoint" aria-label=${`Checkpoint of step ${step}`}>
    <h2>Step ${step} ${isResult && html`<span class="tag">the job's result</span>`} <code class="id">${id}</code></h2>
    <div class="columns">
      <div class="stack">
        <h3>Use it</h3>
        <${Way} part=${download} />
        <span class="switch" role="group" aria-label="With">${ways.map(([title]) => html`<button key=${title} aria-pressed=${title === way[0] ? "true" : "false"} onClick=${() => choose(title)}>${title}</button>`)}</span>
        <${Way} part=${way} />
      </div>
      <div class="stack">
        <h3>Files</h3>
        <ul class="plain files">${files.map(({ name, size_bytes, sha256 }) => html`<li key=${name}>
          <a href=${`/checkpoints/${id}/files/${encodeURIComponent(name)}`} download>${name}</a> <span class="dim num">${bytes(size_bytes)}</span>
          <div class="hash"><code title="SHA-256">${sha256}</code> <${Copy} text=${sha256} label="Copy hash" /></div></li>`)}</ul>
        <details><summary>${plural(Object.keys(metrics).length, "metric")} at step ${step}</summary>
          <dl class="pairs">${Object.entries(metrics).map(([key, value]) => html`<div key=${key}><dt>${key}</dt><dd>${number(value, 6)}</dd></div>`)}</dl></details>
      </div>
    </div>
  </section>`;
}

const Way = ({ part: [title, about, lines] }) => html`<div class="usage"><h4>${title} <span class="dim small">${about}</span></h4><${Code} text=${lines} label=${title} /></div>`;
