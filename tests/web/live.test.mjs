// Live updates: every event is shown once and in order, even when the connection breaks.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { makeJob, startBrowser, visit } from "./browser.mjs";
import { startProxy, startServer } from "./server.mjs";
import { step, Worker } from "./worker.mjs";

let server, proxy, browser, worker;
before(async () => {
  [server, browser] = await Promise.all([startServer(), startBrowser()]);
  proxy = await startProxy(server.url);
  worker = new Worker(server);
  await worker.register();
});
after(async () => {
  await browser?.close();
  await proxy?.stop();
  await server?.stop();
});

/** Reads the steps and values of the reward from the chart's table. */
async function readRewardTable(page) {
  const chart = page.locator("figure", { has: page.getByRole("heading", { name: /^Reward\b/ }) });
  if (!(await chart.locator("table").count())) await chart.getByRole("button", { name: "Table" }).click();
  const rows = await chart.locator("tbody tr").evaluateAll((rows) => rows.map((row) => [...row.children].map((cell) => cell.textContent)));
  return rows.map(([number, value]) => [Number(number), Number(value)]).reverse();
}

const pause = (ms) => new Promise((done) => setTimeout(done, ms));
const value = (number) => Number((number / 1000).toPrecision(6));
const rows = (from, to) => Array.from({ length: to - from + 1 }, (_, index) => [from + index, value(from + index)]);
const reportSteps = (attempt, from, to) => attempt.events(rows(from, to).map(([number, reward]) => step(number, 200, "train", { reward, kl: 0 })));

test("a connection that is cut repeatedly leaves no gap and no duplicate point", { timeout: 120_000 }, async () => {
  await makeJob(server, { name: "cut", total: 200 });
  const attempt = await worker.claim();
  await reportSteps(attempt, 1, 20);
  await visit(browser, proxy.url, `#/jobs/${attempt.job}`, async (page) => {
    await page.getByRole("heading", { name: "cut", exact: true }).waitFor();
    await page.waitForFunction(() => document.querySelector("[aria-label^='Reward.']")?.ariaLabel.includes("20 values"));
    let next = 21;
    for (let round = 0; round < 12; round++) {
      const to = next + 4 + (round % 3);
      await reportSteps(attempt, next, to);
      next = to + 1;
      if (round % 2) await pause(40 * round);
      proxy.disconnect();
    }
    await reportSteps(attempt, next, 150);
    await page.waitForFunction(() => document.querySelector("[aria-label^='Reward.']")?.ariaLabel.includes("to 150,"), null, { timeout: 60_000 });
    await page.waitForFunction(() => !document.querySelector("[data-connection]"), null, { timeout: 60_000 });
    assert.deepEqual(await readRewardTable(page), rows(1, 150));
    // The attempt ends without a checkpoint, so the next one starts at step 0 and the old points disappear.
    await attempt.finish({ outcome: "requeued" });
    const second = await worker.claim();
    proxy.disconnect();
    await reportSteps(second, 1, 30);
    await page.waitForFunction(() => document.querySelectorAll(".values tbody tr").length === 30, null, { timeout: 60_000 });
    assert.deepEqual(await readRewardTable(page), rows(1, 30));
    await second.finish({ outcome: "cancelled" });
  }, { allow: /\/session$|ERR_CONNECTION_RESET|ERR_EMPTY_RESPONSE|ERR_INCOMPLETE_CHUNKED|ERR_SOCKET/ });
});

test("the list of jobs is updated live, and after a broken connection", { timeout: 60_000 }, () =>
  visit(browser, proxy.url, "", async (page) => {
    await page.getByRole("row", { name: /cut/ }).waitFor();
    const job = await makeJob(server, { name: "another", total: 10 });
    await page.getByRole("row", { name: /another.*queued/ }).waitFor();
    proxy.disconnect();
    const attempt = await worker.claim();
    assert.equal(attempt.job, job.id);
    await reportSteps(attempt, 1, 3);
    await page.getByRole("row", { name: /another.*running.*3 \/ 10/ }).waitFor();
    await attempt.finish({ outcome: "failed", failure: { class: "user", code: "bad_prompt", message: "a prompt is <b>too long</b>", phase: null, step: 3, suggestion: null } });
    await page.getByRole("row", { name: /another.*failed/ }).waitFor();
    assert.equal(await page.locator("main b").filter({ hasText: "too long" }).count(), 0, "text became markup");
  }, { allow: /\/session$|ERR_CONNECTION_RESET|ERR_EMPTY_RESPONSE|ERR_INCOMPLETE_CHUNKED|ERR_SOCKET/ }));

const ALLOW_BROKEN = { allow: /\/session$|404|ERR_CONNECTION_RESET|ERR_EMPTY_RESPONSE|ERR_INCOMPLETE_CHUNKED|ERR_SOCKET/ };

test("typed filters and a zoom from the address survive the arrival of new steps", { timeout: 120_000 }, async () => {
  await makeJob(server, { name: "typed", total: 200 });
  const attempt = await worker.claim();
  await reportSteps(attempt, 1, 20);
  let done = false;
  const steps = (async () => {
    for (let next = 21; !done; next++) {
      await reportSteps(attempt, next, next);
      await pause(60);
    }
  })();
  try {
    await visit(browser, server.url, `#/jobs/${attempt.job}/samples`, async (page) => {
      await page.getByLabel("Search").pressSequentially("what is two", { delay: 90 });
      await page.getByLabel("Step", { exact: true }).pressSequentially("123", { delay: 120 });
      await page.waitForFunction(() => /q=what\+is\+two/.test(location.hash) && /step=123/.test(location.hash));
      assert.equal(await page.getByLabel("Search").inputValue(), "what is two");
      assert.equal(await page.getByLabel("Step", { exact: true }).inputValue(), "123");
    }, ALLOW_BROKEN);
    await visit(browser, server.url, `#/jobs/${attempt.job}`, async (page) => {
      const controls = page.getByRole("group", { name: "Charts" });
      await controls.waitFor();
      for (const [from, to] of [[3, 9], [5, 17]]) {
        await page.evaluate(([from, to]) => (location.hash = `${location.hash.split("?")[0]}?from=${from}&to=${to}&smooth=0.5`), [from, to]);
        await controls.getByText(`steps ${from} to ${to}`).waitFor();
        await controls.getByText("0.50").waitFor();
      }
      await pause(600);
      assert.match(await page.evaluate(() => location.hash), /from=5&to=17&smooth=0.5/);
    }, ALLOW_BROKEN);
  } finally {
    done = true;
    await steps;
    await attempt.finish({ outcome: "cancelled" });
  }
});

test("the page reports that its job was deleted", { timeout: 60_000 }, async () => {
  await makeJob(server, { name: "to be deleted", total: 3 });
  const attempt = await worker.claim();
  await reportSteps(attempt, 1, 2);
  await attempt.finish({ outcome: "cancelled" });
  await visit(browser, server.url, `#/jobs/${attempt.job}`, async (page) => {
    await page.getByRole("button", { name: "Retry" }).waitFor();
    await server.api("DELETE", `/jobs/${attempt.job}`);
    await page.getByText("This job was deleted.").waitFor();
    assert.equal(await page.getByRole("button", { name: "Retry" }).count(), 0);
  }, ALLOW_BROKEN);
});

test("the page reports that its job was deleted before the event stream was opened", { timeout: 60_000 }, async () => {
  await makeJob(server, { name: "to be deleted early", total: 3 });
  const attempt = await worker.claim();
  await reportSteps(attempt, 1, 2);
  await attempt.finish({ outcome: "cancelled" });
  await visit(browser, server.url, "#/", async (page) => {
    let deleted;
    const deletion = new Promise((resolve) => (deleted = resolve));
    await page.route(`**/jobs/${attempt.job}/events`, async (route) => {
      await deletion;
      await route.continue();
    });
    await page.evaluate((job) => (location.hash = `#/jobs/${job}`), attempt.job);
    const followed = page.waitForRequest(`**/jobs/${attempt.job}/events`);
    await page.getByRole("button", { name: "Retry" }).waitFor();
    await followed;
    await server.api("DELETE", `/jobs/${attempt.job}`);
    deleted();
    await page.getByText("This job was deleted.").waitFor();
  }, ALLOW_BROKEN);
});

test("names of 200 letters without spaces fit on a phone", { timeout: 120_000 }, async () => {
  const long = "x".repeat(200);
  const job = await makeJob(server, { name: long, total: 3, more: { metadata: { team: "y".repeat(400) } } });
  const attempt = await worker.claim();
  await reportSteps(attempt, 1, 1);
  for (const hash of [`#/jobs/${job.id}`, `#/jobs/${job.id}/samples`, `#/jobs/${job.id}/config`, `#/compare?ids=${job.id}`, "#/", `#/new?from=${job.id}`]) {
    await visit(browser, server.url, hash, async (page) => {
      await page.getByText(long.slice(0, 20)).first().waitFor({ state: "attached" });
      await pause(300);
      const overflow = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
      assert.ok(overflow <= 0, `${hash} is ${overflow} px wider than the screen`);
    }, { ...ALLOW_BROKEN, width: 360 });
  }
  await attempt.finish({ outcome: "cancelled" });
});
