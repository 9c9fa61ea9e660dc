// The model: one that is registered, one of the hub, or a directory on the server.
import { all, post } from "../core/api.js";
import { count } from "../core/format.js";
import { useLoad } from "../core/load.js";
import { html, useState } from "../core/ui.js";
import { useWork } from "../core/work.js";
import { Input } from "../parts/field.js";
import { ProblemBox } from "../parts/problem.js";

export function ModelChoice({ form }) {
  const { data, error, reload } = useLoad((signal) => all("/models", {}, 1000, signal), []);
  const models = (data ?? []).filter(({ card }) => card?.task !== "sequence_classification");
  const named = form.spec.model;
  const chosen = models.find(({ id }) => id === named);
  const known = models.map(({ id, state }) => [id, state === "ready" ? id : `${id} (${state})`]);
  const options = [["", models.length ? "choose" : "none yet: register one below"], ...(named && !chosen ? [[named, named]] : []), ...known];
  return html`<div class="stack" data-pointer="/model">
    <${Input} label="Model *" errors=${form.errorsAt("/model")} hint=${chosen?.state === "downloading" ? "It is being downloaded; the job waits for it and begins by itself." : chosen?.card && `${chosen.card.architecture}, ${count(chosen.card.num_parameters)} parameters${chosen.card.has_chat_template ? ", chat template" : ""}`}
      options=${options} value=${named ?? ""} set=${(id) => form.set("/model", id || undefined)} />
    <${ProblemBox} error=${error} />
    <details open=${data && !models.length}><summary>Add a model</summary>
      <${Register} onDone=${async (model) => (await reload(), form.set("/model", model.id))} /></details>
  </div>`;
}

/** One of the hub by its id, or a directory by its path. */
export function Register({ onDone }) {
  const [hub, setHub] = useState("");
  const [token, setToken] = useState("");
  const [id, setId] = useState("");
  const [source, setSource] = useState("");
  const { busy, error, at, run } = useWork();
  const headers = token ? { "x-hub-token": token } : {};
  const download = async () => onDone(await post("/models", { hub: hub.trim() }, { headers }));
  const register = async () => onDone(await post("/models", { id: id.trim(), source: source.trim() }));
  return html`<div class="stack"><div class="fields">
      <${Input} label="Model of the hub" hint="such as Qwen/Qwen3-0.6B, or org/name@revision" errors=${at("/hub")} value=${hub} set=${setHub} />
      <${Input} label="Token of the hub" optional type="password" autocomplete="off" hint="for gated and private models; it is not kept" value=${token} set=${setToken} />
      <div class="field"><button type="button" disabled=${busy || !hub.trim()} onClick=${() => run(download)}>${busy ? "Looking…" : "Download"}</button></div>
    </div>
    <div class="fields">
      <${Input} label="Id" hint="such as Qwen/Qwen3-0.6B" errors=${at("/id")} value=${id} set=${setId} />
      <${Input} label="Directory on the server" hint="config.json, *.safetensors, tokenizer.json" errors=${at("/source")} value=${source} set=${setSource} />
      <div class="field"><button type="button" disabled=${busy || !id.trim() || !source.trim()} onClick=${() => run(register)}>${busy ? "Reading…" : "Register"}</button></div>
    </div>
    <${ProblemBox} error=${error} hasFields /></div>`;
}
