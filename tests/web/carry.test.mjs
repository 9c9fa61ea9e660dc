// Carrying a checkpoint away: pushes to a hub with progress, its certificate, and lines to copy that work.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { after, before, test } from "node:test";
import { startBrowser, visit } from "./browser.mjs";
import { CORPUS } from "./corpus.mjs";
import { finished, submit } from "./job.mjs";
import { startPushHub, WRITE_TOKEN } from "./push-hub.mjs";
import { startFront, startServer } from "./server.mjs";

let server, browser, hub, job, checkpoint, certificate;
before(async () => {
  hub = await startPushHub();
  [server, browser] = await Promise.all([startServer({ devices: "cpu", env: { HF_ENDPOINT: hub.url, HF_HUB_OFFLINE: "0" } }), startBrowser()]);
  job = await finished(server, await submit(server, { name: "Carried away", steps: 4, more: { checkpoints: { every_steps: 2, keep_last: 3 } } }));
  [checkpoint] = (await server.api("GET", `/jobs/${job.id}/checkpoints`)).data;
  certificate = await server.api("GET", `/checkpoints/${checkpoint.id}/certificate`);
}, { timeout: 300_000 });
after(() => Promise.all([server?.stop(), browser?.close(), hub?.stop()]));

const openCheckpoint = (check, { url = server.url, ...options } = {}) => visit(browser, url, `#/jobs/${job.id}/checkpoints`, async (page) => {
  await page.getByRole("heading", { name: `Step ${checkpoint.step}` }).waitFor();
  await check(page);
}, { allow: /404|422|429/, ...options });
const panelOf = (page, name) => page.getByRole("region", { name, exact: true });
const push = (panel) => panel.getByRole("button", { name: "Push", exact: true });
const latest = (panel) => panel.locator(".files > li").first();
const serverFile = async (name) => Buffer.from(await (await fetch(`${server.url}/checkpoints/${checkpoint.id}/files/${name}`)).arrayBuffer());

test("a push is started, shows its progress, is cancelled, and is completed when it is started again", { timeout: 120_000 }, () =>
  openCheckpoint(async (page) => {
    const panel = panelOf(page, "Pushes");
    const token = panel.getByLabel("Hugging Face token");
    hub.hold(true);
    await panel.getByLabel("Repository", { exact: true }).fill("ann/sums");
    await token.fill(WRITE_TOKEN);
    await push(panel).click();
    await latest(panel).getByText("Uploading").waitFor();
    await panel.getByRole("progressbar", { name: "Progress of the push" }).waitFor();
    assert.match(await latest(panel).innerText(), /^Adapter to ann\/sums running[^]*\d (B|KiB) of \d+ KiB/);
    assert.equal(await token.inputValue(), "");
    await panel.getByRole("button", { name: "Cancel the push to ann/sums" }).click();
    await latest(panel).getByText("cancelled").waitFor();
    hub.hold(false);
    assert.equal(hub.repos.get("ann/sums").files.size, 0);

    await panel.getByLabel("Show prompts and completions on the model card").check();
    await token.fill(WRITE_TOKEN);
    await push(panel).click();
    const link = latest(panel).getByRole("link", { name: "ann/sums" });
    await link.waitFor({ timeout: 30_000 });
    assert.equal(await link.getAttribute("href"), `${hub.url}/ann/sums`);
    assert.match(await latest(panel).innerText(), /succeeded/);
    const { private: isPrivate, files } = hub.repos.get("ann/sums");
    assert.equal(isPrivate, true);
    assert.ok(files.get("adapter_model.safetensors").equals(await serverFile("adapter_model.safetensors")));
    assert.match(files.get("README.md").toString(), /## Samples/);
    const kept = () => [location.href, document.documentElement.outerHTML, JSON.stringify(localStorage), JSON.stringify(sessionStorage)].join("\n");
    assert.ok(!(await page.evaluate(kept)).includes(WRITE_TOKEN), "the page keeps the token");
  }));

test("a merged model is pushed to a public repository, and a repeated push says that nothing changed", { timeout: 120_000 }, () =>
  openCheckpoint(async (page) => {
    const panel = panelOf(page, "Pushes");
    await panel.getByLabel("Repository", { exact: true }).fill("ann/merged");
    await panel.getByLabel("Files to push").selectOption("merged");
    await panel.getByLabel("Create the repository as private").uncheck();
    for (const text of [/^Merged model to ann\/merged succeeded$/, /already/]) {
      await panel.getByLabel("Hugging Face token").fill(WRITE_TOKEN);
      await push(panel).click();
      await latest(panel).filter({ hasText: text }).waitFor({ timeout: 60_000 });
    }
    await latest(panel).getByText("The repository has these files already.").waitFor();
    const { private: isPrivate, files } = hub.repos.get("ann/merged");
    assert.equal(isPrivate, false);
    assert.ok(files.has("model.safetensors") && files.has("tokenizer.json") && !files.has("adapter_model.safetensors"));
  }));

test("the errors of a push show their text, at their field and in the list", { timeout: 120_000 }, () =>
  openCheckpoint(async (page) => {
    const panel = panelOf(page, "Pushes");
    const repo = panel.getByLabel("Repository", { exact: true });
    await repo.fill("not a name");
    await panel.getByLabel("Hugging Face token").fill(WRITE_TOKEN);
    await push(panel).click();
    await page.waitForFunction(() => document.querySelector('[aria-label="Pushes"] [aria-invalid=true]'));
    assert.equal(await repo.getAttribute("aria-invalid"), "true");
    await repo.fill("bob/sums");
    await push(panel).click();
    await latest(panel).getByText("failed").waitFor({ timeout: 30_000 });
    assert.match(await latest(panel).locator(".bad").innerText(), /bob\/sums/);
    // Without a token, the server's own one is missing too.
    await repo.fill("ann/other");
    await panel.getByLabel("Hugging Face token").fill("");
    await push(panel).click();
    await panel.getByRole("alert").getByText(/token/).first().waitFor();
  }));

test("the certificate shows effect, precision and prompts, and the command that checks a server", { timeout: 60_000 }, () =>
  openCheckpoint(async (page) => {
    const panel = panelOf(page, "Certificate");
    const { effect, dtype, prompts } = certificate;
    await panel.getByText("Effect", { exact: true }).first().waitFor();
    const facts = await panel.locator(".stats").innerText();
    const round = (value) => Number(value.toPrecision(4));
    assert.match(facts, new RegExp(`Effect\\s+${round(effect.rms_nats)} nats\\s+root mean square of ${effect.num_tokens} tokens`));
    assert.match(facts, new RegExp(`Largest difference\\s+${round(effect.max_nats)} nats`));
    assert.match(facts, new RegExp(`Precision\\s+${dtype}\\s+Base model\\s+rlood/tiny`));
    await panel.getByText(`${prompts.length} prompts on which base model and checkpoint differ most`).click();
    const rows = await panel.locator("tbody tr").evaluateAll((rows) => rows.map((row) => [...row.cells].map((cell) => cell.textContent)));
    const largest = ({ base, trained }) => Math.max(...trained.map((logprob, index) => Math.abs(logprob - base[index])));
    const shown = ([text, continuation, , difference]) => [text, continuation, Number(difference)];
    assert.deepEqual(rows.map(shown), prompts.map((one) => [one.text, one.continuation.join(""), round(largest(one))]));
    const token = panel.locator(".token").first();
    assert.match(await token.getAttribute("title"), /: base model -[\d.e-]+, checkpoint -[\d.e-]+ nats$/);
    const command = await panel.getByLabel("Verify", { exact: true }).innerText();
    assert.equal(command, `rlood verify ${checkpoint.id} --url http://127.0.0.1:8000/v1 --model carried-away-step${checkpoint.step} --server ${server.url}`);
    // The command works against this server, under the name that the checkpoint has here.
    const [, ...words] = command.split(" ");
    const given = words.map((word) => ({ "http://127.0.0.1:8000/v1": `${server.url}/v1`, [`carried-away-step${checkpoint.step}`]: checkpoint.id })[word] ?? word);
    assert.match(execFileSync(process.env.RLOOD, given, { encoding: "utf8" }), /equal/);
  }));

test("a checkpoint without a certificate has a button that computes it", { timeout: 60_000 }, async () => {
  let isRefused = true;
  const front = await startFront(server.url, (request, body, response) => {
    const { pathname } = new URL(request.url, server.url);
    const answer = (status, document) => (response.writeHead(status, { "content-type": "application/json" }).end(JSON.stringify(document)), true);
    if (pathname === `/jobs/${job.id}/checkpoints`) return answer(200, { data: [{ ...checkpoint, files: checkpoint.files.filter(({ name }) => name !== "certificate.json") }], next: null });
    if (pathname !== `/checkpoints/${checkpoint.id}/certificate` || !isRefused) return false;
    isRefused = false;
    return answer(429, { title: "Too many requests", detail: "another certificate is being computed", code: "too_many_requests", errors: [] });
  });
  try {
    await openCheckpoint(async (page) => {
      const panel = panelOf(page, "Certificate");
      await panel.getByRole("button", { name: "Compute" }).click();
      await panel.getByText("another certificate is being computed").waitFor();
      await panel.getByRole("button", { name: "Compute" }).click();
      await panel.locator(".stats").waitFor();
      await panel.getByRole("link", { name: "certificate.json" }).waitFor();
    }, { url: front.url });
  } finally {
    await front.stop();
  }
});

test("texts of certificates and of the hub are shown as text, and only web addresses become links", { timeout: 60_000 }, async () => {
  const push = { id: "psh_1", repo: "ann/x", format: "adapter", state: "succeeded", stage: null, progress: { done: 1, total: 1 }, url: "javascript:window.pwned(1)", is_new: true, error: null };
  const failed = CORPUS.map((message, index) => ({ ...push, id: `psh_x${index}`, state: "failed", url: null, error: { code: "hub", message } }));
  const [first] = certificate.prompts;
  const prompts = CORPUS.map((text) => ({ ...first, text, continuation: first.continuation.map(() => text) }));
  await openCheckpoint(async (page) => {
    const ran = [];
    await page.exposeFunction("pwned", (what) => ran.push(what));
    const answer = (body) => (route) => route.fulfill({ status: 200, contentType: "application/json", body: JSON.stringify(body) });
    await page.route("**/pushes", answer({ data: [push, ...failed], next: null }));
    await page.route("**/certificate", answer({ ...certificate, prompts }));
    await page.reload();
    await panelOf(page, "Certificate").getByText(/prompts on which/).click();
    const texts = await panelOf(page, "Certificate").locator("tbody td:first-child").evaluateAll((all) => all.map((cell) => cell.textContent));
    assert.deepEqual(texts, CORPUS);
    const errors = await panelOf(page, "Pushes").locator(".bad").evaluateAll((all) => all.map((element) => element.firstChild.textContent));
    assert.deepEqual(errors.map((text) => text.trim()), CORPUS.map((text) => text.trim()));
    assert.equal(await panelOf(page, "Pushes").getByRole("link").count(), 0);
    assert.equal(await page.locator("main script, main img, main iframe, main style, main svg").count(), 0);
    assert.deepEqual(ran, []);
  });
});

test("each line is copied as it is shown, and the copied lines work", { timeout: 120_000 }, () =>
  openCheckpoint(async (page) => {
    const copied = {};
    for (const name of ["Download", "openai", "curl", "rlood", "vLLM", "transformers", "PEFT", "llama.cpp"]) {
      if (name !== "Download") await page.getByRole("group", { name: "Program" }).getByRole("button", { name, exact: true }).click();
      const block = page.locator(".code").filter({ has: page.getByLabel(name, { exact: true }) });
      await block.getByRole("button", { name: "Copy" }).click();
      await block.getByRole("button", { name: "Copied" }).waitFor();
      copied[name] = await page.evaluate(() => navigator.clipboard.readText());
      assert.equal(copied[name], await block.locator("pre").evaluate((element) => element.textContent), name);
    }
    const folder = mkdtempSync(join(tmpdir(), "rlood-carry-"));
    const env = { ...process.env, PATH: `${dirname(process.env.RLOOD)}:${process.env.PATH}` };
    const shell = (command) => execFileSync("bash", ["-euo", "pipefail", "-c", command], { cwd: folder, env, encoding: "utf8", stdio: ["ignore", "pipe", "pipe"] });
    try {
      const answer = JSON.parse(shell(copied.curl));
      const { choices } = await server.api("POST", "/v1/chat/completions", { model: checkpoint.id, messages: [{ role: "user", content: "Hello" }], max_tokens: 6 });
      assert.deepEqual([answer.model, answer.choices.length], [checkpoint.id, choices.length]);
      const weights = await serverFile("adapter_model.safetensors");
      const read = () => readFileSync(join(folder, `carried-away-step${checkpoint.step}`, "adapter_model.safetensors"));
      shell(copied.Download);
      assert.ok(read().equals(weights));
      rmSync(join(folder, `carried-away-step${checkpoint.step}`), { recursive: true });
      shell(copied.rlood);
      assert.ok(read().equals(weights));
      shell(copied["llama.cpp"].split("\n")[0]);
      assert.equal(readFileSync(join(folder, `carried-away-step${checkpoint.step}-gguf`, "adapter.gguf")).subarray(0, 4).toString(), "GGUF");
    } finally {
      rmSync(folder, { recursive: true, force: true });
    }
    assert.match(copied.openai, new RegExp(`base_url="${server.url}/v1"[^]*model="${checkpoint.id}"[^]*max_tokens=6`));
    assert.match(copied.vLLM, new RegExp(`^rlood pull ${checkpoint.id} -o (\\S+) [^]*vllm serve rlood/tiny --enable-lora --max-lora-rank 16 --lora-modules \\1=\\./\\1\n[^]*"model":"\\1"`));
    assert.match(copied.transformers, /load_adapter\("carried-away-step4"\)/);
  }, { permissions: ["clipboard-read", "clipboard-write"] }));
