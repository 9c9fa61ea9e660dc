// A reward service for rlood's reward contract v1. Node 18 or later, no packages.
//
//     REWARD_SECRET=whsec_… node service.mjs [PORT]
//
// It marks sums: 1 if the completion is the row's column `answer`, 0.5 if the answer stands in it, else 0. Put your own marks
// into `mark`. Without REWARD_SECRET it believes everybody: for a look on your own machine only.

import { createHmac, timingSafeEqual } from "node:crypto";
import { createServer } from "node:http";

const MAX_SAMPLES = 64;
const MAX_BYTES = 4 << 20;
// How far a request's timestamp may lie from this clock, s.
const TOLERANCE_S = 300;
// Two secrets, separated by a space, while one is rotated.
const SECRETS = (process.env.REWARD_SECRET ?? "").split(" ").filter((secret) => secret !== "");

/** What the caller did wrong. */
class Refused extends Error {
  constructor(status, reason) {
    super(reason);
    this.status = status;
  }
}

/** Standard Webhooks: one of our secrets must have signed these very bytes, just now. */
function verify(headers, body) {
  if (SECRETS.length === 0) return;
  const [id, stamp] = [headers["webhook-id"] ?? "", headers["webhook-timestamp"] ?? ""];
  if (!/^\d+$/.test(stamp) || Math.abs(Date.now() / 1000 - Number(stamp)) > TOLERANCE_S) {
    throw new Refused(401, "webhook-timestamp is missing or more than five minutes away from this clock");
  }
  // Several signatures, separated by spaces, while a secret is rotated: one that fits is enough.
  const given = (headers["webhook-signature"] ?? "").split(" ").filter((signature) => signature.startsWith("v1,"));
  for (const secret of SECRETS) {
    const key = Buffer.from(secret.replace(/^whsec_/, ""), "base64");
    const expected = createHmac("sha256", key).update(`${id}.${stamp}.`).update(body).digest();
    for (const signature of given) {
      const bytes = Buffer.from(signature.slice(3), "base64");
      if (bytes.length === expected.length && timingSafeEqual(bytes, expected)) return;
    }
  }
  throw new Refused(401, "no signature in webhook-signature fits");
}

/** The result of one sample. What cannot be marked gets an error, never a 0. */
function mark(sample) {
  const column = sample.columns?.answer;
  if (typeof column !== "string" && typeof column !== "number") {
    const error = { code: "no_answer", message: "the row has no column 'answer'", retryable: false };
    return { sample_id: sample.sample_id, reward: null, error };
  }
  const [answer, completion] = [String(column).trim(), sample.completion.trim()];
  const reward = completion === answer ? 1 : completion.includes(answer) ? 0.5 : 0;
  return { sample_id: sample.sample_id, reward, metrics: { length: completion.length } };
}

/** The answer to a request; what is none is refused before anything is computed. */
function answer(body) {
  let request;
  try {
    request = JSON.parse(body.toString("utf8"));
  } catch (error) {
    throw new Refused(400, `the body is not JSON: ${error.message}`);
  }
  if (request?.type === "reward.ping") return { max_batch_samples: MAX_SAMPLES, modes: ["sync"], range: [0, 1] };
  if (request?.type !== "reward.score.request") throw new Refused(422, "known types: reward.ping, reward.score.request");
  if (request.version !== "1") throw new Refused(422, "version 1 of the contract is spoken here");
  const isSample = (sample) => typeof sample?.sample_id === "string" && typeof sample.completion === "string";
  if (!Array.isArray(request.samples) || !request.samples.every(isSample)) {
    throw new Refused(422, "'samples' must be a list of objects with sample_id and completion");
  }
  // The request is split in halves and comes again.
  if (request.samples.length > MAX_SAMPLES) throw new Refused(413, `at most ${MAX_SAMPLES} samples in one request`);
  // The same samples always get the same marks. Where they would not (a sampled judge), keep the answer by request.id: a
  // request whose answer was lost comes again with the same id.
  return { version: "1", id: request.id, results: request.samples.map(mark) };
}

async function read(request) {
  const chunks = [];
  let bytes = 0;
  for await (const chunk of request) {
    bytes += chunk.length;
    if (bytes > MAX_BYTES) throw new Refused(413, `at most ${MAX_BYTES} bytes in one request`);
    chunks.push(chunk);
  }
  return Buffer.concat(chunks);
}

const server = createServer(async (request, response) => {
  const say = (status, value) => {
    const body = Buffer.from(JSON.stringify(value));
    response.writeHead(status, { "content-type": "application/json", "content-length": body.length }).end(body);
  };
  try {
    if (request.method !== "POST") throw new Refused(405, "requests are POSTs");
    const body = await read(request);
    verify(request.headers, body);
    say(200, answer(body));
  } catch (error) {
    if (!(error instanceof Refused)) console.error(error);
    const status = error instanceof Refused ? error.status : 500;
    if (!response.headersSent) say(status, { error: { code: "refused", message: status === 500 ? "it failed" : error.message } });
  }
});

server.listen(Number(process.argv[2] ?? 8090), "127.0.0.1", () => {
  console.log(`listening on http://127.0.0.1:${server.address().port}`);
});
