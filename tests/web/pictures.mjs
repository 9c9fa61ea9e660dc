// Takes the pictures under docs/images: a run and its samples, from the demo job; and under docs/images/pages the pages of models and data
// and of the system in the states empty, full, busy and failed, at 390 and 1440 pixels, in dark and light.
// Usage: tests/web/pictures.sh BINARY
import { startBrowser, visit, SHOTS } from "./browser.mjs";
import { startHub } from "./hub.mjs";
import { finished, prompts, submit } from "./job.mjs";
import { startPushHub, WRITE_TOKEN } from "./push-hub.mjs";
import { startServer } from "./server.mjs";

const CSV = "question,solution,level\n" + [...Array(40).keys()].map((n) => `What is ${n} + ${n + 2}?,${2 * n + 2},${1 + (n % 3)}\n`).join("");

const hub = await startHub();
const pushHub = await startPushHub();
const browser = await startBrowser();
const env = { HF_ENDPOINT: hub.url, HF_HUB_OFFLINE: "0" };
const start = (devices, more) => startServer({ devices, env: { ...env, ...more } });

async function takePicture(server, name, hash, { prepare = async () => {}, fullPage = false, ...options }) {
  await visit(browser, server.url, hash, async (page) => {
    await page.waitForFunction(() => !document.querySelector("[aria-busy=true]") && document.querySelector("main h1"));
    await prepare(page);
    await page.waitForTimeout(400);
    await page.screenshot({ path: `${SHOTS}/picture-${name}.png`, fullPage });
  }, { allow: /422|401|404|\/session/, ...options });
}

async function takePagePictures(server, name, hash, prepare) {
  for (const width of [390, 1440]) {
    for (const scheme of ["light", "dark"]) {
      await takePicture(server, `pages-${name}-${width}-${scheme}`, hash, { prepare, fullPage: true, scheme, width, height: 900 });
    }
  }
}

const waitUntil = async (test) => {
  while (!(await test())) await new Promise((done) => setTimeout(done, 200));
};

/** Sends two messages, the second with log-probabilities. */
async function chat(page) {
  await page.getByLabel("Seed").fill("6");
  await page.getByLabel("Temperature").fill("1.5");
  for (const text of ["What is 29 + 13?", "Tell me about spiders."]) {
    await page.getByLabel("Message", { exact: true }).fill(text);
    await page.getByRole("button", { name: "Send" }).click();
    await page.locator(".said", { hasText: text }).waitFor();
    await page.getByRole("button", { name: "Send" }).waitFor();
    await page.getByLabel("Log-probabilities of tokens").check();
  }
}

/** Pushes a checkpoint of a job, and starts a push that stops halfway. Returns what opens the prompts of the certificate. */
async function pushTwice(server, job) {
  const [{ id }] = (await server.api("GET", `/jobs/${job}/checkpoints`)).data;
  const push = (repo, more) => server.api("POST", `/checkpoints/${id}/pushes`, { repo, private: true, ...more }, { "x-hub-token": WRITE_TOKEN });
  const first = await push("ann/sums");
  await waitUntil(async () => (await server.api("GET", `/pushes/${first.id}`)).state === "succeeded");
  pushHub.hold(true);
  const second = await push("ann/sums-merged", { format: "merged" });
  await waitUntil(async () => (await server.api("GET", `/pushes/${second.id}`)).stage === "uploading");
  return (page) => page.getByText(/prompts? on which base model and checkpoint differ most/).click();
}

try {
  const demo = await start("cpu", { HF_ENDPOINT: pushHub.url });
  const { id } = await finished(demo, await demo.api("POST", "/demo"));
  await demo.api("POST", `/jobs/${id}/verdict`, {});
  await waitUntil(async () => (await demo.api("GET", `/jobs/${id}/verdict`)).result);
  await takePicture(demo, "run", `#/jobs/${id}?smooth=0.5`, { width: 1280, height: 1000 });
  await takePicture(demo, "samples", `#/jobs/${id}/samples?step=4`, { scheme: "dark", width: 1280, height: 760 });
  await takePagePictures(demo, "chat", `#/jobs/${id}/chat`, chat);
  await takePagePictures(demo, "checkpoint", `#/jobs/${id}/checkpoints`, await pushTwice(demo, id));
  pushHub.hold(false);
  await demo.stop();

  const empty = await start("none");
  await takePagePictures(empty, "data-empty", "#/library");
  await takePagePictures(empty, "system-empty", "#/system");
  await empty.stop();

  const server = await start("cpu");
  await server.api("POST", "/models", { id: "rlood/tiny", source: `${process.env.RLOOD_ASSETS}/tiny` });
  await server.api("POST", "/models", { hub: "org/model" });
  const upload = (name, body, query) => fetch(`${server.url}/datasets?name=${name}&${query}`, { method: "POST", headers: { "content-type": "text/csv" }, body });
  await upload("sums.csv", CSV, "prompt=question");
  await server.api("POST", "/datasets", { records: prompts(24) });
  const job = await submit(server, { name: "Sums, careful", steps: 6, rows: prompts(24) });
  await finished(server, job);
  await waitUntil(async () => (await server.api("GET", "/models")).data.every(({ state }) => state === "ready"));
  const map = async (page) => {
    await page.locator("input[type=file]").setInputFiles({ name: "mine.csv", mimeType: "text/csv", buffer: Buffer.from(CSV) });
    await page.getByLabel("Prompt column").selectOption("question");
    await page.locator(".row-preview").first().waitFor();
  };
  await takePagePictures(server, "data-full", "#/library", map);
  await takePagePictures(server, "system-full", "#/system");

  await server.api("POST", "/models", { hub: "org/slow-model" });
  const busy = await submit(server, { name: "Sums, long", steps: 3000, rows: prompts(24) });
  await submit(server, { name: "Sums, next", steps: 20, rows: prompts(24) });
  await server.api("POST", "/jobs", { name: "Sums, on a new model", model: "org/slow-model", dataset: { records: prompts(6) }, rewards: [{ type: "length", min_words: 1, max_words: 2 }], training: { prompts_per_step: 3, max_steps: 4 } });
  await waitUntil(async () => (await server.api("GET", `/jobs/${busy.id}`)).step > 3);
  await takePagePictures(server, "data-busy", "#/library");
  await takePagePictures(server, "system-busy", "#/system");

  await server.api("POST", "/models", { hub: "org/broken-model" });
  await waitUntil(async () => (await server.api("GET", "/models/org%2Fbroken-model")).state === "failed");
  await takePagePictures(server, "data-failed", "#/library", async (page) => {
    await page.getByLabel("Hugging Face dataset").fill("unknown/rows");
    await page.getByRole("button", { name: "Preview" }).click();
    await page.getByText(/unknown\/rows.*private/).waitFor();
  });
  await server.stop();
} finally {
  await browser.close();
  await hub.stop();
  await pushHub.stop();
}
