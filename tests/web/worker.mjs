// A worker without an engine: it implements the worker protocol, and a test decides what it reports. Jobs, rows and events are real.
import { randomBytes } from "node:crypto";
import { WORKER_TOKEN } from "./server.mjs";

/** The version of the worker protocol, as in the server. */
const PROTOCOL = 13;
const CROCKFORD = "0123456789abcdefghjkmnpqrstvwxyz";
const ulid = () => `01${[...randomBytes(24)].map((byte) => CROCKFORD[byte & 31]).join("")}`;

export class Worker {
  id = `wrk_${ulid()}`;

  constructor(server, { device = "cpu" } = {}) {
    Object.assign(this, { server, device });
  }

  #call = (path, body) => this.server.api("POST", `/worker/${path}`, body, { authorization: `Bearer ${WORKER_TOKEN}` });

  register = () => this.#call("register", { worker: this.id, device: this.device, pid: process.pid, threads: 1, version: "0.2.0", child: false, protocol: PROTOCOL });

  /** Claims the next job and returns its attempt, through which a test reports events. */
  async claim() {
    const { job, attempt } = await this.#call("claim", { worker: this.id, wait_ms: 5000, protocol: PROTOCOL });
    return new Attempt(this.#call, job, attempt);
  }
}

class Attempt {
  #batch = 0;

  constructor(call, job, attempt) {
    Object.assign(this, { call, job, attempt });
  }

  events = (events, log = []) => this.call(`jobs/${this.job}/events`, { attempt: this.attempt, batch: this.#batch++, events, log });
  heartbeat = (step, phase = "train", eta_s = 60) => this.call(`jobs/${this.job}/heartbeat`, { attempt: this.attempt, phase, status_reason: null, step, eta_s });
  finish = (outcome) => this.call(`jobs/${this.job}/finish`, { attempt: this.attempt, outcome });
}

/** Plausible metrics of a step in a job whose reward rises. */
export function metricsOf(step, total) {
  const wave = Math.sin(step * 0.7) * 0.05 + Math.sin(step * 0.013) * 0.03;
  const done = step / total;
  return {
    reward: 0.2 + 0.7 * (1 - Math.exp(-4 * done)) + wave, reward_std: 0.4 * (1 - done) + 0.05,
    "rewards/correct/mean": 0.2 + 0.7 * done + wave, "rewards/correct/missing_fraction": 0,
    kl: 0.2 * done + wave / 10, entropy: 1.2 * Math.exp(-2 * done), grad_norm: 0.5 + Math.abs(wave) * 4,
    "completions/mean_length": 40 + 20 * done, "completions/max_length": 64, "completions/clipped_ratio": 0.1 * (1 - done),
    frac_reward_zero_std: 0.3 * done, loss: wave, learning_rate: 1e-5 * (1 - done), step_time: 0.4, "step_time/generate": 0.2, "step_time/reward": 0.05, "step_time/train": 0.15,
  };
}

export const step = (number, total, kind = "train", metrics = metricsOf(number, total)) => ({ type: "step", step: number, kind, metrics });
