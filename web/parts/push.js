// The pushes of a checkpoint to repositories of the model hub. Starts one, shows its progress and the repository, cancels it.
import { announce } from "../core/announce.js";
import { get, post } from "../core/api.js";
import { bytes } from "../core/format.js";
import { useLoad } from "../core/load.js";
import { hasScope } from "../core/session.js";
import { html, useState } from "../core/ui.js";
import { useAction } from "../core/action.js";
import { Input } from "./field.js";
import { HubToken, tokenHeaders } from "./hub-token.js";
import { ProblemBox } from "./problem.js";

/** Polling interval while a push is not finished, in ms. */
const POLL_INTERVAL_MS = 1000;
const FORMATS = { adapter: "Adapter", merged: "Merged model" };
const STAGES = { exporting: "Merging the model", uploading: "Uploading" };
const isOver = ({ state }) => !["queued", "running"].includes(state);

export function Pushes({ checkpoint, isAdapter }) {
  const [isActive, setActive] = useState(false);
  const load = async (signal) => {
    const { data } = await get(`/checkpoints/${checkpoint.id}/pushes`, undefined, signal);
    setActive(data.some((one) => !isOver(one)));
    return data;
  };
  const { data, error, reload } = useLoad(load, [checkpoint.id], { every: isActive ? POLL_INTERVAL_MS : 0 });
  if (!data?.length && !hasScope("submit")) return null;
  return html`<section aria-label="Pushes">
    <h3>Push to the model hub</h3>
    ${hasScope("submit") && html`<${NewPush} checkpoint=${checkpoint} isAdapter=${isAdapter} onStarted=${reload} />`}
    <${ProblemBox} error=${error} retry=${reload} />
    ${data?.length > 0 && html`<ul class="plain files">${data.map((one) => html`<li key=${one.id}><${Push} one=${one} reload=${reload} /></li>`)}</ul>`}
  </section>`;
}

function NewPush({ checkpoint, isAdapter, onStarted }) {
  const [repo, setRepo] = useState("");
  const [format, setFormat] = useState(isAdapter ? "adapter" : "merged");
  const [isPrivate, setPrivate] = useState(true);
  const [withSamples, setWithSamples] = useState(false);
  const [token, setToken] = useState("");
  const { busy, error, errorsAt, submit } = useAction();
  const start = async () => {
    const body = { repo: repo.trim(), format, private: isPrivate, with_samples: withSamples };
    await post(`/checkpoints/${checkpoint.id}/pushes`, body, { headers: tokenHeaders(token) });
    setToken("");
    announce("Push queued");
    onStarted();
  };
  const formats = Object.entries(FORMATS).filter(([name]) => isAdapter || name !== "adapter");
  const check = (text, checked, set) => html`<label class="pick"><input type="checkbox" checked=${checked} onChange=${({ target }) => set(target.checked)} /> <span>${text}</span></label>`;
  return html`<form class="stack" onSubmit=${submit(start)}>
    <div class="fields">
      <${Input} label="Repository" required autocomplete="off" placeholder="org/name" hint="Created if it does not exist." errors=${errorsAt("/repo")} value=${repo} set=${setRepo} />
      <${Input} label="Files to push" options=${formats} errors=${errorsAt("/format")} value=${format} set=${setFormat} />
      <${HubToken} value=${token} set=${setToken} hint="Needs write permission. The server does not store the token." />
    </div>
    <div>${check("Create the repository as private", isPrivate, setPrivate)}${check("Show prompts and completions on the model card", withSamples, setWithSamples)}</div>
    <div><button disabled=${busy}>Push</button></div>
    <${ProblemBox} error=${error} hasFields=${errorsAt("/repo").length + errorsAt("/format").length} />
  </form>`;
}

function Push({ one, reload }) {
  const { busy, error, run } = useAction();
  const { id, repo, format, state, stage, progress, url, is_new } = one;
  const cancel = () => run(async () => {
    await post(`/pushes/${id}/cancel`, {});
    reload();
  });
  // Only web addresses become links.
  const isWeb = /^https?:\/\//.test(url ?? "");
  return html`<div class="row between wrap"><span>${FORMATS[format] ?? format} to ${isWeb ? html`<a href=${url} target="_blank" rel="noreferrer">${repo}</a>` : repo} <span class="tag">${state}</span></span>
      ${!isOver(one) && hasScope("submit") && html`<button class="mini" disabled=${busy} aria-label=${`Cancel the push to ${repo}`} onClick=${cancel}>Cancel</button>`}</div>
    ${!isOver(one) && html`<p class="dim small">${STAGES[stage] ?? "Waiting for earlier pushes"} ${progress.total > 0 && html`<progress max=${progress.total} value=${progress.done} aria-label="Progress of the push"></progress> ${stage === "uploading" && html`<span class="num">${bytes(progress.done)} of ${bytes(progress.total)}</span>`}`}</p>`}
    ${is_new === false && html`<p class="dim small">The repository has these files already.</p>`}
    ${one.error && html`<p class="bad">${one.error.message} <span class="dim small">${one.error.code}</span></p>`}
    <${ProblemBox} error=${error} />`;
}
