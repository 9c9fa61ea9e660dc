// The page of API keys, webhooks and the audit log. Keys and the audit log need the scope `admin`.
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
      ? "This server has no API keys, so anyone who can reach it has full access. After you create the first key, every request requires one."
      : `Signed in${name ? ` with the key ${name}` : ""}${owner ? ` as ${owner}` : ""}. Scopes: ${scopes.join(", ")}.`}</p>
    ${isAdmin ? html`<${Keys} isOpen=${state === "open"} />` : html`<p class="notice">To manage keys, sign in with a key that has the <code>admin</code> scope.</p>`}
    <${Webhooks} />
    ${isAdmin && html`<${Audit} />`}`;
}
