// API keys: who has one, what it permits; making and revoking.
import { all, del, post } from "../core/api.js";
import { announce } from "../core/announce.js";
import { day, NONE } from "../core/format.js";
import { useLoad } from "../core/load.js";
import { whoAmI } from "../core/session.js";
import { cls, html, useState } from "../core/ui.js";
import { useWork } from "../core/work.js";
import { Confirm, FormDialog, Shown } from "./dialog.js";
import { Input, Picks } from "./field.js";
import { ProblemBox } from "./problem.js";
import { Table } from "./table.js";
import { Ago } from "./text.js";

const SCOPES = [["read", "look at jobs, datasets, models"], ["submit", "submit, steer and delete them"], ["admin", "everything, of every owner; keys and webhooks"], ["worker", "work as rlood worker, nothing else"]];
const SCOPE_PICKS = SCOPES.map(([scope, what]) => [scope, html`<b>${scope}</b> <span class="dim">${what}</span>`]);
const LIVES = [["", "never"], [86_400, "in a day"], [7 * 86_400, "in a week"], [90 * 86_400, "in 90 days"], [366 * 86_400, "in a year"]];

export function Keys({ isOpen }) {
  const { data, error, reload } = useLoad((signal) => all("/keys", {}, 1000, signal), []);
  const [dialog, show] = useState(null);
  const close = () => show(null);
  const revoke = async (key) => {
    const { webhooks } = await del(`/keys/${key.id}`);
    const left = webhooks?.length ?? 0;
    announce(left ? `Revoked: ${key.name}. ${key.owner} has ${left} ${left === 1 ? "webhook" : "webhooks"} that go on sending: check the list.` : `Revoked: ${key.name}`);
    reload();
  };
  return html`<section>
    <div class="row between wrap"><h2>Keys</h2><button onClick=${() => show("new")}>New key…</button></div>
    <${ProblemBox} error=${error} retry=${reload} />
    ${data && !data.length && html`<p class="dim">No keys yet.</p>`}
    ${data?.length > 0 && html`<${Table} label="Keys" head=${["Name", "Owner", "Scopes", "Begins with", "State", "Made", "Used", "Ends", "!Actions"]}>${data.map((key) => html`<tr key=${key.id}>
        <th scope="row">${key.name}</th><td>${key.owner}</td><td>${key.scopes.join(", ")}</td><td><code>${key.prefix}…</code></td>
        <td><span class=${cls("tag", key.state === "active" && "good")}>${key.state === "active" ? "✓ " : "✕ "}${key.state}</span></td>
        <td><${Ago} time=${key.created_at} /></td><td>${key.used_at ? html`<${Ago} time=${key.used_at} />` : "never"}</td><td>${key.expires_at ? day(key.expires_at) : NONE}</td>
        <td>${key.state === "active" && html`<button class="mini danger" aria-label=${`Revoke the key ${key.name}`} onClick=${() => show(key)}>Revoke…</button>`}</td></tr>`)}<//>`}
    ${dialog === "new" && html`<${NewKey} isFirst=${isOpen} onMade=${reload} onClose=${close} />`}
    ${dialog?.id && html`<${Confirm} title="Revoke this key?" action="Revoke it" onDone=${() => revoke(dialog)} onClose=${close}>
      <p><strong>${dialog.name}</strong> and every session opened with it are over at once.</p><//>`}
  </section>`;
}

function NewKey({ isFirst, onMade, onClose }) {
  const [form, setForm] = useState({ name: "", owner: "", scopes: isFirst ? ["admin"] : ["submit"], life: "" });
  const [made, setMade] = useState(null);
  const work = useWork();
  const { at } = work;
  const set = (name) => (value) => setForm({ ...form, [name]: value });
  const make = async () => {
    const { name, owner, scopes, life } = form;
    setMade(await post("/keys", { name, scopes, ...(owner && { owner }), ...(life && { expires_in_s: Number(life) }) }));
  };
  // With the first key the server asks for one: this page then has to sign in.
  const close = () => {
    onClose();
    if (isFirst) whoAmI();
    else onMade();
  };
  if (made) return html`<${Shown} title="The new key" about="This is shown once. Keep it where secrets are kept." text=${made.key} label="Key" onClose=${close} />`;
  return html`<${FormDialog} title="New key" action="Make the key" work=${work} onSubmit=${make} onClose=${onClose}>
    ${isFirst && html`<p class="notice">From now on this server asks everybody for a key. The first needs the scope admin.</p>`}
    <${Input} label="Name" errors=${at("/name")} required maxlength="100" value=${form.name} set=${set("name")} />
    <${Picks} label="May" options=${SCOPE_PICKS} chosen=${form.scopes} errors=${at("/scopes")} set=${set("scopes")} />
    <${Input} label="Owner" optional errors=${at("/owner")} hint="Keys with one owner share their jobs. Default: the key's own." maxlength="100" value=${form.owner} set=${set("owner")} />
    <${Input} label="Ends" errors=${at("/expires_in_s")} options=${LIVES} value=${form.life} set=${set("life")} /><//>`;
}
