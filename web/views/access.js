// Keys, webhooks and the record of changes, as far as the session's scopes go.
import { session } from "../core/session.js";
import { useSignal } from "../core/signal.js";
import { html } from "../core/ui.js";
import { Audit } from "../parts/audit.js";
import { Keys } from "../parts/keys.js";
import { Webhooks } from "../parts/webhooks.js";

export default function Access() {
  const { state, name, owner, scopes } = useSignal(session);
  const isAdmin = scopes.includes("admin");
  return html`<h1>Keys and webhooks</h1>
    <p class="dim">${state === "open"
      ? "This server has no keys: everybody who reaches it may do everything. With the first key, every request needs one."
      : `Signed in${name ? ` with the key ${name}` : ""}${owner ? ` as ${owner}` : ""}: ${scopes.join(", ")}.`}</p>
    ${isAdmin ? html`<${Keys} isOpen=${state === "open"} />` : html`<p class="notice">Keys are kept by admins: this needs a key with the scope admin.</p>`}
    <${Webhooks} />
    ${isAdmin && html`<${Audit} />`}`;
}
