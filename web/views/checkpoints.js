// Checkpoints: metrics at the step, hashes, sizes, downloads, and the lines that use one.
import { del, post } from "../core/api.js";
import { bytes, number, plural, savesEvery } from "../core/format.js";
import { hrefOf, useFilters } from "../core/router.js";
import { useCheckpoints } from "../core/run.js";
import { may, session } from "../core/session.js";
import { cls, html, useState } from "../core/ui.js";
import { useWork } from "../core/work.js";
import { Empty } from "../parts/empty.js";
import { jobView } from "../parts/job-page.js";
import { Loading, ProblemBox } from "../parts/problem.js";
import { Switch } from "../parts/switch.js";
import { Table } from "../parts/table.js";
import { Ago, Code, Copy } from "../parts/text.js";
import { usage } from "../parts/usage.js";

/** The metrics of the list; the rest stands with the checkpoint. */
const HEADLINES = ["reward", "eval_reward", "kl", "entropy"];

const Checkpoints = jobView("/checkpoints", CheckpointsOf);
export default Checkpoints;

function CheckpointsOf({ run, job }) {
  const [query, set] = useFilters();
  const { data, error, reload } = useCheckpoints(run);
  if (!data) return html`<${Loading} error=${error} retry=${reload} />`;
  if (!data.length) return html`<${Empty} title="No checkpoint yet"><p>This job saves one every ${savesEvery(job.plan.checkpoints)}, and its last.</p><//>`;
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
  return html`<${Table} label="Checkpoints" head=${["Step", ...keys.map((key) => `#${key}`), "#Size", "Published", "!Actions"]}>${checkpoints.map((one) => html`<tr key=${one.id} class=${cls(one === chosen && "chosen")}>
      <th scope="row"><button class="link" aria-pressed=${one === chosen} onClick=${() => onChoose(one.id)}>step ${one.step}</button>
        ${one.best && html` <span class="tag good">★ best</span>`}${one.pinned && html` <span class="tag">pinned</span>`}</th>
      ${keys.map((key) => html`<td key=${key} class="num">${number(one.metrics[key])}</td>`)}
      <td class="num">${bytes(sizeOf(one))}</td><td><${Ago} time=${one.created_at} /></td>
      <td><div class="row end"><a class="button mini" href=${`/checkpoints/${one.id}/archive.tar`} download aria-label=${`Download the checkpoint of step ${one.step}`}>Download</a><${Pin} checkpoint=${one} reload=${reload} /></div></td>
    </tr>`)}<//>`;
}

const sizeOf = ({ files }) => files.reduce((sum, { size_bytes }) => sum + size_bytes, 0);

function Pin({ checkpoint, reload }) {
  const { error, run } = useWork();
  if (!may("submit")) return null;
  const { id, step, pinned } = checkpoint;
  const press = () => run(async () => {
    await (pinned ? del : post)(`/checkpoints/${id}/pin`);
    reload();
  });
  return html`<button class="mini" aria-pressed=${pinned} aria-label=${`Pin the checkpoint of step ${step}`} title="Kept whatever the rotation says" onClick=${press}>Pin</button>
    <${ProblemBox} error=${error} />`;
}

function One({ job, checkpoint, isResult }) {
  const { id, step, files, metrics } = checkpoint;
  const [chosen, choose] = useState(null);
  const [download, ...ways] = usage({ job, checkpoint, origin: location.origin, needsKey: session.value.state === "in" });
  const way = ways.find(([title]) => title === chosen) ?? ways[0];
  return html`<section class="panel checkpoint" aria-label=${`Checkpoint of step ${step}`}>
    <h2>Step ${step} ${isResult && html`<span class="tag">the job's result</span>`} <code class="id">${id}</code></h2>
    <p><a class="button" href=${hrefOf(`/jobs/${job.id}/playground`, { step })}>Try it beside the base model</a></p>
    <div class="columns">
      <div class="stack">
        <h3>Use it</h3>
        <${Way} part=${download} />
        <${Switch} label="With" options=${ways.map(([title]) => [title, title])} value=${way[0]} set=${choose} />
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
