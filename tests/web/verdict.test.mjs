// The verdict of a job: started by a button, shown first on the job's page, with the answers of both models.
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

test("a comparison is started by a button, shown first on the page, and lists the answers of both models", { timeout: 120_000 }, () =>
  visit(browser, server.url, `#/jobs/${job.id}`, async (page) => {
    await page.getByRole("button", { name: "Compare", exact: true }).click();
    const verdict = page.getByRole("region", { name: "Verdict" });
    await verdict.locator("[data-verdict]").waitFor({ timeout: 60_000 });
    const { result, step } = await server.api("GET", `/jobs/${job.id}/verdict`);
    assert.equal(await verdict.locator("[data-verdict]").getAttribute("data-verdict"), result.verdict);
    const text = await verdict.innerText();
    assert.ok(text.includes(result.summary), text);
    const note = `${result.note[0].toUpperCase()}${result.note.slice(1)}.`;
    assert.ok(text.includes(note), text);
    assert.ok(text.includes(`${result.won}, ${result.lost}, ${result.tied}`) && text.includes(`step ${step}`), text);
    // The verdict comes before everything else on the page.
    const isFirst = await page.evaluate(() => {
      const [verdict, facts] = [document.querySelector(".verdict"), document.querySelector("dl.stats.panel")];
      return !!(verdict.compareDocumentPosition(facts) & Node.DOCUMENT_POSITION_FOLLOWING);
    });
    assert.ok(isFirst, "the numbers come before the verdict");
    await verdict.locator("summary").click();
    await verdict.getByLabel("Rows").selectOption("");
    await verdict.locator("article").nth(9).waitFor();
    const { data } = await server.api("GET", `/verdicts/${(await server.api("GET", `/jobs/${job.id}/verdict`)).id}/rows?limit=10`);
    const shown = await verdict.locator("article .completion .text").allInnerTexts();
    const wanted = data.flatMap(({ base, trained }) => [base, trained].map(({ completions }) => completions[0].completion || "(empty)"));
    assert.deepEqual(shown.map((one) => one.trim()), wanted.map((one) => one.trim()));
  }));

test("the verdict of a finished job is shown on its page and is part of the job's summary", { timeout: 60_000 }, () =>
  visit(browser, server.url, `#/jobs/${job.id}`, async (page) => {
    await page.locator("[data-verdict]").waitFor();
    assert.equal(await page.getByRole("button", { name: "Compare again" }).count(), 1);
    const { verdict } = await server.api("GET", `/jobs/${job.id}/summary`);
    assert.equal(await page.locator("[data-verdict]").getAttribute("data-verdict"), verdict.verdict);
  }));
