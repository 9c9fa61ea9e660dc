// Chooses a dataset: an existing one, an uploaded file, pasted rows, or a Hugging Face dataset.
import { announce } from "../core/announce.js";
import { get, getAll, Problem, send } from "../core/api.js";
import { plural } from "../core/format.js";
import { useLoad } from "../core/load.js";
import { cls, html, useEffect, useState } from "../core/ui.js";
import { useAction } from "../core/action.js";
import { Input } from "../parts/field.js";
import { ProblemBox } from "../parts/problem.js";
import { CONTENT_TYPES, contentTypeOf, EXTENSIONS, HubDataset, Mapping } from "./mapping.js";

/** Number of rows in the preview. */
const PREVIEW_ROWS = 3;
/** Maximum number of datasets in the list, newest first. */
const MAX_LISTED = 1000;

/**
 * Detects the format of pasted text and returns `[body, content type]`. The text is a JSON list, one JSON object per line, CSV, or JSON
 * objects over several lines, which become a list when brackets are added.
 */
function detectFormat(text) {
  const start = text.trimStart();
  if (/^(\[|\{\s*"records"\s*:)/.test(start)) return [text, CONTENT_TYPES.json];
  if (!start.startsWith("{")) return [text, CONTENT_TYPES.csv];
  return start.split("\n")[0].trimEnd().endsWith("}") ? [text, CONTENT_TYPES.ndjson] : [`[${text}]`, CONTENT_TYPES.json];
}

/** The choice of a dataset for the setting at `pointer`. `onRows` receives the first rows, which the reward tester uses as its example. */
export function DatasetChoice({ form, pointer, label, onRows }) {
  const { data, reload } = useLoad((signal) => getAll("/datasets", {}, MAX_LISTED, signal), []);
  const [text, setText] = useState("");
  const [isOver, setOver] = useState(false);
  const [unmapped, setUnmapped] = useState(null);
  const { busy, error, run } = useAction();
  const id = form.spec[pointer.slice(1)]?.id;
  const known = data ?? [];
  const chosen = known.find((dataset) => dataset.id === id);
  const rows = useRows(id, onRows);

  const choose = async (dataset) => {
    await reload();
    form.set(`${pointer}/id`, dataset.id);
    setUnmapped(null);
  };
  const upload = (body, kind, name) => run(async () => {
    let response;
    try {
      response = await send("POST", "/datasets", { query: { name }, body, headers: { "content-type": kind } });
    } catch (problem) {
      // The file has no prompt column: show the form that maps its columns.
      if (!problem.errors?.some(({ code }) => code === "missing_prompt")) throw problem;
      setUnmapped(new File([body], name ?? "rows", { type: kind }));
      return;
    }
    const dataset = await response.json();
    await choose(dataset);
    announce(`Uploaded ${plural(dataset.num_rows, "row")}`);
    setText("");
  });
  const uploadFile = (file) => {
    const kind = contentTypeOf(file.name);
    if (kind) return upload(file, kind, file.name);
    run(() => Promise.reject(new Problem({ title: "Unsupported file type", detail: `The name ${file.name} must end with one of ${EXTENSIONS.replaceAll(",", ", ")}.`, code: "file_type" })));
  };
  const onDrop = (event) => {
    event.preventDefault();
    setOver(false);
    const [file] = event.dataTransfer.files;
    if (file) uploadFile(file);
  };
  const placeholder = !known.length ? "No datasets yet. Add one below" : known.length < MAX_LISTED ? "Choose a dataset, or add one below" : `Choose one of the newest ${known.length} datasets`;
  const options = [["", placeholder], ...(id && !chosen ? [[id, id]] : []), ...known.map(({ id, name, num_rows }) => [id, `${name ?? id} · ${plural(num_rows, "row")}`])];
  return html`<div class="stack" data-pointer=${(form.at ?? "") + pointer}>
    <${Input} label=${label} errors=${[...form.errorsAt(pointer, true), ...form.errorsAt(`${pointer}/id`)]} hint=${chosen && `${plural(chosen.num_rows, "row")}. Columns: ${chosen.columns.join(", ")}`}
      options=${options} value=${id ?? ""} set=${(id) => form.set(`${pointer}/id`, id || undefined)} />
    <div class=${cls("drop", isOver && "over")} onDragOver=${(event) => (event.preventDefault(), setOver(true))} onDragLeave=${() => setOver(false)} onDrop=${onDrop}>
      <label>Drop a file here (JSON, CSV, TSV or Parquet), or choose one: <input type="file" accept=${EXTENSIONS} disabled=${busy} onChange=${({ target }) => target.files[0] && uploadFile(target.files[0])} /></label>
      <details><summary>Paste rows instead</summary>
        <textarea class="mono" rows="4" aria-label="Rows" spellcheck=${false} placeholder=${'{"prompt": "What is 2 + 2?", "answer": "4"}'} value=${text} onInput=${(event) => setText(event.target.value)}></textarea>
        <button type="button" disabled=${busy || !text.trim()} onClick=${() => upload(...detectFormat(text))}>Add rows</button></details>
      ${busy && html`<p role="status">Uploading…</p>`}
      <${ProblemBox} error=${error} />
    </div>
    ${unmapped && html`<${Mapping} key=${unmapped.name + unmapped.size} file=${unmapped} model=${form.spec.model} onDone=${choose} />`}
    <details><summary>Add a Hugging Face dataset</summary><${HubDataset} model=${form.spec.model} onDone=${choose} /></details>
    ${rows.length > 0 && html`<details><summary>First rows</summary><pre tabindex="0">${rows.map((row) => JSON.stringify(row)).join("\n")}</pre></details>`}
  </div>`;
}

function useRows(id, onRows) {
  const [rows, setRows] = useState([]);
  useEffect(() => {
    let isCurrent = true;
    const publish = (records) => {
      if (!isCurrent) return;
      setRows(records);
      onRows?.(records);
    };
    publish([]);
    if (id) get(`/datasets/${encodeURIComponent(id)}/rows`, { limit: PREVIEW_ROWS }).then(({ data }) => publish(data.map(({ record }) => record)), () => publish([]));
    return () => (isCurrent = false);
  }, [id]);
  return rows;
}
