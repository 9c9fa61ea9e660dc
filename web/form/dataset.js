// The prompts: a dataset that is there, or a file, dropped, chosen or pasted.
import { announce } from "../core/announce.js";
import { get, send } from "../core/api.js";
import { count, plural } from "../core/format.js";
import { useGet } from "../core/load.js";
import { cls, html, useEffect, useState } from "../core/ui.js";
import { Field } from "../parts/field.js";
import { ProblemBox } from "../parts/problem.js";

const KINDS = { ndjson: "application/x-ndjson", jsonl: "application/x-ndjson", json: "application/json", csv: "text/csv" };
const PREVIEW = 3;

/** What pasted text is: rows as JSON lines, a JSON list, or CSV. */
export function kindOf(text) {
  const start = text.trimStart();
  if (start.startsWith("[")) return "application/json";
  if (!start.startsWith("{")) return "text/csv";
  try {
    JSON.parse(start.split("\n")[0]);
    return "application/x-ndjson";
  } catch {
    return "application/json";
  }
}

/** `onRows` is told the first rows, for tests of rewards. */
export function DatasetChoice({ form, pointer, label, onRows }) {
  const { data, reload } = useGet("/datasets", { limit: 100 });
  const [text, setText] = useState("");
  const [isOver, setOver] = useState(false);
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  const id = form.spec[pointer.slice(1)]?.id;
  const known = data?.data ?? [];
  const chosen = known.find((dataset) => dataset.id === id);
  const rows = useRows(id, onRows);

  const upload = async (body, kind, name) => {
    setBusy(true);
    setError(null);
    try {
      const response = await send("POST", "/datasets", { query: { name }, body, headers: { "content-type": kind } });
      const dataset = await response.json();
      await reload();
      form.set(`${pointer}/id`, dataset.id);
      announce(`Uploaded ${plural(dataset.num_rows, "row")}`);
      setText("");
    } catch (problem) {
      setError(problem);
    }
    setBusy(false);
  };
  const take = (file) => {
    const kind = KINDS[file.name.split(".").at(-1).toLowerCase()];
    if (!kind) return setError({ title: "This file is not one of them", message: `${file.name} does not end with .ndjson, .jsonl, .json or .csv.`, code: "file_type" });
    upload(file, kind, file.name);
  };
  const drop = (event) => {
    event.preventDefault();
    setOver(false);
    const [file] = event.dataTransfer.files;
    if (file) take(file);
  };
  return html`<div class="stack" data-pointer=${pointer}>
    <${Field} label=${label} errors=${[...form.errorsAt(pointer, true), ...form.errorsAt(`${pointer}/id`)]} hint=${chosen && `${count(chosen.num_rows)} rows; columns ${chosen.columns.join(", ")}`}>
      ${(attributes) => html`<select ...${attributes} value=${id ?? ""} onChange=${(event) => form.set(`${pointer}/id`, event.target.value || undefined)}>
        <option value="">${known.length ? "choose, or add one below" : "none yet: add one below"}</option>
        ${id && !chosen && html`<option value=${id}>${id}</option>`}
        ${known.map((dataset) => html`<option key=${dataset.id} value=${dataset.id}>${dataset.name ?? dataset.id} · ${count(dataset.num_rows)} rows</option>`)}</select>`}<//>
    <div class=${cls("drop", isOver && "over")} onDragOver=${(event) => (event.preventDefault(), setOver(true))} onDragLeave=${() => setOver(false)} onDrop=${drop}>
      <label>Drop a file here (.jsonl, .json, .csv), or choose it: <input type="file" accept=".ndjson,.jsonl,.json,.csv" disabled=${busy} onChange=${({ target }) => target.files[0] && take(target.files[0])} /></label>
      <details><summary>Or paste rows</summary>
        <textarea class="mono" rows="4" aria-label="Rows to paste" spellcheck=${false} placeholder=${'{"prompt": "What is 2 + 2?", "answer": "4"}'} value=${text} onInput=${(event) => setText(event.target.value)}></textarea>
        <button type="button" disabled=${busy || !text.trim()} onClick=${() => upload(text, kindOf(text), undefined)}>Add these rows</button></details>
      ${busy && html`<p role="status">Uploading…</p>`}
      <${ProblemBox} error=${error} />
    </div>
    ${rows.length > 0 && html`<details><summary>First rows</summary><pre tabindex="0">${rows.map((row) => JSON.stringify(row)).join("\n")}</pre></details>`}
  </div>`;
}

function useRows(id, onRows) {
  const [rows, setRows] = useState([]);
  useEffect(() => {
    let wanted = true;
    const tell = (found) => {
      if (!wanted) return;
      setRows(found);
      onRows?.(found);
    };
    tell([]);
    if (id) get(`/datasets/${encodeURIComponent(id)}/rows`, { limit: PREVIEW }).then(({ data }) => tell(data.map(({ record }) => record)), () => tell([]));
    return () => (wanted = false);
  }, [id]);
  return rows;
}
