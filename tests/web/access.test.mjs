// Keys and webhooks: made, shown once, tested, revoked, as far as the key that signed in may.
import assert from "node:assert/strict";
import { createServer } from "node:http";
import { after, before, test } from "node:test";
import { makeJob, startBrowser, visit } from "./browser.mjs";
import { startServer } from "./server.mjs";

const OPERATOR = "rld_the_operators_key_of_this_test_0123456789";

let server, browser, received, receiver, known;
before(async () => {
  received = [];
  receiver = createServer(async (asked, reply) => {
    let body = "";
    for await (const part of asked) body += part;
    received.push({ headers: asked.headers, body: JSON.parse(body) });
    reply.writeHead(204).end();
  });
  await new Promise((done) => receiver.listen(0, "127.0.0.1", done));
  [server, browser] = await Promise.all([startServer({ env: { RLOOD_API_KEY: OPERATOR, RLOOD_MODEL_ROOT: process.env.RLOOD_ASSETS }, args: ["--allow-outgoing", "loopback"] }), startBrowser()]);
  known = (await server.api("GET", "/openapi.json")).paths;
});
after(() => Promise.all([server?.stop(), browser?.close(), new Promise((done) => receiver.close(done))]));

const signIn = async (page, key) => {
  await page.getByLabel("Key", { exact: true }).fill(key);
  await page.getByRole("button", { name: "Sign in" }).click();
  await page.getByRole("heading", { name: "Keys and webhooks" }).waitFor();
};
const open = (key, look) => visit(browser, server.url, "#/access", async (page) => {
  await signIn(page, key);
  await look(page);
  // The key is in no address and in no storage; the cookie is not for scripts.
  assert.deepEqual(await page.evaluate((key) => [location.href, document.cookie, JSON.stringify(localStorage), JSON.stringify(sessionStorage)].filter((text) => text.includes(key) || text.includes("rlood_session")), key), []);
}, { allow: /401|404/ });

const api = (method, path, body) => server.api(method, path, body, { authorization: `Bearer ${OPERATOR}` });

test("a key is made by keyboard, shown once, works, and is revoked", { timeout: 120_000 }, async (t) => {
  if (!known["/keys"] || !known["/session"]) return t.skip("this server has no keys over the API");
  let made;
  await open(OPERATOR, async (page) => {
    await page.getByRole("button", { name: "New key…" }).focus();
    await page.keyboard.press("Enter");
    await page.getByLabel("Name", { exact: true }).focus();
    await page.keyboard.type("<b>reader</b>");
    await page.getByRole("checkbox", { name: /^submit/ }).focus();
    await page.keyboard.press("Space");
    await page.getByRole("checkbox", { name: /^read/ }).focus();
    await page.keyboard.press("Space");
    await page.getByRole("button", { name: "Make the key" }).focus();
    await page.keyboard.press("Enter");
    await page.getByRole("heading", { name: "The new key" }).waitFor();
    made = (await page.locator("dialog pre").innerText()).trim();
    assert.match(made, /^rld_/);
    // To select it is not to close what shows it once.
    const [key, dialog] = await Promise.all(["dialog pre", "dialog"].map((one) => page.locator(one).boundingBox()));
    await page.mouse.move(key.x + 20, key.y + 10);
    await page.mouse.down();
    await page.mouse.move(dialog.x - 40, key.y + 10, { steps: 5 });
    await page.mouse.up();
    assert.ok(await page.getByRole("heading", { name: "The new key" }).isVisible());
    await page.getByRole("button", { name: "I have it" }).click();
    await page.getByRole("row", { name: /<b>reader<\/b>.*read.*✓ active/ }).waitFor();
    assert.ok(!(await page.locator("body").innerText()).includes(made), "it is shown once");
  });
  // It may look, and nothing else.
  await open(made, async (page) => {
    await page.getByText("Keys are kept by admins").waitFor();
    assert.equal(await page.getByRole("button", { name: /^New / }).count(), 0);
    assert.equal(await page.getByRole("link", { name: "New job" }).count(), 0);
  });
  await open(OPERATOR, async (page) => {
    await page.getByRole("button", { name: "Revoke the key <b>reader</b>" }).click();
    await page.getByRole("button", { name: "Revoke it" }).click();
    await page.getByRole("row", { name: /<b>reader<\/b>.*✕ revoked/ }).waitFor();
  });
  const refused = await fetch(`${server.url}/jobs`, { headers: { authorization: `Bearer ${made}` } });
  assert.equal(refused.status, 401);
});

test("who changed what stands there for admins, and can be searched", { timeout: 120_000 }, async () => {
  const { id } = await api("POST", "/keys", { name: "<i>changer</i>", scopes: ["submit"], owner: "somebody" });
  await open(OPERATOR, async (page) => {
    const changes = page.getByRole("region", { name: "Changes" });
    await changes.getByRole("row", { name: new RegExp(`operator POST /keys /keys/${id} 201`) }).waitFor();
    await page.getByLabel("Of", { exact: true }).fill(`/keys/${id}`);
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => document.querySelectorAll("[aria-label=Changes] tbody tr").length === 1);
    assert.match(new URL(page.url()).hash, /target=/);
    await page.getByLabel("By", { exact: true }).fill("nobody");
    await page.keyboard.press("Enter");
    await page.getByText("No change fits.").waitFor();
  });
});

test("a webhook is made, its test arrives signed, and it is switched off and deleted", { timeout: 120_000 }, async (t) => {
  if (!known["/webhooks"] || !known["/session"]) return t.skip("this server has no webhooks");
  await open(OPERATOR, async (page) => {
    await page.getByRole("button", { name: "New webhook…" }).click();
    await page.getByLabel("URL").fill(`http://127.0.0.1:${receiver.address().port}/hook`);
    await page.getByLabel("Description").fill("<img src=x onerror=alert(1)>");
    await page.getByRole("button", { name: "Make the webhook" }).click();
    await page.getByRole("heading", { name: "Its secret" }).waitFor();
    assert.match(await page.locator("dialog pre").innerText(), /^whsec_/);
    await page.getByRole("button", { name: "I have it" }).click();
    await page.getByRole("heading", { name: "<img src=x onerror=alert(1)>" }).waitFor();
    await page.getByRole("button", { name: "Send a test" }).click();
    await page.locator(".delivery").filter({ hasText: "✓ Delivered" }).waitFor({ timeout: 30_000 });
    assert.equal(received[0].body.type, "webhook.test");
    assert.match(received[0].headers["webhook-signature"], /^v1,/);
    // Another secret: shown once, and for an hour the old one signs too.
    await page.getByRole("button", { name: "New secret…" }).click();
    await page.getByLabel("The old one signs too").selectOption("3600");
    await page.getByRole("button", { name: "Make a new secret" }).click();
    await page.getByRole("heading", { name: "Its secret" }).waitFor();
    const renewed = (await page.locator("dialog pre").innerText()).trim();
    assert.match(renewed, /^whsec_/);
    await page.getByRole("button", { name: "I have it" }).click();
    await page.getByText("the old secret signs too until").waitFor();
    assert.ok(!(await page.locator("body").innerText()).includes(renewed), "it is shown once");
    await page.getByRole("button", { name: "Send a test" }).click();
    await page.waitForFunction(() => document.querySelectorAll(".delivery").length > 0);
    for (const end = Date.now() + 20_000; received.length < 2 && Date.now() < end; ) await new Promise((done) => setTimeout(done, 100));
    const { headers } = received[1];
    assert.equal(headers["webhook-signature"].split(" ").length, 2, "signed with both");
    await page.getByRole("button", { name: "Switch off" }).click();
    await page.getByText("Ⅱ off").waitFor();
    assert.equal((await api("GET", "/webhooks")).data[0].enabled, false);
    await page.getByRole("button", { name: "Delete…" }).click();
    await page.getByRole("button", { name: "Delete it" }).click();
    await page.getByText("None yet.").waitFor();
    assert.equal((await api("GET", "/webhooks")).data.length, 0);
  });
});

test("who signs in anew in another tab breaks nothing in this one", { timeout: 60_000 }, async (t) => {
  if (!known["/session"]) return t.skip("this server has no sessions");
  const job = await makeJob(server, { name: "two tabs", headers: { authorization: `Bearer ${OPERATOR}` } });
  await visit(browser, server.url, "#/access", async (page) => {
    await signIn(page, OPERATOR);
    await page.goto(`${server.url}/#/jobs/${job.id}`);
    await page.getByRole("button", { name: "Pause" }).waitFor();
    const other = await page.context().newPage();
    await other.goto(`${server.url}/#/access`);
    await other.getByRole("button", { name: "Sign out" }).click();
    await signIn(other, OPERATOR);
    await page.getByRole("button", { name: "Pause" }).click();
    await page.getByRole("button", { name: "Resume" }).waitFor();
    assert.equal(await page.locator(".problem").count(), 0);
  }, { allow: /401|403|404/ });
});
