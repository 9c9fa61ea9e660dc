// The health of a job's rewards: values, latency, errors, retries, the circuit breaker, and the recent failures with their requests.
import { count, duration, formatTime, NONE, number, percent, plural, sentenceCase, timeAgo } from "../core/format.js";
import { useGet } from "../core/load.js";
import { useSignal } from "../core/signal.js";
import { cls, html } from "../core/ui.js";
import { jobView } from "../parts/job-page.js";
import { Facts } from "../parts/text.js";
import { Loading, ProblemBox } from "../parts/problem.js";
import { isOver } from "../parts/state.js";

const RewardHealth = jobView("/rewards", RewardsOf);
export default RewardHealth;

function RewardsOf({ run, job }) {
  useSignal(run.metrics);
  const { data, error, reload } = useGet(`${run.path}/rewards`, {}, { every: isOver(job) ? 0 : 2000 });
  if (!data) return html`<${Loading} error=${error} retry=${reload} />`;
  return html`
    <${ProblemBox} error=${error} retry=${reload} />
    ${data.data.map((reward) => html`<${RewardPanel} key=${`${reward.evaluation} ${reward.name}`} reward=${reward} table=${run.table} />`)}`;
}

const latency = (ms) => (ms < 10 ? `${number(ms, 2)} ms` : duration(ms / 1000));

/** Returns `[CSS class, status, explanation]`. */
function describeHealth({ breaker, degraded, samples, missing_fraction, updated_at }) {
  if (breaker?.state === "open") return ["bad", "✕ Circuit breaker open", breaker.retry_at ? `No requests are sent to the reward service until ${formatTime(breaker.retry_at)}.` : "No requests are sent to the reward service for now."];
  if (breaker?.state === "half_open") return ["warn", "! Recovering", "Sending one test request to the reward service."];
  if (degraded) return ["warn", "! Degraded", "At least 3 of the last 20 requests to the reward service failed."];
  if (missing_fraction > 0.2) return ["warn", "! Values missing", `${percent(missing_fraction)} of the samples have no reward.`];
  if (updated_at === null || !samples) return ["", "◌ Not used yet", ""];
  return ["good", "✓ Healthy", ""];
}

function RewardPanel({ reward, table }) {
  const { name, type, weight, required, evaluation, latency_ms, errors = {}, breaker, concurrency, failures = [], slowest, updated_at } = reward;
  const [level, status, explanation] = describeHealth(reward);
  const key = `${evaluation ? "eval_" : ""}rewards/${name}`;
  const isHttp = breaker !== null && breaker !== undefined;
  const value = (statistic) => number(table.last(`${key}/${statistic}`));
  const facts = [
    ["Mean", value("mean"), value("std") === NONE ? "" : `± ${value("std")}, latest step`],
    updated_at !== undefined && ["Samples", count(reward.samples), `${count(reward.missing)} missing, ${count(reward.not_applicable)} not applicable`],
    latency_ms && ["Median latency", latency(latency_ms.p50), `95th percentile ${latency(latency_ms.p95)}, maximum ${latency(latency_ms.max)}`],
    isHttp && ["Requests", count(reward.requests), `${plural(reward.retries, "retry", "retries")}, ${count(reward.failed)} failed, ${count(reward.replayed)} answered from an earlier attempt`],
    concurrency && ["Concurrency", `${concurrency.limit}`, `maximum ${concurrency.max}`],
    isHttp && ["Circuit breaker", sentenceCase(breaker.state), `opened ${plural(breaker.opened, "time")}`],
    reward.cached > 0 && ["From cache", count(reward.cached), "no request sent"],
  ].filter((fact) => fact && fact[1] !== undefined);
  const errorCounts = Object.entries(errors).sort((a, b) => b[1] - a[1]);
  return html`<section class="panel reward" aria-label=${`Reward ${name}`}>
    <div class="row between wrap">
      <h2>${name} <span class="dim small">${type} · ${weight === 0 ? "metric only" : `weight ${number(weight)}`}${required ? "" : " · optional"}${evaluation ? " · evaluation" : ""}</span></h2>
      ${updated_at !== undefined && html`<span class=${cls("tag", level)} title=${explanation}>${status}</span>`}
    </div>
    ${explanation && html`<p class=${level}>${explanation}</p>`}
    <${Facts} facts=${facts} />
    ${errorCounts.length > 0 && html`<h3>Errors</h3><ul class="errors">${errorCounts.map(([kind, number]) => html`<li key=${kind}><span>${sentenceCase(kind)}</span> <b class="num">${count(number)}</b></li>`)}</ul>`}
    ${failures.length > 0 && html`<h3>Recent failures</h3>${failures.map((failure, index) => html`<${Exchange} key=${failure.time + index} exchange=${failure} />`)}`}
    ${slowest && html`<h3>Slowest request</h3><${Exchange} exchange=${slowest} />`}
    ${updated_at && html`<p class="dim small">Updated ${timeAgo(updated_at)} (attempt ${reward.attempt})</p>`}
  </section>`;
}

/** A request to a reward service and its response. */
function Exchange({ exchange }) {
  const { time, message, latency_ms, step, samples, request, response } = exchange;
  return html`<details class="exchange"><summary><span class="num">${formatTime(time)}</span> ${exchange.class && html`<b>${sentenceCase(exchange.class)}</b> `}${message} <span class="dim small">step ${step}, ${plural(samples.length, "sample")}, ${latency(latency_ms)}</span></summary>
    <div class="columns">
      <${Message} title="Request" message=${request} />
      ${response ? html`<${Message} title="Response" message=${response} />` : html`<p class="dim">No response received.</p>`}
    </div></details>`;
}

function Message({ title, message }) {
  const { url, status, headers, body } = message;
  const head = Object.entries(headers).map(([key, value]) => `${key}: ${value}`).join("\n");
  return html`<div class="grow"><h4>${title} ${status && html`<span class="num">${status}</span>`}</h4>
    <pre class="wire" tabindex="0" aria-label=${title}>${[url, head, "", body].filter((part) => part !== null).join("\n")}</pre></div>`;
}
