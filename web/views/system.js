// The page of the server: its state, its workers, the queue and the storage.
import { get, getAll, send } from "../core/api.js";
import { bytes, count, duration, plural, timeAgo } from "../core/format.js";
import { useLoad } from "../core/load.js";
import { hrefOf } from "../core/router.js";
import { cls, html } from "../core/ui.js";
import { Loading, ProblemBox } from "../parts/problem.js";
import { describeActivity, Progress, State } from "../parts/state.js";
import { Table } from "../parts/table.js";
import { Ago, Facts, Id } from "../parts/text.js";

const WORKER_GLYPHS = { idle: "◌", running: "▶", lost: "✕" };
const MAX_QUEUED = 500;
/** Metrics of the sampling and the training speed. */
const SPEED_METRICS = ["tokens_per_second/rollout", "tokens_per_second/train"];
/** Metrics of the peak memory: of a GPU, or of the process on a CPU. */
const MEMORY_METRICS = ["memory/peak_device_bytes", "memory/peak_resident_bytes"];
/** Names of the API's storage kinds. */
const STORAGE_KINDS = {
  models: "Models", datasets: "Datasets", checkpoints: "Checkpoints", adapters: "Adapters", initial_adapters: "Initial adapters", journals: "Reward journals",
  samples: "Samples", database: "Database", staging: "Uploads and downloads in progress", scratch: "Temporary files of workers", other: "Other",
};

export default function System() {
  const { data, error, reload } = useLoad(readSystem, [], { every: 3000 });
  if (!data) return html`<h1>System</h1><${Loading} error=${error} retry=${reload} />`;
  return html`<h1>System</h1>
    <${ProblemBox} error=${error} retry=${reload} />
    <${Server} data=${data} />
    <${Workers} workers=${data.workers} running=${data.running} lastSteps=${data.lastSteps} />
    <${Queue} queued=${data.queued} paused=${data.paused} workers=${data.workers} />
    <${Storage} storage=${data.storage} />`;
}

async function readSystem(signal) {
  const jobsIn = (state, limit) => getAll("/jobs", { state }, limit, signal);
  const [workers, queued, running, paused, serverMetrics, readyProblem, storage] = await Promise.all([
    get("/workers", {}, signal).then(({ data }) => data),
    jobsIn("queued", MAX_QUEUED),
    jobsIn("running", 200),
    jobsIn("paused", 200),
    send("GET", "/metrics", { signal }).then((response) => response.text(), () => ""),
    send("GET", "/readyz", { signal }).then(() => null, (problem) => problem),
    get("/system/storage", {}, signal).catch(() => null),
  ]);
  queued.sort((a, b) => a.queue_position - b.queue_position);
  const lastSteps = new Map(await Promise.all(running.map(async (job) => [job.id, await readLastStep(job, signal)])));
  return { workers, queued, running, paused, serverMetrics, readyProblem, storage, lastSteps };
}

/** Reads the metrics of a job's last step; empty before its first step. */
async function readLastStep(job, signal) {
  if (!job.step) return {};
  // The job reports a step before its metrics are stored, so the step before is read too.
  const { data } = await get(`/jobs/${job.id}/metrics`, { min_step: job.step - 1 }, signal).catch(() => ({ data: [] }));
  return data.at(-1) ?? {};
}

const firstPresent = (metrics, names) => names.map((name) => metrics?.[name]).find((value) => value != null);

/** Reads one value from metrics in the Prometheus text format. */
function readMetric(text, name) {
  const line = text.split("\n").find((line) => line.startsWith(name) && " {".includes(line[name.length]));
  return line ? Number(line.slice(line.lastIndexOf(" "))) : undefined;
}

function Server({ data: { serverMetrics, readyProblem, workers, queued, running } }) {
  const version = serverMetrics.match(/^rlood_build_info\{.*?version="([^"]*)"/m)?.[1];
  const facts = [
    ["Server", readyProblem ? html`<span class="bad">✕ not ready</span>` : html`<span class="good">✓ ready</span>`, version && `version ${version}`],
    ["Uptime", duration(readMetric(serverMetrics, "rlood_uptime_seconds")), ""],
    ["Free disk space", bytes(readMetric(serverMetrics, "rlood_disk_free_bytes")), "in the data directory"],
    ["Workers", count(workers.filter(({ state }) => state !== "lost").length), `${workers.filter(({ state }) => state === "idle").length} idle`],
    ["Running jobs", count(running.length), ""],
    ["Queued jobs", queued.length >= MAX_QUEUED ? `${MAX_QUEUED}+` : count(queued.length), ""],
  ];
  return html`<${Facts} panel facts=${facts} />
    ${readyProblem && html`<${ProblemBox} error=${readyProblem} />`}`;
}

function Workers({ workers, running, lastSteps }) {
  const jobOf = (id) => running.find((job) => job.id === id);
  const head = ["Device", "State", "Job", "Activity", "Progress", "#Sampled tokens/s", "#Trained tokens/s", "#Peak memory", "Last seen", "Worker"];
  return html`<h2>Workers</h2>
    ${!workers.length && html`<div class="empty"><p>No workers connected. Restart the server with <code>--devices cpu</code>, or run <code>rlood worker</code>.</p></div>`}
    ${workers.length > 0 && html`<${Table} label="Workers" head=${head}>${workers.map((worker) => {
      const job = jobOf(worker.job_id);
      const metrics = lastSteps.get(worker.job_id);
      const [sampled, trained] = SPEED_METRICS.map((name) => metrics?.[name]);
      return html`<tr key=${worker.id}>
        <th scope="row"><b>${worker.device}</b></th>
        <td><span class=${cls("state", worker.state === "lost" ? "failed" : worker.state)}><span aria-hidden="true">${WORKER_GLYPHS[worker.state]}</span> ${worker.state}</span></td>
        <td>${worker.job_id ? html`<a href=${hrefOf(`/jobs/${worker.job_id}`)}>${job?.name ?? worker.job_id}</a>` : "–"}</td>
        <td>${job ? describeActivity(job) : ""}</td>
        <td>${job ? html`<${Progress} job=${job} />` : ""}</td>
        <td class="num">${count(sampled && Math.round(sampled))}</td><td class="num">${count(trained && Math.round(trained))}</td>
        <td class="num">${bytes(firstPresent(metrics, MEMORY_METRICS))}</td>
        <td>${timeAgo(worker.seen_at)}</td>
        <td><${Id} id=${worker.id} /><div class="dim small num">process ${worker.pid}, ${plural(worker.threads, "thread")}, ${worker.version}${worker.runtimes?.map(({ runtime, devices }) => `, ${runtime} (${devices})`)}</div></td>
      </tr>`;
    })}<//>`}`;
}

function Storage({ storage }) {
  if (!storage) return null;
  const kinds = storage.kinds.filter(({ size_bytes, limit_bytes }) => size_bytes > 0 || limit_bytes != null);
  const owners = storage.owners.filter(({ owner }) => owner);
  return html`<h2>Storage</h2>
    <p class="dim">The data directory uses ${bytes(storage.size_bytes)}. ${bytes(storage.disk.free_bytes)} of ${bytes(storage.disk.total_bytes)} are free. To list unused files, run <code>rlood gc --dry-run</code>.</p>
    ${kinds.length > 0 && html`<${Table} label="Storage by kind" head=${["Kind", "#Size", "#Count", "#Limit"]}>${kinds.map(({ kind, size_bytes, count: number, limit_bytes }) => html`<tr key=${kind}>
        <th scope="row">${STORAGE_KINDS[kind] ?? kind}</th><td class="num">${bytes(size_bytes)}</td><td class="num">${count(number)}</td><td class="num">${limit_bytes == null ? "–" : bytes(limit_bytes)}</td>
      </tr>`)}<//>`}
    ${owners.length > 0 && html`<${Table} label="Storage by owner" head=${["Owner", "#Size", "#Count"]}>${owners.map(({ owner, size_bytes, count: number }) => html`<tr key=${owner}>
        <th scope="row">${owner}</th><td class="num">${bytes(size_bytes)}</td><td class="num">${count(number)}</td>
      </tr>`)}<//>`}`;
}

function Queue({ queued, paused, workers }) {
  const rows = [...queued, ...paused];
  return html`<h2>Queue</h2>
    ${!rows.length && html`<p class="dim">The queue is empty.</p>`}
    ${queued.length > 0 && !workers.some(({ state }) => state !== "lost") && html`<p class="warn">Jobs are queued but no worker is connected.</p>`}
    ${rows.length > 0 && html`<${Table} label="Queue" head=${["#Position", "Job", "State", "#Priority", "Steps", "Submitted"]}>${rows.map((job) => html`<tr key=${job.id}>
        <td class="num">${job.queue_position ?? "–"}</td>
        <th scope="row"><a href=${hrefOf(`/jobs/${job.id}`)}>${job.name ?? job.id}</a><div class="dim small">${job.plan.model.id}</div></th>
        <td><${State} job=${job} /> <span class="dim small">${(job.state === "paused" || job.status_reason) && describeActivity(job)}</span></td>
        <td class="num">${job.plan.priority ?? 0}</td><td><${Progress} job=${job} /></td><td><${Ago} time=${job.created_at} /></td>
      </tr>`)}<//>`}`;
}
