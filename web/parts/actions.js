// The buttons for the actions that a job's state allows.
import { announce } from "../core/announce.js";
import { del, post } from "../core/api.js";
import { hrefOf, navigate } from "../core/router.js";
import { hasScope } from "../core/session.js";
import { html, useState } from "../core/ui.js";
import { useAction } from "../core/action.js";
import { Confirm } from "./dialog.js";
import { ForkDialog } from "./fork.js";
import { ProblemBox } from "./problem.js";

const ACTIONS_BY_STATE = { queued: ["pause", "cancel"], running: ["pause", "cancel"], paused: ["resume", "cancel"], succeeded: ["retry", "delete"], failed: ["retry", "delete"], cancelled: ["retry", "delete"] };
const LABELS = { pause: "Pause", resume: "Resume", cancel: "Cancel…", retry: "Retry", delete: "Delete…" };
/** Confirmation dialogs, by action: title, text, button. */
const CONFIRMATIONS = {
  cancel: ["Cancel this job?", "The job stops immediately. Saved checkpoints are kept.", "Cancel job"],
  delete: ["Delete this job?", "This also deletes its metrics, samples and checkpoints. It cannot be undone.", "Delete job"],
};

export function Actions({ run, job }) {
  const [dialog, setDialog] = useState(null);
  const { busy, error, run: runAction } = useAction();
  if (!hasScope("submit")) return null;
  const request = async (action, body) => {
    if (action === "delete") {
      await del(run.path);
      return navigate("/");
    }
    const changedJob = await post(`${run.path}/${action}`, body);
    announce(`Requested: ${action}`);
    if (action === "retry") return navigate(`/jobs/${changedJob.id}`);
    run.refresh();
  };
  const onPress = (action) => (CONFIRMATIONS[action] || action === "fork" ? setDialog(action) : runAction(() => request(action)));
  // The server resumes from the latest checkpoint by default, unless the failure was the user's.
  const resumes = job.state === "failed" && job.failure?.class !== "user";
  return html`<div class="actions">
    ${ACTIONS_BY_STATE[job.state].map((action) => html`<button key=${action} disabled=${busy || job.requested === action} title=${action === "retry" && resumes ? "Resumes from the latest checkpoint" : null} onClick=${() => onPress(action)}>${LABELS[action]}</button>`)}
    ${resumes && html`<button disabled=${busy} title="Retries from step 0, without using the checkpoint" onClick=${() => runAction(() => request("retry", { from: "start" }))}>Start over</button>`}
    <button onClick=${() => onPress("fork")}>Fork…</button>
    <a class="button" href=${hrefOf("/new", { from: job.id })}>Clone</a>
    ${error && html`<${ProblemBox} error=${error} />`}
    ${CONFIRMATIONS[dialog] && html`<${Confirm} title=${CONFIRMATIONS[dialog][0]} action=${CONFIRMATIONS[dialog][2]} onConfirm=${() => request(dialog)} onClose=${() => setDialog(null)}><p>${CONFIRMATIONS[dialog][1]}</p><//>`}
    ${dialog === "fork" && html`<${ForkDialog} run=${run} job=${job} onClose=${() => setDialog(null)} />`}
  </div>`;
}
