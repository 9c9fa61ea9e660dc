// Rows that need a mapping: a file or a data set of the hub, which column is the prompt, and what the first rows become, as one types.
import { announce } from "../core/announce.js";
import { post, send } from "../core/api.js";
import { count, plural } from "../core/format.js";
import { cls, html, useEffect, useState } from "../core/ui.js";
import { useWork } from "../core/work.js";
import { Input } from "../parts/field.js";
import { ProblemBox } from "../parts/problem.js";

const TYPING_MS = 350;
/** Of a file, what a look needs; parquet keeps its index at the end. */
const LOOK_BYTES = 4 << 20;
const ROWS = 3;

export const KINDS = {
  ndjson: "application/x-ndjson", jsonl: "application/x-ndjson", json: "application/json", csv: "text/csv", tsv: "text/tab-separated-values",
  parquet: "application/vnd.apache.parquet", gz: "application/gzip", zst: "application/zstd",
};
export const ENDINGS = Object.keys(KINDS).map((ending) => `.${ending}`).join(",");
export const kindOf = (name) => KINDS[name.split(".").at(-1).toLowerCase()];

const given = (fields) => Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== "" && value !== undefined));

/** The map that the fields say; `more` is JSON for the rest. */
function mapOf({ prompt, system, answer, answerFrom, more }) {
  const rest = more.trim() ? JSON.parse(more) : {};
  const columns = { ...rest.columns, ...(answer && answerFrom ? { [answer]: answerFrom } : {}) };
  const map = { ...rest, ...given({ prompt, system }) };
  if (Object.keys(columns).length) map.columns = columns;
  return map;
}

/** What a map says, as fields. */
function fieldsOf(map) {
  const { prompt = "", system = "", columns = {}, ...rest } = map;
  const [[answer, answerFrom] = ["", ""], ...others] = Object.entries(columns);
  if (others.length) rest.columns = Object.fromEntries(others);
  return { prompt, system, answer, answerFrom, more: Object.keys(rest).length ? JSON.stringify(rest) : "" };
}

const EMPTY = { prompt: "", system: "", answer: "", answerFrom: "", more: "", limit: "" };

/** `file` or `hub` = {hub, config, split}; `model` says how prompts are read; `onDone` is told the dataset. */
export function Mapping({ file, hub, model, onDone }) {
  const [fields, setFields] = useState(EMPTY);
  const [look, setLook] = useState(null);
  const [problem, setProblem] = useState(null);
  const { busy, error, run } = useWork();
  const set = (name) => (value) => setFields((old) => ({ ...old, [name]: value }));

  const recipe = () => {
    const map = mapOf(fields);
    return { ...(Object.keys(map).length ? { map } : {}), ...(fields.limit ? { limit: Number(fields.limit) } : {}) };
  };
  const form = (part) => {
    const body = new FormData();
    body.append("mapping", JSON.stringify(recipe()));
    body.append("file", new File([part], file.name, { type: kindOf(file.name) }));
    return body;
  };
  useEffect(() => {
    const stop = new AbortController();
    const timer = setTimeout(async () => {
      try {
        const query = { rows: ROWS, model };
        const isWhole = file?.name.toLowerCase().endsWith(".parquet");
        const answer = hub
          ? await post("/datasets/preview", { ...given(hub), ...recipe() }, { query, signal: stop.signal })
          : await (await send("POST", "/datasets/preview", { query, body: form(isWhole ? file : file.slice(0, LOOK_BYTES)), signal: stop.signal })).json();
        setLook(answer);
        setProblem(null);
      } catch (found) {
        if (found.name !== "AbortError") setProblem(found instanceof SyntaxError ? { title: "More of the mapping is not JSON", message: found.message } : found);
      }
    }, look ? TYPING_MS : 0);
    return () => (clearTimeout(timer), stop.abort());
  }, [fields, file, hub?.hub, hub?.config, hub?.split, model]);

  const add = () => run(async () => {
    const dataset = hub
      ? await post("/datasets", { ...given(hub), ...recipe(), name: [hub.hub, hub.config, hub.split].filter(Boolean).join(" ") })
      : await (await send("POST", "/datasets", { query: { name: file.name }, body: form(file) })).json();
    announce(`Added ${plural(dataset.num_rows, "row")}`);
    await onDone(dataset);
  });
  const columns = (look?.columns ?? []).map(({ name, kind }) => [name, `${name} (${kind})`]);
  const isTemplate = fields.prompt.includes("{{");
  const isUsable = look && !look.errors.length && look.rows.length > 0 && !problem;
  return html`<section class="panel stack mapping" aria-label="What the rows become">
    <h3>${file?.name ?? hub.hub}</h3>
    ${look?.suggested_map && html`<p class="notice">${look.suggested_map.prompt ? "No column is called prompt. This looks like a known layout." : "The answer lies inside another column, where rewards do not find it."} <button type="button" onClick=${() => setFields({ ...fields, ...fieldsOf(look.suggested_map) })}>Use its mapping</button></p>`}
    <div class="fields">
      ${columns.length > 0 && !isTemplate
        ? html`<${Input} label="Column with the prompt" options=${[["", columns.some(([name]) => name === "prompt") ? "prompt" : "choose"], ...columns.filter(([name]) => name !== "prompt"), ...(fields.prompt && !columns.some(([name]) => name === fields.prompt) ? [[fields.prompt, fields.prompt]] : [])]} value=${fields.prompt} set=${set("prompt")} />`
        : html`<${Input} label="Prompt" hint="A column, or a template such as {{ question }}" value=${fields.prompt} set=${set("prompt")} />`}
      <${Input} label="System message" optional rows="2" value=${fields.system} set=${set("system")} />
      <${Input} label="Column for the rewards" optional hint="its name, such as answer" value=${fields.answer} set=${set("answer")} />
      <${Input} label="… made from" optional hint="a column, or a template: {{ answer.split('####')[-1] | trim }}" value=${fields.answerFrom} set=${set("answerFrom")} />
      <${Input} label="Rows at most" optional type="number" min="1" value=${fields.limit} set=${set("limit")} />
    </div>
    <details><summary>More of the mapping</summary><${Input} label="As JSON" hint=${'keep, drop, where, unique, chat, cut_answer: {"where": "level == 1"}'} class="mono" rows="3" spellcheck=${false} value=${fields.more} set=${set("more")} /></details>
    <${ProblemBox} error=${problem} />
    ${look?.errors.map((item, at) => html`<p key=${at} class="bad small">${item.detail}</p>`)}
    ${!look && !problem && html`<p role="status" class="dim">Reading…</p>`}
    ${look && html`<${Rows} look=${look} isOld=${!!problem} />`}
    <div><button type="button" class="primary" disabled=${busy || !isUsable} onClick=${add}>${busy ? "Adding…" : "Add this data"}</button></div>
    <${ProblemBox} error=${error} />
  </section>`;
}

/** The first rows: as the model reads them where one is known, else as they are kept. */
function Rows({ look, isOld }) {
  if (!look.rows.length) return html`<div><p class="dim">Its first row:</p><pre tabindex="0">${JSON.stringify(look.source_rows[0], null, 1)}</pre></div>`;
  return html`<div class=${cls(isOld && "dim")}>${look.rows.map(({ record, text, num_tokens, problem }, at) => {
    const { prompt, ...rest } = record;
    return html`<figure key=${at} class="row-look"><figcaption class="dim small">Row ${at + 1}${num_tokens !== undefined && ` · ${count(num_tokens)} tokens as the model reads it`}</figcaption>
      <pre tabindex="0">${text ?? (typeof prompt === "string" ? prompt : prompt.map(({ role, content }) => `${role}: ${content}`).join("\n"))}</pre>
      ${problem && html`<p class="bad small">${problem}</p>`}
      ${Object.keys(rest).length > 0 && html`<pre tabindex="0" class="dim small">${JSON.stringify(rest)}</pre>`}</figure>`;
  })}</div>`;
}

/** A data set of the hub, named and then mapped. */
export function HubData({ model, onDone }) {
  const [fields, setFields] = useState({ hub: "", config: "", split: "" });
  const [chosen, setChosen] = useState(null);
  const set = (name) => (value) => setFields((old) => ({ ...old, [name]: value.trim() }));
  return html`<div class="stack"><div class="fields">
      <${Input} label="Data set of the hub" hint="such as openai/gsm8k, or org/name@revision" value=${fields.hub} set=${set("hub")} />
      <${Input} label="Configuration" optional value=${fields.config} set=${set("config")} />
      <${Input} label="Split" optional hint="train, unless there is another" value=${fields.split} set=${set("split")} />
      <div class="field beside-label"><button type="button" disabled=${!fields.hub} onClick=${() => setChosen({ ...fields })}>Look at it</button></div>
    </div>
    ${chosen && html`<${Mapping} key=${JSON.stringify(chosen)} hub=${chosen} model=${model} onDone=${onDone} />`}</div>`;
}
