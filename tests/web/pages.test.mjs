// The welcome page of an empty server, and the API reference.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { SHOTS, startBrowser, visit } from "./browser.mjs";
import { startServer } from "./server.mjs";

let server, browser;
before(async () => ([server, browser] = await Promise.all([startServer({ devices: "cpu" }), startBrowser()])));
after(() => Promise.all([server?.stop(), browser?.close()]));

test("an empty server shows a welcome page that starts the demo job", { timeout: 180_000 }, () =>
  visit(browser, server.url, "", async (page) => {
    await page.getByRole("heading", { name: "No jobs yet" }).waitFor();
    await page.screenshot({ path: `${SHOTS}/first.png` });
    await page.getByRole("button", { name: "Run the demo job" }).click();
    await page.getByRole("heading", { name: "demo: sums" }).waitFor();
    await page.locator(".state.succeeded").waitFor({ timeout: 150_000 });
    // After the last live update, the chart's summary matches the server's data.
    const id = (await page.evaluate(() => location.hash)).split("/")[2];
    const { data } = await server.api("GET", `/jobs/${id}/metrics?keys=reward&min_step=40`);
    const summary = await page.getByRole("img", { name: /^Reward\./ }).getAttribute("aria-label");
    assert.match(summary, /reward: 40 values from step 1 to 40/);
    assert.ok(summary.includes(`last ${Number(data[0].reward.toPrecision(4))}`), summary);
  }));

test("the API reference shows every operation", () =>
  visit(browser, server.url, "docs/", async (page) => {
    await page.waitForSelector(".opblock", { timeout: 20_000 });
    const document = await server.api("GET", "/openapi.json");
    const methods = ["get", "put", "post", "delete", "patch", "head"];
    const count = Object.values(document.paths).flatMap((path) => methods.filter((method) => method in path)).length;
    await page.waitForFunction((n) => document.querySelectorAll(".opblock").length >= n, count, { timeout: 20_000 });
    await page.locator(".opblock-post").filter({ has: page.locator('[data-path="/jobs"]') }).locator(".opblock-summary-control").click();
    await page.waitForSelector(".opblock-body");
    await page.screenshot({ path: `${SHOTS}/docs.png` });
  }, { allow: /404/ }));
