// Performance with 200 jobs, a million metric points and a run of 100,000 steps. Times are measured in the browser.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { makeJob, SHOTS, startBrowser, visit } from "./browser.mjs";
import { startServer } from "./server.mjs";
import { metricsOf, step, Worker } from "./worker.mjs";

const JOBS = 200;
const LONG_RUN_STEPS = 100_000;
const OTHER_RUN_STEPS = 180;
/** Limits in ms. */
const MAX_FIRST_PAINT_MS = 1000;
const MAX_FRAME_MS = 16;

const FAILED = { outcome: "failed", failure: { class: "user", code: "bad", message: "a reason", phase: null, step: 1, suggestion: null } };

let server, browser, longest;
before(async () => {
  [server, browser] = await Promise.all([startServer(), startBrowser()]);
  const worker = new Worker(server);
  await worker.register();
  let points = 0;
  const fill = async (attempt, total, keys) => {
    for (let begin = 1; begin <= total; begin += 1000) {
      const events = [];
      for (let number = begin; number < begin + 1000 && number <= total; number++) {
        const all = metricsOf(number, total);
        const metrics = keys ? Object.fromEntries(keys.map((key) => [key, all[key]])) : all;
        points += Object.keys(metrics).length;
        events.push(step(number, total, "train", metrics));
      }
      await attempt.events(events);
      // Renew the lease, since a slow machine may need longer than its duration.
      await attempt.heartbeat(Math.min(begin + 999, total));
    }
  };
  // A pause of half a minute loses the lease; then the next attempt starts again.
  const runJob = async (total, keys, outcome) => {
    for (;;) {
      const attempt = await worker.claim();
      const before = points;
      try {
        await fill(attempt, total, keys);
        await attempt.finish(outcome);
        return attempt.job;
      } catch (error) {
        if (!error.message.includes("lease_lost")) throw error;
        points = before;
      }
    }
  };
  for (let index = 0; index < JOBS; index++) {
    const isLong = index === JOBS - 1;
    const total = isLong ? LONG_RUN_STEPS : OTHER_RUN_STEPS;
    await makeJob(server, { name: isLong ? "a long run" : `run ${index}`, total });
    const job = await runJob(total, isLong ? ["reward", "kl", "entropy", "grad_norm"] : null, index % 5 ? { outcome: "cancelled" } : FAILED);
    if (isLong) longest = job;
  }
  assert.ok(points >= 1_000_000, `${points} points`);
  console.log(`${JOBS} jobs, ${points} metric points`);
}, { timeout: 600_000 });
after(() => Promise.all([server?.stop(), browser?.close()]));

test("the list of 200 jobs is painted within a second, and its sparklines are loaded", { timeout: 120_000 }, () =>
  visit(browser, server.url, "", async (page) => {
    await page.getByRole("row", { name: /a long run/ }).waitFor();
    const times = await page.evaluate(() => ({
      paint: performance.getEntriesByName("first-contentful-paint")[0]?.startTime,
      listed: performance.now(),
    }));
    console.log(`first paint ${Math.round(times.paint)} ms, first rows before ${Math.round(times.listed)} ms`);
    assert.ok(times.paint <= MAX_FIRST_PAINT_MS, `first paint after ${times.paint} ms`);
    await page.waitForFunction((jobs) => document.querySelectorAll("tbody tr").length === jobs, JOBS, { timeout: 20_000 });
    await page.waitForFunction((jobs) => document.querySelectorAll("tbody .spark").length === jobs, JOBS, { timeout: 60_000 });
    await page.screenshot({ path: `${SHOTS}/jobs-200.png` });
  }));

test("a run of 100,000 steps can be zoomed, and its CSV file has every step", { timeout: 120_000 }, () =>
  visit(browser, server.url, `#/jobs/${longest}`, async (page) => {
    const reward = page.getByRole("img", { name: /^Reward\./ });
    await page.waitForFunction(() => document.querySelector("[aria-label^='Reward.']")?.ariaLabel.includes("to 100000,"), null, { timeout: 60_000 });
    console.log(`charts of 100,000 steps after ${Math.round(await page.evaluate(() => performance.now()))} ms`);
    await page.screenshot({ path: `${SHOTS}/run-100k.png` });
    // After zooming in, the page loads every step of the range.
    await page.goto(`${server.url}/#/jobs/${longest}?from=5000&to=5400`);
    await page.reload();
    await page.waitForFunction(() => document.querySelector("[aria-label^='Reward.']"));
    await reward.focus();
    const chart = page.locator("figure", { has: page.getByRole("heading", { name: /^Entropy/ }) });
    await page.waitForTimeout(1500);
    const [download] = await Promise.all([page.waitForEvent("download"), chart.getByRole("button", { name: "CSV" }).click()]);
    const lines = readFileSync(await download.path(), "utf8").trim().split("\n");
    assert.equal(lines.length, LONG_RUN_STEPS + 1, "the CSV file does not have every step");
    assert.equal(lines[0], "step,entropy");
  }));

test("panning eight charts of 100,000 points each takes less than a frame", { timeout: 120_000 }, () =>
  visit(browser, server.url, "#/system", async (page) => {
    await page.getByRole("heading", { name: "System" }).waitFor();
    // Serve the modules of web/ under /source/, so that the test can import them.
    await page.route("**/source/**", async (route) => {
      const name = new URL(route.request().url()).pathname.replace(/^.*\/source\//, "");
      await route.fulfill({ contentType: "text/javascript", body: readFileSync(join(process.env.WEB, name), "utf8") });
    });
    const times = await page.evaluate(async () => {
      const folder = "/source/";
      const [{ Plot }, { ChartGroup }] = await Promise.all([import(`${folder}chart/plot.js`), import(`${folder}chart/group.js`)]);
      const points = 100_000;
      const x = Float64Array.from({ length: points }, (_, index) => index);
      const noise = (seed) => Float64Array.from(x, (at) => Math.sin(at / 900 + seed) + Math.sin(at * 12.9898 + seed) * 0.3);
      const group = new ChartGroup({ smoothing: 0.9 });
      group.extent = [0, points - 1];
      const main = document.getElementById("main");
      const container = document.createElement("div");
      container.className = "charts";
      main.replaceChildren(container);
      const plots = Array.from({ length: 8 }, (_, index) => {
        const box = document.createElement("div");
        box.className = "plot";
        container.append(box);
        const plot = new Plot(box, group);
        plot.set({ x, series: [{ label: "a", values: noise(index) }, { label: "b", values: noise(index + 50) }] }, false);
        return plot;
      });
      group.show(0, 50_000);
      await new Promise((done) => setTimeout(done, 1000));
      // Measures the time that the page's own code takes per frame, including drawing.
      let spent = 0;
      const original = requestAnimationFrame;
      window.requestAnimationFrame = (callback) => original((time) => {
        const start = performance.now();
        callback(time);
        spent += performance.now() - start;
      });
      const frames = [];
      for (let frame = 0; frame < 120; frame++) {
        spent = 0;
        group.moveTo(frame * 400);
        await new Promise((done) => original(() => setTimeout(done)));
        frames.push(spent);
      }
      window.requestAnimationFrame = original;
      for (const plot of plots) plot.destroy();
      return frames.slice(10).sort((a, b) => a - b);
    });
    const [median, p95] = [times[times.length >> 1], times[Math.floor(times.length * 0.95)]];
    console.log(`panning: median ${median.toFixed(1)} ms per frame, 95th percentile ${p95.toFixed(1)} ms`);
    assert.ok(median > 0 && median <= MAX_FRAME_MS, `${median} ms per frame`);
  }, { width: 1500, height: 1400 }));
