// The playground: a prompt for the base model and a checkpoint, by keyboard, with errors at their fields, and nothing but text.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { makeJob, startBrowser, visit } from "./browser.mjs";
import { CORPUS } from "./corpus.mjs";
import { finished, prompts, submit } from "./job.mjs";
import { startServer } from "./server.mjs";

let server, browser, job, steps;
before(async () => {
  [server, browser] = await Promise.all([startServer({ devices: "cpu" }), startBrowser()]);
  job = await finished(server, await submit(server, { name: "asked", steps: 6, rate: 0.02 }));
  steps = (await server.api("GET", `/jobs/${job.id}/checkpoints`)).data.map(({ step }) => step);
}, { timeout: 300_000 });
after(() => Promise.all([server?.stop(), browser?.close()]));

const open = (query, look, options) => visit(browser, server.url, `#/jobs/${job.id}/playground${query}`, look, { allow: /404|422|429/, ...options });
const prompt = (page) => page.getByLabel("Prompt", { exact: true });
/** Waits until the dataset's first prompt stands in the form: the browser sends no form with an empty one. */
const ready = (page) => page.waitForFunction(() => document.querySelector("textarea")?.value);
const said = (page) => page.locator(".beside .completion .text").allInnerTexts();

test("both models answer a prompt of the dataset, as the API says, reached from a checkpoint and by keyboard alone", { timeout: 120_000 }, () =>
  visit(browser, server.url, `#/jobs/${job.id}/checkpoints`, async (page) => {
    await page.getByRole("link", { name: "Try it beside the base model" }).focus();
    await page.keyboard.press("Enter");
    await prompt(page).waitFor();
    assert.equal(new URL(page.url()).hash, `#/jobs/${job.id}/playground?step=${steps[0]}`);
    const [first, second] = prompts(2);
    // The dataset's first prompt stands there; another one is taken by its list.
    await page.waitForFunction((text) => document.querySelector("textarea").value === text, first.prompt[0].content);
    await page.getByLabel("Take a prompt from the dataset").focus();
    await page.keyboard.type("1:");
    await page.waitForFunction((text) => document.querySelector("textarea").value === text, second.prompt[0].content);
    await page.getByLabel("Temperature").fill("0");
    await page.getByLabel("Longest completion").fill("12");
    await page.getByLabel("Completions of each").fill("2");
    await prompt(page).focus();
    await page.keyboard.press("Control+Enter");
    await page.getByRole("heading", { name: "Answers" }).waitFor({ timeout: 60_000 });
    const wanted = await server.api("POST", `/jobs/${job.id}/generate`, { prompt: second.prompt, checkpoint: steps[0], num_generations: 2, sampling: { temperature: 0, max_completion_length: 12 } });
    assert.deepEqual(await said(page), wanted.base.flatMap((one, index) => [one.completion, wanted.trained[index].completion]));
    assert.deepEqual(await page.locator(".beside h3").allInnerTexts(), Array(2).fill(["Base model rlood/tiny", `Step ${steps[0]} with its adapter`]).flat());
    assert.match(await page.locator(".beside article").first().innerText(), new RegExp(`${wanted.base[0].num_tokens} tokens? · ended by itself`));
    await page.locator("details summary").filter({ hasText: "The prompt as the models saw it" }).click();
    assert.equal(await page.locator("pre.prompt").innerText(), wanted.prompt.text);
    assert.equal(await page.getByText("temperature 0 · at most 12 tokens · seed 3").count(), 1);
    if (wanted.base[0].completion !== wanted.trained[0].completion) {
      await page.getByLabel("Mark what differs").check();
      assert.ok((await page.locator(".beside ins, .beside del").count()) > 0);
    }
  }));

test("the address keeps the checkpoint, and what is wrong stands at its field", { timeout: 120_000 }, () =>
  open("", async (page) => {
    await ready(page);
    await page.getByLabel("Checkpoint").selectOption(String(steps.at(-1)));
    await page.waitForFunction((step) => location.hash.endsWith(`?step=${step}`), steps.at(-1));
    await page.reload();
    await ready(page);
    assert.equal(await page.getByLabel("Checkpoint").inputValue(), String(steps.at(-1)));
    const ask = page.getByRole("button", { name: "Ask both" });
    const wrong = async (label, value, detail) => {
      const field = page.getByLabel(label, { exact: true });
      await field.fill(value);
      await ask.click();
      await page.getByText(detail).waitFor({ timeout: 30_000 });
      assert.equal(await field.getAttribute("aria-invalid"), "true", label);
      assert.match(await page.locator(`[id="${(await field.getAttribute("aria-describedby")).split(" ").at(-1)}"]`).innerText(), detail);
      await field.fill(label === "Prompt" ? "What is 1 + 2?" : "");
    };
    await wrong("Temperature", "-1", /at least 0 \(0 = greedy\)/);
    await wrong("Completions of each", "9", /between 1 and 8/);
    await wrong("Seed", "x", /must be a whole number/);
    await wrong("Prompt", "word ".repeat(300), /the prompt has \d+ tokens/);
    await page.getByLabel("Sent as").selectOption("chat");
    await wrong("Prompt", '[{"role": "user"}]', /has no 'content'/);
    // A step that has no checkpoint (any more).
    await page.evaluate((id) => (location.hash = `#/jobs/${id}/playground?step=999`), job.id);
    await page.getByLabel("Sent as").selectOption("text");
    await ask.click();
    await page.getByText(/no checkpoint of step 999/).waitFor({ timeout: 30_000 });
  }));

test("an answer is waited for, can be stopped, and is asked for once at a time", { timeout: 120_000 }, () =>
  open("", async (page) => {
    await ready(page);
    let refused = true;
    await page.route("**/generate", async (route) => {
      if (!refused) return new Promise(() => {});
      refused = false;
      await route.fulfill({ status: 429, contentType: "application/problem+json", headers: { "retry-after": "5" }, body: JSON.stringify({ title: "Too many requests", detail: "another generate request is running; try again when it has finished", code: "too_many_requests", status: 429, errors: [] }) });
    });
    await page.getByRole("button", { name: "Ask both" }).click();
    await page.getByText("another generate request is running").waitFor();
    await page.getByRole("button", { name: "Ask both" }).click();
    await page.getByRole("button", { name: "Asking both…" }).waitFor();
    await page.getByRole("button", { name: "Stop" }).click();
    await page.getByRole("button", { name: "Ask both" }).waitFor();
    assert.equal(await page.locator(".problem").count(), 0);
  }));

test("whatever a model says is text", { timeout: 120_000 }, () =>
  open("", async (page) => {
    const ran = [];
    await page.exposeFunction("pwned", (what) => ran.push(what));
    page.on("dialog", (dialog) => (ran.push(dialog.message()), dialog.dismiss()));
    const one = (completion) => ({ completion, num_tokens: 3, finish_reason: "length" });
    const answer = { job_id: job.id, model: CORPUS[0], checkpoint_id: "ckpt_x", step: 6, weights: "adapter", sampling: job.plan.sampling, seed: 1, prompt: { text: CORPUS.join("\n"), num_tokens: 9 }, base: CORPUS.map(one), trained: CORPUS.map((_, index) => one(CORPUS[(index + 1) % CORPUS.length])), seconds: 1 };
    await page.route("**/generate", (route) => route.fulfill({ status: 200, contentType: "application/json", body: JSON.stringify(answer) }));
    await ready(page);
    await page.getByRole("button", { name: "Ask both" }).click();
    await page.getByRole("heading", { name: "Answers" }).waitFor();
    const texts = await page.locator(".beside article:nth-child(odd) .text").evaluateAll((all) => all.map((element) => element.textContent));
    assert.deepEqual(CORPUS.filter((text) => text.length < 1200 && text !== "" && !texts.includes(text)), []);
    await page.getByLabel("Mark what differs").check();
    await page.evaluate(() => document.querySelectorAll("details").forEach((details) => (details.open = true)));
    await page.waitForTimeout(300);
    assert.equal(await page.locator("main script, main img, main iframe, main style").count(), 0);
    assert.deepEqual(ran, []);
  }));

test("a job without a checkpoint says so", { timeout: 60_000 }, async () => {
  const idle = await startServer();
  try {
    const waiting = await makeJob(idle);
    await visit(browser, idle.url, `#/jobs/${waiting.id}/playground`, (page) => page.getByRole("heading", { name: "Nothing to compare yet" }).waitFor(), { allow: /404/ });
  } finally {
    await idle.stop();
  }
});
