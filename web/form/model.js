// Chooses a model: a registered one, a Hugging Face model, or a directory on the server.
import { getAll, post } from "../core/api.js";
import { count } from "../core/format.js";
import { useLoad } from "../core/load.js";
import { html, useState } from "../core/ui.js";
import { useAction } from "../core/action.js";
import { Input } from "../parts/field.js";
import { HubToken, tokenHeaders } from "../parts/hub-token.js";
import { ProblemBox } from "../parts/problem.js";

export function ModelChoice({ form }) {
  const { data, error, reload } = useLoad((signal) => getAll("/models", {}, 1000, signal), []);
  const models = (data ?? []).filter(({ card }) => card?.task !== "sequence_classification");
  const named = form.spec.model;
  const chosen = models.find(({ id }) => id === named);
  const known = models.map(({ id, state }) => [id, state === "ready" ? id : `${id} (${state})`]);
  const options = [["", models.length ? "Choose a model" : "No models yet. Add one below"], ...(named && !chosen ? [[named, named]] : []), ...known];
  return html`<div class="stack" data-pointer="/model">
    <${Input} label="Model *" errors=${form.errorsAt("/model")} hint=${chosen?.state === "downloading" ? "Downloading. The job starts when the download is complete." : chosen?.card && `${chosen.card.architecture}, ${count(chosen.card.num_parameters)} parameters${chosen.card.has_chat_template ? ", chat template" : ""}`}
      options=${options} value=${named ?? ""} set=${(id) => form.set("/model", id || undefined)} />
    <${ProblemBox} error=${error} />
    <details open=${data && !models.length}><summary>Add a model</summary>
      <${Register} onDone=${async (model) => (await reload(), form.set("/model", model.id))} /></details>
  </div>`;
}

/** Downloads a Hugging Face model, or registers a directory on the server. */
export function Register({ onDone }) {
  const [hub, setHub] = useState("");
  const [token, setToken] = useState("");
  const [id, setId] = useState("");
  const [source, setSource] = useState("");
  const { busy, error, errorsAt, run } = useAction();
  const download = async () => onDone(await post("/models", { hub: hub.trim() }, { headers: tokenHeaders(token) }));
  const register = async () => onDone(await post("/models", { id: id.trim(), source: source.trim() }));
  return html`<div class="stack"><div class="fields">
      <${Input} label="Hugging Face model" hint="For example Qwen/Qwen3-0.6B or org/name@revision" errors=${errorsAt("/hub")} value=${hub} set=${setHub} />
      <${HubToken} value=${token} set=${setToken} />
      <div class="field beside-label"><button type="button" disabled=${busy || !hub.trim()} onClick=${() => run(download)}>${busy ? "Checking…" : "Download"}</button></div>
    </div>
    <div class="fields">
      <${Input} label="Model ID" hint="For example Qwen/Qwen3-0.6B" errors=${errorsAt("/id")} value=${id} set=${setId} />
      <${Input} label="Directory on the server" hint="Contains config.json, tokenizer.json, *.safetensors" errors=${errorsAt("/source")} value=${source} set=${setSource} />
      <div class="field beside-label"><button type="button" disabled=${busy || !id.trim() || !source.trim()} onClick=${() => run(register)}>${busy ? "Registering…" : "Register"}</button></div>
    </div>
    <${ProblemBox} error=${error} hasFields /></div>`;
}
