// The form for a new job, by keyboard and by what the server says.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { makeJob, startBrowser, visit } from "./browser.mjs";
import { startServer } from "./server.mjs";

let server, browser;
before(async () => {
  [server, browser] = await Promise.all([startServer({ devices: "cpu" }), startBrowser()]);
  await server.api("POST", "/models", { id: "rlood/tiny", source: `${process.env.RLOOD_ASSETS}/tiny` });
  await server.api("POST", "/datasets?name=two", { records: [{ prompt: "What is 2 + 2?", answer: "4" }, { prompt: "What is 3 + 4?", answer: "7" }] });
});
after(() => Promise.all([server?.stop(), browser?.close()]));

const open = (look, hash = "#/new") => visit(browser, server.url, hash, async (page) => {
  await page.getByRole("heading", { name: /^New job/ }).waitFor();
  await look(page);
}, { allow: /\/session$|422|400/ });

/** The control of a setting. */
const field = (page, pointer) => page.locator(`[data-pointer="${pointer}"]:is(input, select, textarea)`);

/** What a field says is wrong, tied to it for screen readers. */
async function errorAt(page, pointer) {
  const control = field(page, pointer);
  assert.equal(await control.getAttribute("aria-invalid"), "true", `${pointer} is not marked`);
  const ids = (await control.getAttribute("aria-describedby")).split(" ");
  return page.locator(`[id="${ids.at(-1)}"]`).innerText();
}

test("what the server refuses stands at its field, and the first one has the focus", { timeout: 60_000 }, () => open(async (page) => {
  await page.getByLabel("Model *").selectOption("rlood/tiny");
  await page.getByText("Or paste rows").first().click();
  await page.getByLabel("Rows to paste").first().fill('{"prompt": "What is 2 + 2?", "answer": "4"}\n{"prompt": "What is 3 + 4?", "answer": "7"}');
  await page.getByRole("button", { name: "Add these rows" }).first().click();
  await page.getByText("2 rows; columns prompt, answer").waitFor();
  await field(page, "/rloo/num_generations").fill("1");
  await field(page, "/optimizer/learning_rate").fill("fast");
  await page.getByRole("button", { name: "Submit" }).click();
  await page.getByText(/things are not right yet/).waitFor();
  assert.match(await errorAt(page, "/rloo/num_generations"), /2/);
  assert.ok((await errorAt(page, "/optimizer/learning_rate")).length > 3);
  const focused = await page.waitForFunction(() => document.activeElement?.dataset.pointer);
  assert.ok(["/rloo/num_generations", "/optimizer/learning_rate"].includes(await focused.jsonValue()));
  assert.equal((await server.api("GET", "/jobs")).data.length, 0, "nothing was submitted");
  // Right again: the marks go, the command beside it says the same.
  await field(page, "/rloo/num_generations").fill("4");
  await field(page, "/training/prompts_per_step").fill("2");
  await field(page, "/optimizer/learning_rate").fill("1e-3");
  await page.getByRole("button", { name: "Check" }).click();
  await page.getByText("The job is valid").first().waitFor();
  assert.equal(await page.locator("[aria-invalid]").count(), 0);
  assert.match(await page.getByLabel("The curl command").innerText(), /"learning_rate": 0.001/);
}));

test("a reward is tried before anything depends on it", { timeout: 60_000 }, () => open(async (page) => {
  await page.getByRole("button", { name: "Test" }).click();
  await page.getByLabel("Completion", { exact: true }).fill("4\n---\n<img src=x onerror=alert(1)>");
  await page.getByLabel("Columns", { exact: true }).fill('{"answer": "4"}');
  await page.getByRole("button", { name: "Score it" }).click();
  await page.getByText("Every completion has a value").waitFor();
  const values = await page.locator(".trial td.num").allInnerTexts();
  assert.deepEqual(values, ["1", "0"]);
  assert.equal(await page.locator(".trial img").count(), 0, "a completion became markup");
}));

test("keyboard alone fills the form, probes and submits a job that runs", { timeout: 180_000 }, () => open(async (page) => {
  await page.waitForFunction(() => document.querySelectorAll("select option").length > 5);
  /** Tab until the control has the focus. */
  const tabTo = async (control) => {
    const handle = await control.elementHandle();
    for (let presses = 0; presses < 90; presses++) {
      if (await handle.evaluate((element) => element === document.activeElement)) return;
      await page.keyboard.press("Tab");
    }
    assert.fail("the control cannot be reached with Tab");
  };
  await tabTo(field(page, "/name"));
  await page.keyboard.type("by keyboard");
  await tabTo(page.getByLabel("Model *"));
  await page.keyboard.type("rlood");
  await tabTo(page.getByLabel("Prompts *"));
  await page.keyboard.press("ArrowDown");
  await page.getByText("2 rows; columns prompt, answer").waitFor();
  await tabTo(field(page, "/training/max_steps"));
  await page.keyboard.type("2");
  await page.keyboard.press("Tab");
  await page.keyboard.type("2");
  await tabTo(field(page, "/sampling/max_completion_length"));
  await page.keyboard.type("6");
  await tabTo(page.getByRole("button", { name: "Probe" }));
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { name: "Probe" }).waitFor({ timeout: 90_000 });
  await tabTo(page.getByRole("button", { name: "Submit" }));
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { name: "by keyboard" }).waitFor();
  await page.locator(".state.succeeded").waitFor({ timeout: 90_000 });
}));

test("a job can be cloned: its settings are in the form", { timeout: 60_000 }, async () => {
  const job = await makeJob(server, { name: "the old one", total: 1, more: { rloo: { num_generations: 3 } } });
  await open(async (page) => {
    assert.equal(await field(page, "/name").inputValue(), "the old one");
    assert.equal(await field(page, "/rloo/num_generations").inputValue(), "3");
    assert.equal(await page.getByLabel("Model *").inputValue(), "rlood/tiny");
  }, `#/new?from=${job.id}`);
});
