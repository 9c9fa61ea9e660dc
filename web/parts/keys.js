// API keys: who has one, what it permits; making and revoking.
import { all, del, post } from "../core/api.js";
import { announce } from "../core/announce.js";
import { day, NONE } from "../core/format.js";
import { useLoad } from "../core/load.js";
import { whoAmI } from "../core/session.js";
import { cls, html, useState } from "../core/ui.js";
import { Confirm, Dialog } from "./dialog.js";
import { Field } from "./field.js";
import { ProblemBox } from "./problem.js";
import { Ago, Code } from "./text.js";

const SCOPES = [["read", "look at jobs, datasets, models"], ["submit", "submit, steer and delete them"], ["admin", "everything, of every owner; keys and webhooks"], ["worker", "work as rlood worker, nothing else"]];
const LIVES = [["", "never"], [86_400, "in a day"], [7 * 86_400, "in a week"], [90 * 86_400, "in 90 days"], [366 * 86_400, "in a year"]];

export function Keys({ isOpen }) {
  const { data, error, reload } = useLoad((signal) => all("/keys", {}, 1000, signal), []);
  const [dialog, show] = useState(null);
  if (error?.status === 404) return null;
  const revoke = async (key) => {
    await del(`/keys/${key.id}`);
    announce(`Revoked: ${key.name}`);
    reload();
  };
  return html`<section>
    <div class="row between wrap"><h2>Keys</h2><button onClick=${() => show("new")}>New key…</button></div>
    <${ProblemBox} error=${error} retry=${reload} />
    ${data && !data.length && html`<p class="dim">No keys yet.</p>`}
    ${data?.length > 0 && html`<div class="scroll" tabindex="0" role="region" aria-label="Keys"><table class="list">
      <thead><tr><th scope="col">Name</th><th scope="col">Owner</th><th scope="col">Scopes</th><th scope="col">Begins with</th><th scope="col">State</th><th scope="col">Made</th><th scope="col">Used</th><th scope="col">Ends</th><th scope="col"><span class="unseen">Actions</span></th></tr></thead>
      <tbody>${data.map((key) => html`<tr key=${key.id}>
        <th scope="row">${key.name}</th><td>${key.owner}</td><td>${key.scopes.join(", ")}</td><td><code>${key.prefix}…</code></td>
        <td><span class=${cls("tag", key.state === "active" ? "good" : "")}>${key.state === "active" ? "✓ " : "✕ "}${key.state}</span></td>
        <td><${Ago} time=${key.created_at} /></td><td>${key.used_at ? html`<${Ago} time=${key.used_at} />` : "never"}</td><td>${key.expires_at ? day(key.expires_at) : NONE}</td>
        <td>${key.state === "active" && html`<button class="mini danger" aria-label=${`Revoke the key ${key.name}`} onClick=${() => show(key)}>Revoke…</button>`}</td></tr>`)}</tbody>
    </table></div>`}
    ${dialog === "new" && html`<${NewKey} isFirst=${isOpen} onMade=${reload} onClose=${() => show(null)} />`}
    ${dialog?.id && html`<${Confirm} title="Revoke this key?" action="Revoke it" danger onDone=${() => revoke(dialog)} onClose=${() => show(null)}>
      <p><strong>${dialog.name}</strong> and every session opened with it are over at once.</p><//>`}
  </section>`;
}

function NewKey({ isFirst, onMade, onClose }) {
  const [form, setForm] = useState({ name: "", owner: "", scopes: isFirst ? ["admin"] : ["submit"], life: "" });
  const [made, setMade] = useState(null);
  const [error, setError] = useState(null);
  const set = (changes) => setForm({ ...form, ...changes });
  const at = (pointer) => error?.at?.(pointer) ?? [];
  const submit = async (event) => {
    event.preventDefault();
    setError(null);
    try {
      const { name, owner, scopes, life } = form;
      setMade(await post("/keys", { name, scopes, ...(owner && { owner }), ...(life && { expires_in_s: Number(life) }) }));
    } catch (problem) {
      setError(problem);
    }
  };
  // With the first key the server asks for one: this page then has to sign in.
  const close = () => {
    onClose();
    if (!made) return;
    if (isFirst) whoAmI();
    else onMade();
  };
  if (made) {
    return html`<${Dialog} title="The new key" onClose=${close}>
      <p>This is shown once. Keep it where secrets are kept.</p><${Code} text=${made.key} label="Key" />
      <div class="row end"><button class="primary" onClick=${close}>I have it</button></div><//>`;
  }
  return html`<${Dialog} title="New key" onClose=${onClose}><form onSubmit=${submit}>
    ${isFirst && html`<p class="notice">From now on this server asks everybody for a key. The first needs the scope admin.</p>`}
    <${Field} label="Name" errors=${at("/name")}>${(a) => html`<input ...${a} required maxlength="100" value=${form.name} onInput=${(event) => set({ name: event.target.value })} />`}<//>
    <fieldset class="field"><legend>May</legend>
      ${SCOPES.map(([scope, what]) => html`<label key=${scope} class="pick"><input type="checkbox" checked=${form.scopes.includes(scope)}
        onChange=${(event) => set({ scopes: event.target.checked ? [...form.scopes, scope] : form.scopes.filter((other) => other !== scope) })} /> <span><b>${scope}</b> <span class="dim">${what}</span></span></label>`)}
      ${at("/scopes").map(({ code, detail }) => html`<p key=${code} class="bad small">${detail}</p>`)}</fieldset>
    <${Field} label="Owner" optional errors=${at("/owner")} hint="Keys with one owner share their jobs. Default: the key's own.">${(a) => html`<input ...${a} maxlength="100" value=${form.owner} onInput=${(event) => set({ owner: event.target.value })} />`}<//>
    <${Field} label="Ends" errors=${at("/expires_in_s")}>${(a) => html`<select ...${a} value=${form.life} onChange=${(event) => set({ life: event.target.value })}>${LIVES.map(([value, text]) => html`<option key=${value} value=${value}>${text}</option>`)}</select>`}<//>
    ${error && !error.errors?.length && html`<${ProblemBox} error=${error} />`}
    <div class="row end"><button type="button" onClick=${onClose}>Close</button><button class="primary">Make the key</button></div>
  </form><//>`;
}
