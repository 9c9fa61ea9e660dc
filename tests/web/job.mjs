// Small real jobs on the bundled model, and a reward service whose responses a test controls.
import { createServer } from "node:http";
import { readFileSync } from "node:fs";

/** Reads rows of the bundled dataset, which the bundled model can answer. */
export const prompts = (count) =>
  readFileSync(`${process.env.RLOOD_ASSETS}/tiny-data/train.jsonl`, "utf8").split("\n", count).map((line) => JSON.parse(line));

/**
 * Starts a reward service (contract v1). `respond({request, count})` returns `{status, body, headers}`, or undefined for the default: reward
 * 1 for a completion equal to the answer, otherwise 0.
 */
export async function startRewards(respond = () => undefined) {
  let count = 0;
  const server = createServer(async (httpRequest, httpResponse) => {
    let body = "";
    for await (const chunk of httpRequest) body += chunk;
    const request = JSON.parse(body || "{}");
    const isPing = request.type === "reward.ping";
    const response = isPing ? undefined : respond({ request, count: count++ });
    const results = () => request.samples.map(({ sample_id, completion, columns }) => ({ sample_id, reward: completion === columns.answer ? 1 : 0, reason: "exact match" }));
    const { status = 200, headers = {}, ...rest } = response ?? {};
    httpResponse.writeHead(status, { "content-type": "application/json", ...headers });
    httpResponse.end(rest.body ?? JSON.stringify(isPing ? {} : { version: "1", id: request.id, results: results() }));
  });
  await new Promise((done) => server.listen(0, "127.0.0.1", done));
  return { url: `http://127.0.0.1:${server.address().port}/score`, stop: () => (server.closeAllConnections(), new Promise((done) => server.close(done))) };
}

/** Submits a job of `steps` steps with a learning rate of `rate`. `more` overrides other settings. */
export async function submit(server, { name, steps = 4, rate = 2e-3, rewards, rows = prompts(6), more = {} }) {
  const models = await server.api("GET", "/models");
  if (!models.data.length) await server.api("POST", "/models", { id: "rlood/tiny", source: `${process.env.RLOOD_ASSETS}/tiny` });
  return server.api("POST", "/jobs", {
    name, model: "rlood/tiny", dataset: { records: rows },
    eval: { dataset: { records: rows.slice(0, 3) }, every_steps: 2, before_start: true, num_generations: 1, temperature: 0 },
    rewards: rewards ?? [{ name: "correct", type: "exact_match", column: "answer" }, { type: "length", min_words: 1, max_words: 2, weight: 0.1 }],
    rloo: { num_generations: 4, beta: 0.01 }, sampling: { max_completion_length: 6 }, lora: { r: 12, alpha: 24 }, optimizer: { learning_rate: rate },
    training: { prompts_per_step: 3, max_steps: steps, seed: 3 }, checkpoints: { every_steps: 2, keep_last: 3 }, ...more,
  });
}

/** Waits until the job has succeeded, and throws if it ends in any other way. */
export async function finished(server, { id }) {
  for (;;) {
    const job = await server.api("GET", `/jobs/${id}?wait=30`);
    if (job.state === "succeeded") return job;
    if (["failed", "cancelled", "paused"].includes(job.state)) throw new Error(`${id} is ${job.state}: ${JSON.stringify(job.failure)}`);
  }
}
