// Small real jobs on the bundled model, and a reward service that a test can make misbehave.
import { createServer } from "node:http";
import { readFileSync } from "node:fs";

/** Prompts of the bundled data that the bundled model answers. */
export const prompts = (count) =>
  readFileSync(`${process.env.RLOOD_ASSETS}/tiny-data/train.jsonl`, "utf8").split("\n", count).map((line) => JSON.parse(line));

/** A reward service by contract v1: `answer({request, count})` gives `{status, body, headers}` or nothing for the usual, one point for each right answer. */
export async function startRewards(answer = () => undefined) {
  let count = 0;
  const server = createServer(async (asked, reply) => {
    let body = "";
    for await (const part of asked) body += part;
    const request = JSON.parse(body || "{}");
    const isPing = request.type === "reward.ping";
    const given = isPing ? undefined : answer({ request, count: count++ });
    const results = () => request.samples.map(({ sample_id, completion, columns }) => ({ sample_id, reward: completion === columns.answer ? 1 : 0, reason: "by the letter" }));
    const { status = 200, headers = {}, ...rest } = given ?? {};
    reply.writeHead(status, { "content-type": "application/json", ...headers });
    reply.end(rest.body ?? JSON.stringify(isPing ? {} : { version: "1", id: request.id, results: results() }));
  });
  await new Promise((done) => server.listen(0, "127.0.0.1", done));
  return { url: `http://127.0.0.1:${server.address().port}/score`, stop: () => (server.closeAllConnections(), new Promise((done) => server.close(done))) };
}

/** Submits a job of a few steps. */
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

/** Waits until the job is over, and wants it to have succeeded. */
export async function finished(server, { id }) {
  for (;;) {
    const job = await server.api("GET", `/jobs/${id}?wait=30`);
    if (job.state === "succeeded") return job;
    if (["failed", "cancelled", "paused"].includes(job.state)) throw new Error(`${id} is ${job.state}: ${JSON.stringify(job.failure)}`);
  }
}
