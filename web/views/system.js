// The server, its devices and workers, and who waits for them.
import { all, get, send } from "../core/api.js";
import { ago, bytes, count, duration } from "../core/format.js";
import { useLoad } from "../core/load.js";
import { hrefOf } from "../core/router.js";
import { cls, html } from "../core/ui.js";
import { Loading, ProblemBox } from "../parts/problem.js";
import { doing, Progress, State } from "../parts/state.js";
import { Table } from "../parts/table.js";
import { Ago, Facts, Id } from "../parts/text.js";

const WORKER_GLYPHS = { idle: "◌", running: "▶", lost: "✕" };
const MOST_QUEUED = 500;

export default function System() {
  const { data, error, reload } = useLoad(readSystem, [], { every: 3000 });
  if (!data) return html`<h1>System</h1><${Loading} error=${error} retry=${reload} />`;
  return html`<h1>System</h1>
    <${ProblemBox} error=${error} retry=${reload} />
    <${Server} data=${data} />
    <${Workers} workers=${data.workers} running=${data.running} />
    <${Queue} queued=${data.queued} paused=${data.paused} workers=${data.workers} />`;
}

async function readSystem(signal) {
  const of = (state, most) => all("/jobs", { state }, most, signal);
  const [workers, queued, running, paused, measured, isReady] = await Promise.all([
    get("/workers", {}, signal).then(({ data }) => data),
    of("queued", MOST_QUEUED),
    of("running", 200),
    of("paused", 200),
    send("GET", "/metrics", { signal }).then((response) => response.text(), () => ""),
    send("GET", "/readyz", { signal }).then(() => null, (problem) => problem),
  ]);
  queued.sort((a, b) => a.queue_position - b.queue_position);
  return { workers, queued, running, paused, measured, isReady };
}

/** One value of Prometheus' text. */
function measure(text, name) {
  const line = text.split("\n").find((line) => line.startsWith(name) && " {".includes(line[name.length]));
  return line ? Number(line.slice(line.lastIndexOf(" "))) : undefined;
}

function Server({ data: { measured, isReady, workers, queued, running } }) {
  const version = measured.match(/^rlood_build_info\{.*?version="([^"]*)"/m)?.[1];
  const facts = [
    ["Server", isReady ? html`<span class="bad">✕ not ready</span>` : html`<span class="good">✓ ready</span>`, version && `version ${version}`],
    ["Up for", duration(measure(measured, "rlood_uptime_seconds")), ""],
    ["Disk free", bytes(measure(measured, "rlood_disk_free_bytes")), "of the data directory"],
    ["Workers", count(workers.filter(({ state }) => state !== "lost").length), `${workers.filter(({ state }) => state === "idle").length} idle`],
    ["Running", count(running.length), "jobs"],
    ["Queued", queued.length >= MOST_QUEUED ? `${MOST_QUEUED}+` : count(queued.length), "jobs"],
  ];
  return html`<${Facts} panel facts=${facts} />
    ${isReady && html`<${ProblemBox} error=${isReady} />`}`;
}

function Workers({ workers, running }) {
  const job = (id) => running.find((job) => job.id === id);
  return html`<h2>Devices and workers</h2>
    ${!workers.length && html`<p class="empty">No worker is connected. Start the server with a device (--devices cpu), or rlood worker by hand.</p>`}
    ${workers.length > 0 && html`<${Table} label="Workers" head=${["Device", "State", "Job", "Progress", "#Threads", "#Process", "Version", "Heard of", "Worker"]}>${workers.map((worker) => html`<tr key=${worker.id}>
        <th scope="row"><b>${worker.device}</b></th>
        <td><span class=${cls("state", worker.state === "lost" ? "failed" : worker.state)}><span aria-hidden="true">${WORKER_GLYPHS[worker.state]}</span> ${worker.state}</span></td>
        <td>${worker.job_id ? html`<a href=${hrefOf(`/jobs/${worker.job_id}`)}>${job(worker.job_id)?.name ?? worker.job_id}</a>` : "–"}</td>
        <td>${job(worker.job_id) ? html`<${Progress} job=${job(worker.job_id)} />` : ""}</td>
        <td class="num">${worker.threads}</td><td class="num">${worker.pid}</td><td>${worker.version}</td><td>${ago(worker.seen_at)}</td><td><${Id} id=${worker.id} /></td>
      </tr>`)}<//>`}`;
}

function Queue({ queued, paused, workers }) {
  const rows = [...queued, ...paused];
  return html`<h2>Queue</h2>
    ${!rows.length && html`<p class="dim">Nobody waits.</p>`}
    ${queued.length > 0 && !workers.some(({ state }) => state !== "lost") && html`<p class="warn">Jobs wait, and there is no worker that could take them.</p>`}
    ${rows.length > 0 && html`<${Table} label="Queue" head=${["#Place", "Job", "State", "#Priority", "Steps", "Submitted"]}>${rows.map((job) => html`<tr key=${job.id}>
        <td class="num">${job.queue_position ?? "–"}</td>
        <th scope="row"><a href=${hrefOf(`/jobs/${job.id}`)}>${job.name ?? job.id}</a><div class="dim small">${job.plan.model.id}</div></th>
        <td><${State} job=${job} /> <span class="dim small">${job.state === "paused" && doing(job)}</span></td>
        <td class="num">${job.plan.priority ?? 0}</td><td><${Progress} job=${job} /></td><td><${Ago} time=${job.created_at} /></td>
      </tr>`)}<//>`}`;
}
