// The playground: completions of both models, keyboard use, errors at their fields, cancellation, and no markup from model output.
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

const openPlayground = (query, check, options) => visit(browser, server.url, `#/jobs/${job.id}/playground${query}`, check, { allow: /404|422|429/, ...options });
const prompt = (page) => page.getByLabel("Prompt", { exact: true });
/** Waits until the form contains the dataset's first prompt: the browser does not submit an empty prompt. */
const ready = (page) => page.waitForFunction(() => document.querySelector("textarea")?.value);
const completionTexts = (page) => page.locator(".beside .completion .text").allInnerTexts();

test("by keyboard alone, a prompt of the dataset gives the same completions of both models as the API", { timeout: 120_000 }, () =>
  visit(browser, server.url, `#/jobs/${job.id}/checkpoints`, async (page) => {
    await page.getByRole("link", { name: "Compare with the base model" }).focus();
    await page.keyboard.press("Enter");
    await prompt(page).waitFor();
    assert.equal(new URL(page.url()).hash, `#/jobs/${job.id}/playground?step=${steps[0]}`);
    const [first, second] = prompts(2);
    // The form starts with the dataset's first prompt; the list selects another one.
    await page.waitForFunction((text) => document.querySelector("textarea").value === text, first.prompt[0].content);
    await page.getByLabel("Prompt from the dataset").focus();
    await page.keyboard.type("1:");
    await page.waitForFunction((text) => document.querySelector("textarea").value === text, second.prompt[0].content);
    await page.getByLabel("Temperature").fill("0");
    await page.getByLabel("Maximum length").fill("12");
    await page.getByLabel("Completions", { exact: true }).fill("2");
    await prompt(page).focus();
    await page.keyboard.press("Control+Enter");
    await page.getByRole("heading", { name: "Completions", exact: true }).waitFor({ timeout: 60_000 });
    const wanted = await server.api("POST", `/jobs/${job.id}/generate`, { prompt: second.prompt, checkpoint: steps[0], num_generations: 2, sampling: { temperature: 0, max_completion_length: 12 } });
    assert.deepEqual(await completionTexts(page), wanted.base.flatMap((one, index) => [one.completion, wanted.trained[index].completion]));
    assert.deepEqual(await page.locator(".beside h3").allInnerTexts(), Array(2).fill(["Base model rlood/tiny", `Step ${steps[0]} adapter`]).flat());
    assert.match(await page.locator(".beside article").first().innerText(), new RegExp(`${wanted.base[0].num_tokens} tokens? · complete`));
    await page.locator("details summary").filter({ hasText: "Formatted prompt" }).click();
    assert.equal(await page.locator("pre.prompt").innerText(), wanted.prompt.text);
    assert.equal(await page.getByText("temperature 0 · at most 12 tokens · seed 3").count(), 1);
    if (wanted.base[0].completion !== wanted.trained[0].completion) {
      await page.getByLabel("Mark differences").check();
      assert.ok((await page.locator(".beside ins, .beside del").count()) > 0);
    }
  }));

test("the address keeps the checkpoint, and errors appear at their fields", { timeout: 120_000 }, () =>
  openPlayground("", async (page) => {
    await ready(page);
    await page.getByLabel("Checkpoint").selectOption(String(steps.at(-1)));
    await page.waitForFunction((step) => location.hash.endsWith(`?step=${step}`), steps.at(-1));
    await page.reload();
    await ready(page);
    assert.equal(await page.getByLabel("Checkpoint").inputValue(), String(steps.at(-1)));
    const generate = page.getByRole("button", { name: "Generate with both models" });
    const expectError = async (label, value, detail) => {
      const field = page.getByLabel(label, { exact: true });
      await field.fill(value);
      await generate.click();
      await page.getByText(detail).waitFor({ timeout: 30_000 });
      assert.equal(await field.getAttribute("aria-invalid"), "true", label);
      assert.match(await page.locator(`[id="${(await field.getAttribute("aria-describedby")).split(" ").at(-1)}"]`).innerText(), detail);
      await field.fill(label === "Prompt" ? "What is 1 + 2?" : "");
    };
    await expectError("Temperature", "-1", /at least 0 \(0 = greedy\)/);
    await expectError("Completions", "9", /between 1 and 8/);
    await expectError("Seed", "x", /must be a whole number/);
    await expectError("Prompt", "word ".repeat(300), /the prompt has \d+ tokens/);
    await page.getByLabel("Prompt format").selectOption("chat");
    await expectError("Prompt", '[{"role": "user"}]', /has no 'content'/);
    // A step without a checkpoint, for example because the checkpoint was deleted.
    await page.evaluate((id) => (location.hash = `#/jobs/${id}/playground?step=999`), job.id);
    await page.getByLabel("Prompt format").selectOption("text");
    await generate.click();
    await page.getByText(/no checkpoint of step 999/).waitFor({ timeout: 30_000 });
  }));

test("a refused request shows its error, and a running one can be stopped", { timeout: 120_000 }, () =>
  openPlayground("", async (page) => {
    await ready(page);
    let isFirst = true;
    await page.route("**/generate", async (route) => {
      if (!isFirst) return new Promise(() => {});
      isFirst = false;
      await route.fulfill({ status: 429, contentType: "application/problem+json", headers: { "retry-after": "5" }, body: JSON.stringify({ title: "Too many requests", detail: "another request to generate completions is running; try again when it has finished", code: "too_many_requests", status: 429, errors: [] }) });
    });
    await page.getByRole("button", { name: "Generate with both models" }).click();
    await page.getByText("another request to generate completions is running").waitFor();
    await page.getByRole("button", { name: "Generate with both models" }).click();
    await page.getByRole("button", { name: "Generating…" }).waitFor();
    await page.getByRole("button", { name: "Stop" }).click();
    await page.getByRole("button", { name: "Generate with both models" }).waitFor();
    assert.equal(await page.locator(".problem").count(), 0);
  }));

test("completions are shown as text, never as markup", { timeout: 120_000 }, () =>
  openPlayground("", async (page) => {
    const ran = [];
    await page.exposeFunction("pwned", (what) => ran.push(what));
    page.on("dialog", (dialog) => (ran.push(dialog.message()), dialog.dismiss()));
    const one = (completion) => ({ completion, num_tokens: 3, finish_reason: "length" });
    const answer = { job_id: job.id, model: CORPUS[0], checkpoint_id: "ckpt_x", step: 6, weights: "adapter", sampling: job.plan.sampling, seed: 1, prompt: { text: CORPUS.join("\n"), num_tokens: 9 }, base: CORPUS.map(one), trained: CORPUS.map((_, index) => one(CORPUS[(index + 1) % CORPUS.length])), seconds: 1 };
    await page.route("**/generate", (route) => route.fulfill({ status: 200, contentType: "application/json", body: JSON.stringify(answer) }));
    await ready(page);
    await page.getByRole("button", { name: "Generate with both models" }).click();
    await page.getByRole("heading", { name: "Completions", exact: true }).waitFor();
    const texts = await page.locator(".beside article:nth-child(odd) .text").evaluateAll((all) => all.map((element) => element.textContent));
    assert.deepEqual(CORPUS.filter((text) => text.length < 1200 && text !== "" && !texts.includes(text)), []);
    await page.getByLabel("Mark differences").check();
    await page.evaluate(() => document.querySelectorAll("details").forEach((details) => (details.open = true)));
    await page.waitForTimeout(300);
    assert.equal(await page.locator("main script, main img, main iframe, main style").count(), 0);
    assert.deepEqual(ran, []);
  }));

test("the playground of a job without a checkpoint says so", { timeout: 60_000 }, async () => {
  const idle = await startServer();
  try {
    const queued = await makeJob(idle);
    await visit(browser, idle.url, `#/jobs/${queued.id}/playground`, (page) => page.getByRole("heading", { name: "No checkpoint yet" }).waitFor(), { allow: /404/ });
  } finally {
    await idle.stop();
  }
});
