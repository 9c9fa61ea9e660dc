// Webhooks: the list, their deliveries, and the forms that create, test, disable and delete them or rotate their secrets.
import { del, get, getAll, patch, post } from "../core/api.js";
import { announce } from "../core/announce.js";
import { duration, formatDateTime, plural, sentenceCase } from "../core/format.js";
import { useLoad } from "../core/load.js";
import { hrefOf } from "../core/router.js";
import { hasScope } from "../core/session.js";
import { cls, html, useState } from "../core/ui.js";
import { useAction } from "../core/action.js";
import { Confirm, FormDialog, SecretDialog } from "./dialog.js";
import { CheckboxGroup, Input } from "./field.js";
import { ProblemBox } from "./problem.js";
import { Ago } from "./text.js";

const EVENTS = ["job.queued", "job.started", "job.paused", "job.succeeded", "job.failed", "job.cancelled", "checkpoint.created", "reward.degraded", "reward.recovered"];
const EVENT_OPTIONS = EVENTS.map((type) => [type, type]);
/** Times for which the old secret stays valid after a rotation, in s. */
const OVERLAP_OPTIONS = [[0, "0 hours (revoke it now)"], [3600, "1 hour"], [86_400, "1 day"], [7 * 86_400, "7 days"]];

export function Webhooks() {
  const { data, error, reload } = useLoad((signal) => getAll("/webhooks", {}, 1000, signal), []);
  const [[dialog, webhook], setDialog] = useState([]);
  const close = () => setDialog([]);
  const remove = async () => {
    await del(`/webhooks/${webhook.id}`);
    announce("Webhook deleted");
    reload();
  };
  return html`<section>
    <div class="row between wrap"><h2>Webhooks</h2>${hasScope("submit") && html`<button onClick=${() => setDialog(["new"])}>New webhook…</button>`}</div>
    <${ProblemBox} error=${error} retry=${reload} />
    ${data && !data.length && html`<p class="dim">No webhooks yet. A webhook notifies another program when a job starts, ends or saves a checkpoint.</p>`}
    ${data?.map((webhook) => html`<${Webhook} key=${webhook.id} webhook=${webhook} reload=${reload} openDialog=${(dialog) => setDialog([dialog, webhook])} />`)}
    ${dialog === "new" && html`<${NewWebhook} onCreated=${reload} onClose=${close} />`}
    ${dialog === "secret" && html`<${RotateSecret} webhook=${webhook} onRotated=${reload} onClose=${close} />`}
    ${dialog === "delete" && html`<${Confirm} title="Delete this webhook?" action="Delete webhook" onConfirm=${remove} onClose=${close}>
      <p>${webhook.url}</p><p>Pending messages will not be delivered.</p><//>`}
  </section>`;
}

function Webhook({ webhook, reload, openDialog }) {
  const { id, url, description, events, enabled, disabled_reason, created_at, old_secret_until } = webhook;
  const [testDelivery, setTestDelivery] = useState(null);
  const { busy, error, run } = useAction();
  const sendTest = async () => {
    const delivery = await post(`/webhooks/${id}/test`);
    setTestDelivery(delivery);
    announce(`Test: ${delivery.state}`);
  };
  const toggleEnabled = async () => {
    await patch(`/webhooks/${id}`, { enabled: !enabled });
    reload();
  };
  return html`<article class="panel webhook">
    <div class="row between wrap">
      <h3>${description || url}</h3>
      <span class=${cls("tag", enabled ? "good" : "warn")}>${enabled ? "✓ enabled" : "Ⅱ disabled"}</span>
    </div>
    ${description && html`<p class="mono">${url}</p>`}
    <p class="dim small">${events.length >= EVENTS.length ? "All events" : events.join(", ")} · created <${Ago} time=${created_at} />${old_secret_until && ` · old secret valid until ${formatDateTime(old_secret_until)}`}${disabled_reason && ` · ${disabled_reason}`}</p>
    ${hasScope("submit") && html`<p class="row wrap">
      <button class="mini" onClick=${() => run(sendTest)} disabled=${busy || !enabled}>Send test</button>
      <button class="mini" onClick=${() => openDialog("secret")}>Rotate secret…</button>
      <button class="mini" onClick=${() => run(toggleEnabled)}>${enabled ? "Disable" : "Enable"}</button>
      <button class="mini danger" onClick=${() => openDialog("delete")}>Delete…</button></p>`}
    <${ProblemBox} error=${error} />
    ${testDelivery && html`<ul class="plain"><${Delivery} delivery=${testDelivery} /></ul>`}
    <details onToggle=${(event) => event.target.open && setTestDelivery(null)}><summary>Deliveries</summary><${Deliveries} id=${id} /></details>
  </article>`;
}

function Deliveries({ id }) {
  const { data, error, reload } = useLoad((signal) => get(`/webhooks/${id}/deliveries`, { limit: 20 }, signal), [id]);
  const resend = async (delivery) => {
    await post(`/webhooks/${id}/deliveries/${delivery.id}/redeliver`).then(() => announce("Message resent"), (problem) => announce(problem.message));
    reload();
  };
  return html`<${ProblemBox} error=${error} retry=${reload} />
    <p><button class="mini" onClick=${reload}>Refresh</button></p>
    ${data && !data.data.length && html`<p class="dim">No deliveries yet.</p>`}
    <ul class="plain">${data?.data.map((delivery) => html`<${Delivery} key=${delivery.id} delivery=${delivery} onResend=${hasScope("submit") && (() => resend(delivery))} />`)}</ul>`;
}

/** CSS class and symbol of a final delivery state. */
const FINAL_STATES = { delivered: ["good", "✓"], failed: ["bad", "✕"] };

function Delivery({ delivery, onResend }) {
  const { type, time, job_id, state, next_try_at, tries } = delivery;
  const last = tries.at(-1);
  const [level, sign] = FINAL_STATES[state] ?? ["warn", "◌"];
  return html`<li class="delivery"><span class="num dim">${formatDateTime(time)}</span> <b>${type}</b> ${job_id && html`<a href=${hrefOf(`/jobs/${job_id}`)}>job</a> `}
    <span class=${level}>${sign} ${sentenceCase(state)}</span>
    <span class="dim small"> ${last && `${plural(tries.length, "attempt")}, ${last.status ?? "no response"}${last.error ? `: ${last.error}` : ""}, ${duration(last.duration_ms / 1000)}`}${next_try_at && `, next attempt ${formatDateTime(next_try_at)}`}</span>
    ${onResend && html` <button class="mini" onClick=${onResend}>Resend</button>`}</li>`;
}

function NewWebhook({ onCreated, onClose }) {
  const [form, setForm] = useState({ url: "", description: "", events: EVENTS });
  const [created, setCreated] = useState(null);
  const request = useAction();
  const { errorsAt } = request;
  const set = (name) => (value) => setForm({ ...form, [name]: value });
  const create = async () => {
    const { url, description, events } = form;
    setCreated(await post("/webhooks", { url, ...(description && { description }), ...(events.length < EVENTS.length && { events }) }));
    onCreated();
  };
  if (created) return html`<${WebhookSecret} secret=${created.secret} onClose=${onClose} />`;
  return html`<${FormDialog} title="New webhook" action="Create webhook" request=${request} onSubmit=${create} onClose=${onClose}>
    <${Input} label="URL" errors=${errorsAt("/url")} type="url" required maxlength="2000" placeholder="https://example.com/rlood" value=${form.url} set=${set("url")} />
    <${Input} label="Description" optional errors=${errorsAt("/description")} maxlength="2000" value=${form.description} set=${set("description")} />
    <${CheckboxGroup} label="Events" options=${EVENT_OPTIONS} chosen=${form.events} errors=${errorsAt("/events")} set=${set("events")} /><//>`;
}

/** The form that replaces a secret. For a chosen time, messages are signed with both the old and the new one. */
function RotateSecret({ webhook, onRotated, onClose }) {
  const [overlap, setOverlap] = useState(86_400);
  const [created, setCreated] = useState(null);
  const request = useAction();
  const rotate = async () => {
    setCreated(await post(`/webhooks/${webhook.id}/secret`, { keep_old_s: Number(overlap) }));
    onRotated();
  };
  if (created) return html`<${WebhookSecret} secret=${created.secret} onClose=${onClose} />`;
  return html`<${FormDialog} title="Rotate secret" action="Create new secret" request=${request} onSubmit=${rotate} onClose=${onClose}>
    <p>Webhook <strong>${webhook.description || webhook.url}</strong>. While the old secret is valid, messages are signed with both secrets.</p>
    <${Input} label="Keep the old secret valid for" errors=${request.errorsAt("/keep_old_s")} options=${OVERLAP_OPTIONS} value=${overlap} set=${setOverlap} /><//>`;
}

const WebhookSecret = ({ secret, onClose }) => html`<${SecretDialog} title="Webhook secret" about="Copy the secret now. It is shown only once. Messages are signed with it as specified by Standard Webhooks." text=${secret} label="Secret" onClose=${onClose} />`;
