// The alerts of a run: what is wrong, since when, the evidence, and how to fix it.
import { number, plural, sentenceCase } from "../core/format.js";
import { hrefOf } from "../core/router.js";
import { useSignal } from "../core/signal.js";
import { cls, html } from "../core/ui.js";

const SIGNS = { info: "i", warning: "!", critical: "‼" };

export function Alerts({ run }) {
  const alerts = useSignal(run.alerts);
  const active = alerts.filter((alert) => alert.cleared_step === null);
  const cleared = alerts.filter((alert) => alert.cleared_step !== null);
  if (!alerts.length) return null;
  return html`<section class="alerts" aria-label="Alerts">
    ${active.map((alert) => html`<${Alert} key=${alert.rule + alert.step} alert=${alert} run=${run} />`)}
    ${cleared.length > 0 && html`<details><summary>${plural(cleared.length, "cleared alert")}</summary>
      ${cleared.map((alert) => html`<${Alert} key=${alert.rule + alert.step} alert=${alert} run=${run} />`)}</details>`}
  </section>`;
}

function Alert({ alert, run }) {
  const { rule, severity, step, since_step, message, evidence, fix, cleared_step, on_alert } = alert;
  return html`<article class=${cls("alert", severity, cleared_step !== null && "cleared")}>
    <span class="sign" aria-hidden="true">${SIGNS[severity]}</span>
    <div class="grow">
      <h3>${sentenceCase(rule)} <span class="dim small">${severity} · step ${step}${cleared_step !== null ? `, cleared at step ${cleared_step}` : ""}${on_alert !== "note" ? ` · ${on_alert}s the job` : ""}</span></h3>
      <p>${message}</p>
      <p><strong>Fix:</strong> ${fix}</p>
      <details><summary>Evidence</summary><ul class="plain">${evidence.map((one) => html`<li key=${one.metric + one.statistic}>
        <code>${one.metric}</code> ${one.statistic} <b class="num">${number(one.value)}</b>${one.limit !== null && html` (limit <span class="num">${number(one.limit)}</span>)`}, steps ${one.from_step} to ${one.to_step}</li>`)}</ul>
        <a href=${hrefOf(`/jobs/${run.id}`, { from: Math.max(0, since_step - 10), to: step + 10 })}>Show these steps</a></details>
    </div>
  </article>`;
}
