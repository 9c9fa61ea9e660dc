// API keys: the list, the form that creates one, and revocation.
import { del, getAll, post } from "../core/api.js";
import { announce } from "../core/announce.js";
import { formatDate, plural } from "../core/format.js";
import { useLoad } from "../core/load.js";
import { loadSession } from "../core/session.js";
import { cls, html, useState } from "../core/ui.js";
import { useAction } from "../core/action.js";
import { Confirm, FormDialog, SecretDialog } from "./dialog.js";
import { CheckboxGroup, Input } from "./field.js";
import { ProblemBox } from "./problem.js";
import { Table } from "./table.js";
import { Ago } from "./text.js";

const SCOPES = [["read", "view jobs, datasets and models"], ["submit", "also create, control and delete jobs"], ["admin", "everything, for all owners, including keys"], ["worker", "only connect worker processes (rlood worker)"]];
const SCOPE_OPTIONS = SCOPES.map(([scope, meaning]) => [scope, html`<b>${scope}</b> <span class="dim">${meaning}</span>`]);
/** Lifetimes in seconds, with their texts. */
const LIFETIMES = [["", "never"], [86_400, "in 1 day"], [7 * 86_400, "in 7 days"], [90 * 86_400, "in 90 days"], [366 * 86_400, "in 1 year"]];

export function Keys({ isOpen }) {
  const { data, error, reload } = useLoad((signal) => getAll("/keys", {}, 1000, signal), []);
  const [dialog, setDialog] = useState(null);
  const close = () => setDialog(null);
  const revoke = async (key) => {
    const { webhooks } = await del(`/keys/${key.id}`);
    const remaining = webhooks?.length ?? 0;
    announce(remaining ? `Revoked: ${key.name}. The owner ${key.owner} still has ${plural(remaining, "active webhook")}. Check the list.` : `Revoked: ${key.name}`);
    reload();
  };
  return html`<section>
    <div class="row between wrap"><h2>Keys</h2><button onClick=${() => setDialog("new")}>New key…</button></div>
    <${ProblemBox} error=${error} retry=${reload} />
    ${data && !data.length && html`<p class="dim">No keys yet.</p>`}
    ${data?.length > 0 && html`<${Table} label="Keys" head=${["Name", "Owner", "Scopes", "Prefix", "State", "Created", "Last used", "Expires", "!Actions"]}>${data.map((key) => html`<tr key=${key.id}>
        <th scope="row">${key.name}</th><td>${key.owner}</td><td>${key.scopes.join(", ")}</td><td><code>${key.prefix}…</code></td>
        <td><span class=${cls("tag", key.state === "active" && "good")}>${key.state === "active" ? "✓ " : "✕ "}${key.state}</span></td>
        <td><${Ago} time=${key.created_at} /></td><td>${key.used_at ? html`<${Ago} time=${key.used_at} />` : "never"}</td><td>${key.expires_at ? formatDate(key.expires_at) : "never"}</td>
        <td>${key.state === "active" && html`<button class="mini danger" aria-label=${`Revoke the key ${key.name}`} onClick=${() => setDialog(key)}>Revoke…</button>`}</td></tr>`)}<//>`}
    ${dialog === "new" && html`<${NewKey} isFirst=${isOpen} onCreated=${reload} onClose=${close} />`}
    ${dialog?.id && html`<${Confirm} title="Revoke this key?" action="Revoke key" onConfirm=${() => revoke(dialog)} onClose=${close}>
      <p>The key <strong>${dialog.name}</strong> and all its sessions stop working immediately.</p><//>`}
  </section>`;
}

function NewKey({ isFirst, onCreated, onClose }) {
  const [form, setForm] = useState({ name: "", owner: "", scopes: isFirst ? ["admin"] : ["submit"], lifetime: "" });
  const [created, setCreated] = useState(null);
  const request = useAction();
  const { errorsAt } = request;
  const set = (name) => (value) => setForm({ ...form, [name]: value });
  const create = async () => {
    const { name, owner, scopes, lifetime } = form;
    setCreated(await post("/keys", { name, scopes, ...(owner && { owner }), ...(lifetime && { expires_in_s: Number(lifetime) }) }));
  };
  // After the first key is created, the server requires one: loading the session shows the sign-in form.
  const close = () => {
    onClose();
    if (isFirst) loadSession();
    else onCreated();
  };
  if (created) return html`<${SecretDialog} title="Key created" about="Copy the key now and store it safely. It is shown only once." text=${created.key} label="Key" onClose=${close} />`;
  return html`<${FormDialog} title="New key" action="Create key" request=${request} onSubmit=${create} onClose=${onClose}>
    ${isFirst && html`<p class="notice">Creating this key turns on authentication for every request. The first key must have the <code>admin</code> scope.</p>`}
    <${Input} label="Name" errors=${errorsAt("/name")} required maxlength="100" value=${form.name} set=${set("name")} />
    <${CheckboxGroup} label="Scopes" options=${SCOPE_OPTIONS} chosen=${form.scopes} errors=${errorsAt("/scopes")} set=${set("scopes")} />
    <${Input} label="Owner" optional errors=${errorsAt("/owner")} hint="Keys with the same owner share jobs. Default: a separate owner for this key." maxlength="100" value=${form.owner} set=${set("owner")} />
    <${Input} label="Expires" errors=${errorsAt("/expires_in_s")} options=${LIFETIMES} value=${form.lifetime} set=${set("lifetime")} /><//>`;
}
