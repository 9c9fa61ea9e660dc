// Webhooks: who is told what happens to jobs, with which result; making, testing, another secret, switching off, deleting.
import { all, del, get, patch, post } from "../core/api.js";
import { announce } from "../core/announce.js";
import { duration, moment, plural, words } from "../core/format.js";
import { useLoad } from "../core/load.js";
import { hrefOf } from "../core/router.js";
import { may } from "../core/session.js";
import { cls, html, useState } from "../core/ui.js";
import { useWork } from "../core/work.js";
import { Confirm, FormDialog, Shown } from "./dialog.js";
import { Input, Picks } from "./field.js";
import { ProblemBox } from "./problem.js";
import { Ago } from "./text.js";

const EVENTS = ["job.queued", "job.started", "job.paused", "job.succeeded", "job.failed", "job.cancelled", "checkpoint.created", "reward.degraded", "reward.recovered"];
const EVENT_PICKS = EVENTS.map((type) => [type, type]);
/** How long the old secret signs beside the new one, s. */
const KEPT_S = [[0, "not at all"], [3600, "for an hour"], [86_400, "for a day"], [7 * 86_400, "for a week"]];

export function Webhooks() {
  const { data, error, reload } = useLoad((signal) => all("/webhooks", {}, 1000, signal), []);
  const [[dialog, webhook], show] = useState([]);
  const close = () => show([]);
  const remove = async () => {
    await del(`/webhooks/${webhook.id}`);
    announce("Webhook deleted");
    reload();
  };
  return html`<section>
    <div class="row between wrap"><h2>Webhooks</h2>${may("submit") && html`<button onClick=${() => show(["new"])}>New webhook…</button>`}</div>
    <${ProblemBox} error=${error} retry=${reload} />
    ${data && !data.length && html`<p class="dim">None yet. A webhook tells another program when a job begins, ends, fails, saves a checkpoint.</p>`}
    ${data?.map((webhook) => html`<${Webhook} key=${webhook.id} webhook=${webhook} reload=${reload} show=${(dialog) => show([dialog, webhook])} />`)}
    ${dialog === "new" && html`<${NewWebhook} onMade=${reload} onClose=${close} />`}
    ${dialog === "secret" && html`<${NewSecret} webhook=${webhook} onMade=${reload} onClose=${close} />`}
    ${dialog === "delete" && html`<${Confirm} title="Delete this webhook?" action="Delete it" onDone=${remove} onClose=${close}>
      <p>${webhook.url}</p><p>Messages that wait are not sent.</p><//>`}
  </section>`;
}

function Webhook({ webhook, reload, show }) {
  const { id, url, description, events, enabled, disabled_reason, created_at, old_secret_until } = webhook;
  const [tested, setTested] = useState(null);
  const { busy, error, run } = useWork();
  const test = async () => {
    const delivery = await post(`/webhooks/${id}/test`);
    setTested(delivery);
    announce(`Test: ${delivery.state}`);
  };
  const turn = async () => {
    await patch(`/webhooks/${id}`, { enabled: !enabled });
    reload();
  };
  return html`<article class="panel webhook">
    <div class="row between wrap">
      <h3>${description || url}</h3>
      <span class=${cls("tag", enabled ? "good" : "warn")}>${enabled ? "✓ on" : "Ⅱ off"}</span>
    </div>
    ${description && html`<p class="mono">${url}</p>`}
    <p class="dim small">${events.length >= EVENTS.length ? "All events" : events.join(", ")} · made <${Ago} time=${created_at} />${old_secret_until && ` · the old secret signs too until ${moment(old_secret_until)}`}${disabled_reason && ` · ${disabled_reason}`}</p>
    ${may("submit") && html`<p class="row wrap">
      <button class="mini" onClick=${() => run(test)} disabled=${busy || !enabled}>Send a test</button>
      <button class="mini" onClick=${() => show("secret")}>New secret…</button>
      <button class="mini" onClick=${() => run(turn)}>${enabled ? "Switch off" : "Switch on"}</button>
      <button class="mini danger" onClick=${() => show("delete")}>Delete…</button></p>`}
    <${ProblemBox} error=${error} />
    ${tested && html`<ul class="plain"><${Delivery} delivery=${tested} /></ul>`}
    <details onToggle=${(event) => event.target.open && setTested(null)}><summary>Messages</summary><${Deliveries} id=${id} /></details>
  </article>`;
}

function Deliveries({ id }) {
  const { data, error, reload } = useLoad((signal) => get(`/webhooks/${id}/deliveries`, { limit: 20 }, signal), [id]);
  const again = async (delivery) => {
    await post(`/webhooks/${id}/deliveries/${delivery.id}/redeliver`).then(() => announce("Sent again"), (problem) => announce(problem.message));
    reload();
  };
  return html`<${ProblemBox} error=${error} retry=${reload} />
    <p><button class="mini" onClick=${reload}>Look again</button></p>
    ${data && !data.data.length && html`<p class="dim">Nothing was sent yet.</p>`}
    <ul class="plain">${data?.data.map((delivery) => html`<${Delivery} key=${delivery.id} delivery=${delivery} onAgain=${may("submit") && (() => again(delivery))} />`)}</ul>`;
}

const ENDS = { delivered: ["good", "✓"], failed: ["bad", "✕"] };

function Delivery({ delivery, onAgain }) {
  const { type, time, job_id, state, next_try_at, tries } = delivery;
  const last = tries.at(-1);
  const [level, sign] = ENDS[state] ?? ["warn", "◌"];
  return html`<li class="delivery"><span class="num dim">${moment(time)}</span> <b>${type}</b> ${job_id && html`<a href=${hrefOf(`/jobs/${job_id}`)}>job</a> `}
    <span class=${level}>${sign} ${words(state)}</span>
    <span class="dim small"> ${last && `${plural(tries.length, "try", "tries")}, ${last.status ?? "no answer"}${last.error ? `: ${last.error}` : ""}, ${duration(last.duration_ms / 1000)}`}${next_try_at && `, next try ${moment(next_try_at)}`}</span>
    ${onAgain && html` <button class="mini" onClick=${onAgain}>Send again</button>`}</li>`;
}

function NewWebhook({ onMade, onClose }) {
  const [form, setForm] = useState({ url: "", description: "", events: EVENTS });
  const [made, setMade] = useState(null);
  const work = useWork();
  const { at } = work;
  const set = (name) => (value) => setForm({ ...form, [name]: value });
  const make = async () => {
    const { url, description, events } = form;
    setMade(await post("/webhooks", { url, ...(description && { description }), ...(events.length < EVENTS.length && { events }) }));
    onMade();
  };
  if (made) return html`<${Secret} secret=${made.secret} onClose=${onClose} />`;
  return html`<${FormDialog} title="New webhook" action="Make the webhook" work=${work} onSubmit=${make} onClose=${onClose}>
    <${Input} label="URL" errors=${at("/url")} type="url" required maxlength="2000" placeholder="https://example.com/rlood" value=${form.url} set=${set("url")} />
    <${Input} label="Description" optional errors=${at("/description")} maxlength="2000" value=${form.description} set=${set("description")} />
    <${Picks} label="Tells of" options=${EVENT_PICKS} chosen=${form.events} errors=${at("/events")} set=${set("events")} /><//>`;
}

/** Another secret, and how long messages are signed with both. */
function NewSecret({ webhook, onMade, onClose }) {
  const [kept, keep] = useState(86_400);
  const [made, setMade] = useState(null);
  const work = useWork();
  const make = async () => {
    setMade(await post(`/webhooks/${webhook.id}/secret`, { keep_old_s: Number(kept) }));
    onMade();
  };
  if (made) return html`<${Secret} secret=${made.secret} onClose=${onClose} />`;
  return html`<${FormDialog} title="New secret" action="Make a new secret" work=${work} onSubmit=${make} onClose=${onClose}>
    <p>For <strong>${webhook.description || webhook.url}</strong>. Until the receiver knows the new one, messages can be signed with both.</p>
    <${Input} label="The old one signs too" errors=${work.at("/keep_old_s")} options=${KEPT_S} value=${kept} set=${keep} /><//>`;
}

const Secret = ({ secret, onClose }) => html`<${Shown} title="Its secret" about="Messages are signed with it, as Standard Webhooks says. It is shown once." text=${secret} label="Secret" onClose=${onClose} />`;
