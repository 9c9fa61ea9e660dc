// Text from models, users and reward services is never treated as markup. These tests put a corpus of attack texts everywhere such text can
// appear, open every view in both themes with everything expanded, and check that nothing runs, loads or breaks out.
import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { after, before, test } from "node:test";
import { startBrowser } from "./browser.mjs";
import { CORPUS } from "./corpus.mjs";
import { finished, startRewards, submit } from "./job.mjs";
import { startServer, WORKER_TOKEN } from "./server.mjs";
import { step, Worker } from "./worker.mjs";

/** Maximum length of a prompt, in characters: the bundled model has a context of 128 tokens. Samples contain the whole texts. */
const MAX_PROMPT_LENGTH = 80;

let server, browser, rewards, infected;
const at = (index) => CORPUS[index % CORPUS.length];
/** A text of the corpus as a job name, which must not contain control characters. */
const jobName = (index) => at(index).replaceAll(/\p{Cc}/gu, " ");
/** An object whose keys are the corpus. */
const withCorpusKeys = (value) => Object.fromEntries(CORPUS.map((text, index) => [text, value(index)]));

before(async () => {
  rewards = await startRewards(({ request, count }) => {
    // Every other response is an error with texts of the corpus; the results have reasons and metrics from it.
    if (count % 2 === 0) return { status: 500 + (count % 4), headers: { "x-note": encodeURI(at(count)) }, body: `${at(count)}\n${CORPUS.join("\n")}`.slice(0, 4000) };
    const results = request.samples.map(({ sample_id }, index) => ({ sample_id, reward: (index % 5) / 5, reason: at(count + index), metrics: { [at(index)]: 1 } }));
    return { body: JSON.stringify({ version: "1", id: request.id, results }) };
  });
  [server, browser] = await Promise.all([startServer(), startBrowser()]);
  const plain = { rewards: [{ name: "judge", type: "webhook", url: rewards.url }] };
  // Each text of the corpus is the name of one job.
  const rows = CORPUS.map((prompt, index) => ({ prompt: prompt.slice(0, MAX_PROMPT_LENGTH), answer: at(index + 1), note: at(index + 2) }));
  infected = await submit(server, { name: jobName(0), rows, steps: CORPUS.length, ...plain, more: { metadata: { [at(3).slice(0, 60)]: at(4) } } });
  for (let index = 1; index < CORPUS.length; index++) await submit(server, { name: jobName(index), rows: rows.slice(0, 3), ...plain });
  await reportCorpus(infected.id);
}, { timeout: 600_000 });
after(() => Promise.all([server?.stop(), browser?.close(), rewards?.stop()]));

/** An episode in which the model, its environment and the names of tools are texts of the corpus. */
const episode = (index) => ({
  opening: [{ role: "user", content: at(index) }],
  turns: [
    { text: at(index + 1), num_tokens: 4, reward: null, latency_ms: 7, observations: [{ role: "tool", tool_call_id: at(index), content: at(index + 2) }],
      tool_calls: [{ id: at(index), type: "function", function: { name: at(index + 3), arguments: JSON.stringify({ text: at(index + 4) }) } }] },
    { text: at(index + 5), num_tokens: 5, parse_error: at(index + 6), reward: 0.5, latency_ms: null },
  ],
  return: 0.5, stop: "env_done", restarts: 1,
});

/** Reports the corpus through a worker in every place that takes text: completions, metrics, warnings, alerts, the log, a failure. */
async function reportCorpus(id) {
  const worker = new Worker(server, { device: "cpu" });
  await worker.register();
  const attempt = await worker.claim();
  assert.equal(attempt.job, id, "the first job is the first in the queue");
  const samples = (number) => CORPUS.map((prompt, index) => ({
    step: number, phase: "train", group_id: `g_${number}_${index >> 2}`, prompt_id: `row_${index >> 2}`, prompt, completion: at(index + number), rewards: { judge: index % 2, ...(index < 4 ? withCorpusKeys(() => 0.5) : {}) },
    reward: index % 3, kl: 0.01, advantage: (index % 3) - 1, finish_reason: index % 2 ? "stop" : "length", num_tokens: 9,
    // Every other sample is an episode.
    ...(index % 2 ? { episode: episode(index + number) } : {}),
  }));
  for (let number = 1; number <= 3; number++) {
    await attempt.events([
      step(number, CORPUS.length, "train", { reward: number, kl: 0.1, ...withCorpusKeys((index) => index * number) }),
      step(number, CORPUS.length, "eval", { eval_reward: number, ...Object.fromEntries(CORPUS.map((text) => [`eval_rewards/${text}/mean`, 1])) }),
      { type: "samples", samples: samples(number) },
      { type: "warning", code: "from_the_corpus", message: at(number), data: { text: at(number + 1) } },
    ], CORPUS);
  }
  const evidence = CORPUS.map((text) => ({ metric: text, statistic: text, value: 1, limit: 2, from_step: 1, to_step: 2 }));
  await attempt.events([{ type: "alert", alert: { rule: "kl_explosion", severity: "critical", step: 2, since_step: 1, message: CORPUS.join("\n"), fix: CORPUS.join("\n"), evidence, on_alert: "note" } }]);
  await checkpoint(attempt, 3);
  await attempt.finish({ outcome: "failed", failure: { class: "user", code: "corpus", message: CORPUS.join("\n"), phase: null, step: 3, suggestion: CORPUS.join("\n") } });
}

async function checkpoint(attempt, number) {
  const files = [];
  for (const name of ["adapter_config.json", "adapter_model.safetensors", "manifest.json"]) {
    const bytes = Buffer.from(`{"${name}": 1}`);
    const path = `${server.url}/worker/jobs/${attempt.job}/checkpoints/${number}/${name}?attempt=${attempt.attempt}`;
    const response = await fetch(path, { method: "PUT", headers: { authorization: `Bearer ${WORKER_TOKEN}` }, body: bytes });
    assert.ok(response.ok, await response.text());
    files.push({ name, size_bytes: bytes.length, sha256: createHash("sha256").update(bytes).digest("hex") });
  }
  await attempt.call(`jobs/${attempt.job}/checkpoints/${number}`, { attempt: attempt.attempt, files, metrics: withCorpusKeys((index) => index) });
}

/** Selects elements and attributes that the dashboard never creates. */
const FORBIDDEN = "iframe, object, embed, base, meta[http-equiv], marquee, math, video, audio, template, form[action], [formaction], [srcdoc], [onerror], [onload], [onclick], [onfocus], [onmouseover], [onbegin], main script, main style, main link, main img, main image";

/** Runs `check` on a new page, and fails if anything of the corpus ran, was requested or opened a dialog or a frame. */
async function visitSafely(check) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, reducedMotion: "reduce" });
  const page = await context.newPage();
  const violations = [];
  await page.exposeFunction("pwned", (cause) => violations.push(`ran: ${cause}`));
  await page.addInitScript(() => {
    addEventListener("securitypolicyviolation", (event) => window.pwned(`the policy stopped ${event.violatedDirective} ${event.blockedURI}`));
  });
  page.on("dialog", (dialog) => (violations.push(`dialog: ${dialog.message()}`), dialog.dismiss()));
  page.on("pageerror", (error) => violations.push(error.stack ?? String(error)));
  page.on("request", (request) => /^\/+pwned/.test(new URL(request.url()).pathname) && violations.push(`requested ${request.url()}`));
  page.on("framenavigated", (frame) => frame === page.mainFrame() || violations.push("a frame"));
  try {
    await check(page);
    assert.deepEqual(violations, []);
  } finally {
    await context.close();
  }
}

/** Expands everything on the page, moves the mouse, and checks the elements and links that the page contains. */
async function inspect(page, path) {
  await page.waitForFunction(() => !document.querySelector("[aria-busy=true]") && document.querySelector("main h1"), null, { timeout: 30_000 });
  await page.evaluate(() => document.querySelectorAll("details").forEach((details) => (details.open = true)));
  // The last one first: a chart that shows its table, behind the first button, disables PNG.
  for (const button of (await page.locator(".completion button, .chart-tools button").all()).reverse()) {
    if (await button.isEnabled({ timeout: 1000 }).catch(() => false)) await button.click({ timeout: 5000 }).catch(() => {});
  }
  await page.mouse.move(400, 400);
  await page.mouse.move(500, 600, { steps: 5 });
  await page.waitForTimeout(300);
  const found = await page.evaluate((forbidden) => ({
    forbidden: [...document.querySelectorAll(forbidden)].map((element) => element.outerHTML.slice(0, 200)),
    // Links and images must point to this page or to a known path of this server.
    links: [...document.querySelectorAll("[href], [src], [action]")].flatMap((element) => ["href", "src", "action"].map((name) => element.getAttribute(name))).filter((value) => value !== null && !/^(#|\/(web|jobs|checkpoints|docs|guide)\/|blob:)/.test(value)),
    app: !!document.getElementById("app")?.querySelector("header"),
  }), FORBIDDEN);
  assert.deepEqual(found, { forbidden: [], links: [], app: true }, path);
}

const views = (id) => {
  const job = `#/jobs/${id}`;
  return ["#/", `#/new`, `#/new?from=${id}`, job, `${job}/samples`, `${job}/samples?as=table`, `${job}/samples?prompt_id=row_1`, `${job}/checkpoints`, `${job}/playground`, `${job}/rewards`, `${job}/logs`, `${job}/logs?of=log`, `${job}/config`, `${job}/config?format=json`, "#/system", "#/access"];
};

async function inspectAll(page, { url }, id) {
  for (const path of views(id)) {
    await page.goto("about:blank");
    await page.goto(`${url}/${path}`);
    await inspect(page, path);
  }
}

test("no text of the corpus runs on any view", { timeout: 300_000 }, () =>
  visitSafely((page) => inspectAll(page, server, infected.id)));

test("a real run on prompts of the corpus, with a reward service that responds with the corpus, runs nothing", { timeout: 300_000 }, async () => {
  const trained = await startServer({ devices: "cpu" });
  try {
    const rows = CORPUS.map((text, index) => ({ prompt: text.slice(0, MAX_PROMPT_LENGTH), answer: at(index + 1) }));
    const job = await finished(trained, await submit(trained, { name: jobName(7), rows, steps: 3, rewards: [{ name: "judge", type: "webhook", url: rewards.url }] }));
    await visitSafely((page) => inspectAll(page, trained, job.id));
  } finally {
    await trained.stop();
  }
});

test("the samples show every text of the corpus unchanged", { timeout: 120_000 }, () =>
  visitSafely(async (page) => {
    await page.goto(`${server.url}/#/jobs/${infected.id}/samples?as=table&step=2`);
    await page.locator(".samples tbody tr").first().waitFor();
    while (await page.getByRole("button", { name: "More" }).count()) {
      const rows = await page.locator(".samples tbody tr").count();
      await page.getByRole("button", { name: "More" }).click();
      await page.waitForFunction((count) => document.querySelectorAll(".samples tbody tr").length > count, rows);
    }
    const shown = new Set(await page.locator(".samples tbody td.text").evaluateAll((cells) => cells.map((cell) => cell.textContent)));
    assert.deepEqual(CORPUS.filter((text) => text.length <= 240 && !shown.has(text)), []);
  }));

test("texts of the corpus in names, filters and addresses run nothing", { timeout: 300_000 }, () =>
  visitSafely(async (page) => {
    const { data } = await server.api("GET", "/jobs?limit=100");
    await page.goto(`${server.url}/#/compare?ids=${data.slice(0, 8).map(({ id }) => id).join(",")}`);
    await inspect(page, "compare");
    for (const [index, text] of CORPUS.entries()) {
      const hostile = encodeURIComponent(text);
      const paths = [`/jobs/${infected.id}/samples?q=${hostile}`, `/jobs/${hostile}`, `/compare?ids=${infected.id}&keys=${hostile}`, `/jobs/${infected.id}/logs?q=${hostile}&type=${hostile}`, `/new?from=${hostile}`, `/${hostile}`, `/jobs/${infected.id}/checkpoints?checkpoint=${hostile}`, `/?q=${hostile}&model=${hostile}`, `/jobs/${infected.id}/playground?step=${hostile}`, `/access?actor=${hostile}&target=${hostile}`];
      await page.evaluate((hash) => (location.hash = hash), paths[index % paths.length]);
      await page.waitForTimeout(120);
      if (index % 8 === 7) await inspect(page, text);
    }
  }));

test("the reward tester shows the texts of a reward service as text", { timeout: 120_000 }, () =>
  visitSafely(async (page) => {
    const answer = await server.api("POST", "/rewards/test", { reward: { name: "judge", type: "webhook", url: rewards.url }, samples: CORPUS.slice(0, 8).map((completion) => ({ prompt: completion, completion })) });
    assert.ok(JSON.stringify(answer).includes("pwned"), "the response does not contain the corpus");
    await page.goto(`${server.url}/#/new?from=${infected.id}`);
    await page.getByRole("heading", { name: /^New job/ }).waitFor();
    for (let attempt = 0; attempt < 2; attempt++) {
      await page.getByRole("button", { name: /^Test/ }).first().click();
      await page.getByLabel("Completion", { exact: true }).first().fill(CORPUS.slice(0, 20).join("\n---\n"));
      await page.getByRole("button", { name: "Score", exact: true }).click();
      await page.locator(".trial, .problem").first().waitFor({ timeout: 60_000 });
      await inspect(page, "the reward tester");
      await page.getByRole("button", { name: /^Test/ }).first().click();
    }
  }));

test("an episode shows its turns, what the environment said, calls, rewards and why it ended", { timeout: 60_000 }, () =>
  visitSafely(async (page) => {
    await page.goto(`${server.url}/#/jobs/${infected.id}/samples?step=1`);
    const completion = page.locator(".completion", { has: page.locator(".turn") }).first();
    await completion.waitFor();
    const shown = await completion.locator(".turn > .small").allInnerTexts();
    assert.deepEqual(shown.map((text) => text.replace(/invalid call: [^]*/, "invalid call")), ["user", "Turn 1 · 4 tokens · 7 ms", "tool", "Turn 2 · 5 tokens · reward 0.5 · invalid call"]);
    assert.equal(await completion.locator(".turn.context").count(), 2);
    assert.match(await completion.locator("code").innerText(), /\(\{"text":/);
    assert.match(await completion.innerText(), /ended: env done · begun again 1 time/);
  }));
