// The checkpoints of a job: metrics, files with sizes and hashes, downloads, and examples that use a checkpoint.
import { del, post } from "../core/api.js";
import { bytes, checkpointInterval, number, plural } from "../core/format.js";
import { useGet } from "../core/load.js";
import { hrefOf, useFilters } from "../core/router.js";
import { useCheckpoints } from "../core/run.js";
import { hasScope, session } from "../core/session.js";
import { cls, html, useState } from "../core/ui.js";
import { useAction } from "../core/action.js";
import { Certificate } from "../parts/certificate.js";
import { Exports } from "../parts/exports.js";
import { jobView } from "../parts/job-page.js";
import { Loading, ProblemBox } from "../parts/problem.js";
import { Pushes } from "../parts/push.js";
import { Switch } from "../parts/switch.js";
import { Table } from "../parts/table.js";
import { Ago, Code, Copy, Empty } from "../parts/text.js";
import { usageExamples, verifyCommand } from "../parts/usage.js";

/** Metrics in the list. The details of a checkpoint show all of them. */
const MAIN_METRICS = ["reward", "eval_reward", "kl", "entropy"];

const Checkpoints = jobView("/checkpoints", CheckpointsOf);
export default Checkpoints;

function CheckpointsOf({ run, job }) {
  const [query, set] = useFilters();
  const { data, error, reload } = useCheckpoints(run);
  if (!data) return html`<${Loading} error=${error} retry=${reload} />`;
  if (!data.length) return html`<${Empty} title="No checkpoint yet"><p>This job saves a checkpoint every ${checkpointInterval(job.plan.checkpoints)} and after its last step.</p><//>`;
  const chosen = data.find(({ id }) => id === query.checkpoint) ?? findResult(job, data);
  return html`
    <${ProblemBox} error=${error} retry=${reload} />
    <${List} checkpoints=${data} chosen=${chosen} onChoose=${(id) => set({ checkpoint: id })} reload=${reload} />
    <${Details} key=${chosen.id} job=${job} checkpoint=${chosen} isResult=${chosen === findResult(job, data)} />`;
}

/** Finds the checkpoint that GET /jobs/{id}/adapter returns: the newest, unless the job ended early and names another one. */
function findResult(job, checkpoints) {
  const named = job.ending?.checkpoint?.step;
  return checkpoints.find(({ step }) => step === named) ?? checkpoints[0];
}

function List({ checkpoints, chosen, onChoose, reload }) {
  const keys = MAIN_METRICS.filter((key) => checkpoints.some(({ metrics }) => key in metrics));
  return html`<${Table} label="Checkpoints" head=${["Step", ...keys.map((key) => `#${key}`), "#Size", "Created", "!Actions"]}>${checkpoints.map((one) => html`<tr key=${one.id} class=${cls(one === chosen && "chosen")}>
      <th scope="row"><button class="link" aria-pressed=${one === chosen} onClick=${() => onChoose(one.id)}>step ${one.step}</button>
        ${one.best && html` <span class="tag good">★ best</span>`}${one.pinned && html` <span class="tag">pinned</span>`}</th>
      ${keys.map((key) => html`<td key=${key} class="num">${number(one.metrics[key])}</td>`)}
      <td class="num">${bytes(totalSize(one))}</td><td><${Ago} time=${one.created_at} /></td>
      <td><div class="row end"><a class="button mini" href=${`/checkpoints/${one.id}/archive.tar`} download aria-label=${`Download the checkpoint of step ${one.step}`}>Download</a><${Pin} checkpoint=${one} reload=${reload} /></div></td>
    </tr>`)}<//>`;
}

const totalSize = ({ files }) => files.reduce((sum, { size_bytes }) => sum + size_bytes, 0);

function Pin({ checkpoint, reload }) {
  const { error, run } = useAction();
  if (!hasScope("submit")) return null;
  const { id, step, pinned } = checkpoint;
  const togglePin = () => run(async () => {
    await (pinned ? del : post)(`/checkpoints/${id}/pin`);
    reload();
  });
  return html`<button class="mini" aria-pressed=${pinned} aria-label=${`Pin the checkpoint of step ${step}`} title="Keep when older checkpoints are deleted" onClick=${togglePin}>Pin</button>
    <${ProblemBox} error=${error} />`;
}

function Details({ job, checkpoint, isResult }) {
  const { id, step, files, metrics } = checkpoint;
  const [chosen, setChosen] = useState(null);
  const model = useGet(`/models/${encodeURIComponent(job.plan.model.id)}`);
  const hasTemplate = model.data?.card?.has_chat_template !== false;
  const isAdapter = files.some(({ name }) => name === "adapter_model.safetensors");
  const origin = location.origin;
  const [download, ...examples] = usageExamples({ job, checkpoint, origin, needsKey: session.value.state === "in", hasTemplate });
  const example = examples.find(([title]) => title === chosen) ?? examples[0];
  return html`<section class="panel checkpoint" aria-label=${`Checkpoint of step ${step}`}>
    <h2>Step ${step} ${isResult && html`<span class="tag">result of the job</span>`} <code class="id">${id}</code></h2>
    <p class="row wrap"><a class="button" href=${hrefOf(`/jobs/${job.id}/chat`, { checkpoint: id })}>Chat with this checkpoint</a>
      <a class="button" href=${hrefOf(`/jobs/${job.id}/playground`, { step })}>Compare with the base model</a></p>
    <div class="columns">
      <div class="stack">
        <h3>Use this checkpoint</h3>
        <${Example} example=${download} />
        <${Switch} label="Program" options=${examples.map(([title]) => [title, title])} value=${example[0]} set=${setChosen} />
        <${Example} example=${example} />
        <${Exports} checkpoint=${checkpoint} isAdapter=${isAdapter} />
        <${Pushes} checkpoint=${checkpoint} isAdapter=${isAdapter} />
      </div>
      <div class="stack">
        <h3>Files</h3>
        <ul class="plain files">${files.map(({ name, size_bytes, sha256 }) => html`<li key=${name}>
          <a href=${`/checkpoints/${id}/files/${encodeURIComponent(name)}`} download>${name}</a> <span class="dim num">${bytes(size_bytes)}</span>
          <div class="hash"><code title="SHA-256">${sha256}</code> <${Copy} text=${sha256} label="Copy hash" /></div></li>`)}</ul>
        <${Certificate} checkpoint=${checkpoint} command=${verifyCommand({ job, checkpoint, origin })} />
        <details><summary>${plural(Object.keys(metrics).length, "metric")} at step ${step}</summary>
          <dl class="pairs">${Object.entries(metrics).map(([key, value]) => html`<div key=${key}><dt>${key}</dt><dd>${number(value, 6)}</dd></div>`)}</dl></details>
      </div>
    </div>
  </section>`;
}

const Example = ({ example: [title, about, lines] }) => html`<div class="usage"><h4>${title} <span class="dim small">${about}</span></h4><${Code} text=${lines} label=${title} /></div>`;
