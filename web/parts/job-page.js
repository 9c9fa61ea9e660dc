// What all pages of a job have at the top: its name, where it stands, what can be done, the tabs.
import { duration } from "../core/format.js";
import { hrefOf } from "../core/router.js";
import { useJob, useRun } from "../core/run.js";
import { useSignal } from "../core/signal.js";
import { html } from "../core/ui.js";
import { Actions } from "./actions.js";
import { Loading } from "./problem.js";
import { doing, Progress, State } from "./state.js";
import { Id } from "./text.js";

/** The tabs of a job's pages: the end of the address, and its name. */
const TABS = [
  ["", "Charts"],
  ["/samples", "Samples"],
  ["/checkpoints", "Checkpoints"],
  ["/playground", "Playground"],
  ["/rewards", "Rewards"],
  ["/logs", "Logs"],
  ["/config", "Config"],
];

const CONNECTION = { lost: "connection lost, trying again", connecting: "connecting", refused: "not followed: the server refused", paused: "paused" };

/** Scrolls a row of tabs that is wider than the page to this one. */
function center(tab) {
  const row = tab?.parentElement;
  if (row) row.scrollLeft = tab.offsetLeft - row.offsetLeft - (row.clientWidth - tab.offsetWidth) / 2;
}

/** A view of a job: its part of the page is given `run` and `job`; `tab` is the end of its address. */
export const jobView = (tab, Part) => ({ params }) => html`<${JobPage} id=${params.id} tab=${tab} Part=${Part} />`;

function JobPage({ id, tab, Part }) {
  const run = useRun(id);
  const job = useJob(run);
  const error = useSignal(run.error);
  const connection = useSignal(run.connection);
  const isGone = useSignal(run.isGone);
  if (!job) return html`<h1>Job</h1><${Loading} error=${error} />`;
  return html`
    <div class="job-head">
      <p class="crumbs"><a href="#/">Jobs</a> / <${Id} id=${job.id} />${job.parent && html` from <a href=${hrefOf(`/jobs/${job.parent}`)}><${Id} id=${job.parent} /></a>`}</p>
      <div class="row between wrap">
        <h1>${job.name ?? job.plan.model?.id ?? job.id}</h1>
        ${!isGone && html`<${Actions} run=${run} job=${job} />`}
      </div>
      ${isGone && html`<p class="problem" role="alert">This job was deleted. What is still shown here is gone from the server.</p>`}
      <p class="facts">
        <${State} job=${job} /> <span>${doing(job)}</span>
        <${Progress} job=${job} />
        ${job.state === "running" && job.eta_s !== null && html`<span>about ${duration(job.eta_s)} to go</span>`}
        ${CONNECTION[connection] && html`<span class="warn" data-connection=${connection}>${CONNECTION[connection]}</span>`}
      </p>
      <nav class="tabs" aria-label="Job">
        ${TABS.map(([end, name]) => html`<a key=${end} href=${hrefOf(`/jobs/${id}${end}`)} aria-current=${end === tab ? "page" : undefined} ref=${end === tab ? center : undefined}>${name}</a>`)}
      </nav>
    </div>
    <${Part} run=${run} job=${job} />`;
}
