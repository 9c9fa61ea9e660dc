// Maps the columns of a file or a Hugging Face dataset to prompts and answers, with a live preview of the first rows.
import { announce } from "../core/announce.js";
import { post, send } from "../core/api.js";
import { plural } from "../core/format.js";
import { cls, html, useEffect, useState } from "../core/ui.js";
import { useAction } from "../core/action.js";
import { Input } from "../parts/field.js";
import { HubToken, tokenHeaders } from "../parts/hub-token.js";
import { ProblemBox } from "../parts/problem.js";

/** Time after the last key press before the preview is updated, in ms. */
const TYPING_DELAY_MS = 350;
/** Number of bytes of a file to send for the preview. Parquet files are sent whole: their index is at the end. */
const PREVIEW_BYTES = 4 << 20;
const PREVIEW_ROWS = 3;

/** Content types by file name extension. */
export const CONTENT_TYPES = {
  ndjson: "application/x-ndjson", jsonl: "application/x-ndjson", json: "application/json", csv: "text/csv", tsv: "text/tab-separated-values",
  parquet: "application/vnd.apache.parquet", gz: "application/gzip", zst: "application/zstd",
};
export const EXTENSIONS = Object.keys(CONTENT_TYPES).map((extension) => `.${extension}`).join(",");
export const contentTypeOf = (name) => CONTENT_TYPES[name.split(".").at(-1).toLowerCase()];

const withoutEmpty = (fields) => Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== "" && value !== undefined));

/** Builds the map of the API from the fields of the form. `more` is JSON with options that have no field. */
function mapFromFields({ prompt, system, answer, answerFrom, more }) {
  const rest = more.trim() ? JSON.parse(more) : {};
  const columns = { ...rest.columns, ...(answer && answerFrom ? { [answer]: answerFrom } : {}) };
  const map = { ...rest, ...withoutEmpty({ prompt, system }) };
  if (Object.keys(columns).length) map.columns = columns;
  return map;
}

/** Converts a map of the API to the fields of the form. */
function fieldsFromMap(map) {
  const { prompt = "", system = "", columns = {}, ...rest } = map;
  const [[answer, answerFrom] = ["", ""], ...others] = Object.entries(columns);
  if (others.length) rest.columns = Object.fromEntries(others);
  return { prompt, system, answer, answerFrom, more: Object.keys(rest).length ? JSON.stringify(rest) : "" };
}

const EMPTY = { prompt: "", system: "", answer: "", answerFrom: "", more: "", limit: "" };

/**
 * The mapping form for `file` or for `hub`, `{hub, config, split}`. `headers` are sent with
 * requests about `hub`. The preview formats prompts with the template of `model`. `onDone` receives the new dataset.
 */
export function Mapping({ file, hub, headers, model, onDone }) {
  const [fields, setFields] = useState(EMPTY);
  const [preview, setPreview] = useState(null);
  const [problem, setProblem] = useState(null);
  const { busy, error, run } = useAction();
  const set = (name) => (value) => setFields((old) => ({ ...old, [name]: value }));

  const recipe = () => {
    const map = mapFromFields(fields);
    return { ...(Object.keys(map).length ? { map } : {}), ...(fields.limit ? { limit: Number(fields.limit) } : {}) };
  };
  const formData = (content) => {
    const body = new FormData();
    body.append("mapping", JSON.stringify(recipe()));
    body.append("file", new File([content], file.name, { type: contentTypeOf(file.name) }));
    return body;
  };
  useEffect(() => {
    const abort = new AbortController();
    const timer = setTimeout(async () => {
      try {
        const query = { rows: PREVIEW_ROWS, model };
        const isWhole = file?.name.toLowerCase().endsWith(".parquet");
        const answer = hub
          ? await post("/datasets/preview", { ...withoutEmpty(hub), ...recipe() }, { query, headers, signal: abort.signal })
          : await (await send("POST", "/datasets/preview", { query, body: formData(isWhole ? file : file.slice(0, PREVIEW_BYTES)), signal: abort.signal })).json();
        setPreview(answer);
        setProblem(null);
      } catch (error) {
        if (error.name !== "AbortError") setProblem(error instanceof SyntaxError ? { title: "Invalid JSON in the mapping options", message: error.message } : error);
      }
    }, preview ? TYPING_DELAY_MS : 0);
    return () => (clearTimeout(timer), abort.abort());
  }, [fields, file, hub?.hub, hub?.config, hub?.split, model]);

  const add = () => run(async () => {
    const dataset = hub
      ? await post("/datasets", { ...withoutEmpty(hub), ...recipe(), name: [hub.hub, hub.config, hub.split].filter(Boolean).join(" ") }, { headers })
      : await (await send("POST", "/datasets", { query: { name: file.name }, body: formData(file) })).json();
    announce(`Added ${plural(dataset.num_rows, "row")}`);
    await onDone(dataset);
  });
  const columns = (preview?.columns ?? []).map(({ name, kind }) => [name, `${name} (${kind})`]);
  const isTemplate = fields.prompt.includes("{{");
  const isUsable = preview && !preview.errors.length && preview.rows.length > 0 && !problem;
  return html`<section class="panel stack mapping" aria-label="Column mapping">
    <h3>${file?.name ?? hub.hub}</h3>
    ${preview?.suggested_map && html`<p class="notice">${preview.suggested_map.prompt ? "No column is named “prompt”, but the columns match a known format." : "The answer is part of another column’s text, where rewards cannot read it."} <button type="button" onClick=${() => setFields({ ...fields, ...fieldsFromMap(preview.suggested_map) })}>Use suggested mapping</button></p>`}
    <div class="fields">
      ${columns.length > 0 && !isTemplate
        ? html`<${Input} label="Prompt column" options=${[["", columns.some(([name]) => name === "prompt") ? "prompt" : "Choose a column"], ...columns.filter(([name]) => name !== "prompt"), ...(fields.prompt && !columns.some(([name]) => name === fields.prompt) ? [[fields.prompt, fields.prompt]] : [])]} value=${fields.prompt} set=${set("prompt")} />`
        : html`<${Input} label="Prompt" hint="A column name, or a template such as {{ question }}" value=${fields.prompt} set=${set("prompt")} />`}
      <${Input} label="System message" optional rows="2" value=${fields.system} set=${set("system")} />
      <${Input} label="Answer column" optional hint="Name of the column to add for the rewards, for example answer" value=${fields.answer} set=${set("answer")} />
      <${Input} label="Answer source" optional hint="A column name, or a template: {{ answer.split('####')[-1] | trim }}" value=${fields.answerFrom} set=${set("answerFrom")} />
      <${Input} label="Maximum rows" optional type="number" min="1" value=${fields.limit} set=${set("limit")} />
    </div>
    <details><summary>More mapping options</summary><${Input} label="Options as JSON" hint=${'Keys: keep, drop, where, unique, chat, cut_answer. Example: {"where": "level == 1"}'} class="mono" rows="3" spellcheck=${false} value=${fields.more} set=${set("more")} /></details>
    <${ProblemBox} error=${problem} />
    ${preview?.errors.map((item, index) => html`<p key=${index} class="bad small">${item.detail}</p>`)}
    ${!preview && !problem && html`<p role="status" class="dim">Reading…</p>`}
    ${preview && html`<${PreviewRows} preview=${preview} isOutdated=${!!problem} />`}
    <div><button type="button" class="primary" disabled=${busy || !isUsable} onClick=${add}>${busy ? "Adding…" : "Add dataset"}</button></div>
    <${ProblemBox} error=${error} />
  </section>`;
}

/** The first rows after the mapping. If a model is chosen, prompts are formatted with its chat template. */
function PreviewRows({ preview, isOutdated }) {
  if (!preview.rows.length) return html`<div><p class="dim">First row of the source:</p><pre tabindex="0">${JSON.stringify(preview.source_rows[0], null, 1)}</pre></div>`;
  return html`<div class=${cls(isOutdated && "dim")}>${preview.rows.map(({ record, text, num_tokens, problem }, index) => {
    const { prompt, ...rest } = record;
    return html`<figure key=${index} class="row-preview"><figcaption class="dim small">Row ${index + 1}${num_tokens !== undefined && ` · ${plural(num_tokens, "token")}, formatted for the model`}</figcaption>
      <pre tabindex="0">${text ?? (typeof prompt === "string" ? prompt : prompt.map(({ role, content }) => `${role}: ${content}`).join("\n"))}</pre>
      ${problem && html`<p class="bad small">${problem}</p>`}
      ${Object.keys(rest).length > 0 && html`<pre tabindex="0" class="dim small">${JSON.stringify(rest)}</pre>`}</figure>`;
  })}</div>`;
}

/** Adds a Hugging Face dataset: its name, then its mapping. */
export function HubDataset({ model, onDone }) {
  const [fields, setFields] = useState({ hub: "", config: "", split: "" });
  const [token, setToken] = useState("");
  const [chosen, setChosen] = useState(null);
  const set = (name) => (value) => setFields((old) => ({ ...old, [name]: value.trim() }));
  return html`<div class="stack"><div class="fields">
      <${Input} label="Hugging Face dataset" hint="For example openai/gsm8k or org/name@revision" value=${fields.hub} set=${set("hub")} />
      <${Input} label="Configuration" optional value=${fields.config} set=${set("config")} />
      <${Input} label="Split" optional hint="Default: train, or the only split" value=${fields.split} set=${set("split")} />
      <${HubToken} value=${token} set=${setToken} />
      <div class="field beside-label"><button type="button" disabled=${!fields.hub} onClick=${() => setChosen({ hub: { ...fields }, headers: tokenHeaders(token) })}>Preview</button></div>
    </div>
    ${chosen && html`<${Mapping} key=${JSON.stringify(chosen)} ...${chosen} model=${model} onDone=${onDone} />`}</div>`;
}
