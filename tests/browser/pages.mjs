// The pages in a real browser: they render, ask nobody else for anything, and break none of their own CSP.
// usage: node pages.mjs BASE_URL SCREENSHOT_FOLDER      (CHROMIUM names the browser; default /usr/bin/chromium)
import assert from "node:assert/strict";
import { test } from "node:test";
import { mkdirSync } from "node:fs";
import { chromium } from "playwright-core";

const [base, folder] = process.argv.slice(2);
mkdirSync(folder, { recursive: true });

async function visit(path, look) {
  const browser = await chromium.launch({
    executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
    args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"],
  });
  try {
    const page = await browser.newPage({ viewport: { width: 1200, height: 900 } });
    const complaints = [];
    const foreign = [];
    page.on("console", (message) => message.type() === "error" && complaints.push(message.text()));
    page.on("pageerror", (error) => complaints.push(String(error)));
    page.on("request", (request) => {
      const url = request.url();
      if (!url.startsWith(base) && !url.startsWith("data:")) foreign.push(url);
    });
    await page.goto(base + path);
    await look(page);
    assert.deepEqual(foreign, [], "requests to other places");
    // Chromium asks for a favicon by itself.
    assert.deepEqual(complaints.filter((text) => !text.includes("404")), [], "errors in the console");
  } finally {
    await browser.close();
  }
}

test("the first page leads to the docs", () =>
  visit("/", async (page) => {
    await page.screenshot({ path: `${folder}/first.png` });
    await page.click("text=The API");
    await page.waitForURL("**/docs/");
  }));

test("the docs show every operation and the reward contract", () =>
  visit("/docs/", async (page) => {
    await page.waitForSelector(".opblock", { timeout: 20_000 });
    const document = await (await page.request.get(base + "/openapi.json")).json();
    const methods = ["get", "put", "post", "delete", "patch", "head"];
    const count = Object.values(document.paths).flatMap((path) => methods.filter((method) => method in path)).length;
    await page.waitForFunction((n) => document.querySelectorAll(".opblock").length >= n, count, { timeout: 20_000 });
    await page.click("text=Submit a job");
    await page.waitForSelector(".opblock-body");
    await page.screenshot({ path: `${folder}/docs.png` });
  }));
