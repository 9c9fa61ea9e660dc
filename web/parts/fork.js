// A new job from one of this one's checkpoints, with something changed.
import { post, Problem } from "../core/api.js";
import { go } from "../core/router.js";
import { useCheckpoints } from "../core/run.js";
import { html, useState } from "../core/ui.js";
import { useWork } from "../core/work.js";
import { Dialog, FormDialog } from "./dialog.js";
import { Input } from "./field.js";
import { ProblemBox } from "./problem.js";

export function ForkDialog({ run, job, onClose }) {
  const { data, error } = useCheckpoints(run);
  const [step, setStep] = useState(null);
  const [text, setText] = useState("{}");
  const work = useWork();
  const checkpoints = data ?? [];
  const fork = async () => {
    const made = await post(`${run.path}/fork`, { from_step: Number(step ?? checkpoints[0].step), overrides: overridesOf(text) });
    onClose();
    go(`/jobs/${made.id}`);
  };
  if (!checkpoints.length) return html`<${Dialog} title="Fork this job" onClose=${onClose}><${ProblemBox} error=${error} />
    ${data && html`<p>It has no checkpoint yet. Retry starts from the beginning; Clone opens the form with its settings.</p>`}<//>`;
  return html`<${FormDialog} title="Fork this job" action="Fork" work=${work} onSubmit=${fork} onClose=${onClose}>
    <p>A new job that goes on from a checkpoint of <strong>${job.name ?? job.id}</strong>.</p>
    <${Input} label="From step" errors=${work.at("/from_step")} options=${checkpoints.map(({ step, best }) => [step, `step ${step}${best ? " (best)" : ""}`])} value=${step ?? checkpoints[0].step} set=${setStep} />
    <${Input} label="Changes" errors=${work.at("/overrides")} hint=${'A partial job, merged over the old one: {"optimizer": {"learning_rate": 5e-5}}'} class="mono" rows="6" spellcheck=${false} value=${text} set=${setText} /><//>`;
}

function overridesOf(text) {
  try {
    return JSON.parse(text || "{}");
  } catch ({ message }) {
    throw new Problem({ title: "Not JSON", detail: message, errors: [{ pointer: "/overrides", code: "syntax", detail: `This is no JSON: ${message}` }] });
  }
}
