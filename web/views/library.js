// The page of models and datasets: their sources, the progress of downloads, the jobs that use them, and forms that add new ones.
import { del, get, getAll } from "../core/api.js";
import { bytes, count, duration, percent, plural } from "../core/format.js";
import { useLoad } from "../core/load.js";
import { hrefOf } from "../core/router.js";
import { hasScope } from "../core/session.js";
import { cls, html, useState } from "../core/ui.js";
import { useAction } from "../core/action.js";
import { EXTENSIONS, HubDataset, Mapping } from "../form/mapping.js";
import { Register } from "../form/model.js";
import { Loading, ProblemBox } from "../parts/problem.js";
import { Table } from "../parts/table.js";
import { Ago } from "../parts/text.js";

const MAX_LISTED = 500;
const PREVIEW_ROWS = 3;

export default function Library() {
  const { data, error, reload } = useLoad(async (signal) => {
    const [models, datasets, jobs] = await Promise.all([getAll("/models", {}, MAX_LISTED, signal), getAll("/datasets", {}, MAX_LISTED, signal), getAll("/jobs", {}, MAX_LISTED, signal)]);
    return { models, datasets, jobs };
  }, [], { every: 2000 });
  if (!data) return html`<h1>Models and data</h1><${Loading} error=${error} retry=${reload} />`;
  const jobsThat = (uses) => data.jobs.filter(uses);
  return html`<h1>Models and data</h1>
    <${ProblemBox} error=${error} retry=${reload} />
    <h2>Models</h2>
    ${!data.models.length && html`<p class="empty">No models yet. Add a Hugging Face model or a directory on the server.</p>`}
    ${data.models.length > 0 && html`<${Table} label="Models" head=${["Model", "State", "Family", "#Parameters", "Precision", "#Size", "Source", "Used by", "!Remove"]}>${data.models.map((model) => html`<${ModelRow} key=${model.id} model=${model} jobs=${jobsThat(({ plan }) => modelsOf(plan).includes(model.id))} reload=${reload} />`)}<//>`}
    ${hasScope("submit") && html`<details class="panel" open=${!data.models.length}><summary>Add a model</summary><${Register} onDone=${reload} /></details>`}
    <h2>Datasets</h2>
    ${!data.datasets.length && html`<p class="empty">No datasets yet. Drop a file below, or add a Hugging Face dataset.</p>`}
    ${data.datasets.length > 0 && html`<${Table} label="Datasets" head=${["Dataset", "#Rows", "#Size", "Columns", "Source", "Used by", "Added", "!Remove"]}>${data.datasets.map((dataset) => html`<${DatasetRow} key=${dataset.id} dataset=${dataset} jobs=${jobsThat(({ plan }) => datasetsOf(plan).includes(dataset.id))} reload=${reload} />`)}<//>`}
    ${hasScope("submit") && html`<${NewDataset} models=${data.models} reload=${reload} />`}`;
}

// The model that a job trains, and the reward models that score for it.
const modelsOf = ({ model, reward_models }) => [model.id, ...Object.keys(reward_models ?? {})];
// The datasets that a job reads: prompts, evaluation, test, guard and warm-up.
const datasetsOf = ({ dataset, eval: evaluation, warm_up }) => [dataset, evaluation?.dataset, evaluation?.test_dataset, evaluation?.guard?.dataset, warm_up?.dataset].map((used) => used?.id);

const UsedBy = ({ jobs }) => (jobs.length ? html`${jobs.slice(0, 3).map(({ id, name }, at) => html`${at > 0 && ", "}<a key=${id} href=${hrefOf(`/jobs/${id}`)}>${name ?? id}</a>`)}${jobs.length > 3 && ` and ${jobs.length - 3} more`}` : html`<span class="dim">no jobs</span>`);

function Remove({ name, path, reload }) {
  const { busy, error, run } = useAction();
  if (!hasScope("submit")) return null;
  return html`<button type="button" class="quiet" disabled=${busy} aria-label=${`Remove ${name}`} onClick=${() => run(async () => (await del(path), reload()))}>Remove</button>${error && html`<span class="bad small" role="alert">${error.message}</span>`}`;
}

function ModelRow({ model, jobs, reload }) {
  const { id, card, state, hub, commit, renamed_to, revision } = model;
  return html`<tr>
    <th scope="row">${id}<div class="dim small">${card?.task === "sequence_classification" ? "reward model" : "language model"}${card?.has_chat_template ? ", chat template" : ""}</div></th>
    <td><${ModelState} model=${model} state=${state} /></td>
    <td>${card?.architecture ?? "–"}</td><td class="num">${card ? count(card.num_parameters) : "–"}</td><td>${card?.precision ?? "–"}</td><td class="num">${card ? bytes(card.size_bytes) : "–"}</td>
    <td>${hub ? html`${hub}<div class="dim small">${revision} at <code title=${commit}>${commit.slice(0, 8)}</code></div>${renamed_to && html`<div class="small">renamed to ${renamed_to}</div>`}` : html`<span class="dim small">${model.source}</span>`}</td>
    <td><${UsedBy} jobs=${jobs} /></td>
    <td><${Remove} name=${id} path=${`/models/${encodeURIComponent(id)}`} reload=${reload} /></td>
  </tr>`;
}

function ModelState({ model: { state, bytes_done, bytes_total, bytes_per_second, eta_s, problem } }) {
  if (state === "ready") return html`<span class="state succeeded">✓ ready</span>`;
  if (state === "failed") return html`<span class="state failed">✕ failed</span><div class="small">${problem}</div>`;
  return html`<span class="state running">↓ downloading</span> <progress max=${bytes_total} value=${bytes_done} aria-label="Downloaded"></progress>
    <div class="dim small">${percent(bytes_total ? bytes_done / bytes_total : 0)} of ${bytes(bytes_total)}${bytes_per_second ? `, ${bytes(bytes_per_second)}/s` : ""}${eta_s ? `, ${duration(eta_s)} left` : ""}</div>`;
}

function DatasetRow({ dataset, jobs, reload }) {
  const { id, name, num_rows, size_bytes, columns, origin, created_at } = dataset;
  const [rows, setRows] = useState(null);
  const toggleRows = async () => setRows(rows ? null : (await get(`/datasets/${encodeURIComponent(id)}/rows`, { limit: PREVIEW_ROWS })).data.map(({ record }) => record));
  const source = origin?.hub ? html`${origin.hub}<div class="dim small">${[origin.config, origin.split].filter(Boolean).join(", ")} at <code title=${origin.commit}>${origin.commit.slice(0, 8)}</code></div>` : html`<span class="dim">${origin?.sources ? plural(origin.sources.length, "source") : "upload"}</span>`;
  if (dataset.bytes_total) return html`<tr><th scope="row">${name ?? id}</th><td colspan="3"><${ModelState} model=${dataset} /></td><td>${source}</td><td><${UsedBy} jobs=${jobs} /></td><td><${Ago} time=${created_at} /></td>
    <td><${Remove} name=${name ?? id} path=${`/datasets/${encodeURIComponent(id)}`} reload=${reload} /></td></tr>`;
  return html`<tr>
      <th scope="row">${name ?? id}<div><button type="button" class="link small" aria-expanded=${!!rows} onClick=${toggleRows}>${rows ? "Hide rows" : "Show first rows"}</button></div></th>
      <td class="num">${count(num_rows)}</td><td class="num">${bytes(size_bytes)}</td><td class="small">${columns.join(", ")}</td><td>${source}</td>
      <td><${UsedBy} jobs=${jobs} /></td><td><${Ago} time=${created_at} /></td>
      <td><${Remove} name=${name ?? id} path=${`/datasets/${encodeURIComponent(id)}`} reload=${reload} /></td>
    </tr>
    ${rows && html`<tr><td colspan="8"><pre tabindex="0">${rows.map((row) => JSON.stringify(row)).join("\n")}</pre></td></tr>`}`;
}

function NewDataset({ models, reload }) {
  const [file, setFile] = useState(null);
  const [isOver, setOver] = useState(false);
  const [model, setModel] = useState("");
  const languageModels = models.filter(({ card, state }) => card?.task !== "sequence_classification" && state !== "failed");
  const onDrop = (event) => {
    event.preventDefault();
    setOver(false);
    if (event.dataTransfer.files[0]) setFile(event.dataTransfer.files[0]);
  };
  const onAdded = async () => (await reload(), setFile(null));
  return html`<details class="panel" open><summary>Add a dataset</summary><div class="stack">
    ${languageModels.length > 0 && html`<label class="small">Format the preview for model: <select value=${model} onChange=${({ target }) => setModel(target.value)}><option value="">none</option>${languageModels.map(({ id }) => html`<option key=${id} value=${id}>${id}</option>`)}</select></label>`}
    <div class=${cls("drop", isOver && "over")} onDragOver=${(event) => (event.preventDefault(), setOver(true))} onDragLeave=${() => setOver(false)} onDrop=${onDrop}>
      <label>Drop a file here (JSON, CSV, TSV or Parquet, optionally in gzip or zstd), or choose one: <input type="file" accept=${EXTENSIONS} onChange=${({ target }) => setFile(target.files[0] ?? null)} /></label></div>
    ${file && html`<${Mapping} key=${file.name + file.size} file=${file} model=${model || undefined} onDone=${onAdded} />`}
    <${HubDataset} model=${model || undefined} onDone=${reload} /></div></details>`;
}
