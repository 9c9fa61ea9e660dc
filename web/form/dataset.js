// The prompts: a dataset that is there, or a file, dropped, chosen or pasted.
import { announce } from "../core/announce.js";
import { all, get, Problem, send } from "../core/api.js";
import { plural } from "../core/format.js";
import { useLoad } from "../core/load.js";
import { cls, html, useEffect, useState } from "../core/ui.js";
import { useWork } from "../core/work.js";
import { Input } from "../parts/field.js";
import { ProblemBox } from "../parts/problem.js";
import { ENDINGS, HubData, KINDS, kindOf, Mapping } from "./mapping.js";

const PREVIEW = 3;
/** Datasets to choose from, newest first. */
const NEWEST = 1000;

/** What pasted text is, with its kind: a JSON list, CSV, an object a line, or objects over several lines, which are a list without its brackets. */
function pasted(text) {
  const start = text.trimStart();
  if (/^(\[|\{\s*"records"\s*:)/.test(start)) return [text, KINDS.json];
  if (!start.startsWith("{")) return [text, KINDS.csv];
  return start.split("\n")[0].trimEnd().endsWith("}") ? [text, KINDS.ndjson] : [`[${text}]`, KINDS.json];
}

/** `onRows` is told the first rows, for tests of rewards. */
export function DatasetChoice({ form, pointer, label, onRows }) {
  const { data, reload } = useLoad((signal) => all("/datasets", {}, NEWEST, signal), []);
  const [text, setText] = useState("");
  const [isOver, setOver] = useState(false);
  const [unmapped, setUnmapped] = useState(null);
  const { busy, error, run } = useWork();
  const id = form.spec[pointer.slice(1)]?.id;
  const known = data ?? [];
  const chosen = known.find((dataset) => dataset.id === id);
  const rows = useRows(id, onRows);

  const use = async (dataset) => {
    await reload();
    form.set(`${pointer}/id`, dataset.id);
    setUnmapped(null);
  };
  const upload = (body, kind, name) => run(async () => {
    let response;
    try {
      response = await send("POST", "/datasets", { query: { name }, body, headers: { "content-type": kind } });
    } catch (problem) {
      // Without a prompt column: which one it is, is asked.
      if (!problem.errors?.some(({ code }) => code === "missing_prompt")) throw problem;
      setUnmapped(new File([body], name ?? "rows", { type: kind }));
      return;
    }
    const dataset = await response.json();
    await use(dataset);
    announce(`Uploaded ${plural(dataset.num_rows, "row")}`);
    setText("");
  });
  const take = (file) => {
    const kind = kindOf(file.name);
    if (kind) return upload(file, kind, file.name);
    run(() => Promise.reject(new Problem({ title: "This file is not one of them", detail: `${file.name} does not end with ${ENDINGS.replaceAll(",", ", ")}.`, code: "file_type" })));
  };
  const drop = (event) => {
    event.preventDefault();
    setOver(false);
    const [file] = event.dataTransfer.files;
    if (file) take(file);
  };
  const options = [["", known.length ? `choose${known.length < NEWEST ? "" : ` of the newest ${known.length}`}, or add one below` : "none yet: add one below"], ...(id && !chosen ? [[id, id]] : []), ...known.map(({ id, name, num_rows }) => [id, `${name ?? id} · ${plural(num_rows, "row")}`])];
  return html`<div class="stack" data-pointer=${(form.at ?? "") + pointer}>
    <${Input} label=${label} errors=${[...form.errorsAt(pointer, true), ...form.errorsAt(`${pointer}/id`)]} hint=${chosen && `${plural(chosen.num_rows, "row")}; columns ${chosen.columns.join(", ")}`}
      options=${options} value=${id ?? ""} set=${(id) => form.set(`${pointer}/id`, id || undefined)} />
    <div class=${cls("drop", isOver && "over")} onDragOver=${(event) => (event.preventDefault(), setOver(true))} onDragLeave=${() => setOver(false)} onDrop=${drop}>
      <label>Drop a file here (JSON, CSV, TSV, parquet), or choose it: <input type="file" accept=${ENDINGS} disabled=${busy} onChange=${({ target }) => target.files[0] && take(target.files[0])} /></label>
      <details><summary>Or paste rows</summary>
        <textarea class="mono" rows="4" aria-label="Rows to paste" spellcheck=${false} placeholder=${'{"prompt": "What is 2 + 2?", "answer": "4"}'} value=${text} onInput=${(event) => setText(event.target.value)}></textarea>
        <button type="button" disabled=${busy || !text.trim()} onClick=${() => upload(...pasted(text))}>Add these rows</button></details>
      ${busy && html`<p role="status">Uploading…</p>`}
      <${ProblemBox} error=${error} />
    </div>
    ${unmapped && html`<${Mapping} key=${unmapped.name + unmapped.size} file=${unmapped} model=${form.spec.model} onDone=${use} />`}
    <details><summary>Or a data set of the hub</summary><${HubData} model=${form.spec.model} onDone=${use} /></details>
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
