// The main page of a job: verdict, failure or early end, alerts, current numbers, charts.
import { Chart } from "../chart/chart.js";
import { ChartControls } from "../chart/controls.js";
import { csvField, download } from "../chart/export.js";
import { ChartGroup } from "../chart/group.js";
import { get } from "../core/api.js";
import { duration, number, sentenceCase, signed } from "../core/format.js";
import { currentRoute, hrefOf, navigate } from "../core/router.js";
import { useSignal } from "../core/signal.js";
import { html, useEffect, useMemo } from "../core/ui.js";
import { Alerts } from "../parts/alerts.js";
import { jobView } from "../parts/job-page.js";
import { Ago, Facts } from "../parts/text.js";
import { Verdict } from "../parts/verdict.js";

const RunView = jobView("", ({ run, job }) => html`
  <${Verdict} run=${run} job=${job} />
  <${Ended} job=${job} />
  <${Alerts} run=${run} />
  <${Numbers} run=${run} job=${job} />
  <${Charts} run=${run} job=${job} />`);
export default RunView;

/** The reason why the job failed or ended before its last step. */
function Ended({ job }) {
  const { failure, ending } = job;
  return html`
    ${failure && html`<div class="problem" role="alert"><strong>${failure.message}</strong>
      ${failure.suggestion && html`<p>${failure.suggestion}</p>`}
      <p class="dim small">${sentenceCase(failure.code)}${failure.phase && ` · in the phase ${failure.phase}`}${failure.step !== null && ` · at step ${failure.step}`}</p></div>`}
    ${ending && html`<div class="notice"><strong>${sentenceCase(ending.code)}.</strong> ${ending.message}
      ${ending.checkpoint && html` The result is <a href=${hrefOf(`/jobs/${job.id}/checkpoints`)}>the checkpoint of step ${ending.checkpoint.step}</a>.`}</div>`}`;
}

function Numbers({ run, job }) {
  useSignal(run.metrics);
  const { table } = run;
  const first = table.column("reward").find((value) => value === value);
  const reward = table.last("reward");
  const facts = [
    ["Reward", number(reward), first !== undefined && reward !== null && `${signed(reward - first)} since step 1`],
    ["Evaluation", number(table.last("eval_reward")), table.has("eval_gap") && `gap ${signed(table.last("eval_gap"))}`],
    ["KL", number(table.last("kl")), "nats per token"],
    ["Entropy", number(table.last("entropy")), "nats"],
    ["Completion length", number(table.last("completions/mean_length")), "tokens"],
    ["Step time", duration(table.last("step_time")), ""],
    ["Training phase", sentenceCase(job.training_phase?.phase), ""],
    ["Learning rate", number(table.last("learning_rate")), ""],
    ["Started", html`<${Ago} time=${job.started_at} />`, job.finished_at && job.started_at && `took ${duration((new Date(job.finished_at) - new Date(job.started_at)) / 1000)}`],
  ];
  return html`<${Facts} panel facts=${facts} />`;
}

/** Reads the range of steps and the smoothing from the query of the address. */
const parseRange = ({ from, to, smooth }) => ({ range: from && to && Number(to) > Number(from) ? [Number(from), Number(to)] : null, smoothing: Number(smooth) || 0 });

function Charts({ run, job }) {
  const version = useSignal(run.metrics);
  const { table } = run;
  const group = useMemo(() => new ChartGroup(parseRange(currentRoute.value.query)), [run]);
  group.extent = extentOf(table);
  useAddressSync(group, job.id);
  useDetail(run, group);
  const charts = useMemo(() => chartLayout(table, job), [run, version]);
  const x = table.steps;
  return html`<h2 class="unseen">Charts</h2><${ChartControls} group=${group} />
    <div class="charts">${charts.map(({ title, note, series }) => html`<${Chart} key=${title} title=${title} note=${note} group=${group} x=${x}
      series=${series} version=${version} onCsv=${(name) => saveCsv(job, name, series)} />`)}</div>`;
}

function extentOf(table) {
  const { steps, size } = table;
  return size ? [steps[0], Math.max(steps[size - 1], steps[0] + 1)] : [0, 1];
}

/** Keeps the range and the smoothing in the address, so that a link shows the same part of the charts. */
function useAddressSync(group, id) {
  useEffect(() => {
    let timer;
    const write = () => {
      clearTimeout(timer);
      timer = setTimeout(() => {
        if (currentRoute.value.path !== `/jobs/${id}`) return;
        navigate(currentRoute.value.path, { ...currentRoute.value.query, ...shown() }, { replace: true });
      }, 400);
    };
    const shown = () => {
      const [from, to] = group.range.value?.map(Math.round) ?? [];
      return { from, to, smooth: group.smoothing.value || undefined };
    };
    // Handles links and the browser's back button, and ignores changes made by `write`.
    const read = ({ path, query }) => {
      const now = shown();
      if (path !== `/jobs/${id}` || Object.keys(now).every((key) => String(now[key] ?? "") === (query[key] ?? ""))) return;
      const { range, smoothing } = parseRange(query);
      group.range.set(range);
      group.smoothing.set(smoothing);
    };
    const unwatch = [group.range.watch(write), group.smoothing.watch(write), currentRoute.watch(read)];
    return () => (clearTimeout(timer), unwatch.forEach((stop) => stop()));
  }, [group]);
}

/** Loads the steps of the visible range in full: the data of a long run is downsampled at first. */
function useDetail(run, group) {
  useEffect(() => {
    let timer;
    const load = () => {
      clearTimeout(timer);
      timer = setTimeout(() => group.range.value && run.loadDetail(...group.range.value), 250);
    };
    load();
    const unwatch = group.range.watch(load);
    return () => (clearTimeout(timer), unwatch());
  }, [run, group]);
}

/** Returns the eight charts in a fixed order. The chart of a warm-up comes first, if the job has one. */
function chartLayout(table, job) {
  const one = (key, label, more = {}) => ({ key, label, values: table.column(key), ...more });
  const names = job.plan.rewards.map(({ name }) => name);
  const evalNames = table.keys.filter((key) => /^eval_rewards\/.*\/mean$/.test(key) && !names.includes(key.slice(13, -5))).map((key) => key.slice(13, -5));
  const present = (list) => list.filter(({ key }) => table.has(key));
  const warmUp = { title: "Warm-up", note: "loss on the warm-up answers, nats per token", series: [one("warm_up/loss", "loss"), one("warm_up/entropy", "entropy", { tint: 1 })] };
  return [
    ...(job.plan.warm_up ? [warmUp] : []),
    { title: "Reward", note: "± std", series: [one("reward", "reward", { band: table.column("reward_std") }), ...present([one("eval_reward", "evaluation", { points: true, tint: 1 })])] },
    { title: "Rewards", note: "mean", series: [...names.map((name, tint) => one(`rewards/${name}/mean`, name, { tint })),
      ...evalNames.map((name, index) => one(`eval_rewards/${name}/mean`, `${name} (evaluation)`, { points: true, tint: names.length + index }))] },
    { title: "KL", note: "nats per token", series: [one("kl", "KL"), ...present([one("kl_k3", "k3")])] },
    { title: "Entropy", note: "nats", series: [one("entropy", "entropy")] },
    { title: "Length", note: "tokens", series: [one("completions/mean_length", "mean"), one("completions/max_length", "max"), one("completions/clipped_ratio", "truncated (right)", { right: true, tint: 3 })] },
    { title: "Ties, missing", note: "rate", series: [one("frac_reward_zero_std", "tied groups"),
      ...names.map((name, index) => one(`rewards/${name}/missing_fraction`, names.length > 1 ? `${name} missing` : "missing", { tint: 1 + index }))] },
    { title: "Gradient norm", series: [one("grad_norm", "norm")] },
    { title: "Step time", note: "s", series: [one("step_time", "total", { tint: 6 }), ...present([one("step_time/generate", "sampling", { tint: 0 }), one("step_time/reward", "rewards", { tint: 1 }),
      one("step_time/reference", "reference", { tint: 2 }), one("step_time/train", "training", { tint: 3 }), one("step_time/checkpoint", "checkpoint", { tint: 4 })])] },
  ];
}

/** Downloads all steps of the series from the server: the page may have loaded only some of them. */
async function saveCsv(job, name, series) {
  const keys = series.flatMap(({ key, band }) => (band ? [key, `${key}_std`] : [key]));
  const lines = [["step", ...keys.map(csvField)].join(",")];
  let after;
  do {
    const page = await get(`/jobs/${job.id}/metrics`, { keys: keys.join(","), after });
    for (const row of page.data) lines.push([row.step, ...keys.map((key) => row[key] ?? "")].join(","));
    after = page.next;
  } while (after);
  download(`${(job.name ?? job.id).replace(/[^\w.-]+/g, "-")}-${name}.csv`, `${lines.join("\n")}\n`, "text/csv");
}
