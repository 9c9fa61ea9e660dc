// The model: one that is registered, or a directory on the server.
import { all, post } from "../core/api.js";
import { count } from "../core/format.js";
import { useLoad } from "../core/load.js";
import { html, useState } from "../core/ui.js";
import { Field } from "../parts/field.js";
import { ProblemBox } from "../parts/problem.js";

export function ModelChoice({ form }) {
  const { data, error, reload } = useLoad((signal) => all("/models", {}, 1000, signal), []);
  const models = (data ?? []).filter(({ card }) => card?.task !== "sequence_classification");
  const chosen = models.find(({ id }) => id === form.spec.model);
  return html`<div class="stack" data-pointer="/model">
    <${Field} label="Model *" errors=${form.errorsAt("/model")} hint=${chosen?.card && `${chosen.card.architecture}, ${count(chosen.card.num_parameters)} parameters${chosen.card.has_chat_template ? ", chat template" : ""}`}>
      ${(attributes) => html`<select ...${attributes} value=${form.spec.model ?? ""} onChange=${(event) => form.set("/model", event.target.value || undefined)}>
        <option value="">${models.length ? "choose" : "none yet: register one below"}</option>
        ${form.spec.model && !chosen && html`<option value=${form.spec.model}>${form.spec.model}</option>`}
        ${models.map(({ id }) => html`<option key=${id} value=${id}>${id}</option>`)}</select>`}<//>
    <${ProblemBox} error=${error} />
    <details open=${data && !models.length}><summary>Register a model of this server</summary>
      <${Register} onDone=${async (model) => (await reload(), form.set("/model", model.id))} /></details>
  </div>`;
}

function Register({ onDone }) {
  const [id, setId] = useState("");
  const [source, setSource] = useState("");
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const run = async () => {
    setBusy(true);
    setError(null);
    try {
      await onDone(await post("/models", { id: id.trim(), source: source.trim() }));
    } catch (problem) {
      setError(problem);
    }
    setBusy(false);
  };
  const at = (pointer) => error?.errors?.filter((item) => item.pointer === pointer) ?? [];
  return html`<div class="fields">
    <${Field} label="Id" hint="such as Qwen/Qwen3-0.6B" errors=${at("/id")}>${(a) => html`<input ...${a} value=${id} onInput=${(event) => setId(event.target.value)} />`}<//>
    <${Field} label="Directory on the server" hint="config.json, *.safetensors, tokenizer.json" errors=${at("/source")}>${(a) => html`<input ...${a} value=${source} onInput=${(event) => setSource(event.target.value)} />`}<//>
    <div class="field"><button type="button" disabled=${busy || !id.trim() || !source.trim()} onClick=${run}>${busy ? "Reading…" : "Register"}</button></div>
    ${error && !error.errors?.length && html`<${ProblemBox} error=${error} />`}
  </div>`;
}
