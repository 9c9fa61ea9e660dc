// The browser of a test. It records console errors and requests to other servers.
import assert from "node:assert/strict";
import { mkdirSync } from "node:fs";
import { chromium } from "playwright-core";

export const SHOTS = process.env.SCREENSHOTS ?? "target/browser";
mkdirSync(SHOTS, { recursive: true });

export const startBrowser = () =>
  chromium.launch({
    executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
    args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"],
  });

/** Runs `check(page)` on a new page, and fails if the page sent a request to another server or logged an error that `allow` does not match. */
export async function visit(browser, base, hash, check, { scheme = "light", width = 1280, height = 800, allow = /\/session$/, ...options } = {}) {
  const context = await browser.newContext({ viewport: { width, height }, colorScheme: scheme, reducedMotion: "reduce", ...options });
  const page = await context.newPage();
  const errors = [];
  const foreignRequests = [];
  page.on("console", (message) => message.type() === "error" && errors.push(`${message.text()} ${message.location().url}`));
  page.on("pageerror", (error) => errors.push(error.stack ?? String(error)));
  page.on("request", (request) => {
    const url = request.url();
    if (!url.startsWith(base) && !url.startsWith("data:") && !url.startsWith("blob:")) foreignRequests.push(url);
  });
  try {
    await page.goto(`${base}/${hash}`);
    const result = await check(page);
    assert.deepEqual(foreignRequests, [], "requests to other servers");
    assert.deepEqual(errors.filter((text) => !allow.test(text)), [], "errors in the console");
    return result;
  } finally {
    await context.close();
  }
}

/** Submits a job of `total` steps on the bundled model and two prompts. It stays queued on a server without workers. */
export async function makeJob(server, { name = "a job", total = 100, more = {}, headers } = {}) {
  const models = await server.api("GET", "/models", undefined, headers);
  if (!models.data.length) await server.api("POST", "/models", { id: "rlood/tiny", source: `${process.env.RLOOD_ASSETS}/tiny` }, headers);
  return server.api("POST", "/jobs", {
    name, model: "rlood/tiny", dataset: { records: [{ prompt: "What is 2 + 2?", answer: "4" }, { prompt: "What is 3 + 4?", answer: "7" }] },
    rewards: [{ name: "correct", type: "exact_match", column: "answer" }], training: { max_steps: total, prompts_per_step: 2 }, sampling: { max_completion_length: 8 }, ...more,
  }, headers);
}
