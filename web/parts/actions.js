// What can be done to a job in its state.
import { announce } from "../core/announce.js";
import { del, post } from "../core/api.js";
import { go, hrefOf } from "../core/router.js";
import { may } from "../core/session.js";
import { html, useState } from "../core/ui.js";
import { useWork } from "../core/work.js";
import { Confirm } from "./dialog.js";
import { ForkDialog } from "./fork.js";
import { ProblemBox } from "./problem.js";

const MOVES = { queued: ["pause", "cancel"], running: ["pause", "cancel"], paused: ["resume", "cancel"], succeeded: ["retry", "delete"], failed: ["retry", "delete"], cancelled: ["retry", "delete"] };
const ASKED = {
  cancel: ["Cancel this job?", "It ends now. What was checkpointed stays.", "Cancel the job"],
  delete: ["Delete this job?", "Its metrics, samples and checkpoints are removed with it. There is no way back.", "Delete it"],
};

export function Actions({ run, job }) {
  const [asked, ask] = useState(null);
  const { busy, error, run: work } = useWork();
  if (!may("submit")) return null;
  const act = async (action, body) => {
    if (action === "delete") {
      await del(run.path);
      return go("/");
    }
    const moved = await post(`${run.path}/${action}`, body);
    announce(`Done: ${action}`);
    if (action === "retry") return go(`/jobs/${moved.id}`);
    run.refresh();
  };
  const press = (action) => (ASKED[action] || action === "fork" ? ask(action) : work(() => act(action)));
  // What the server does by default after such a failure.
  const resumes = job.state === "failed" && job.failure?.class !== "user";
  const names = { pause: "Pause", resume: "Resume", cancel: "Cancel…", retry: "Retry", delete: "Delete…" };
  return html`<div class="actions">
    ${MOVES[job.state].map((action) => html`<button key=${action} disabled=${busy || job.requested === action} title=${action === "retry" && resumes ? "Resumes from the latest checkpoint" : null} onClick=${() => press(action)}>${names[action]}</button>`)}
    ${resumes && html`<button disabled=${busy} title="Retries from step 0, without the checkpoint" onClick=${() => work(() => act("retry", { from: "start" }))}>Start over</button>`}
    <button onClick=${() => press("fork")}>Fork…</button>
    <a class="button" href=${hrefOf("/new", { from: job.id })}>Clone</a>
    ${error && html`<${ProblemBox} error=${error} />`}
    ${ASKED[asked] && html`<${Confirm} title=${ASKED[asked][0]} action=${ASKED[asked][2]} onDone=${() => act(asked)} onClose=${() => ask(null)}><p>${ASKED[asked][1]}</p><//>`}
    ${asked === "fork" && html`<${ForkDialog} run=${run} job=${job} onClose=${() => ask(null)} />`}
  </div>`;
}
