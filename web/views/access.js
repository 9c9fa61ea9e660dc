// Keys and webhooks, for admins.
import { words } from "../core/format.js";
import { usePages } from "../core/pages.js";
import { session } from "../core/session.js";
import { useSignal } from "../core/signal.js";
import { html } from "../core/ui.js";
import { Keys } from "../parts/keys.js";
import { ProblemBox } from "../parts/problem.js";
import { Ago } from "../parts/text.js";
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
    ${isAdmin && html`<${Changes} />`}`;
}

/** Who changed what. */
function Changes() {
  const { rows, next, error, loading, more } = usePages("/audit", { limit: 50 });
  if (error?.status === 404) return null;
  return html`<section aria-label="Changes"><h2>Changes</h2>
    <${ProblemBox} error=${error} />
    ${!loading && !rows.length && html`<p class="dim">Nothing was changed yet.</p>`}
    ${rows.length > 0 && html`<div class="scroll" tabindex="0" role="region" aria-label="Changes"><table class="list">
      <thead><tr><th scope="col">When</th><th scope="col">Who</th><th scope="col">What</th><th scope="col">Of what</th><th scope="col" class="num">Answer</th><th scope="col">From</th></tr></thead>
      <tbody>${rows.map(({ id, time, actor, actor_name, action, target, status, address }) => html`<tr key=${id}>
        <td><${Ago} time=${time} /></td><td>${actor_name ?? words(actor)}</td><td><code>${action}</code></td><td><code>${target}</code></td><td class="num">${status ?? ""}</td><td>${address ?? ""}</td></tr>`)}</tbody></table></div>`}
    ${next && html`<p class="more"><button disabled=${loading} onClick=${more}>More</button></p>`}</section>`;
}
