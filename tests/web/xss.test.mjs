// Whatever a model, a user or a reward service wrote is text: a corpus of texts that would run is carried everywhere, every
// view is opened in both colours, everything that opens is opened, and nothing runs, loads or breaks out.
import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { after, before, test } from "node:test";
import { startBrowser } from "./browser.mjs";
import { CORPUS } from "./corpus.mjs";
import { finished, startRewards, submit } from "./job.mjs";
import { startServer, WORKER_TOKEN } from "./server.mjs";
import { step, Worker } from "./worker.mjs";

/** The bundled model reads 128 tokens; prompts of the dataset leave room for an answer. Samples carry everything. */
const SHORT = 80;

let server, browser, rewards, carried;
const at = (index) => CORPUS[index % CORPUS.length];
/** A job's name has no control characters. */
const named = (index) => at(index).replaceAll(/\p{Cc}/gu, " ");
const keyed = (value) => Object.fromEntries(CORPUS.map((text, index) => [text, value(index)]));

before(async () => {
  rewards = await startRewards(({ request, count }) => {
    // Every other answer is an error whose words are the corpus'; results carry reasons and metrics of it.
    if (count % 2 === 0) return { status: 500 + (count % 4), headers: { "x-note": encodeURI(at(count)) }, body: `${at(count)}\n${CORPUS.join("\n")}`.slice(0, 4000) };
    const results = request.samples.map(({ sample_id }, index) => ({ sample_id, reward: (index % 5) / 5, reason: at(count + index), metrics: { [at(index)]: 1 } }));
    return { body: JSON.stringify({ version: "1", id: request.id, results }) };
  });
  [server, browser] = await Promise.all([startServer(), startBrowser()]);
  const plain = { rewards: [{ name: "judge", type: "webhook", url: rewards.url }] };
  // Names and labels: of one job each.
  const rows = CORPUS.map((prompt, index) => ({ prompt: prompt.slice(0, SHORT), answer: at(index + 1), note: at(index + 2) }));
  carried = await submit(server, { name: named(0), rows, steps: CORPUS.length, ...plain, more: { metadata: { [at(3).slice(0, 60)]: at(4) } } });
  for (let index = 1; index < CORPUS.length; index++) await submit(server, { name: named(index), rows: rows.slice(0, 3), ...plain });
  await carry(carried.id);
}, { timeout: 600_000 });
after(() => Promise.all([server?.stop(), browser?.close(), rewards?.stop()]));

/** A worker that says the corpus wherever it may say something: completions, metrics, warnings, alerts, the log, a failure. */
async function carry(id) {
  const worker = new Worker(server, { device: "cpu" });
  await worker.register();
  const attempt = await worker.claim();
  assert.equal(attempt.job, id, "the first job is the first in the queue");
  const samples = (number) => CORPUS.map((prompt, index) => ({
    step: number, phase: "train", group_id: `g_${number}_${index >> 2}`, prompt_id: `row_${index >> 2}`, prompt, completion: at(index + number), rewards: { judge: index % 2, ...(index < 4 ? keyed(() => 0.5) : {}) },
    reward: index % 3, kl: 0.01, advantage: (index % 3) - 1, finish_reason: index % 2 ? "stop" : "length", num_tokens: 9,
  }));
  for (let number = 1; number <= 3; number++) {
    await attempt.events([
      step(number, CORPUS.length, "train", { reward: number, kl: 0.1, ...keyed((index) => index * number) }),
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
  await attempt.call(`jobs/${attempt.job}/checkpoints/${number}`, { attempt: attempt.attempt, files, metrics: keyed((index) => index) });
}

/** Elements that text never becomes, and attributes that nobody of ours writes. */
const STRANGE = "iframe, object, embed, base, meta[http-equiv], marquee, math, video, audio, template, form[action], [formaction], [srcdoc], [onerror], [onload], [onclick], [onfocus], [onmouseover], [onbegin], main script, main style, main link, main img, main image";

async function watch(look, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, reducedMotion: "reduce", ...options });
  const page = await context.newPage();
  const wrong = [];
  await page.exposeFunction("pwned", (what) => wrong.push(`ran: ${what}`));
  await page.addInitScript(() => {
    addEventListener("securitypolicyviolation", (event) => window.pwned(`the policy stopped ${event.violatedDirective} ${event.blockedURI}`));
  });
  page.on("dialog", (dialog) => (wrong.push(`dialog: ${dialog.message()}`), dialog.dismiss()));
  page.on("pageerror", (error) => wrong.push(error.stack ?? String(error)));
  page.on("request", (request) => /^\/+pwned/.test(new URL(request.url()).pathname) && wrong.push(`asked for ${request.url()}`));
  page.on("framenavigated", (frame) => frame === page.mainFrame() || wrong.push("a frame"));
  try {
    await look(page);
    assert.deepEqual(wrong, []);
  } finally {
    await context.close();
  }
}

/** Opens all that opens, moves over what reacts, and looks at what the page has become. */
async function inspect(page, path) {
  await page.waitForFunction(() => !document.querySelector("[aria-busy=true]") && document.querySelector("main h1"), null, { timeout: 30_000 });
  await page.evaluate(() => document.querySelectorAll("details").forEach((details) => (details.open = true)));
  for (const button of await page.locator(".completion button, .chart-tools button").all()) await button.click({ timeout: 5000 }).catch(() => {});
  await page.mouse.move(400, 400);
  await page.mouse.move(500, 600, { steps: 5 });
  await page.waitForTimeout(300);
  const found = await page.evaluate((strange) => ({
    strange: [...document.querySelectorAll(strange)].map((element) => element.outerHTML.slice(0, 200)),
    // Where links and pictures lead: places of this page, of this server, nothing that runs.
    links: [...document.querySelectorAll("[href], [src], [action]")].flatMap((element) => ["href", "src", "action"].map((name) => element.getAttribute(name))).filter((value) => value !== null && !/^(#|\/(web|jobs|checkpoints|docs)\/|blob:)/.test(value)),
    app: !!document.getElementById("app")?.querySelector("header"),
  }), STRANGE);
  assert.deepEqual(found, { strange: [], links: [], app: true }, path);
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

for (const colorScheme of ["light", "dark"]) {
  test(`no text of the corpus runs on any view, ${colorScheme}`, { timeout: 300_000 }, () =>
    watch(async (page) => {
      await inspectAll(page, server, carried.id);
    }, { colorScheme }));
}

test("a real run on prompts of the corpus, scored by a service that answers with it, runs nothing", { timeout: 300_000 }, async () => {
  const trained = await startServer({ devices: "cpu" });
  try {
    const rows = CORPUS.map((text, index) => ({ prompt: text.slice(0, SHORT), answer: at(index + 1) }));
    const job = await finished(trained, await submit(trained, { name: named(7), rows, steps: 3, rewards: [{ name: "judge", type: "webhook", url: rewards.url }] }));
    await watch((page) => inspectAll(page, trained, job.id));
  } finally {
    await trained.stop();
  }
});

test("the whole corpus stands in the samples as it was written", { timeout: 120_000 }, () =>
  watch(async (page) => {
    await page.goto(`${server.url}/#/jobs/${carried.id}/samples?as=table&step=2`);
    await page.locator(".samples tbody tr").first().waitFor();
    while (await page.getByRole("button", { name: "More" }).count()) {
      const rows = await page.locator(".samples tbody tr").count();
      await page.getByRole("button", { name: "More" }).click();
      await page.waitForFunction((count) => document.querySelectorAll(".samples tbody tr").length > count, rows);
    }
    const shown = new Set(await page.locator(".samples tbody td.text").evaluateAll((cells) => cells.map((cell) => cell.textContent)));
    assert.deepEqual(CORPUS.filter((text) => text.length <= 240 && !shown.has(text)), []);
  }));

test("names, filters and addresses of the corpus run nowhere", { timeout: 300_000 }, () =>
  watch(async (page) => {
    const { data } = await server.api("GET", "/jobs?limit=100");
    await page.goto(`${server.url}/#/compare?ids=${data.slice(0, 8).map(({ id }) => id).join(",")}`);
    await inspect(page, "compare");
    for (const [index, text] of CORPUS.entries()) {
      const hostile = encodeURIComponent(text);
      const paths = [`/jobs/${carried.id}/samples?q=${hostile}`, `/jobs/${hostile}`, `/compare?ids=${carried.id}&keys=${hostile}`, `/jobs/${carried.id}/logs?q=${hostile}&type=${hostile}`, `/new?from=${hostile}`, `/${hostile}`, `/jobs/${carried.id}/checkpoints?checkpoint=${hostile}`, `/?q=${hostile}&model=${hostile}`, `/jobs/${carried.id}/playground?step=${hostile}`, `/access?actor=${hostile}&target=${hostile}`];
      await page.evaluate((hash) => (location.hash = hash), paths[index % paths.length]);
      await page.waitForTimeout(120);
      if (index % 8 === 7) await inspect(page, text);
    }
  }));

test("the words of a reward service are text where a reward is tried", { timeout: 120_000 }, () =>
  watch(async (page) => {
    const answer = await server.api("POST", "/rewards/test", { reward: { name: "judge", type: "webhook", url: rewards.url }, samples: CORPUS.slice(0, 8).map((completion) => ({ prompt: completion, completion })) });
    assert.ok(JSON.stringify(answer).includes("pwned"), "the service's words came back");
    await page.goto(`${server.url}/#/new?from=${carried.id}`);
    await page.getByRole("heading", { name: /^New job/ }).waitFor();
    for (let tries = 0; tries < 2; tries++) {
      await page.getByRole("button", { name: /^Test/ }).first().click();
      await page.getByLabel("Completion", { exact: true }).first().fill(CORPUS.slice(0, 20).join("\n---\n"));
      await page.getByRole("button", { name: "Score it" }).click();
      await page.locator(".trial, .problem").first().waitFor({ timeout: 60_000 });
      await inspect(page, "a reward's test");
      await page.getByRole("button", { name: /^Test/ }).first().click();
    }
  }));
