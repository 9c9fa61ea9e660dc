// The chat: streamed answers of a checkpoint and of the base model, turns, errors, stopping, a model without a chat template, sessions, and
// no markup from model output.
import assert from "node:assert/strict";
import { cpSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { makeJob, startBrowser, visit } from "./browser.mjs";
import { CORPUS } from "./corpus.mjs";
import { finished, submit } from "./job.mjs";
import { startFront, startServer } from "./server.mjs";

const KEY = "rld_the_operators_key_of_this_test_0123456789";

let server, browser, front, job, checkpoints, answerOf;
before(async () => {
  [server, browser] = await Promise.all([startServer({ devices: "cpu" }), startBrowser()]);
  front = await startFront(server.url, (...given) => answerOf?.(...given) ?? false);
  job = await finished(server, await submit(server, { name: "chatted", steps: 6 }));
  checkpoints = (await server.api("GET", `/jobs/${job.id}/checkpoints`)).data;
}, { timeout: 300_000 });
after(() => Promise.all([server?.stop(), browser?.close(), front?.stop()]));

const openChat = (url, query, check, options) => visit(browser, url, `#/jobs/${job.id}/chat${query}`, check, { allow: /400|404|429/, ...options });
const message = (page) => page.getByLabel("Message", { exact: true });
const send = (page) => page.getByRole("button", { name: "Send" });
const answers = (page, turn) => page.getByRole("region", { name: `Turn ${turn}` }).getByRole("group", { name: "Answer" });
/** Waits until the answers of a turn are over, and returns their texts. */
async function answered(page, turn) {
  await page.getByRole("region", { name: `Turn ${turn}` }).waitFor();
  await send(page).waitFor({ timeout: 60_000 });
  return answers(page, turn).allInnerTexts();
}
/** Opens the chat behind `front`, whose chat completions `answer(body, response)` answers. */
async function withAnswers(answer, check, options) {
  answerOf = (request, body, response) => (request.url === "/v1/chat/completions" ? (answer(JSON.parse(body), response), true) : false);
  try {
    await openChat(front.url, "", check, options);
  } finally {
    answerOf = null;
  }
}
const startStream = (response) => response.writeHead(200, { "content-type": "text/event-stream" });
const chunk = (content, more = {}) => `data: ${JSON.stringify({ choices: [{ index: 0, delta: { content }, finish_reason: null, ...more }], usage: null })}\n\n`;
const END = `${chunk("", { finish_reason: "stop" })}data: [DONE]\n\n`;

test("by keyboard, both models answer several turns as the API does, each with its own answers before it", { timeout: 120_000 }, () =>
  visit(browser, server.url, `#/jobs/${job.id}/checkpoints`, async (page) => {
    await page.getByRole("link", { name: "Chat with this checkpoint" }).focus();
    await page.keyboard.press("Enter");
    await message(page).waitFor();
    assert.equal(new URL(page.url()).hash, `#/jobs/${job.id}/chat?checkpoint=${checkpoints[0].id}`);
    const [last, earlier] = checkpoints;
    await page.getByLabel("Checkpoint").selectOption(earlier.id);
    await page.waitForFunction((id) => location.hash.endsWith(id), earlier.id);
    await page.getByLabel("Temperature").fill("0");
    await page.getByLabel("Maximum tokens").fill("9");
    await page.getByText("System message").first().click();
    await page.getByLabel("System message").fill("Be brief.");
    assert.notEqual(last.id, earlier.id);
    const texts = ["What is 2 + 2?", "What is 3 + 4?"];
    const histories = ["rlood/tiny", earlier.id].map((model) => ({ model, messages: [{ role: "system", content: "Be brief." }] }));
    for (const [turn, text] of texts.entries()) {
      await message(page).focus();
      await page.keyboard.type(text);
      await page.keyboard.press("Enter");
      const shown = await answered(page, turn + 1);
      for (const [index, { model, messages }] of histories.entries()) {
        messages.push({ role: "user", content: text });
        const wanted = await server.api("POST", "/v1/chat/completions", { model, messages, temperature: 0, max_tokens: 9 });
        assert.equal(shown[index], wanted.choices[0].message.content || "(empty)", `${model}, turn ${turn}`);
        messages.push({ role: "assistant", content: wanted.choices[0].message.content });
      }
      assert.equal(await message(page).inputValue(), "");
    }
    assert.deepEqual(await page.locator("article h3").allInnerTexts(), Array(2).fill(["Base model rlood/tiny", `Step ${earlier.step} checkpoint`]).flat());
    // Without the base model, the checkpoint answers alone; Shift+Enter starts a new line.
    await page.getByLabel("Base model beside it").uncheck();
    await message(page).focus();
    await page.keyboard.type("What is");
    await page.keyboard.press("Shift+Enter");
    await page.keyboard.type("1 + 1?");
    await send(page).click();
    assert.equal((await answered(page, 3)).length, 1);
    assert.equal(await page.locator(".said").last().innerText(), "What is\n1 + 1?");
    await page.getByRole("button", { name: "New chat" }).click();
    assert.equal(await page.locator("article").count(), 0);
  }, { allow: /404/ }));

test("the settings are sent, and the log-probabilities of the tokens are those of the API", { timeout: 120_000 }, () =>
  openChat(server.url, "", async (page) => {
    const bodies = [];
    page.on("request", (request) => request.url().endsWith("/v1/chat/completions") && bodies.push(request.postDataJSON()));
    await page.getByLabel("Log-probabilities of tokens").check();
    await page.getByLabel("Temperature").fill("1.5");
    await page.getByLabel("Seed").fill("7");
    await message(page).fill("What is 2 + 5?");
    await send(page).click();
    await answered(page, 1);
    const model = checkpoints[0].id;
    const body = bodies.find((body) => body.model === model);
    const { max_completion_length: most } = job.plan.sampling;
    assert.deepEqual(body, { model, temperature: 1.5, max_tokens: most, seed: 7, messages: [{ role: "user", content: "What is 2 + 5?" }], logprobs: true, stream: true, stream_options: { include_usage: true } });
    const { choices } = await server.api("POST", "/v1/chat/completions", { ...body, stream: false, stream_options: undefined });
    const titles = await answers(page, 1).last().locator(".token").evaluateAll((all) => all.map(({ title }) => title));
    const shown = titles.join("\n").split("\n").map((line) => [JSON.parse(line.match(/^"(?:[^"\\]|\\.)*"/)[0]), Number(line.match(/: (\S+) nats/)[1])]);
    assert.deepEqual(shown.map(([token]) => token), choices[0].logprobs.content.map(({ token }) => token));
    shown.forEach(([, logprob], index) => assert.ok(Math.abs(logprob - choices[0].logprobs.content[index].logprob) < 1e-3 * Math.max(1, Math.abs(logprob))));
  }));

test("an error shows its text, at its field and in the answer, and the message can be sent again", { timeout: 120_000 }, () =>
  openChat(server.url, "", async (page) => {
    const temperature = page.getByLabel("Temperature");
    await temperature.fill("-1");
    await message(page).fill("What is 2 + 2?");
    await send(page).click();
    await page.getByRole("alert").getByText("temperature is -1: must be from 0 to 2").first().waitFor();
    await page.waitForFunction(() => document.querySelector("[aria-invalid=true]"));
    assert.equal(await temperature.getAttribute("aria-invalid"), "true");
    assert.equal(await message(page).inputValue(), "What is 2 + 2?");
    await temperature.fill("0");
    await send(page).click();
    await page.waitForFunction(() => !document.querySelector(".problem"));
    // The failed turn is gone, and the answers are those without it.
    const shown = await answered(page, 1);
    const { choices } = await server.api("POST", "/v1/chat/completions", { model: checkpoints[0].id, messages: [{ role: "user", content: "What is 2 + 2?" }], temperature: 0, max_tokens: 6 });
    assert.equal(shown[1], choices[0].message.content || "(empty)");
    await page.getByLabel("Maximum tokens").fill("5000");
    await message(page).fill("And 2 + 3?");
    await send(page).click();
    await page.getByText(/maximum context length is 128 tokens/).first().waitFor();
  }));

test("the text appears while it is generated, and Stop aborts the requests of both models", { timeout: 120_000 }, async () => {
  const open = [];
  await withAnswers((body, response) => {
    startStream(response).write(chunk("", { delta: { role: "assistant", content: "" } }));
    open.push({ body, response, closed: new Promise((done) => response.on("close", () => done(!response.writableEnded))) });
  }, async (page) => {
    await message(page).fill("Count.");
    await send(page).click();
    await page.getByRole("button", { name: "Answering…" }).waitFor();
    while (open.length < 2) await page.waitForTimeout(20);
    // A character whose bytes arrive in two pieces, and a line that does.
    const bytes = Buffer.from(chunk("öne"));
    const cut = bytes.indexOf(0xc3) + 1;
    open[0].response.write(bytes.subarray(0, cut));
    await page.waitForTimeout(50);
    open[0].response.write(bytes.subarray(cut));
    const [first] = await answers(page, 1).all();
    await page.waitForFunction(() => document.querySelector("article .text").textContent === "öne");
    open[0].response.write(chunk(", two"));
    await page.waitForFunction(() => document.querySelector("article .text").textContent === "öne, two");
    await page.getByRole("button", { name: "Stop" }).click();
    assert.deepEqual(await Promise.all(open.map(({ closed }) => closed)), [true, true]);
    await send(page).waitFor();
    assert.equal(await first.innerText(), "öne, two");
    assert.equal(await page.getByText("stopped").count(), 2);
    assert.equal(await page.locator(".problem").count(), 0);
    // The stopped text is part of the conversation of the model that wrote it.
    await message(page).fill("Go on.");
    await send(page).click();
    while (open.length < 4) await page.waitForTimeout(20);
    const messages = Object.fromEntries(open.slice(2).map(({ body }) => [body.model, body.messages.map(({ content }) => content)]));
    assert.deepEqual(messages, { "rlood/tiny": ["Count.", "öne, two", "Go on."], [checkpoints[0].id]: ["Go on."] });
    // Leaving the page aborts too.
    await page.getByRole("link", { name: "Samples" }).click();
    assert.deepEqual(await Promise.all(open.slice(2).map(({ closed }) => closed)), [true, true]);
  });
});

test("errors of a full server, inside a stream and of a lost connection show their text", { timeout: 120_000 }, async () => {
  const error = (message, code) => ({ error: { message, type: "server_error", param: null, code } });
  const full = (response) => response.writeHead(429, { "content-type": "application/json", "retry-after": "1" }).end(JSON.stringify(error("256 answers are being generated; try again", "rate_limit_exceeded")));
  const failing = (response) => startStream(response).end(`${chunk("half")}data: ${JSON.stringify(error("the process that generates ended", "generation_failed"))}\n\n`);
  const cut = (response) => startStream(response).write(chunk("a part"), () => setTimeout(() => response.destroy(), 200));
  let how = full;
  await withAnswers((body, response) => (body.model === "rlood/tiny" ? startStream(response).end(chunk("fine") + END) : how(response)), async (page) => {
    const expect = async (next, text, kept) => {
      how = next;
      await message(page).fill("Hello");
      await send(page).click();
      const problem = page.getByRole("alert").last();
      await problem.getByText(text).waitFor();
      assert.equal(await page.locator("article").last().locator(".text").innerText(), kept);
      assert.equal(await page.locator("article").nth(-2).locator(".text").innerText(), "fine");
    };
    await expect(full, "256 answers are being generated; try again", "");
    await expect(failing, "the process that generates ended", "half");
    await expect(cut, "The connection ended before the answer was complete.", "a part");
  }, { allow: /404|429|ERR_INCOMPLETE_CHUNKED_ENCODING/ });
});

test("answers are shown as text, never as markup, with and without log-probabilities", { timeout: 120_000 }, async () => {
  const logprobs = (token) => ({ logprobs: { content: [{ token, logprob: -0.5, bytes: [], top_logprobs: [] }] } });
  await withAnswers((body, response) => startStream(response).end(CORPUS.map((text) => chunk(text, body.logprobs ? logprobs(text) : {})).join("") + END), async (page) => {
    const ran = [];
    await page.exposeFunction("pwned", (what) => ran.push(what));
    page.on("dialog", (dialog) => (ran.push(dialog.message()), dialog.dismiss()));
    for (const turn of [1, 2]) {
      await message(page).fill(CORPUS[turn]);
      await send(page).click();
      await answered(page, turn);
      assert.deepEqual(await answers(page, turn).evaluateAll((all) => all.map((element) => element.textContent)), Array(2).fill(CORPUS.join("")));
      await page.getByLabel("Log-probabilities of tokens").check();
    }
    assert.equal(await answers(page, 2).first().locator(".token").count(), CORPUS.length);
    await page.waitForTimeout(300);
    assert.equal(await page.locator("main script, main img, main iframe, main style, main svg").count(), 0);
    assert.deepEqual(ran, []);
  });
});

test("a model without a chat template gets plain text, and the page says so", { timeout: 180_000 }, async () => {
  const folder = mkdtempSync(join(tmpdir(), "rlood-plain-"));
  const plain = await startServer({ devices: "cpu" });
  try {
    cpSync(`${process.env.RLOOD_ASSETS}/tiny`, folder, { recursive: true });
    const config = join(folder, "tokenizer_config.json");
    writeFileSync(config, JSON.stringify({ ...JSON.parse(readFileSync(config)), chat_template: undefined }));
    await plain.api("POST", "/models", { id: "rlood/plain", source: folder });
    const rows = [1, 2, 3].map((n) => ({ prompt: `${n} + 1 =`, answer: `${n + 1}` }));
    const trained = await finished(plain, await submit(plain, { name: "plain", steps: 2, rows, more: { model: "rlood/plain" } }));
    const [{ id }] = (await plain.api("GET", `/jobs/${trained.id}/checkpoints`)).data;
    await visit(browser, plain.url, `#/jobs/${trained.id}/chat`, async (page) => {
      await page.getByText(/This model has no chat template/).waitFor();
      assert.equal(await page.getByText("System message").count(), 0);
      await page.getByLabel("Temperature").fill("0");
      const prompts = ["", ""];
      for (const [turn, text] of ["4 + 1 =", "5 + 1 ="].entries()) {
        await message(page).fill(text);
        await send(page).click();
        const shown = await answered(page, turn + 1);
        for (const [index, model] of ["rlood/plain", id].entries()) {
          const prompt = prompts[index] + text;
          const { choices } = await plain.api("POST", "/v1/completions", { model, prompt, temperature: 0, max_tokens: 6 });
          assert.equal(shown[index], choices[0].text || "(empty)", `${model}: ${prompt}`);
          prompts[index] = `${prompt}${choices[0].text}\n`;
        }
      }
      await page.getByRole("link", { name: "Checkpoints" }).click();
      await page.getByLabel("openai", { exact: true }).waitFor();
      await page.waitForFunction(() => /client\.completions\.create\([^]*prompt="Hello"/.test(document.querySelector('[aria-label="openai"]').textContent));
    }, { allow: /404/ });
  } finally {
    await plain.stop();
    rmSync(folder, { recursive: true, force: true });
  }
});

test("a session with a key can chat, and one with a read-only key is told why not", { timeout: 180_000 }, async () => {
  const locked = await startServer({ devices: "cpu", env: { RLOOD_API_KEY: KEY, RLOOD_MODEL_ROOT: process.env.RLOOD_ASSETS } });
  const apiOf = (key) => (method, path, body) => locked.api(method, path, body, { authorization: `Bearer ${key}` });
  try {
    await apiOf(KEY)("POST", "/models", { id: "rlood/tiny", source: `${process.env.RLOOD_ASSETS}/tiny` });
    const create = async (name, ...scopes) => (await apiOf(KEY)("POST", "/keys", { name, scopes, owner: "team" })).key;
    const [writer, reader] = [await create("writer", "read", "submit"), await create("reader", "read")];
    const api = apiOf(writer);
    const { id } = await finished({ api }, await submit({ api }, { name: "locked", steps: 2 }));
    const open = (key, check) => visit(browser, locked.url, `#/jobs/${id}/chat`, async (page) => {
      await page.getByLabel("API key", { exact: true }).fill(key);
      await page.getByRole("button", { name: "Sign in" }).click();
      await check(page);
    }, { allow: /401|404/ });
    await open(writer, async (page) => {
      await message(page).fill("What is 2 + 2?");
      const [request] = await Promise.all([page.waitForRequest("**/v1/chat/completions"), send(page).click()]);
      assert.ok(request.headers()["x-csrf-token"]);
      await answered(page, 1);
      assert.equal(await page.locator(".problem").count(), 0);
      assert.equal(await page.getByText("tokens · ").count() + await page.getByText("token · ").count(), 2);
      await page.getByRole("link", { name: "Checkpoints" }).click();
      assert.match(await page.getByLabel("openai", { exact: true }).innerText(), /api_key=os\.environ\["RLOOD_API_KEY"\]/);
    });
    await open(reader, (page) => page.getByText(/Your API key is read-only. To chat, sign in/).waitFor());
  } finally {
    await locked.stop();
  }
});

test("the chat of a job without a checkpoint says so", { timeout: 60_000 }, async () => {
  const idle = await startServer();
  try {
    const queued = await makeJob(idle);
    await visit(browser, idle.url, `#/jobs/${queued.id}/chat`, (page) => page.getByRole("heading", { name: "No checkpoint yet" }).waitFor(), { allow: /404/ });
  } finally {
    await idle.stop();
  }
});
