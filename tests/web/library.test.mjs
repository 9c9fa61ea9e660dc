// The page of models and datasets: mapping a CSV file to prompts, empty states, and errors of the hub.
import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer } from "node:http";
import { after, before, test } from "node:test";
import { SHOTS, startBrowser, visit } from "./browser.mjs";
import { startServer } from "./server.mjs";

const CSV = "question,solution,level\nWhat is 2 + 2?,4,1\nWhat is 3 + 4?,7,2\n\"What is 10,000 + 1?\",\"10,001\",3\n";

let server, browser, hub;
before(async () => {
  // A hub without any repositories.
  hub = createServer((request, response) => response.writeHead(401, { "x-error-code": "RepoNotFound" }).end()).listen(0, "127.0.0.1");
  await once(hub, "listening");
  const env = { HF_ENDPOINT: `http://127.0.0.1:${hub.address().port}`, HF_HUB_OFFLINE: "0" };
  [server, browser] = await Promise.all([startServer({ devices: "none", env }), startBrowser()]);
});
after(() => Promise.all([server?.stop(), browser?.close(), hub?.close()]));

const openPage = (hash, check, options = {}) => visit(browser, server.url, hash, async (page) => {
  await page.getByRole("heading", { level: 1 }).waitFor();
  await check(page);
}, { allow: /422|401/, ...options });

const screenshot = (page, name) => page.screenshot({ path: `${SHOTS}/${name}.png`, fullPage: true });

test("an empty server says what to do, and errors of the hub appear at their fields", { timeout: 60_000 }, () => openPage("#/library", async (page) => {
  await page.getByText("No models yet").waitFor();
  await page.getByText("No datasets yet").waitFor();
  await screenshot(page, "library-empty");
  await page.getByLabel("Hugging Face model").fill("unknown/nothing");
  await page.getByRole("button", { name: "Download" }).click();
  await page.getByText(/unknown\/nothing.*private/).waitFor();
  await page.getByLabel("Hugging Face dataset").fill("unknown/rows");
  await page.getByRole("button", { name: "Preview" }).click();
  await page.getByText(/unknown\/rows.*private/).waitFor();
  await screenshot(page, "library-failed");
}));

test("a CSV file without a prompt column is mapped, with a preview of its rows", { timeout: 60_000 }, async () => {
  await server.api("POST", "/models", { id: "rlood/tiny", source: `${process.env.RLOOD_ASSETS}/tiny` });
  await openPage("#/library", async (page) => {
    await page.getByLabel(/Format the preview for model/).selectOption("rlood/tiny");
    await page.locator("input[type=file]").setInputFiles({ name: "mine.csv", mimeType: "text/csv", buffer: Buffer.from(CSV) });
    await page.locator(".mapping .bad").filter({ hasText: "'prompt'" }).first().waitFor();
    const add = page.getByRole("button", { name: "Add dataset" });
    assert.ok(await add.isDisabled());
    await page.getByLabel("Prompt column").selectOption("question");
    await page.getByText(/tokens, formatted for the model/).first().waitFor();
    await page.getByLabel("Answer column").fill("answer");
    await page.getByLabel("Answer source").fill("{{ soluton | replace(',', '') }}");
    await page.getByText(/did you mean 'solution'/).first().waitFor();
    await page.getByLabel("Answer source").fill("{{ solution | replace(',', '') }}");
    await page.getByText('"answer":"10001"').waitFor();
    await screenshot(page, "library-mapping");
    await add.click();
    await page.getByRole("rowheader", { name: /mine.csv/ }).waitFor();
    await page.getByRole("button", { name: "Show first rows" }).click();
    await page.locator("td pre").waitFor();
    await screenshot(page, "library-full");
  });
  const [dataset] = (await server.api("GET", "/datasets")).data;
  assert.deepEqual([dataset.num_rows, dataset.columns], [3, ["prompt", "question", "solution", "level", "answer"]]);
  const { data } = await server.api("GET", `/datasets/${dataset.id}/rows`);
  assert.equal(data[2].record.answer, "10001");
});

test("the form for a new job asks for the prompt column", { timeout: 60_000 }, () => openPage("#/new", async (page) => {
  await page.locator("input[type=file]").first().setInputFiles({ name: "other.csv", mimeType: "text/csv", buffer: Buffer.from(CSV) });
  await page.getByLabel("Prompt column").selectOption("question");
  await page.getByRole("button", { name: "Add dataset" }).click();
  await page.getByText(/3 rows\. Columns: prompt, question, solution, level/).first().waitFor();
}));
