// How the job's rewards are doing: values, latency, errors, retries, the breaker, the last failures as they went over the wire.
import { ago, clock, count, duration, number, percent, plural, words } from "../core/format.js";
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

/** A sign, a word, and what it means. */
function standing({ breaker, degraded, samples, missing_fraction, updated_at }) {
  if (breaker?.state === "open") return ["bad", "✕ breaker open", breaker.retry_at ? `Nothing is sent until ${clock(breaker.retry_at)}.` : "Nothing is sent for now."];
  if (breaker?.state === "half_open") return ["warn", "! trying again", "One request is under way; its answer decides."];
  if (degraded) return ["warn", "! degraded", "At least 4 of the last 20 tries brought nothing usable."];
  if (missing_fraction > 0.2) return ["warn", "! values missing", `${percent(missing_fraction)} of the samples got no value.`];
  if (updated_at === null || !samples) return ["", "◌ not asked yet", ""];
  return ["good", "✓ well", ""];
}

function RewardPanel({ reward, table }) {
  const { name, type, weight, required, evaluation, latency_ms, errors = {}, breaker, concurrency, failures = [], slowest, updated_at } = reward;
  const [level, word, meaning] = standing(reward);
  const key = `${evaluation ? "eval_" : ""}rewards/${name}`;
  const isHttp = breaker !== null && breaker !== undefined;
  const value = (part) => number(table.last(`${key}/${part}`));
  const facts = [
    ["Mean", value("mean"), `± ${value("std")}, latest step`],
    updated_at !== undefined && ["Samples", count(reward.samples), `${count(reward.missing)} missing, ${count(reward.not_applicable)} not applicable`],
    latency_ms && ["Latency, median", latency(latency_ms.p50), `95 % below ${latency(latency_ms.p95)}, longest ${latency(latency_ms.max)}`],
    isHttp && ["Requests", count(reward.requests), `${plural(reward.retries, "retry", "retries")}, ${count(reward.failed)} failed, ${count(reward.replayed)} from the journal`],
    concurrency && ["At once", `${concurrency.limit}`, `of at most ${concurrency.max}`],
    isHttp && ["Breaker", words(breaker.state), `opened ${plural(breaker.opened, "time")}`],
    reward.cached > 0 && ["Known already", count(reward.cached), "nobody was asked"],
  ].filter((fact) => fact && fact[1] !== undefined);
  const wrong = Object.entries(errors).sort((a, b) => b[1] - a[1]);
  return html`<section class="panel reward" aria-label=${`Reward ${name}`}>
    <div class="row between wrap">
      <h2>${name} <span class="dim small">${type} · ${weight === 0 ? "metric only" : `weight ${number(weight)}`}${required ? "" : " · optional"}${evaluation ? " · evaluation" : ""}</span></h2>
      ${updated_at !== undefined && html`<span class=${cls("tag", level)} title=${meaning}>${word}</span>`}
    </div>
    ${meaning && html`<p class=${level}>${meaning}</p>`}
    <${Facts} facts=${facts} />
    ${wrong.length > 0 && html`<h3>What went wrong</h3><ul class="errors">${wrong.map(([kind, number]) => html`<li key=${kind}><span>${words(kind)}</span> <b class="num">${count(number)}</b></li>`)}</ul>`}
    ${failures.length > 0 && html`<h3>Last failures</h3>${failures.map((failure, index) => html`<${Try} key=${failure.time + index} one=${failure} />`)}`}
    ${slowest && html`<h3>Slowest answer</h3><${Try} one=${slowest} />`}
    ${updated_at && html`<p class="dim small">Told ${ago(updated_at)}, attempt ${reward.attempt}.</p>`}
  </section>`;
}

function Try({ one }) {
  const { time, message, latency_ms, step, samples, request, response } = one;
  return html`<details class="try"><summary><span class="num">${clock(time)}</span> ${one.class && html`<b>${words(one.class)}</b> `}${message} <span class="dim small">step ${step}, ${plural(samples.length, "sample")}, ${latency(latency_ms)}</span></summary>
    <div class="columns">
      <${Message} title="Request" message=${request} />
      ${response ? html`<${Message} title="Response" message=${response} />` : html`<p class="dim">No answer came.</p>`}
    </div></details>`;
}

function Message({ title, message }) {
  const { url, status, headers, body } = message;
  const head = Object.entries(headers).map(([key, value]) => `${key}: ${value}`).join("\n");
  return html`<div class="grow"><h4>${title} ${status && html`<span class="num">${status}</span>`}</h4>
    <pre class="wire" tabindex="0" aria-label=${title}>${[url, head, "", body].filter((part) => part !== null).join("\n")}</pre></div>`;
}
