// The exports of a checkpoint: conversions to formats that other programs load. Starts one, shows progress, results and their files.
import { announce } from "../core/announce.js";
import { del, get, post } from "../core/api.js";
import { bytes, number } from "../core/format.js";
import { useLoad } from "../core/load.js";
import { hasScope } from "../core/session.js";
import { html, useState } from "../core/ui.js";
import { useAction } from "../core/action.js";
import { ProblemBox } from "./problem.js";
import { Select } from "./switch.js";

/** Polling interval while an export is not finished, in ms. */
const POLL_INTERVAL_MS = 1000;
/** Formats of the API: their names, and the data types that each takes; "" stands for the server's default. */
const FORMATS = {
  merged: ["Merged model, for transformers and vLLM", ["", "float32", "float16", "bfloat16"]],
  gguf: ["GGUF model, for llama.cpp", ["", "float32", "float16", "bfloat16", "q8_0"]],
  gguf_adapter: ["GGUF adapter, for llama.cpp", ["", "float16"]],
};
const defaultDtype = (format) => (format === "gguf_adapter" ? "float32" : "the base model's");
const isOver = ({ state }) => !["queued", "running"].includes(state);

export function Exports({ checkpoint, isAdapter }) {
  const [isActive, setActive] = useState(false);
  const load = async (signal) => {
    const { data } = await get(`/checkpoints/${checkpoint.id}/exports`, undefined, signal);
    setActive(data.some((one) => !isOver(one)));
    return data;
  };
  const { data, error, reload } = useLoad(load, [checkpoint.id], { every: isActive ? POLL_INTERVAL_MS : 0 });
  if (!data?.length && !hasScope("submit")) return null;
  return html`<section aria-label="Exports">
    <h3>Exports</h3>
    ${hasScope("submit") && html`<${NewExport} checkpoint=${checkpoint} isAdapter=${isAdapter} onStarted=${reload} />`}
    <${ProblemBox} error=${error} retry=${reload} />
    ${data?.length > 0 && html`<ul class="plain files">${data.map((one) => html`<li key=${one.id}><${Export} one=${one} reload=${reload} /></li>`)}</ul>`}
  </section>`;
}

function NewExport({ checkpoint, isAdapter, onStarted }) {
  const [format, setFormat] = useState("merged");
  const [dtype, setDtype] = useState("");
  const { busy, error, run } = useAction();
  const formats = Object.entries(FORMATS).filter(([name]) => isAdapter || name !== "gguf_adapter");
  const choose = (name) => {
    setFormat(name);
    if (!FORMATS[name][1].includes(dtype)) setDtype("");
  };
  const start = () => run(async () => {
    await post(`/checkpoints/${checkpoint.id}/exports`, dtype ? { format, dtype } : { format });
    announce("Export queued");
    onStarted();
  });
  return html`<div class="row wrap">
      <${Select} aria-label="Format" options=${formats.map(([name, [text]]) => [name, text])} value=${format} set=${choose} />
      <${Select} aria-label="Precision" options=${FORMATS[format][1].map((name) => [name, name || `precision: ${defaultDtype(format)}`])} value=${dtype} set=${setDtype} />
      <button disabled=${busy} onClick=${start}>Export</button>
    </div>
    <${ProblemBox} error=${error} />`;
}

function Export({ one, reload }) {
  const { busy, error, run } = useAction();
  const { id, format, dtype, state, progress, files, survived, advice } = one;
  const remove = () => run(async () => {
    await (isOver(one) ? del(`/exports/${id}`) : post(`/exports/${id}/cancel`, {}));
    reload();
  });
  return html`<div class="row between wrap"><span>${FORMATS[format]?.[0] ?? format}${dtype && `, ${dtype}`} <span class="tag">${state}</span></span>
      ${hasScope("submit") && html`<button class="mini" disabled=${busy} aria-label=${`${isOver(one) ? "Delete" : "Cancel"} the export ${id}`} onClick=${remove}>${isOver(one) ? "Delete" : "Cancel"}</button>`}</div>
    ${!isOver(one) && progress.total > 0 && html`<progress max=${progress.total} value=${progress.done} aria-label="Progress of the export"></progress>`}
    ${one.error && html`<p class="bad">${one.error.message} <span class="dim small">${one.error.code}</span></p>`}
    ${survived && html`<p class="dim small">${number(survived.fraction * 100)} % of the update survives the rounding, cosine ${number(survived.cosine)}</p>`}
    ${advice && html`<p class="warn">${advice}</p>`}
    ${state === "succeeded" && html`<ul class="plain">${files.map(({ name, size_bytes }) => html`<li key=${name}>
      <a href=${`/exports/${id}/files/${name.split("/").map(encodeURIComponent).join("/")}`} download>${name}</a> <span class="dim num">${bytes(size_bytes)}</span></li>`)}
      ${files.length > 1 && html`<li><a href=${`/exports/${id}/archive.tar`} download>All files as a tar</a></li>`}</ul>`}
    <${ProblemBox} error=${error} />`;
}
