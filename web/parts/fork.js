// The dialog that forks a job: a new job that continues from a checkpoint with changed settings.
import { post, Problem } from "../core/api.js";
import { navigate } from "../core/router.js";
import { useCheckpoints } from "../core/run.js";
import { html, useState } from "../core/ui.js";
import { useAction } from "../core/action.js";
import { Dialog, FormDialog } from "./dialog.js";
import { Input } from "./field.js";
import { ProblemBox } from "./problem.js";

export function ForkDialog({ run, job, onClose }) {
  const { data, error } = useCheckpoints(run);
  const [step, setStep] = useState(null);
  const [text, setText] = useState("{}");
  const request = useAction();
  const checkpoints = data ?? [];
  const fork = async () => {
    const newJob = await post(`${run.path}/fork`, { from_step: Number(step ?? checkpoints[0].step), overrides: parseOverrides(text) });
    onClose();
    navigate(`/jobs/${newJob.id}`);
  };
  if (!checkpoints.length) return html`<${Dialog} title="Fork this job" onClose=${onClose}><${ProblemBox} error=${error} />
    ${data && html`<p>This job has no checkpoint yet. Retry it from the start, or clone it to change its settings.</p>`}<//>`;
  return html`<${FormDialog} title="Fork this job" action="Fork" request=${request} onSubmit=${fork} onClose=${onClose}>
    <p>Creates a job that continues from a checkpoint of <strong>${job.name ?? job.id}</strong>.</p>
    <${Input} label="From step" errors=${request.errorsAt("/from_step")} options=${checkpoints.map(({ step, best }) => [step, `step ${step}${best ? " (best)" : ""}`])} value=${step ?? checkpoints[0].step} set=${setStep} />
    <${Input} label="Changed settings" errors=${request.errorsAt("/overrides")} hint=${'JSON that is merged into the settings of this job. Example: {"optimizer": {"learning_rate": 5e-5}}'} class="mono" rows="6" spellcheck=${false} value=${text} set=${setText} /><//>`;
}

function parseOverrides(text) {
  try {
    return JSON.parse(text || "{}");
  } catch ({ message }) {
    throw new Problem({ title: "Invalid JSON", detail: message, errors: [{ pointer: "/overrides", code: "syntax", detail: `Invalid JSON: ${message}` }] });
  }
}
