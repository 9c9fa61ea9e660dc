// Models and data: somebody's own CSV becomes prompts without a document, what a download is doing is shown, what failed says why.
import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer } from "node:http";
import { after, before, test } from "node:test";
import { SHOTS, startBrowser, visit } from "./browser.mjs";
import { startServer } from "./server.mjs";

const CSV = "question,solution,level\nWhat is 2 + 2?,4,1\nWhat is 3 + 4?,7,2\n\"What is 10,000 + 1?\",\"10,001\",3\n";

let server, browser, hub;
before(async () => {
  // A hub that knows nothing, for what is refused.
  hub = createServer((request, response) => response.writeHead(401, { "x-error-code": "RepoNotFound" }).end()).listen(0, "127.0.0.1");
  await once(hub, "listening");
  const env = { HF_ENDPOINT: `http://127.0.0.1:${hub.address().port}`, HF_HUB_OFFLINE: "0" };
  [server, browser] = await Promise.all([startServer({ devices: "none", env }), startBrowser()]);
});
after(() => Promise.all([server?.stop(), browser?.close(), hub?.close()]));

const open = (hash, look, options = {}) => visit(browser, server.url, hash, async (page) => {
  await page.getByRole("heading", { level: 1 }).waitFor();
  await look(page);
}, { allow: /422|401/, ...options });

const shot = (page, name) => page.screenshot({ path: `${SHOTS}/${name}.png`, fullPage: true });

test("an empty server says what to do, and a hub's refusal stands at its field", { timeout: 60_000 }, () => open("#/library", async (page) => {
  await page.getByText("No model yet").waitFor();
  await page.getByText("No data yet").waitFor();
  await shot(page, "library-empty");
  await page.getByLabel("Model of the hub").fill("nobody/nothing");
  await page.getByRole("button", { name: "Download" }).click();
  await page.getByText(/or it is private/).waitFor();
  await page.getByLabel("Data set of the hub").fill("nobody/rows");
  await page.getByRole("button", { name: "Look at it" }).click();
  await page.getByText(/no data set nobody\/rows, or it is private/).waitFor();
  await shot(page, "library-failed");
}));

test("a CSV without a prompt column is mapped while its rows are looked at", { timeout: 60_000 }, async () => {
  await server.api("POST", "/models", { id: "rlood/tiny", source: `${process.env.RLOOD_ASSETS}/tiny` });
  await open("#/library", async (page) => {
    await page.getByLabel(/Show prompts as this model reads them/).selectOption("rlood/tiny");
    await page.locator("input[type=file]").setInputFiles({ name: "mine.csv", mimeType: "text/csv", buffer: Buffer.from(CSV) });
    await page.getByText(/there is no 'prompt' column/).first().waitFor();
    const add = page.getByRole("button", { name: "Add this data" });
    assert.ok(await add.isDisabled());
    await page.getByLabel("Column with the prompt").selectOption("question");
    await page.getByText(/tokens as the model reads it/).first().waitFor();
    await page.getByLabel("Column for the rewards").fill("answer");
    await page.getByLabel("… made from").fill("{{ soluton | replace(',', '') }}");
    await page.getByText(/did you mean 'solution'/).first().waitFor();
    await page.getByLabel("… made from").fill("{{ solution | replace(',', '') }}");
    await page.getByText('"answer":"10001"').waitFor();
    await shot(page, "library-mapping");
    await add.click();
    await page.getByRole("rowheader", { name: /mine.csv/ }).waitFor();
    await page.getByRole("button", { name: "First rows" }).click();
    await page.locator("td pre").waitFor();
    await shot(page, "library-full");
  });
  const [dataset] = (await server.api("GET", "/datasets")).data;
  assert.deepEqual([dataset.num_rows, dataset.columns], [3, ["prompt", "question", "solution", "level", "answer"]]);
  const { data } = await server.api("GET", `/datasets/${dataset.id}/rows`);
  assert.equal(data[2].record.answer, "10001");
});

test("the form of a new job asks which column the prompt is", { timeout: 60_000 }, () => open("#/new", async (page) => {
  await page.locator("input[type=file]").first().setInputFiles({ name: "other.csv", mimeType: "text/csv", buffer: Buffer.from(CSV) });
  await page.getByLabel("Column with the prompt").selectOption("question");
  await page.getByRole("button", { name: "Add this data" }).click();
  await page.getByText(/3 rows; columns prompt, question, solution, level/).first().waitFor();
}));
