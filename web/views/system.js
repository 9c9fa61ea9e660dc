// The server, its devices and workers, and who waits for them.
import { all, get, send } from "../core/api.js";
import { ago, bytes, count, duration, plural } from "../core/format.js";
import { useLoad } from "../core/load.js";
import { hrefOf } from "../core/router.js";
import { cls, html } from "../core/ui.js";
import { Loading, ProblemBox } from "../parts/problem.js";
import { doing, Progress, State } from "../parts/state.js";
import { Table } from "../parts/table.js";
import { Ago, Facts, Id } from "../parts/text.js";

const WORKER_GLYPHS = { idle: "◌", running: "▶", lost: "✕" };
const MOST_QUEUED = 500;
const RATE = ["tokens_per_second/rollout", "tokens_per_second/train"];
const MEMORY = ["memory/peak_device_bytes", "memory/peak_resident_bytes"];
const KINDS = {
  models: "Models", datasets: "Datasets", checkpoints: "Checkpoints", adapters: "Adapters", initial_adapters: "Adapters that jobs begin with", journals: "Journals",
  samples: "Samples", database: "Database", staging: "Uploads and downloads under way", scratch: "Workers' own files", other: "Other",
};

export default function System() {
  const { data, error, reload } = useLoad(readSystem, [], { every: 3000 });
  if (!data) return html`<h1>System</h1><${Loading} error=${error} retry=${reload} />`;
  return html`<h1>System</h1>
    <${ProblemBox} error=${error} retry=${reload} />
    <${Server} data=${data} />
    <${Workers} workers=${data.workers} running=${data.running} doing_now=${data.doingNow} />
    <${Queue} queued=${data.queued} paused=${data.paused} workers=${data.workers} />
    <${Storage} storage=${data.storage} />`;
}

async function readSystem(signal) {
  const of = (state, most) => all("/jobs", { state }, most, signal);
  const [workers, queued, running, paused, measured, isReady, storage] = await Promise.all([
    get("/workers", {}, signal).then(({ data }) => data),
    of("queued", MOST_QUEUED),
    of("running", 200),
    of("paused", 200),
    send("GET", "/metrics", { signal }).then((response) => response.text(), () => ""),
    send("GET", "/readyz", { signal }).then(() => null, (problem) => problem),
    get("/system/storage", {}, signal).catch(() => null),
  ]);
  queued.sort((a, b) => a.queue_position - b.queue_position);
  const doingNow = new Map(await Promise.all(running.map(async (job) => [job.id, await lastStep(job, signal)])));
  return { workers, queued, running, paused, measured, isReady, storage, doingNow };
}

/** The metrics of a job's last step; none before its first. */
async function lastStep(job, signal) {
  if (!job.step) return {};
  // The step is known before its metrics are.
  const { data } = await get(`/jobs/${job.id}/metrics`, { min_step: job.step - 1 }, signal).catch(() => ({ data: [] }));
  return data.at(-1) ?? {};
}

const first = (metrics, names) => names.map((name) => metrics?.[name]).find((value) => value != null);

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

function Workers({ workers, running, doing_now: doingNow }) {
  const jobOf = (id) => running.find((job) => job.id === id);
  const head = ["Device", "State", "Job", "Does", "Progress", "#Tokens/s, sampled", "#Tokens/s, trained", "#Memory, most", "Heard of", "Worker"];
  return html`<h2>Devices and workers</h2>
    ${!workers.length && html`<p class="empty">No worker is connected. Start the server with a device (--devices cpu), or rlood worker by hand.</p>`}
    ${workers.length > 0 && html`<${Table} label="Workers" head=${head}>${workers.map((worker) => {
      const job = jobOf(worker.job_id);
      const metrics = doingNow.get(worker.job_id);
      const [sampled, trained] = RATE.map((name) => metrics?.[name]);
      return html`<tr key=${worker.id}>
        <th scope="row"><b>${worker.device}</b></th>
        <td><span class=${cls("state", worker.state === "lost" ? "failed" : worker.state)}><span aria-hidden="true">${WORKER_GLYPHS[worker.state]}</span> ${worker.state}</span></td>
        <td>${worker.job_id ? html`<a href=${hrefOf(`/jobs/${worker.job_id}`)}>${job?.name ?? worker.job_id}</a>` : "–"}</td>
        <td>${job ? doing(job) : ""}</td>
        <td>${job ? html`<${Progress} job=${job} />` : ""}</td>
        <td class="num">${count(sampled && Math.round(sampled))}</td><td class="num">${count(trained && Math.round(trained))}</td>
        <td class="num">${bytes(first(metrics, MEMORY))}</td>
        <td>${ago(worker.seen_at)}</td>
        <td><${Id} id=${worker.id} /><div class="dim small num">process ${worker.pid}, ${plural(worker.threads, "thread")}, ${worker.version}</div></td>
      </tr>`;
    })}<//>`}`;
}

function Storage({ storage }) {
  if (!storage) return null;
  const kept = storage.kinds.filter(({ size_bytes, limit_bytes }) => size_bytes > 0 || limit_bytes != null);
  const owners = storage.owners.filter(({ owner }) => owner);
  return html`<h2>Storage</h2>
    <p class="dim">${bytes(storage.size_bytes)} in the data directory; ${bytes(storage.disk.free_bytes)} of ${bytes(storage.disk.total_bytes)} are free. <code>rlood gc --dry-run</code> lists what nothing needs.</p>
    ${kept.length > 0 && html`<${Table} label="Storage by kind" head=${["Kind", "#Size", "#Number", "#Limit"]}>${kept.map(({ kind, size_bytes, count: number, limit_bytes }) => html`<tr key=${kind}>
        <th scope="row">${KINDS[kind] ?? kind}</th><td class="num">${bytes(size_bytes)}</td><td class="num">${count(number)}</td><td class="num">${limit_bytes == null ? "–" : bytes(limit_bytes)}</td>
      </tr>`)}<//>`}
    ${owners.length > 0 && html`<${Table} label="Storage by owner" head=${["Owner", "#Size", "#Number"]}>${owners.map(({ owner, size_bytes, count: number }) => html`<tr key=${owner}>
        <th scope="row">${owner}</th><td class="num">${bytes(size_bytes)}</td><td class="num">${count(number)}</td>
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
        <td><${State} job=${job} /> <span class="dim small">${(job.state === "paused" || job.status_reason) && doing(job)}</span></td>
        <td class="num">${job.plan.priority ?? 0}</td><td><${Progress} job=${job} /></td><td><${Ago} time=${job.created_at} /></td>
      </tr>`)}<//>`}`;
}
