// The first page of an empty server, and the API's pages.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { SHOTS, startBrowser, visit } from "./browser.mjs";
import { startServer } from "./server.mjs";

let server, browser;
before(async () => ([server, browser] = await Promise.all([startServer({ devices: "cpu" }), startBrowser()])));
after(() => Promise.all([server?.stop(), browser?.close()]));

test("an empty server greets, and its demo job is one click away", { timeout: 180_000 }, () =>
  visit(browser, server.url, "", async (page) => {
    await page.getByRole("heading", { name: "Nothing has been trained here yet" }).waitFor();
    await page.screenshot({ path: `${SHOTS}/first.png` });
    await page.getByRole("button", { name: "Run the demo job" }).click();
    await page.getByRole("heading", { name: "demo: sums" }).waitFor();
    await page.locator(".state.succeeded").waitFor({ timeout: 150_000 });
    // Live to the end: what the charts say is what the server has.
    const id = (await page.evaluate(() => location.hash)).split("/")[2];
    const { data } = await server.api("GET", `/jobs/${id}/metrics?keys=reward&min_step=40`);
    const words = await page.getByRole("img", { name: /^Reward\./ }).getAttribute("aria-label");
    assert.match(words, /reward: 40 values from step 1 to 40/);
    assert.ok(words.includes(`last ${Number(data[0].reward.toPrecision(4))}`), words);
  }));

test("the docs show every operation and the reward contract", () =>
  visit(browser, server.url, "docs/", async (page) => {
    await page.waitForSelector(".opblock", { timeout: 20_000 });
    const document = await server.api("GET", "/openapi.json");
    const methods = ["get", "put", "post", "delete", "patch", "head"];
    const count = Object.values(document.paths).flatMap((path) => methods.filter((method) => method in path)).length;
    await page.waitForFunction((n) => document.querySelectorAll(".opblock").length >= n, count, { timeout: 20_000 });
    await page.click("text=Submit a job");
    await page.waitForSelector(".opblock-body");
    await page.screenshot({ path: `${SHOTS}/docs.png` });
  }, { allow: /404/ }));
