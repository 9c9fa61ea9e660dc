// The top of every page of a job: its name, its state, its actions, the tabs.
import { duration, plural } from "../core/format.js";
import { hrefOf } from "../core/router.js";
import { useJob, useRun } from "../core/run.js";
import { useSignal } from "../core/signal.js";
import { centerInRow, html } from "../core/ui.js";
import { Actions } from "./actions.js";
import { Loading } from "./problem.js";
import { describeActivity, Progress, State } from "./state.js";
import { Id } from "./text.js";

/** The tabs: `[end of the path, text]`. */
const TABS = [
  ["", "Charts"],
  ["/samples", "Samples"],
  ["/checkpoints", "Checkpoints"],
  ["/playground", "Playground"],
  ["/chat", "Chat"],
  ["/rewards", "Rewards"],
  ["/logs", "Logs"],
  ["/config", "Config"],
];

const CONNECTION_TEXTS = { lost: "Connection lost. Reconnecting…", connecting: "Connecting…", refused: "No live updates: the server refused the connection.", paused: "Live updates are paused." };

/** Makes a view of a job page: `Content` is the component below the tabs, `tab` the end of its path. */
export const jobView = (tab, Content) => ({ params }) => html`<${JobPage} id=${params.id} tab=${tab} Content=${Content} />`;

function JobPage({ id, tab, Content }) {
  const run = useRun(id);
  const job = useJob(run);
  const error = useSignal(run.error);
  const connection = useSignal(run.connection);
  const isDeleted = useSignal(run.isDeleted);
  if (!job) return html`<h1>Job</h1><${Loading} error=${error} />`;
  return html`
    <div class="job-head">
      <p class="crumbs"><a href="#/">Jobs</a> / <${Id} id=${job.id} />${job.parent && html` from <a href=${hrefOf(`/jobs/${job.parent}`)}><${Id} id=${job.parent} /></a>`}</p>
      <div class="row between wrap">
        <h1>${job.name ?? job.plan.model?.id ?? job.id}</h1>
        ${!isDeleted && html`<${Actions} run=${run} job=${job} />`}
      </div>
      ${isDeleted && html`<p class="problem" role="alert">This job was deleted. The data on this page is no longer on the server.</p>`}
      <p class="facts">
        <${State} job=${job} /> <span>${describeActivity(job)}</span>
        <${Progress} job=${job} />
        ${job.runtime?.name === "trl" && html`<span class="dim">trl ${job.runtime.versions.trl} on ${plural(job.plan.resources?.devices ?? 1, "device")}, resumes ${job.runtime.guarantees.resume}</span>`}
        ${job.plan.rollout && html`<span class="dim">${job.plan.rollout.servers.length || ""} vLLM</span>`}
        ${job.state === "running" && job.eta_s !== null && html`<span>about ${duration(job.eta_s)} left</span>`}
        ${CONNECTION_TEXTS[connection] && html`<span class="warn" data-connection=${connection}>${CONNECTION_TEXTS[connection]}</span>`}
      </p>
      <nav class="tabs" aria-label="Job pages">
        ${TABS.map(([end, name]) => html`<a key=${end} href=${hrefOf(`/jobs/${id}${end}`)} aria-current=${end === tab ? "page" : undefined} ref=${end === tab ? centerInRow : undefined}>${name}</a>`)}
      </nav>
    </div>
    <${Content} run=${run} job=${job} />`;
}
