// The records of a run: samples, checkpoints, comparisons, reward health, events and logs, the configuration; and the system page.
import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { after, before, test } from "node:test";
import { startBrowser, visit } from "./browser.mjs";
import { finished, startRewards, submit } from "./job.mjs";
import { startServer } from "./server.mjs";

let server, browser, rewards, careful, bold;
before(async () => {
  // One request fails, so that the page of rewards has a failure to show.
  rewards = await startRewards(({ count }) => (count === 1 ? { status: 503, body: '{"oops": "busy"}' } : undefined));
  [server, browser] = await Promise.all([startServer({ devices: "cpu" }), startBrowser()]);
  careful = await submit(server, { name: "careful", rate: 1e-4 });
  bold = await submit(server, { name: "bold", rewards: [{ name: "judge", type: "webhook", url: rewards.url }, { type: "length", min_words: 1, max_words: 2, weight: 0.1 }] });
  careful = await finished(server, careful);
  bold = await finished(server, bold);
}, { timeout: 300_000 });
after(() => Promise.all([server?.stop(), browser?.close(), rewards?.stop()]));

/** Opens a page. A browser logs every 404 response as an error, so these are allowed. */
const openPage = (hash, check, options) => visit(browser, server.url, hash, check, { allow: /404/, ...options });
const texts = (locator) => locator.allInnerTexts();

test("a group shows the prompt with all its completions and the numbers of the API", { timeout: 60_000 }, () =>
  openPage(`#/jobs/${careful.id}/samples?step=2`, async (page) => {
    await page.locator(".group").first().waitFor();
    const { data } = await server.api("GET", `/jobs/${careful.id}/samples?step=2&phase=train&limit=100`);
    const groups = new Set(data.map(({ group_id }) => group_id));
    assert.equal(await page.locator(".group").count(), groups.size);
    assert.equal(await page.locator(".completion").count(), data.length);
    const group = page.locator(".group").first();
    const prompt = (await group.locator("h2").innerText()).match(/row_\d+/)[0];
    const wanted = data.filter(({ prompt_id }) => prompt_id === prompt);
    assert.equal((await group.locator(".prompt .text").innerText()).trim(), wanted[0].prompt);
    assert.deepEqual((await texts(group.locator(".completion .long .text"))).sort(), wanted.map(({ completion }) => completion || "(empty)").sort());
    // Each advantage has a number, and a symbol that shows its sign.
    const advantages = await group.locator(".advantage").evaluateAll((all) => all.map((one) => [one.className, one.textContent]));
    for (const [name, text] of advantages) {
      const value = Number(text.replace(/^.*advantage /, "").replace("−", "-").replace("±", ""));
      assert.ok(wanted.some(({ advantage }) => Math.abs(advantage - value) < 0.006), `no sample has the advantage ${text}`);
      assert.equal(name.includes("plus"), text.startsWith("▲"));
      assert.equal(name.includes("minus"), text.startsWith("▼"));
    }
    const first = group.locator(".completion").first();
    assert.match(await first.locator(".parts").innerText(), /correct\s+[01]\s+length\s+\S+ × 0.1\s+KL\s+\S+\s+tokens\s+\d+\s+finish\s+(stop|truncated)/);
  }));

test("two completions of a group can be compared word by word", { timeout: 60_000 }, () =>
  openPage(`#/jobs/${careful.id}/samples?step=1`, async (page) => {
    await page.locator(".group").first().waitFor();
    const groups = page.locator(".group");
    for (let at = 0; at < (await groups.count()); at++) {
      const group = groups.nth(at);
      const answers = await texts(group.locator(".completion .long .text"));
      const other = answers.findIndex((text) => text !== answers[0]);
      if (other < 0) continue;
      await group.getByRole("button", { name: "Compare completion 1" }).click();
      await group.getByRole("button", { name: `Compare completion ${other + 1}` }).click();
      const difference = group.locator(".difference");
      await difference.waitFor();
      const read = (kind) => difference.locator(".text").evaluate((text, kind) => [...text.childNodes].filter((node) => node.nodeName !== kind).map((node) => node.textContent).join(""), kind);
      assert.equal(await read("INS"), answers[0], "without the insertions, the text is the first completion");
      assert.equal(await read("DEL"), answers[other], "without the deletions, the text is the second completion");
      assert.match(await difference.innerText(), new RegExp(`Completion 1 → Completion ${other + 1}`));
      // A filter that hides the compared completions closes the comparison, and leaves the filters in place.
      await page.getByLabel("Reward from").fill("100");
      await page.getByText("No samples match these filters.").waitFor();
      await page.getByRole("button", { name: "Clear filters" }).click();
      await groups.first().waitFor();
      assert.deepEqual([await difference.count(), await page.getByRole("search", { name: "Samples" }).count()], [0, 1]);
      return;
    }
    assert.fail("no group has two different completions");
  }));

test("one prompt is followed over the steps, with a chart of its rewards", { timeout: 60_000 }, () =>
  openPage(`#/jobs/${careful.id}/samples`, async (page) => {
    await page.getByRole("link", { name: "Follow this prompt" }).first().click();
    const chart = page.getByRole("img", { name: /^Reward of row_\d+\./ });
    await chart.waitFor();
    const prompt = (await page.evaluate(() => location.hash)).match(/prompt_id=(row_\d+)/)[1];
    const { data } = await server.api("GET", `/jobs/${careful.id}/samples?phase=train&limit=100&prompt_id=${prompt}`);
    const steps = [...new Set(data.map(({ step }) => step))];
    assert.ok(steps.length >= 2);
    assert.match(await chart.getAttribute("aria-label"), new RegExp(`mean: ${steps.length} values`));
    assert.deepEqual((await texts(page.locator(".group h2"))).map((text) => Number(text.match(/Step (\d+)/)[1])), steps.sort((a, b) => b - a));
  }));

test("the address keeps search and filters, which survive a reload", { timeout: 60_000 }, () =>
  openPage(`#/jobs/${careful.id}/samples?as=table`, async (page) => {
    await page.getByLabel("Search").fill("SUM of");
    await page.locator("[name=phase]").selectOption("train");
    await page.getByLabel("Order").selectOption("best");
    await page.waitForFunction(() => /q=SUM/.test(location.hash) && /sort=best/.test(location.hash));
    await page.reload();
    await page.locator(".samples tbody tr").first().waitFor();
    assert.equal(await page.getByLabel("Search").inputValue(), "SUM of");
    assert.equal(await page.getByLabel("Order").inputValue(), "best");
    const { data } = await server.api("GET", `/jobs/${careful.id}/samples?q=sum%20of&phase=train&sort=best&limit=100`);
    assert.ok(data.length > 0);
    await page.waitForFunction((count) => document.querySelectorAll(".samples tbody tr").length === count, data.length);
    assert.deepEqual((await texts(page.locator(".samples tbody td:nth-child(4)"))).map(Number), data.map(({ reward }) => Number(reward.toPrecision(4))));
    await page.getByLabel("Step", { exact: true }).fill("2");
    await page.waitForFunction(() => /step=2/.test(location.hash));
    await page.waitForFunction(() => [...document.querySelectorAll(".samples tbody td:first-child")].every((cell) => cell.textContent.startsWith("2")));
    await page.getByRole("button", { name: "Previous step with samples" }).click();
    await page.waitForFunction(() => /step=1\b/.test(location.hash));
    await page.getByLabel("Search").fill("no prompt has this");
    await page.getByText("No samples match these filters.").waitFor();
  }));

/** Exports a checkpoint as files for llama.cpp: the adapter is written, the bundled model's tokenizer is refused by name. */
async function exportsFromThePage(page, id) {
  const panel = page.getByRole("region", { name: "Exports" });
  await panel.getByLabel("Format").selectOption("gguf_adapter");
  await panel.getByRole("button", { name: "Export", exact: true }).click();
  const link = panel.getByRole("link", { name: "adapter.gguf" });
  await link.waitFor();
  const [download] = await Promise.all([page.waitForEvent("download"), link.click()]);
  assert.equal(readFileSync(await download.path()).subarray(0, 4).toString(), "GGUF");
  await panel.getByLabel("Format").selectOption("gguf");
  await panel.getByLabel("Precision").selectOption("q8_0");
  await panel.getByRole("button", { name: "Export", exact: true }).click();
  await panel.getByText(/pre_tokenizer was not compared with llama.cpp/).waitFor();
  await panel.getByRole("button", { name: /^Delete the export/ }).first().click();
  await page.waitForFunction(() => document.querySelectorAll('[aria-label="Exports"] .tag').length === 1);
  const { data } = await server.api("GET", `/checkpoints/${id}/exports`);
  assert.deepEqual(data.map(({ format, state }) => [format, state]), [["gguf_adapter", "succeeded"]]);
}

test("a checkpoint shows the hash of each downloaded file, and examples that use it", { timeout: 60_000 }, () =>
  openPage(`#/jobs/${careful.id}/checkpoints`, async (page) => {
    const { data } = await server.api("GET", `/jobs/${careful.id}/checkpoints`);
    await page.getByRole("heading", { name: `Step ${data[0].step}` }).waitFor();
    assert.equal(await page.getByRole("region", { name: "Checkpoints" }).locator("tbody tr").count(), data.length);
    const shown = page.locator(".files li").filter({ hasText: "adapter_model.safetensors" });
    const [download] = await Promise.all([page.waitForEvent("download"), shown.getByRole("link").click()]);
    const hash = createHash("sha256").update(readFileSync(await download.path())).digest("hex");
    assert.equal((await shown.locator("code").innerText()).trim(), hash);
    assert.equal(data[0].files.find(({ name }) => name === "adapter_model.safetensors").sha256, hash);
    const lines = (name) => page.getByLabel(name, { exact: true }).innerText();
    assert.match(await lines("Download"), new RegExp(`curl -fsS ${server.url}/checkpoints/${data[0].id}/archive.tar`));
    assert.match(await lines("openai"), new RegExp(`base_url="${server.url}/v1"[^]*model="${data[0].id}"`));
    await page.getByRole("button", { name: "PEFT" }).click();
    assert.match(await lines("PEFT"), /AutoModelForCausalLM.from_pretrained\("rlood\/tiny"[^]*PeftModel.from_pretrained\(model, "careful-step4"\)/);
    await page.getByRole("button", { name: "vLLM" }).click();
    // vLLM does not accept the job's rank, 12; the next accepted value is 16.
    assert.match(await lines("vLLM"), /vllm serve rlood\/tiny --enable-lora --max-lora-rank 16 --lora-modules careful-step4=.\/careful-step4/);
    await page.getByRole("button", { name: "llama.cpp" }).click();
    assert.match(await lines("llama.cpp"), new RegExp(`rlood export ${data[0].id} --gguf-adapter -o careful-step4-gguf`));
    await exportsFromThePage(page, data[0].id);
    const pin = page.getByRole("button", { name: `Pin the checkpoint of step ${data[0].step}` });
    await pin.click();
    await page.getByText("pinned").waitFor();
    assert.equal((await server.api("GET", `/checkpoints/${data[0].id}`)).pinned, true);
  }));

test("runs are compared: charts over the same steps, and the settings that differ", { timeout: 60_000 }, () =>
  openPage(`#/compare`, async (page) => {
    await page.getByRole("checkbox", { name: /careful/ }).check();
    await page.getByRole("checkbox", { name: /bold/ }).check();
    await page.waitForFunction(() => /ids=job_/.test(location.hash));
    const chart = page.getByRole("img", { name: /^Reward\./ });
    await chart.waitFor();
    const summary = await chart.getAttribute("aria-label");
    for (const { id, name } of [careful, bold]) {
      const { data } = await server.api("GET", `/jobs/${id}/metrics?keys=reward&min_step=1`);
      assert.ok(summary.includes(`${name}: ${data.length} values from step 1 to 4, first ${Number(data[0].reward.toPrecision(4))}`), `${name} in: ${summary}`);
    }
    const rows = page.getByRole("region", { name: "Settings that differ" }).locator("tbody tr");
    const settings = Object.fromEntries(await rows.evaluateAll((rows) => rows.map((row) => [row.cells[0].textContent, [...row.cells].slice(1).map((cell) => cell.textContent)])));
    assert.deepEqual(settings["optimizer.learning_rate"], ["0.0001", "0.002"]);
    assert.ok(!("training.seed" in settings), "a setting that is the same is listed");
    await page.getByLabel("Metric").fill("rewards/length/mean");
    await page.keyboard.press("Enter");
    await page.getByRole("img", { name: /^rewards\/length\/mean\./ }).waitFor();
  }));

test("the page of rewards shows latency, errors and the failed request with its response", { timeout: 60_000 }, async (t) => {
  const health = await server.api("GET", `/jobs/${bold.id}/rewards`).catch(() => null);
  if (!health) return t.skip("this server does not report the health of rewards");
  await openPage(`#/jobs/${bold.id}/rewards`, async (page) => {
    const judge = page.getByRole("region", { name: "Reward judge" });
    await judge.getByRole("heading", { name: "Errors" }).waitFor();
    const reported = health.data.find(({ name }) => name === "judge");
    assert.ok(reported.requests > reported.answers, "no request failed with 503");
    assert.match(await judge.locator(".stats").innerText(), new RegExp(`Requests\\s+${reported.requests}\\s+1 retry`));
    await judge.locator(".exchange summary").first().click();
    assert.match(await judge.locator(".exchange").first().innerText(), /Response 503[^]*"oops": "busy"/);
    assert.ok(await page.getByRole("region", { name: "Reward length" }).isVisible());
  });
});

test("all events and log lines are shown once, and the search filters them", { timeout: 60_000 }, () =>
  openPage(`#/jobs/${careful.id}/logs`, async (page) => {
    const { data } = await server.api("GET", `/jobs/${careful.id}/events?limit=100`);
    await page.waitForFunction((count) => document.querySelectorAll(".lines .line").length >= count, data.length);
    assert.equal(await page.locator(".lines .line").count(), data.length, "an event is shown twice");
    await page.locator("select[name=type]").selectOption("checkpoint.saved");
    assert.equal(await page.locator(".lines .line").count(), data.filter(({ type }) => type === "checkpoint.saved").length);
    await page.getByRole("button", { name: "Worker log" }).click();
    const logs = await server.api("GET", `/jobs/${careful.id}/logs?limit=100`);
    await page.waitForFunction((count) => document.querySelectorAll(".lines .line").length === count, logs.data.length);
    const [{ line }] = logs.data;
    await page.getByLabel("Search").fill(line);
    await page.waitForFunction((count) => document.querySelectorAll(".lines .line").length === count, logs.data.filter((other) => other.line.includes(line)).length);
  }));

test("the log grows while the job runs", { timeout: 120_000 }, async () => {
  const job = await submit(server, { name: "long enough", steps: 20 });
  await openPage(`#/jobs/${job.id}/logs?of=log`, async (page) => {
    await page.locator(".state.succeeded").waitFor({ timeout: 90_000 });
    const logs = await server.api("GET", `/jobs/${job.id}/logs?limit=100`);
    await page.waitForFunction((count) => document.querySelectorAll(".lines .line").length === count, logs.data.length, { timeout: 10_000 });
    assert.deepEqual(await texts(page.locator(".lines .line .text")), logs.data.map(({ line }) => line));
  });
});

test("the configuration is shown in three formats and can be submitted again", { timeout: 60_000 }, () =>
  openPage(`#/jobs/${careful.id}/config?format=json`, async (page) => {
    const config = JSON.parse(await page.getByLabel("Configuration").innerText());
    assert.equal((await server.api("POST", "/jobs/validate", config)).valid, true);
    await page.getByRole("button", { name: "TOML" }).click();
    await page.waitForFunction(() => document.querySelector("pre")?.textContent.includes("[rloo]"));
  }));

test("the system page shows workers, the order of the queue, and the storage", { timeout: 120_000 }, async () => {
  const idle = await startServer();
  try {
    for (const [name, priority] of [["second", 0], ["first", 5]]) await submit(idle, { name, more: { priority } });
    await visit(browser, idle.url, "#/system", async (page) => {
      const rows = page.getByRole("region", { name: "Queue" }).locator("tbody tr");
      await rows.first().waitFor();
      assert.match((await texts(rows))[0], /^1\s+first/);
      assert.match((await texts(rows))[1], /^2\s+second/);
      await page.getByText("No workers connected").waitFor();
    }, { allow: /404/ });
  } finally {
    await idle.stop();
  }
  await openPage("#/system", async (page) => {
    const row = page.getByRole("region", { name: "Workers" }).locator("tbody tr").first();
    await row.waitFor();
    const { data } = await server.api("GET", "/workers");
    assert.match(await row.innerText(), new RegExp(`^cpu\\s[^]*process ${data[0].pid}, ${data[0].threads} thread`));
    await page.getByText("✓ ready").waitFor();
    const kinds = await texts(page.getByRole("region", { name: "Storage by kind" }).locator("tbody tr"));
    assert.ok(kinds.some((text) => /^Checkpoints\s+[\d.]+ [KM]iB\s+\d+\s+–/.test(text)), kinds.join("\n"));
  });
});

test("the keyboard alone compares two completions and opens the examples of a checkpoint", { timeout: 90_000 }, () =>
  openPage(`#/jobs/${careful.id}/samples?step=1`, async (page) => {
    const press = async (locator, key = "Enter") => {
      const wanted = await locator.elementHandle();
      for (let presses = 0; presses < 120; presses++) {
        if (await wanted.evaluate((element) => element === document.activeElement)) return page.keyboard.press(key);
        await page.keyboard.press("Tab");
      }
      assert.fail("the element cannot be reached with Tab");
    };
    await page.locator(".group").first().waitFor();
    await press(page.getByRole("button", { name: "Compare completion 1" }).first(), "Space");
    await press(page.getByRole("button", { name: "Compare completion 2" }).first(), "Space");
    await page.locator(".difference").waitFor();
    await page.evaluate(() => document.activeElement.blur());
    await press(page.getByRole("link", { name: "Checkpoints" }));
    await page.locator(".checkpoint").waitFor();
    await press(page.getByRole("button", { name: "step 2", exact: true }));
    await page.getByRole("heading", { name: "Step 2" }).waitFor();
    await press(page.getByRole("button", { name: "vLLM" }));
    await page.getByLabel("vLLM", { exact: true }).waitFor();
  }));
