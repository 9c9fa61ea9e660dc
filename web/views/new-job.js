// A new job: a form made of what the server's document says, checked and probed by the server before it is submitted.
import { announce } from "../core/announce.js";
import { get, post } from "../core/api.js";
import { bytes, count, duration, number, percent, words } from "../core/format.js";
import { useLoad } from "../core/load.js";
import { go, useFilters } from "../core/router.js";
import { may, session } from "../core/session.js";
import { html, useEffect, useMemo, useRef, useState } from "../core/ui.js";
import { curlOf } from "../form/curl.js";
import { DatasetChoice } from "../form/dataset.js";
import { jobSchema, withValue } from "../form/document.js";
import { ModelChoice } from "../form/model.js";
import { Rewards } from "../form/rewards.js";
import { Setting } from "../form/setting.js";
import { Input } from "../parts/field.js";
import { Loading, ProblemBox } from "../parts/problem.js";
import { Code, Facts } from "../parts/text.js";

/** Settings with a control of their own. */
const ELSEWHERE = ["/eval/dataset", "/warm_up/dataset"];
/** Datasets of sections. */
const DATASETS = { eval: "Prompts of the evaluation", warm_up: "Rows of the warm-up, with answers" };
const EMPTY = { rewards: [{ type: "exact_match", column: "answer" }] };
const CHECK_MS = 500;

export default function NewJob() {
  const [{ from }] = useFilters();
  // Under the sign-in the form waits for whoever filled it in.
  const isOut = session.value.state === "out";
  const { data, error, reload } = useLoad(async (signal) => {
    const [schema, old] = await Promise.all([jobSchema(), from ? get(`/jobs/${encodeURIComponent(from)}/config`, {}, signal) : null]);
    return { schema, old, from };
  }, [from, isOut]);
  if (!isOut && !may("submit")) return html`<h1>New job</h1><p class="notice">Your key may only read: submitting a job needs a key with the scope submit.</p>`;
  if (data?.from !== from || !data) return html`<h1>New job</h1><${Loading} error=${error} retry=${reload} />`;
  return html`<${Form} key=${from ?? ""} schema=${data.schema} old=${data.old} from=${from} />`;
}

const hasSecret = (config) => [...(config?.rewards ?? []), ...(config?.eval?.rewards ?? [])].some(({ url }) => url);

function Form({ schema, old, from }) {
  const [spec, setSpec] = useState(old ?? EMPTY);
  // A press of a button sends what was typed just before, drawn or not.
  const latest = useRef(spec);
  const [rows, setRows] = useState([]);
  const [problem, setProblem] = useState(null);
  const [checked, setChecked] = useState(null);
  const [busy, setBusy] = useState("");
  const element = useRef(null);
  const errors = problem?.errors ?? checked?.errors ?? [];
  const form = useMemo(() => ({
    schema, spec, rows,
    set: (pointer, value) => {
      setProblem(null);
      setSpec((latest.current = withValue(latest.current, pointer, value)));
    },
    /** Of this place and, unless `alone`, of what lies below it. */
    errorsAt: (pointer, alone = false) => errors.filter((item) => item.pointer === pointer || (!alone && item.pointer.startsWith(`${pointer}/`))),
  }), [spec, rows, errors]);

  // Once somebody asked, the answer keeps up with what is typed.
  useEffect(() => {
    if (!checked) return;
    const timer = setTimeout(() => post("/jobs/validate", spec).then((answer) => setChecked((old) => (old && spec === latest.current ? { ...answer, probe: undefined } : old)), () => {}), CHECK_MS);
    return () => clearTimeout(timer);
  }, [spec]);

  const toFirstError = (items) => setTimeout(() => {
    announce(`${items.length === 1 ? "One thing is" : `${items.length} things are`} not right yet`);
    focusAt(element.current, items[0]?.pointer ?? "");
  }, 50);
  const run = async (what, work) => {
    setBusy(what);
    setProblem(null);
    try {
      await work();
    } catch (error) {
      // The sign-in says that the session is over; the form is there again after it.
      if (error.status !== 401) setProblem(error);
      if (error.errors?.length) toFirstError(error.errors);
    }
    setBusy("");
  };
  const check = (isProbed) => run(isProbed ? "probe" : "check", async () => {
    const answer = await post("/jobs/validate", latest.current, { query: isProbed ? { probe: true } : {} });
    setChecked(answer);
    if (answer.errors.length) toFirstError(answer.errors);
    else announce("The job is valid");
  });
  const submit = (event) => {
    event.preventDefault();
    run("submit", async () => {
      const job = await post("/jobs", latest.current);
      announce("Submitted");
      go(`/jobs/${job.id}`);
    });
  };

  return html`<div class="new-job">
    <form ref=${element} onSubmit=${submit} novalidate class="stack">
      <h1>${from ? "New job from an old one" : "New job"}</h1>
      ${from && hasSecret(old) && html`<p class="notice">Secrets and headers are never shown again: give them anew where a service needs them.</p>`}
      <${Errors} problem=${problem} items=${errors} root=${element} />
      <fieldset class="panel"><legend>What to train</legend>
        <div class="fields"><${Setting} form=${form} pointer="/name" /></div>
        <${ModelChoice} form=${form} />
        <${DatasetChoice} form=${form} pointer="/dataset" label="Prompts *" onRows=${setRows} />
      </fieldset>
      <${Rewards} form=${form} />
      <fieldset class="panel"><legend>How</legend><div class="fields"><${Trained} form=${form} />${form.schema.first.filter((pointer) => form.spec.lora !== null || !pointer.startsWith("/lora/")).map((pointer) => html`<${Setting} key=${pointer} form=${form} pointer=${pointer} />`)}</div></fieldset>
      <${More} form=${form} />
      <div class="submit-bar">
        <button type="button" disabled=${!!busy} onClick=${() => check(false)}>${busy === "check" ? "Checking…" : "Check"}</button>
        <button type="button" disabled=${!!busy} onClick=${() => check(true)}>${busy === "probe" ? "Probing…" : "Probe"}</button>
        <button class="primary" disabled=${!!busy}>${busy === "submit" ? "Submitting…" : "Submit"}</button>
        <span class="dim small">Probe samples the model and asks the rewards, without training.</span>
      </div>
    </form>
    <aside class="stack" aria-label="What will be sent">
      ${checked && html`<${Verdict} answer=${checked} />`}
      <section class="panel stack"><h2>The same with curl</h2><${Code} text=${curlOf(spec, location.origin, session.value.state === "in")} label="The curl command" /></section>
    </aside>
  </div>`;
}

/** To the control of a place, or the nearest one around it; what hides it is opened. */
function focusAt(root, pointer) {
  for (let at = pointer; at; at = at.slice(0, at.lastIndexOf("/"))) {
    const place = root.querySelector(`[data-pointer="${CSS.escape(at)}"]`);
    if (!place) continue;
    for (let around = place; (around = around.parentElement?.closest("details")); ) around.open = true;
    const control = place.matches("input, select, textarea") ? place : place.querySelector("input, select, textarea, button");
    control?.focus();
    return;
  }
}

/** Everything that is wrong, each leading to its place. */
function Errors({ problem, items, root }) {
  if (problem && !items.length) return html`<${ProblemBox} error=${problem} />`;
  if (!items.length) return null;
  return html`<div class="problem" role="alert"><strong>${items.length === 1 ? "One thing is not right yet" : `${items.length} things are not right yet`}</strong>
    <ul>${items.map((item) => html`<li key=${item.pointer + item.code}><button type="button" class="link" onClick=${() => focusAt(root.current, item.pointer)}><code>${item.pointer || "the job"}</code> ${item.detail}</button></li>`)}</ul></div>`;
}

/** An adapter, or every weight: then there is nothing to say of an adapter. */
const Trained = ({ form }) => html`<${Input} label="What is trained" errors=${form.errorsAt("/lora", true)} pointer="/lora" options=${[["", "an adapter (default)"], ["all", "every weight"]]}
  value=${form.spec.lora === null ? "all" : ""} set=${(text) => form.set("/lora", text ? null : undefined)} />`;

/** Every other setting, by section. */
function More({ form }) {
  const isHere = (pointer) => !form.schema.first.includes(pointer) && !ELSEWHERE.includes(pointer);
  return html`<details class="panel more"><summary>All settings</summary>
    ${form.schema.sections.filter(({ name }) => form.spec[name] !== null).map(({ name, title, order, properties }) => {
      const keys = order.filter((key) => isHere(`/${name}/${key}`));
      return html`<section key=${name}><h2>${title}</h2>
        ${DATASETS[name] && html`<${DatasetChoice} form=${sectionForm(form, name)} pointer="/dataset" label=${DATASETS[name]} />`}
        <div class="fields">${keys.map((key) => html`<${Setting} key=${key} form=${form} pointer=${`/${name}/${key}`} schema=${properties[key]} />`)}</div></section>`;
    })}
    <section><h2>Labels</h2><div class="fields"><${Setting} form=${form} pointer="/metadata" placeholder=${'{"team": "x"}'} /></div></section>
  </details>`;
}

/** The form with a section as its root. */
const sectionForm = (form, name) => ({ ...form, at: `/${name}`, spec: form.spec[name] ?? {}, set: (pointer, value) => form.set(`/${name}${pointer}`, value), errorsAt: (pointer, alone) => form.errorsAt(`/${name}${pointer}`, alone) });

/** What the server makes of the job. */
function Verdict({ answer }) {
  const { valid, warnings, estimate, plan, probe } = answer;
  const facts = [
    ["Steps", plan && count(plan.training.max_steps + (plan.warm_up?.steps ?? 0))],
    ["Completions a step", plan && count(plan.training.prompts_per_step * plan.rloo.num_generations)],
    ["Memory", estimate?.memory_bytes && bytes(estimate.memory_bytes)],
    ["A checkpoint", estimate?.checkpoint_bytes && bytes(estimate.checkpoint_bytes)],
  ];
  return html`<section class="panel stack" role="status"><h2 class=${valid ? "good" : "bad"}>${valid ? "✓ The job is valid" : "Not valid yet"}</h2>
    <${Facts} facts=${facts} />
    ${warnings.map((warning) => html`<p key=${warning.pointer + warning.code} class="warn"><code>${warning.pointer}</code> ${warning.detail}</p>`)}
    ${probe && html`<${Probe} report=${probe} />`}</section>`;
}

function Probe({ report }) {
  const facts = [
    ["Reward", report.reward !== null && `${number(report.reward)} ± ${number(report.reward_std)}`],
    ["Tied groups", report.tied_groups_fraction !== null && percent(report.tied_groups_fraction)],
    ["Cut off", report.truncated_fraction !== null && percent(report.truncated_fraction)],
    ["Length", report.mean_completion_length !== null && `${number(report.mean_completion_length, 3)} tokens`],
    ["A step", report.step_seconds?.total && duration(report.step_seconds.total)],
    ["The job", report.eta_s && `about ${duration(report.eta_s)}`],
    ["Memory", report.peak_memory_bytes && bytes(report.peak_memory_bytes)],
  ];
  return html`<h3>Probe</h3>
    ${report.error && html`<p class="bad">${report.error.message}</p>`}
    <ul class="findings">${report.verdict.map((finding) => html`<li key=${finding.code} class=${finding.code === "ready" ? "good" : "warn"}><strong>${words(finding.code)}.</strong> ${finding.detail} ${finding.fix}</li>`)}</ul>
    <${Facts} facts=${facts} />
    ${report.samples.length > 0 && html`<details><summary>${count(report.samples.length)} completions</summary>
      ${report.samples.map((sample, index) => html`<div key=${index} class="probed"><p class="dim small">${sample.prompt_id} · reward ${number(sample.reward)} · ${sample.num_tokens} tokens · ${sample.finish_reason}</p>
        <pre>${sample.prompt}</pre><pre>${sample.completion}</pre></div>`)}</details>`}`;
}
