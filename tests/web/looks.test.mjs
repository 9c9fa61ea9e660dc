// Checks every view in light and dark, at desktop and phone width: axe finds no serious violation, nothing is wider than the page, every
// chart has a text summary, and the page has exactly one h1. Screenshots are saved to target/browser.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { after, before, test } from "node:test";
import { SHOTS, startBrowser, visit } from "./browser.mjs";
import { finished, prompts, startRewards, submit } from "./job.mjs";
import { startServer } from "./server.mjs";

const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const WIDTHS = [["light", 1280], ["dark", 1280], ["light", 390], ["dark", 390]];

let server, browser, rewards, one, other;
before(async () => {
  rewards = await startRewards(({ count }) => (count % 4 === 1 ? { status: 503, body: '{"oops": "busy"}' } : undefined));
  [server, browser] = await Promise.all([startServer({ devices: "cpu" }), startBrowser()]);
  const judged = [{ name: "judge", type: "webhook", url: rewards.url }, { type: "length", min_words: 1, max_words: 2, weight: 0.1 }];
  [one, other] = await Promise.all([submit(server, { name: "Sums, careful", rate: 5e-4, steps: 12, rows: prompts(24) }), submit(server, { name: "Sums, with a judge", rewards: judged, steps: 12, rows: prompts(24) })]);
  await finished(server, one);
  await finished(server, other);
  // A paused job, so that the queue is not empty.
  const paused = await submit(server, { name: "Sums, later", steps: 900 });
  await server.api("POST", `/jobs/${paused.id}/pause`);
}, { timeout: 300_000 });
after(() => Promise.all([server?.stop(), browser?.close(), rewards?.stop()]));

const views = {
  jobs: () => "#/",
  "new-job": () => `#/new?from=${one.id}`,
  run: () => `#/jobs/${other.id}`,
  groups: () => `#/jobs/${one.id}/samples?step=3`,
  samples: () => `#/jobs/${one.id}/samples?as=table&sort=worst`,
  prompt: () => `#/jobs/${one.id}/samples?prompt_id=row_1`,
  checkpoints: () => `#/jobs/${one.id}/checkpoints`,
  playground: () => `#/jobs/${one.id}/playground`,
  chat: () => `#/jobs/${one.id}/chat`,
  rewards: () => `#/jobs/${other.id}/rewards`,
  events: () => `#/jobs/${one.id}/logs`,
  log: () => `#/jobs/${one.id}/logs?of=log`,
  config: () => `#/jobs/${one.id}/config`,
  compare: () => `#/compare?ids=${one.id},${other.id}`,
  library: () => "#/library",
  system: () => "#/system",
  access: () => "#/access",
  "not-found": () => "#/not-found",
};

/** Actions that open more of a view before it is checked. */
const openMore = {
  async library(page) {
    const buffer = Buffer.from('question,answer\nWhat is 2 + 2?,4\nWhat is 3 + 4?,7\n');
    await page.locator("input[type=file]").setInputFiles({ name: "mine.csv", mimeType: "text/csv", buffer });
    await page.getByRole("button", { name: "Use suggested mapping" }).click();
    await page.locator(".row-preview").first().waitFor();
  },
  async groups(page) {
    const group = page.locator(".group").first();
    await group.getByRole("button", { name: "Compare completion 1" }).click();
    await group.getByRole("button", { name: /^Compare completion [2-9]/ }).last().click();
    await page.locator(".difference").waitFor();
  },
  async playground(page) {
    // The browser does not submit an empty prompt: wait for the dataset's first one.
    await page.waitForFunction(() => document.querySelector("textarea")?.value);
    await page.getByRole("button", { name: "Generate with both models" }).click();
    await page.getByRole("heading", { name: "Completions", exact: true }).waitFor({ timeout: 60_000 });
  },
  async chat(page) {
    await page.getByLabel("Log-probabilities of tokens").check();
    await page.getByLabel("Temperature").fill("1.6");
    await page.getByLabel("Message", { exact: true }).fill("What is 2 + 3?");
    await page.getByRole("button", { name: "Send" }).click();
    await page.getByText(/ tokens? · /).last().waitFor({ timeout: 60_000 });
  },
  async checkpoints(page) {
    await page.getByText(/prompts? on which base model and checkpoint differ most/).click();
  },
  async rewards(page) {
    const first = page.locator(".exchange summary").first();
    if (await first.count()) await first.click();
  },
};

for (const [name, hash] of Object.entries(views)) {
  test(`${name}: no serious axe violation, nothing too wide, a summary for every chart`, { timeout: 180_000 }, async () => {
    for (const [scheme, width] of WIDTHS) {
      await visit(browser, server.url, hash(), async (page) => {
        await page.waitForFunction(() => !document.querySelector("[aria-busy=true]") && document.querySelector("main h1"), null, { timeout: 30_000 });
        await openMore[name]?.(page);
        await page.waitForTimeout(400);
        const tag = `${name}-${scheme}${width < 500 ? "-phone" : ""}`;
        await page.screenshot({ path: `${SHOTS}/${tag}.png`, fullPage: !["samples", "log", "new-job"].includes(name) });
        await page.evaluate(AXE);
        const { violations } = await page.evaluate(() => axe.run(document, { resultTypes: ["violations"] }));
        const serious = violations.filter(({ impact }) => ["serious", "critical"].includes(impact));
        assert.deepEqual(serious.map(({ id, nodes }) => `${id}: ${nodes.slice(0, 3).map(({ target, any }) => `${target.join(" ")} (${any[0]?.message ?? ""})`).join("; ")}`), [], tag);
        const found = await page.evaluate(() => ({
          overflow: document.documentElement.scrollWidth - innerWidth,
          headings: document.querySelectorAll("h1").length,
          withoutSummary: [...document.querySelectorAll(".plot")].filter((plot) => !(plot.getAttribute("aria-label")?.length > 10)).length,
          hiddenTabs: [...document.querySelectorAll(".tabs [aria-current]")].filter((tab) => tab.getBoundingClientRect().right > innerWidth || tab.getBoundingClientRect().left < 0).length,
          title: document.title,
        }));
        assert.ok(found.overflow <= 0, `${tag} is ${found.overflow} px too wide`);
        assert.deepEqual([found.headings, found.withoutSummary, found.hiddenTabs], [1, 0, 0], tag);
        assert.match(found.title, / · rlood$/);
      }, { scheme, width, height: width < 500 ? 844 : 900, allow: /404/ });
    }
  });
}
