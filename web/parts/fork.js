// A new job from one of this one's checkpoints, with something changed.
import { post } from "../core/api.js";
import { useGet } from "../core/load.js";
import { go } from "../core/router.js";
import { html, useState } from "../core/ui.js";
import { Dialog } from "./dialog.js";
import { Field } from "./field.js";
import { ProblemBox } from "./problem.js";

export function ForkDialog({ run, job, onClose }) {
  const { data, error } = useGet(`${run.path}/checkpoints`, { limit: 100 });
  const [step, setStep] = useState(null);
  const [text, setText] = useState("{}");
  const [refused, setRefused] = useState(null);
  const checkpoints = data?.data ?? [];
  const submit = async (event) => {
    event.preventDefault();
    setRefused(null);
    let overrides;
    try {
      overrides = JSON.parse(text || "{}");
    } catch (wrong) {
      return setRefused({ title: "Not JSON", message: wrong.message, errors: [{ pointer: "/overrides", code: "syntax", detail: `This is no JSON: ${wrong.message}` }] });
    }
    try {
      const made = await post(`${run.path}/fork`, { from_step: Number(step ?? checkpoints[0]?.step), overrides });
      onClose();
      go(`/jobs/${made.id}`);
    } catch (problem) {
      setRefused(problem);
    }
  };
  const at = (pointer) => (refused?.errors ?? []).filter((item) => item.pointer.startsWith(pointer));
  return html`<${Dialog} title="Fork this job" onClose=${onClose}>
    <${ProblemBox} error=${error} />
    ${data && !checkpoints.length && html`<p>It has no checkpoint yet. Retry begins anew; Clone opens the form with its settings.</p>`}
    ${checkpoints.length > 0 && html`<form onSubmit=${submit}>
      <p>A new job that goes on from a checkpoint of <strong>${job.name ?? job.id}</strong>.</p>
      <${Field} label="From step" errors=${at("/from_step")}>${(a) => html`<select ...${a} value=${step ?? checkpoints[0].step} onChange=${(e) => setStep(e.target.value)}>
        ${checkpoints.map((c) => html`<option key=${c.id} value=${c.step}>step ${c.step}${c.best ? " (best)" : ""}</option>`)}</select>`}<//>
      <${Field} label="Changes" errors=${at("/overrides")} hint=${'A partial job, merged over the old one: {"optimizer": {"learning_rate": 1e-5}}'}>
        ${(a) => html`<textarea ...${a} class="mono" rows="6" spellcheck=${false} value=${text} onInput=${(e) => setText(e.target.value)}></textarea>`}<//>
      ${refused && !refused.errors?.length && html`<${ProblemBox} error=${refused} />`}
      <div class="row end"><button type="button" onClick=${onClose}>Close</button><button class="primary">Fork</button></div>
    </form>`}
  <//>`;
}
