// The audit log: every change with its actor, action and target, newest first.
import { NONE } from "../core/format.js";
import { usePages } from "../core/load.js";
import { hrefOf, useFilters } from "../core/router.js";
import { html } from "../core/ui.js";
import { ProblemBox } from "./problem.js";
import { Table } from "./table.js";
import { Ago } from "./text.js";

const jobOf = (target) => target.match(/^\/jobs\/job_\w+/)?.[0];

export function Audit() {
  const [{ actor, target }, set] = useFilters();
  const { rows, next, error, loading, loadMore, reload } = usePages("/audit", { actor, target, limit: 50 });
  const search = (label, name, value, placeholder) => html`<label class="inline">${label} <input type="search" placeholder=${placeholder} value=${value ?? ""} onChange=${(event) => set({ [name]: event.target.value.trim() })} /></label>`;
  return html`<section>
    <div class="row between wrap"><h2>Audit log</h2><div class="filters">${search("Actor", "actor", actor, "key_…, operator")}${search("Target", "target", target, "/jobs/job_…")}<button onClick=${reload}>Refresh</button></div></div>
    <${ProblemBox} error=${error} retry=${reload} />
    ${rows.length > 0 && html`<${Table} label="Audit log" head=${["Time", "Actor", "Action", "Target", "#Status", "IP address"]}>${rows.map(({ id, time, actor, actor_name, owner, action, target, status, address }) => html`<tr key=${id}>
      <td><${Ago} time=${time} /></td><th scope="row"><button class="link" title=${`Show only changes by ${actor}`} onClick=${() => set({ actor })}>${actor_name ?? actor}</button>${owner && html`<div class="dim small">${owner}</div>`}</th>
      <td><code>${action}</code></td><td class="words">${jobOf(target) ? html`<a href=${hrefOf(jobOf(target))}>${target}</a>` : target}</td><td class="num">${status ?? NONE}</td><td>${address ?? NONE}</td></tr>`)}<//>`}
    ${!rows.length && !loading && !error && html`<p class="dim">${actor || target ? "No matching entries." : "No changes recorded yet."}</p>`}
    ${next && html`<p class="more"><button disabled=${loading} onClick=${loadMore}>Show earlier entries</button></p>`}
  </section>`;
}
