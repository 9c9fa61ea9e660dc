// Keys and webhooks: creating, showing secrets once, testing and revoking, within the scopes of the session.
import assert from "node:assert/strict";
import { createServer } from "node:http";
import { after, before, test } from "node:test";
import { makeJob, startBrowser, visit } from "./browser.mjs";
import { startServer } from "./server.mjs";

const OPERATOR = "rld_the_operators_key_of_this_test_0123456789";

let server, browser, received, receiver, paths;
before(async () => {
  received = [];
  receiver = createServer(async (request, response) => {
    let body = "";
    for await (const chunk of request) body += chunk;
    received.push({ headers: request.headers, body: JSON.parse(body) });
    response.writeHead(204).end();
  });
  await new Promise((done) => receiver.listen(0, "127.0.0.1", done));
  [server, browser] = await Promise.all([startServer({ env: { RLOOD_API_KEY: OPERATOR, RLOOD_MODEL_ROOT: process.env.RLOOD_ASSETS }, args: ["--allow-outgoing", "loopback"] }), startBrowser()]);
  ({ paths } = await server.api("GET", "/openapi.json"));
});
after(() => Promise.all([server?.stop(), browser?.close(), new Promise((done) => receiver.close(done))]));

const signIn = async (page, key) => {
  await page.getByLabel("API key", { exact: true }).fill(key);
  await page.getByRole("button", { name: "Sign in" }).click();
  await page.getByRole("heading", { name: "Keys and webhooks" }).waitFor();
};
const openAccessPage = (key, check) => visit(browser, server.url, "#/access", async (page) => {
  await signIn(page, key);
  await check(page);
  // The key must not be in the address or in storage, and scripts must not see the cookie.
  assert.deepEqual(await page.evaluate((key) => [location.href, document.cookie, JSON.stringify(localStorage), JSON.stringify(sessionStorage)].filter((text) => text.includes(key) || text.includes("rlood_session")), key), []);
}, { allow: /401|404/ });

const api = (method, path, body) => server.api(method, path, body, { authorization: `Bearer ${OPERATOR}` });

test("a key is created by keyboard, shown once, works, and is revoked", { timeout: 120_000 }, async (t) => {
  if (!paths["/keys"] || !paths["/session"]) return t.skip("this server cannot create keys over the API");
  let newKey;
  await openAccessPage(OPERATOR, async (page) => {
    await page.getByRole("button", { name: "New key…" }).focus();
    await page.keyboard.press("Enter");
    await page.getByLabel("Name", { exact: true }).focus();
    await page.keyboard.type("<b>reader</b>");
    await page.getByRole("checkbox", { name: /^submit/ }).focus();
    await page.keyboard.press("Space");
    await page.getByRole("checkbox", { name: /^read/ }).focus();
    await page.keyboard.press("Space");
    await page.getByRole("button", { name: "Create key" }).focus();
    await page.keyboard.press("Enter");
    await page.getByRole("heading", { name: "Key created" }).waitFor();
    newKey = (await page.locator("dialog pre").innerText()).trim();
    assert.match(newKey, /^rld_/);
    // Selecting the key with a drag that ends outside must not close the dialog, which shows the key only once.
    const [key, dialog] = await Promise.all(["dialog pre", "dialog"].map((one) => page.locator(one).boundingBox()));
    await page.mouse.move(key.x + 20, key.y + 10);
    await page.mouse.down();
    await page.mouse.move(dialog.x - 40, key.y + 10, { steps: 5 });
    await page.mouse.up();
    assert.ok(await page.getByRole("heading", { name: "Key created" }).isVisible());
    await page.getByRole("button", { name: "Done" }).click();
    await page.getByRole("row", { name: /<b>reader<\/b>.*read.*✓ active/ }).waitFor();
    assert.ok(!(await page.locator("body").innerText()).includes(newKey), "the key is shown more than once");
  });
  // A session with the scope "read" has no buttons that change anything.
  await openAccessPage(newKey, async (page) => {
    await page.getByText("To manage keys, sign in").waitFor();
    assert.equal(await page.getByRole("button", { name: /^New / }).count(), 0);
    assert.equal(await page.getByRole("link", { name: "New job" }).count(), 0);
  });
  await openAccessPage(OPERATOR, async (page) => {
    await page.getByRole("button", { name: "Revoke the key <b>reader</b>" }).click();
    await page.getByRole("button", { name: "Revoke key" }).click();
    await page.getByRole("row", { name: /<b>reader<\/b>.*✕ revoked/ }).waitFor();
  });
  const response = await fetch(`${server.url}/jobs`, { headers: { authorization: `Bearer ${newKey}` } });
  assert.equal(response.status, 401);
});

test("the audit log is shown to admins and can be filtered", { timeout: 120_000 }, async () => {
  const { id } = await api("POST", "/keys", { name: "<i>changer</i>", scopes: ["submit"], owner: "team-a" });
  await openAccessPage(OPERATOR, async (page) => {
    const entries = page.getByRole("region", { name: "Audit log" });
    await entries.getByRole("row", { name: new RegExp(`operator POST /keys /keys/${id} 201`) }).waitFor();
    await page.getByLabel("Target", { exact: true }).fill(`/keys/${id}`);
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => document.querySelectorAll("[aria-label='Audit log'] tbody tr").length === 1);
    assert.match(new URL(page.url()).hash, /target=/);
    await page.getByLabel("Actor", { exact: true }).fill("unknown");
    await page.keyboard.press("Enter");
    await page.getByText("No matching entries.").waitFor();
  });
});

test("a webhook is created, receives a signed test, and is disabled and deleted", { timeout: 120_000 }, async (t) => {
  if (!paths["/webhooks"] || !paths["/session"]) return t.skip("this server has no webhooks");
  await openAccessPage(OPERATOR, async (page) => {
    await page.getByRole("button", { name: "New webhook…" }).click();
    await page.getByLabel("URL").fill(`http://127.0.0.1:${receiver.address().port}/hook`);
    await page.getByLabel("Description").fill("<img src=x onerror=alert(1)>");
    await page.getByRole("button", { name: "Create webhook" }).click();
    await page.getByRole("heading", { name: "Webhook secret" }).waitFor();
    assert.match(await page.locator("dialog pre").innerText(), /^whsec_/);
    await page.getByRole("button", { name: "Done" }).click();
    await page.getByRole("heading", { name: "<img src=x onerror=alert(1)>" }).waitFor();
    await page.getByRole("button", { name: "Send test" }).click();
    await page.locator(".delivery").filter({ hasText: "✓ Delivered" }).waitFor({ timeout: 30_000 });
    assert.equal(received[0].body.type, "webhook.test");
    assert.match(received[0].headers["webhook-signature"], /^v1,/);
    // Rotate the secret: the new one is shown once, and messages are signed with both for an hour.
    await page.getByRole("button", { name: "Rotate secret…" }).click();
    await page.getByLabel("Keep the old secret valid for").selectOption("3600");
    await page.getByRole("button", { name: "Create new secret" }).click();
    await page.getByRole("heading", { name: "Webhook secret" }).waitFor();
    const newSecret = (await page.locator("dialog pre").innerText()).trim();
    assert.match(newSecret, /^whsec_/);
    await page.getByRole("button", { name: "Done" }).click();
    await page.getByText("old secret valid until").waitFor();
    assert.ok(!(await page.locator("body").innerText()).includes(newSecret), "the secret is shown more than once");
    await page.getByRole("button", { name: "Send test" }).click();
    await page.waitForFunction(() => document.querySelectorAll(".delivery").length > 0);
    for (const end = Date.now() + 20_000; received.length < 2 && Date.now() < end; ) await new Promise((done) => setTimeout(done, 100));
    const { headers } = received[1];
    assert.equal(headers["webhook-signature"].split(" ").length, 2, "the message is not signed with both secrets");
    await page.getByRole("button", { name: "Disable" }).click();
    await page.getByText("Ⅱ disabled").waitFor();
    assert.equal((await api("GET", "/webhooks")).data[0].enabled, false);
    await page.getByRole("button", { name: "Delete…" }).click();
    await page.getByRole("button", { name: "Delete webhook" }).click();
    await page.getByText("No webhooks yet.").waitFor();
    assert.equal((await api("GET", "/webhooks")).data.length, 0);
  });
});

test("signing in again in another tab does not break this one", { timeout: 60_000 }, async (t) => {
  if (!paths["/session"]) return t.skip("this server has no sessions");
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
