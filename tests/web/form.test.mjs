// The form for a new job: keyboard use, the server's schema, and the server's errors.
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

const openForm = (check, hash = "#/new") => visit(browser, server.url, hash, async (page) => {
  await page.getByRole("heading", { name: /^New job/ }).waitFor();
  await check(page);
}, { allow: /\/session$|422|400/ });

/** Locates the control of a setting. */
const field = (page, pointer) => page.locator(`[data-pointer="${pointer}"]:is(input, select, textarea)`);

/** Returns the error of a field, which must be linked to the control for screen readers. */
async function errorAt(page, pointer) {
  const control = field(page, pointer);
  assert.equal(await control.getAttribute("aria-invalid"), "true", `${pointer} is not marked`);
  const ids = (await control.getAttribute("aria-describedby")).split(" ");
  return page.locator(`[id="${ids.at(-1)}"]`).innerText();
}

test("errors of the server appear at their fields, and the first one gets the focus", { timeout: 60_000 }, () => openForm(async (page) => {
  await page.getByLabel("Model *").selectOption("rlood/tiny");
  await page.getByText("Paste rows instead").first().click();
  await page.getByLabel("Rows", { exact: true }).first().fill('{"prompt": "What is 2 + 2?", "answer": "4"}\n{"prompt": "What is 3 + 4?", "answer": "7"}');
  await page.getByRole("button", { name: "Add rows" }).first().click();
  await page.getByText("2 rows. Columns: prompt, answer").waitFor();
  await field(page, "/rloo/num_generations").fill("1");
  await field(page, "/optimizer/learning_rate").fill("fast");
  await page.getByRole("button", { name: "Submit" }).click();
  await page.getByRole("alert").getByText(/errors to fix/).waitFor();
  assert.match(await errorAt(page, "/rloo/num_generations"), /2/);
  assert.ok((await errorAt(page, "/optimizer/learning_rate")).length > 3);
  const focused = await page.waitForFunction(() => document.activeElement?.dataset.pointer);
  assert.ok(["/rloo/num_generations", "/optimizer/learning_rate"].includes(await focused.jsonValue()));
  assert.equal((await server.api("GET", "/jobs")).data.length, 0, "nothing was submitted");
  // After the settings are corrected, the marks disappear and the curl command contains the new values.
  await field(page, "/rloo/num_generations").fill("4");
  await field(page, "/training/prompts_per_step").fill("2");
  await field(page, "/optimizer/learning_rate").fill("1e-3");
  await page.getByRole("button", { name: "Check" }).click();
  await page.getByText("The job is valid").first().waitFor();
  assert.equal(await page.locator("[aria-invalid]").count(), 0);
  assert.match(await page.getByLabel("curl command").innerText(), /"learning_rate": 0.001/);
}));

test("order, labels, limits and defaults are those of the server's document", { timeout: 60_000 }, () => openForm(async (page) => {
  const { JobSpec } = (await server.api("GET", "/openapi.json")).components.schemas;
  const { first, sections } = JobSpec["x-form"];
  const shown = (root) => root.locator("[data-pointer]").evaluateAll((elements) => [...new Set(elements.map(({ dataset }) => dataset.pointer))]);
  assert.deepEqual((await shown(page.locator("fieldset", { hasText: "Trained weights" }))).filter((pointer) => pointer !== "/lora"), first);
  await page.getByText("All settings").click();
  const section = (title) => page.locator(".more section").filter({ has: page.getByRole("heading", { name: title, exact: true }) });
  for (const name of sections) {
    const { properties, oneOf } = JobSpec.properties[name];
    const { order, title } = (properties ? JobSpec.properties[name] : oneOf[0])["x-form"];
    const pointers = order.map((key) => `/${name}/${key}`).filter((pointer) => !first.includes(pointer) && pointer !== "/eval/dataset");
    assert.deepEqual((await shown(section(title))).filter((pointer) => pointer !== "/eval/dataset"), pointers, name);
  }
  assert.match(await section("RLOO").innerText(), /greater than 0, less than 1/);
  await page.getByLabel("Checkpoint every", { exact: true }).waitFor();
  assert.equal(await field(page, "/rloo/epsilon").getAttribute("placeholder"), "0.2");
}));

test("a reward can be tested before the job is submitted", { timeout: 60_000 }, () => openForm(async (page) => {
  await page.getByRole("button", { name: "Test" }).click();
  await page.getByLabel("Completion", { exact: true }).fill("4\n---\n<img src=x onerror=alert(1)>");
  await page.getByLabel("Columns", { exact: true }).fill('{"answer": "4"}');
  await page.getByRole("button", { name: "Score", exact: true }).click();
  await page.getByText("Every completion was scored").waitFor();
  const values = await page.locator(".trial td.num").allInnerTexts();
  assert.deepEqual(values, ["1", "0"]);
  assert.equal(await page.locator(".trial img").count(), 0, "a completion became markup");
}));

test("the keyboard alone fills the form, runs a preflight and submits a job that runs", { timeout: 180_000 }, () => openForm(async (page) => {
  await page.waitForFunction(() => document.querySelectorAll("select option").length > 5);
  /** Presses Tab until the control has the focus. */
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
  await page.getByText("2 rows. Columns: prompt, answer").waitFor();
  await tabTo(field(page, "/training/max_steps"));
  await page.keyboard.type("2");
  await page.keyboard.press("Tab");
  await page.keyboard.type("2");
  await tabTo(field(page, "/sampling/max_completion_length"));
  await page.keyboard.type("6");
  await tabTo(page.getByRole("button", { name: "Run preflight" }));
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { name: "Preflight" }).waitFor({ timeout: 90_000 });
  await tabTo(page.getByRole("button", { name: "Submit" }));
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { name: "by keyboard" }).waitFor();
  await page.locator(".state.succeeded").waitFor({ timeout: 90_000 });
}));

test("cloning a job fills the form with its settings", { timeout: 60_000 }, async () => {
  const job = await makeJob(server, { name: "the original", total: 1, more: { rloo: { num_generations: 3 } } });
  await openForm(async (page) => {
    assert.equal(await field(page, "/name").inputValue(), "the original");
    assert.equal(await field(page, "/rloo/num_generations").inputValue(), "3");
    assert.equal(await page.getByLabel("Model *").inputValue(), "rlood/tiny");
  }, `#/new?from=${job.id}`);
});

/** Parses the job in the curl command next to the form. */
const jobInCommand = async (page) => JSON.parse((await page.getByLabel("curl command").innerText()).match(/-d '([^]*)'\s*$/)[1].replaceAll("'\\''", "'"));

test("typed text survives rendering during the input", { timeout: 60_000 }, () => openForm(async (page) => {
  await page.getByRole("button", { name: "Check" }).click();
  await page.getByText(/errors? to fix/).first().waitFor();
  await field(page, "/training/max_steps").fill("7");
  // The check that follows each change arrives while the number is being typed.
  const checked = page.waitForResponse(/validate/);
  await field(page, "/training/prompts_per_step").pressSequentially("12");
  await checked;
  await field(page, "/training/prompts_per_step").pressSequentially("345");
  await field(page, "/optimizer/learning_rate").pressSequentially("1e-3");
  assert.equal(await field(page, "/training/prompts_per_step").inputValue(), "12345");
  const { training, optimizer } = await jobInCommand(page);
  assert.deepEqual([training, optimizer], [{ max_steps: 7, prompts_per_step: 12345 }, { learning_rate: 0.001 }]);
}));

test("only secrets are left out of the command", { timeout: 60_000 }, () => openForm(async (page) => {
  await page.getByText("All settings").click();
  await field(page, "/metadata").fill('{"headers": "abc", "secret": "m"}');
  await field(page, "/eval/rewards").fill('[{"type": "webhook", "url": "http://a.example/", "secret": "whsec_x", "previous_secret": "whsec_y", "headers": {"authorization": "z"}}]');
  await field(page, "/rewards/0/type").selectOption("webhook");
  await field(page, "/rewards/0/secret").fill("whsec_w");
  const { metadata, rewards, eval: { rewards: [evalReward] } } = await jobInCommand(page);
  assert.deepEqual(metadata, { headers: "abc", secret: "m" });
  assert.equal(rewards[0].secret, "whsec_…");
  assert.deepEqual(evalReward, { type: "webhook", url: "http://a.example/", secret: "whsec_…", previous_secret: "whsec_…", headers: { authorization: "…" } });
}));

test("a new job after a clone starts empty, and going back restores the clone", { timeout: 60_000 }, async () => {
  const job = await makeJob(server, { name: "cloned", total: 1 });
  await openForm(async (page) => {
    const isNamed = (name) => page.waitForFunction((name) => document.querySelector('[data-pointer="/name"]')?.value === name, name);
    await isNamed("cloned");
    await page.getByRole("link", { name: "New job" }).click();
    await isNamed("");
    assert.deepEqual(Object.keys(await jobInCommand(page)), ["rewards"]);
    await page.goBack();
    await isNamed("cloned");
    assert.equal((await jobInCommand(page)).model, "rlood/tiny");
  }, `#/new?from=${job.id}`);
});

test("target modules, all weights, alert rules and evaluation rewards can be read and changed", { timeout: 60_000 }, async () => {
  const job = await makeJob(server, { total: 1, more: { lora: { target_modules: ["q_proj", "v_proj"] }, doctor: { rules: { cold_start: false } } } });
  await openForm(async (page) => {
    await page.getByText("All settings").click();
    const checkedModules = () => page.locator('[data-pointer="/lora/target_modules"] :checked').evaluateAll((boxes) => boxes.map((box) => box.closest("label").innerText.trim()));
    assert.deepEqual(await checkedModules(), ["q_proj", "v_proj"]);
    await page.getByLabel("o_proj").check();
    assert.equal(await field(page, "/optimizer/kind").locator(":checked").innerText(), "adamw (default)");
    assert.match(await field(page, "/doctor/rules").inputValue(), /"cold_start"/);
    await field(page, "/eval/rewards").fill('[{"type": "length"');
    await field(page, "/name").focus();
    assert.match(await errorAt(page, "/eval/rewards"), /Invalid JSON/);
    await field(page, "/eval/rewards").fill('[{"type": "length"}]');
    const { lora, eval: { rewards } } = await jobInCommand(page);
    assert.deepEqual([lora.target_modules, rewards], [["q_proj", "v_proj", "o_proj"], [{ type: "length" }]]);
    await page.getByLabel("Trained weights").selectOption("all weights");
    assert.equal(await page.locator('[data-pointer^="/lora/"]').count(), 0, "a job without an adapter shows adapter settings");
    assert.equal((await jobInCommand(page)).lora, null);
  }, `#/new?from=${job.id}`);
});

test("a reward is tested on chat messages, and a change of its settings removes the result", { timeout: 60_000 }, async () => {
  await server.api("POST", "/datasets?name=chat", { records: [{ prompt: [{ role: "user", content: "2 + 2?" }], answer: "4" }] });
  await openForm(async (page) => {
    await page.getByLabel("Prompts *").selectOption("chat · 1 row");
    await page.getByText(/^1 row\. Columns/).waitFor();
    await page.getByRole("button", { name: "Add a reward" }).click();
    const second = page.getByRole("group", { name: "Reward 2" });
    await second.getByLabel("Type").selectOption("exact_match");
    await second.getByLabel("Column *").fill("answer");
    await second.getByRole("button", { name: "Test" }).click();
    const request = page.waitForRequest(/rewards\/test/);
    await second.getByRole("button", { name: "Score", exact: true }).click();
    assert.deepEqual((await request).postDataJSON().samples[0].prompt, [{ role: "user", content: "2 + 2?" }]);
    await page.getByText("Every completion was scored").waitFor();
    // The result stays with its reward when another reward is removed, and disappears when the settings of its own reward change.
    await page.getByRole("button", { name: "Remove reward 1" }).click();
    const first = page.getByRole("group", { name: "Reward 1" });
    assert.equal(await first.getByText("Every completion was scored").count(), 1);
    await first.getByLabel("Weight").fill("2");
    assert.equal(await page.getByText("Every completion was scored").count(), 0);
  });
});
