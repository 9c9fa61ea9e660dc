// The record of changes: who did what to which thing, newest first.
import { NONE } from "../core/format.js";
import { usePages } from "../core/pages.js";
import { hrefOf, useFilters } from "../core/router.js";
import { html } from "../core/ui.js";
import { ProblemBox } from "./problem.js";
import { Table } from "./table.js";
import { Ago } from "./text.js";

const jobOf = (target) => target.match(/^\/jobs\/job_\w+/)?.[0];

export function Audit() {
  const [{ actor, target }, set] = useFilters();
  const { rows, next, error, loading, more, reload } = usePages("/audit", { actor, target, limit: 50 });
  const search = (label, name, value, placeholder) => html`<label class="inline">${label} <input type="search" placeholder=${placeholder} value=${value ?? ""} onChange=${(event) => set({ [name]: event.target.value.trim() })} /></label>`;
  return html`<section>
    <div class="row between wrap"><h2>Changes</h2><div class="filters">${search("By", "actor", actor, "key_…, operator")}${search("Of", "target", target, "/jobs/job_…")}<button onClick=${reload}>Look again</button></div></div>
    <${ProblemBox} error=${error} retry=${reload} />
    ${rows.length > 0 && html`<${Table} label="Changes" head=${["When", "Who", "What", "Of what", "#Answer", "From"]}>${rows.map(({ id, time, actor, actor_name, owner, action, target, status, address }) => html`<tr key=${id}>
      <td><${Ago} time=${time} /></td><th scope="row"><button class="link" title=${`Only by ${actor}`} onClick=${() => set({ actor })}>${actor_name ?? actor}</button>${owner && html`<div class="dim small">${owner}</div>`}</th>
      <td><code>${action}</code></td><td class="words">${jobOf(target) ? html`<a href=${hrefOf(jobOf(target))}>${target}</a>` : target}</td><td class="num">${status ?? NONE}</td><td>${address ?? NONE}</td></tr>`)}<//>`}
    ${!rows.length && !loading && !error && html`<p class="dim">${actor || target ? "No change fits." : "Nothing was changed yet."}</p>`}
    ${next && html`<p class="more"><button disabled=${loading} onClick=${more}>Earlier changes</button></p>`}
  </section>`;
}
