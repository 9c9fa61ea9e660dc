// The form for a new job, built from the server's OpenAPI document. The server can check the job and run a preflight before submission.
import { announce } from "../core/announce.js";
import { get, post } from "../core/api.js";
import { bytes, count, duration, number, percent, plural, sentenceCase } from "../core/format.js";
import { useLoad } from "../core/load.js";
import { navigate, useFilters } from "../core/router.js";
import { hasScope, session } from "../core/session.js";
import { html, useEffect, useMemo, useRef, useState } from "../core/ui.js";
import { curlCommand } from "../form/curl.js";
import { DatasetChoice } from "../form/dataset.js";
import { loadJobSchema, withValue } from "../form/document.js";
import { ModelChoice } from "../form/model.js";
import { Rewards } from "../form/rewards.js";
import { Setting } from "../form/setting.js";
import { Input } from "../parts/field.js";
import { Loading, ProblemBox } from "../parts/problem.js";
import { Code, Facts } from "../parts/text.js";

/** Settings that are not in the list of their section: they have a dataset chooser instead. */
const DATASET_SETTINGS = ["/eval/dataset", "/warm_up/dataset"];
/** Labels of the dataset choosers, by section. */
const DATASET_LABELS = { eval: "Evaluation prompts", warm_up: "Warm-up rows: prompts with answers" };
const EMPTY = { rewards: [{ type: "exact_match", column: "answer" }] };
/** Time after the last change before the job is checked again, in ms. */
const CHECK_DELAY_MS = 500;

export default function NewJob() {
  const [{ from }] = useFilters();
  // The form stays mounted behind the sign-in page when the session expires, see app.js.
  const isOut = session.value.state === "out";
  const { data, error, reload } = useLoad(async (signal) => {
    const [schema, old] = await Promise.all([loadJobSchema(), from ? get(`/jobs/${encodeURIComponent(from)}/config`, {}, signal) : null]);
    return { schema, old, from };
  }, [from, isOut]);
  if (!isOut && !hasScope("submit")) return html`<h1>New job</h1><p class="notice">Your API key is read-only. To submit a job, sign in with a key that has the <code>submit</code> scope.</p>`;
  if (data?.from !== from || !data) return html`<h1>New job</h1><${Loading} error=${error} retry=${reload} />`;
  return html`<${Form} key=${from ?? ""} schema=${data.schema} old=${data.old} from=${from} />`;
}

const hasSecret = (config) => [...(config?.rewards ?? []), ...(config?.eval?.rewards ?? [])].some(({ url }) => url);

function Form({ schema, old, from }) {
  const [spec, setSpec] = useState(old ?? EMPTY);
  // Submitting reads this ref, so that it includes a change that has not been rendered yet.
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
    /** Returns the errors at a pointer and, unless `isExact`, those nested in it. */
    errorsAt: (pointer, isExact = false) => errors.filter((item) => item.pointer === pointer || (!isExact && item.pointer.startsWith(`${pointer}/`))),
  }), [spec, rows, errors]);

  // After the first check, the job is checked again on every change.
  useEffect(() => {
    if (!checked) return;
    const timer = setTimeout(() => post("/jobs/validate", spec).then((answer) => setChecked((old) => (old && spec === latest.current ? { ...answer, probe: undefined } : old)), () => {}), CHECK_DELAY_MS);
    return () => clearTimeout(timer);
  }, [spec]);

  const focusFirstError = (items) => setTimeout(() => {
    announce(`${plural(items.length, "error")} to fix`);
    focusSetting(element.current, items[0]?.pointer ?? "");
  }, 50);
  const run = async (name, action) => {
    setBusy(name);
    setProblem(null);
    try {
      await action();
    } catch (error) {
      // 401: the sign-in page reports that the session has expired.
      if (error.status !== 401) setProblem(error);
      if (error.errors?.length) focusFirstError(error.errors);
    }
    setBusy("");
  };
  const check = (hasPreflight) => run(hasPreflight ? "preflight" : "check", async () => {
    const answer = await post("/jobs/validate", latest.current, { query: hasPreflight ? { probe: true } : {} });
    setChecked(answer);
    if (answer.errors.length) focusFirstError(answer.errors);
    else announce("The job is valid");
  });
  const submit = (event) => {
    event.preventDefault();
    run("submit", async () => {
      const job = await post("/jobs", latest.current);
      announce("Job submitted");
      navigate(`/jobs/${job.id}`);
    });
  };

  return html`<div class="new-job">
    <form ref=${element} onSubmit=${submit} novalidate class="stack">
      <h1>${from ? "New job from an existing job" : "New job"}</h1>
      ${from && hasSecret(old) && html`<p class="notice">Secrets and headers were not copied. Enter them again for each service that needs them.</p>`}
      <${Errors} problem=${problem} items=${errors} root=${element} />
      <fieldset class="panel"><legend>Model and prompts</legend>
        <div class="fields"><${Setting} form=${form} pointer="/name" /></div>
        <${ModelChoice} form=${form} />
        <${DatasetChoice} form=${form} pointer="/dataset" label="Prompts *" onRows=${setRows} />
      </fieldset>
      <${Rewards} form=${form} />
      <fieldset class="panel"><legend>Training</legend><div class="fields"><${TrainedWeights} form=${form} />${form.schema.first.filter((pointer) => form.spec.lora !== null || !pointer.startsWith("/lora/")).map((pointer) => html`<${Setting} key=${pointer} form=${form} pointer=${pointer} />`)}</div></fieldset>
      <${AllSettings} form=${form} />
      <div class="submit-bar">
        <button type="button" disabled=${!!busy} onClick=${() => check(false)}>${busy === "check" ? "Checking…" : "Check"}</button>
        <button type="button" disabled=${!!busy} onClick=${() => check(true)}>${busy === "preflight" ? "Running preflight…" : "Run preflight"}</button>
        <button class="primary" disabled=${!!busy}>${busy === "submit" ? "Submitting…" : "Submit"}</button>
        <span class="dim small">A preflight samples the base model and scores its completions, without training.</span>
      </div>
    </form>
    <aside class="stack" aria-label="Result of checking the job">
      ${checked && html`<${CheckResult} answer=${checked} />`}
      <section class="panel stack"><h2>Submit with curl</h2><${Code} text=${curlCommand(spec, location.origin, session.value.state === "in")} label="curl command" /></section>
    </aside>
  </div>`;
}

/** Focuses the control of the setting at `pointer`, or of the closest parent that has one. Opens every section around it. */
function focusSetting(root, pointer) {
  for (let at = pointer; at; at = at.slice(0, at.lastIndexOf("/"))) {
    const element = root.querySelector(`[data-pointer="${CSS.escape(at)}"]`);
    if (!element) continue;
    for (let parent = element; (parent = parent.parentElement?.closest("details")); ) parent.open = true;
    const control = element.matches("input, select, textarea") ? element : element.querySelector("input, select, textarea, button");
    control?.focus();
    return;
  }
}

/** The list of all errors, each with a link to its setting. */
function Errors({ problem, items, root }) {
  if (problem && !items.length) return html`<${ProblemBox} error=${problem} />`;
  if (!items.length) return null;
  return html`<div class="problem" role="alert"><strong>${plural(items.length, "error")} to fix</strong>
    <ul>${items.map((item) => html`<li key=${item.pointer + item.code}><button type="button" class="link" onClick=${() => focusSetting(root.current, item.pointer)}><code>${item.pointer || "job"}</code> ${item.detail}</button></li>`)}</ul></div>`;
}

/** The choice between a LoRA adapter and all weights, for which the job sets `lora` to null. */
const TrainedWeights = ({ form }) => html`<${Input} label="Trained weights" errors=${form.errorsAt("/lora", true)} pointer="/lora" options=${[["", "LoRA adapter (default)"], ["all", "all weights"]]}
  value=${form.spec.lora === null ? "all" : ""} set=${(text) => form.set("/lora", text ? null : undefined)} />`;

/** The settings that are not shown above, by section. */
function AllSettings({ form }) {
  const isListed = (pointer) => !form.schema.first.includes(pointer) && !DATASET_SETTINGS.includes(pointer);
  return html`<details class="panel more"><summary>All settings</summary>
    ${form.schema.sections.filter(({ name }) => form.spec[name] !== null).map(({ name, title, order, properties }) => {
      const keys = order.filter((key) => isListed(`/${name}/${key}`));
      return html`<section key=${name}><h2>${title}</h2>
        ${DATASET_LABELS[name] && html`<${DatasetChoice} form=${sectionForm(form, name)} pointer="/dataset" label=${DATASET_LABELS[name]} />`}
        <div class="fields">${keys.map((key) => html`<${Setting} key=${key} form=${form} pointer=${`/${name}/${key}`} schema=${properties[key]} />`)}</div></section>`;
    })}
    <section><h2>Metadata</h2><div class="fields"><${Setting} form=${form} pointer="/metadata" placeholder=${'{"team": "x"}'} /></div></section>
  </details>`;
}

/** Returns a form whose pointers are relative to a section. */
const sectionForm = (form, name) => ({ ...form, at: `/${name}`, spec: form.spec[name] ?? {}, set: (pointer, value) => form.set(`/${name}${pointer}`, value), errorsAt: (pointer, isExact) => form.errorsAt(`/${name}${pointer}`, isExact) });

/** The result of the server's check: estimates, warnings and the preflight, if there was one. */
function CheckResult({ answer }) {
  const { valid, warnings, estimate, plan, probe } = answer;
  const facts = [
    ["Steps", plan && count(plan.training.max_steps + (plan.warm_up?.steps ?? 0))],
    ["Completions per step", plan && count(plan.training.prompts_per_step * plan.rloo.num_generations)],
    ["Memory", estimate?.total_bytes && `${estimate.devices > 1 ? `${estimate.devices} × ` : ""}${bytes(estimate.total_bytes)}`],
    ["Checkpoint size", estimate?.checkpoint_bytes && bytes(estimate.checkpoint_bytes)],
  ];
  return html`<section class="panel stack" role="status"><h2 class=${valid ? "good" : "bad"}>${valid ? "✓ The job is valid" : "✕ The job is not valid"}</h2>
    <${Facts} facts=${facts} />
    ${warnings.map((warning) => html`<p key=${warning.pointer + warning.code} class="warn"><code>${warning.pointer}</code> ${warning.detail}</p>`)}
    ${probe && html`<${Preflight} report=${probe} />`}</section>`;
}

function Preflight({ report }) {
  const facts = [
    ["Reward", report.reward !== null && `${number(report.reward)} ± ${number(report.reward_std)}`],
    ["Tied groups", report.tied_groups_fraction !== null && percent(report.tied_groups_fraction)],
    ["Truncated", report.truncated_fraction !== null && percent(report.truncated_fraction)],
    ["Mean length", report.mean_completion_length !== null && `${number(report.mean_completion_length, 3)} tokens`],
    ["Step time", report.step_seconds?.total && duration(report.step_seconds.total)],
    ["Job time", report.eta_s && `about ${duration(report.eta_s)}`],
    ["Peak memory", report.peak_memory_bytes && bytes(report.peak_memory_bytes)],
  ];
  return html`<h3>Preflight</h3>
    ${report.error && html`<p class="bad">${report.error.message}</p>`}
    <ul class="findings">${report.verdict.map((finding) => html`<li key=${finding.code} class=${finding.code === "ready" ? "good" : "warn"}><strong>${sentenceCase(finding.code)}.</strong> ${finding.detail} ${finding.fix}</li>`)}</ul>
    <${Facts} facts=${facts} />
    ${report.samples.length > 0 && html`<details><summary>${plural(report.samples.length, "completion")}</summary>
      ${report.samples.map((sample, index) => html`<div key=${index} class="preflight-sample"><p class="dim small">${sample.prompt_id} · reward ${number(sample.reward)} · ${sample.num_tokens} tokens · ${sample.finish_reason}</p>
        <pre>${sample.prompt}</pre><pre>${sample.completion}</pre></div>`)}</details>`}`;
}
