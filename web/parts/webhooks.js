// Webhooks: who is told what happens to jobs, with which result; making, testing, switching off, deleting.
import { all, del, get, patch, post } from "../core/api.js";
import { announce } from "../core/announce.js";
import { clock, duration, words } from "../core/format.js";
import { useLoad } from "../core/load.js";
import { hrefOf } from "../core/router.js";
import { may } from "../core/session.js";
import { cls, html, useState } from "../core/ui.js";
import { Confirm, Dialog } from "./dialog.js";
import { Field } from "./field.js";
import { ProblemBox } from "./problem.js";
import { Ago, Code } from "./text.js";

const EVENTS = ["job.queued", "job.started", "job.paused", "job.succeeded", "job.failed", "job.cancelled", "checkpoint.created", "reward.degraded", "reward.recovered"];

export function Webhooks() {
  const { data, error, reload } = useLoad((signal) => all("/webhooks", {}, 1000, signal), []);
  const [dialog, show] = useState(null);
  const close = () => show(null);
  if (error?.status === 404) return null;
  const remove = async (webhook) => {
    await del(`/webhooks/${webhook.id}`);
    announce("Webhook deleted");
    reload();
  };
  return html`<section>
    <div class="row between wrap"><h2>Webhooks</h2>${may("submit") && html`<button onClick=${() => show("new")}>New webhook…</button>`}</div>
    <${ProblemBox} error=${error} retry=${reload} />
    ${data && !data.length && html`<p class="dim">None yet. A webhook tells another program when a job begins, ends, fails, saves a checkpoint.</p>`}
    ${data?.map((webhook) => html`<${Webhook} key=${webhook.id} webhook=${webhook} reload=${reload} onDelete=${() => show(webhook)} />`)}
    ${dialog === "new" && html`<${NewWebhook} onMade=${reload} onClose=${close} />`}
    ${dialog?.id && html`<${Confirm} title="Delete this webhook?" action="Delete it" danger onDone=${() => remove(dialog)} onClose=${close}>
      <p>${dialog.url}</p><p>Messages that wait are not sent.</p><//>`}
  </section>`;
}

function Webhook({ webhook, reload, onDelete }) {
  const { id, url, description, events, enabled, disabled_reason, created_at, old_secret_until } = webhook;
  const [error, setError] = useState(null);
  const [tested, setTested] = useState(null);
  const act = async (what) => {
    setError(null);
    try {
      await what();
    } catch (problem) {
      setError(problem);
    }
  };
  const test = () => act(async () => {
    const delivery = await post(`/webhooks/${id}/test`);
    setTested(delivery);
    announce(`Test: ${delivery.state}`);
  });
  return html`<article class="panel webhook">
    <div class="row between wrap">
      <h3>${description || url}</h3>
      <span class=${cls("tag", enabled ? "good" : "warn")}>${enabled ? "✓ on" : "Ⅱ off"}</span>
    </div>
    ${description && html`<p class="mono">${url}</p>`}
    <p class="dim small">${events.length >= EVENTS.length ? "All events" : events.join(", ")} · made <${Ago} time=${created_at} />${old_secret_until && ` · the old secret signs too until ${clock(old_secret_until)}`}${disabled_reason && ` · ${disabled_reason}`}</p>
    ${may("submit") && html`<p class="row wrap">
      <button class="mini" onClick=${test} disabled=${!enabled}>Send a test</button>
      <button class="mini" onClick=${() => act(async () => (await patch(`/webhooks/${id}`, { enabled: !enabled }), reload()))}>${enabled ? "Switch off" : "Switch on"}</button>
      <button class="mini danger" onClick=${onDelete}>Delete…</button></p>`}
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

function Delivery({ delivery, onAgain }) {
  const { type, time, job_id, state, next_try_at, tries } = delivery;
  const last = tries.at(-1);
  return html`<li class="delivery"><span class="num dim">${clock(time)}</span> <b>${type}</b> ${job_id && html`<a href=${hrefOf(`/jobs/${job_id}`)}>job</a> `}
    <span class=${state === "delivered" ? "good" : state === "failed" ? "bad" : "warn"}>${state === "delivered" ? "✓" : state === "failed" ? "✕" : "◌"} ${words(state)}</span>
    <span class="dim small"> ${tries.length > 0 && `${tries.length === 1 ? "1 try" : `${tries.length} tries`}, ${last.status ?? "no answer"}${last.error ? `: ${last.error}` : ""}, ${duration(last.duration_ms / 1000)}`}${next_try_at && `, next try ${clock(next_try_at)}`}</span>
    ${onAgain && html` <button class="mini" onClick=${onAgain}>Send again</button>`}</li>`;
}

function NewWebhook({ onMade, onClose }) {
  const [form, setForm] = useState({ url: "", description: "", events: EVENTS });
  const [made, setMade] = useState(null);
  const [error, setError] = useState(null);
  const set = (changes) => setForm({ ...form, ...changes });
  const at = (pointer) => error?.at?.(pointer) ?? [];
  const submit = async (event) => {
    event.preventDefault();
    setError(null);
    try {
      const { url, description, events } = form;
      setMade(await post("/webhooks", { url, ...(description && { description }), ...(events.length < EVENTS.length && { events }) }));
      onMade();
    } catch (problem) {
      setError(problem);
    }
  };
  if (made) return html`<${Secret} secret=${made.secret} onClose=${onClose} />`;
  return html`<${Dialog} title="New webhook" onClose=${onClose}><form onSubmit=${submit}>
    <${Field} label="URL" errors=${at("/url")}>${(a) => html`<input ...${a} type="url" required maxlength="2000" placeholder="https://example.com/rlood" value=${form.url} onInput=${(event) => set({ url: event.target.value })} />`}<//>
    <${Field} label="Description" optional errors=${at("/description")}>${(a) => html`<input ...${a} maxlength="2000" value=${form.description} onInput=${(event) => set({ description: event.target.value })} />`}<//>
    <fieldset class="field"><legend>Tells of</legend>
      ${EVENTS.map((type) => html`<label key=${type} class="pick"><input type="checkbox" checked=${form.events.includes(type)} onChange=${(event) => set({ events: event.target.checked ? [...form.events, type] : form.events.filter((other) => other !== type) })} /> <span>${type}</span></label>`)}
      ${at("/events").map(({ code, detail }) => html`<p key=${code} class="bad small">${detail}</p>`)}</fieldset>
    ${error && !error.errors?.length && html`<${ProblemBox} error=${error} />`}
    <div class="row end"><button type="button" onClick=${onClose}>Close</button><button class="primary">Make the webhook</button></div>
  </form><//>`;
}

const Secret = ({ secret, onClose }) => html`<${Dialog} title="Its secret" onClose=${onClose}>
  <p>Messages are signed with it, as Standard Webhooks says. It is shown once.</p><${Code} text=${secret} label="Secret" />
  <div class="row end"><button class="primary" onClick=${onClose}>I have it</button></div><//>`;
