// The verdict: asked for by a button, first on the job's page, with rows won and lost and nothing but text.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { startBrowser, visit } from "./browser.mjs";
import { finished, prompts, submit } from "./job.mjs";
import { startServer } from "./server.mjs";

let server, browser, job;
before(async () => {
  [server, browser] = await Promise.all([startServer({ devices: "cpu" }), startBrowser()]);
  const rows = prompts(60);
  const evaluation = { dataset: { records: rows.slice(0, 30) }, every_steps: 6, before_start: true };
  job = await finished(server, await submit(server, { name: "judged", steps: 6, rate: 0.02, rows, more: { eval: evaluation } }));
}, { timeout: 300_000 });
after(() => Promise.all([server?.stop(), browser?.close()]));

test("a comparison is asked for, told first on the page, and shows what both models said", { timeout: 120_000 }, () =>
  visit(browser, server.url, `#/jobs/${job.id}`, async (page) => {
    await page.getByRole("button", { name: "Compare", exact: true }).click();
    const verdict = page.getByRole("region", { name: "Verdict" });
    await verdict.locator("[data-verdict]").waitFor({ timeout: 60_000 });
    const { result, step } = await server.api("GET", `/jobs/${job.id}/verdict`);
    assert.equal(await verdict.locator("[data-verdict]").getAttribute("data-verdict"), result.verdict);
    const text = await verdict.innerText();
    assert.ok(text.includes(result.summary), text);
    assert.ok(text.includes("These rows also chose this checkpoint: optimistic."), text);
    assert.ok(text.includes(`${result.won}, ${result.lost}, ${result.tied}`) && text.includes(`step ${step}`), text);
    // Before everything else of the page.
    const first = await page.evaluate(() => {
      const [verdict, facts] = [document.querySelector(".verdict"), document.querySelector("dl.stats.panel")];
      return !!(verdict.compareDocumentPosition(facts) & Node.DOCUMENT_POSITION_FOLLOWING);
    });
    assert.ok(first, "the numbers stand before the verdict");
    await verdict.locator("summary").click();
    await verdict.getByLabel("Rows").selectOption("");
    await verdict.locator("article").nth(9).waitFor();
    const { data } = await server.api("GET", `/verdicts/${(await server.api("GET", `/jobs/${job.id}/verdict`)).id}/rows?limit=10`);
    const said = await verdict.locator("article .completion .text").allInnerTexts();
    const wanted = data.flatMap(({ base, trained }) => [base, trained].map(({ completions }) => completions[0].completion || "(empty)"));
    assert.deepEqual(said.map((one) => one.trim()), wanted.map((one) => one.trim()));
  }));

test("the verdict of a finished job is there without a press, and its end is told by the summary", { timeout: 60_000 }, () =>
  visit(browser, server.url, `#/jobs/${job.id}`, async (page) => {
    await page.locator("[data-verdict]").waitFor();
    assert.equal(await page.getByRole("button", { name: "Compare again" }).count(), 1);
    const { verdict } = await server.api("GET", `/jobs/${job.id}/summary`);
    assert.equal(await page.locator("[data-verdict]").getAttribute("data-verdict"), verdict.verdict);
  }));
