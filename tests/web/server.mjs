// The binary under test: started on a free port with a data directory of its own.
import { spawn } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { createConnection, createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";

export const WORKER_TOKEN = "a-token-for-the-tests-of-the-pages";

/** Starts `rlood serve`; `stop` ends it and removes its data. `devices` "none" = no worker of its own. */
export async function startServer({ devices = "none", env = {}, args = [] } = {}) {
  const data = mkdtempSync(join(tmpdir(), "rlood-web-"));
  const child = spawn(process.env.RLOOD, ["serve", "--listen", "127.0.0.1:0", "--data-dir", data, "--devices", devices, ...args], {
    // Verdicts begin when a test asks for them.
    env: { ...process.env, RLOOD_WORKER_TOKEN: WORKER_TOKEN, RLOOD_AUTO_VERDICT: "false", ...env },
    stdio: ["ignore", "pipe", "pipe"],
  });
  let said = "";
  child.stderr.on("data", (text) => (said += text));
  const url = await new Promise((found, failed) => {
    let out = "";
    child.stdout.on("data", (text) => {
      out += text;
      const line = out.match(/^listening on (\S+)/m);
      if (line) found(line[1]);
    });
    child.on("exit", (code) => failed(new Error(`rlood ended with ${code}: ${said}`)));
  });
  const ended = new Promise((done) => child.on("exit", done));
  const stop = async () => {
    child.kill("SIGTERM");
    await ended;
    rmSync(data, { recursive: true, force: true });
  };
  return { url, data, stop, api: (method, path, body, headers) => call(url, method, path, body, headers) };
}

async function call(url, method, path, body, headers = {}) {
  const response = await fetch(url + path, {
    method,
    headers: { ...(body === undefined ? {} : { "content-type": "application/json" }), ...headers },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  const text = await response.text();
  if (!response.ok) throw new Error(`${method} ${path}: ${response.status} ${text}`);
  return text ? JSON.parse(text) : null;
}

/** A line between browser and server that can be cut: `cut()` drops every connection through it. */
export async function startLine(url) {
  const { hostname, port } = new URL(url);
  const open = new Set();
  const line = createServer((near) => {
    const far = createConnection(Number(port), hostname);
    open.add(near);
    near.pipe(far);
    far.pipe(near);
    const end = () => {
      open.delete(near);
      near.destroy();
      far.destroy();
    };
    for (const socket of [near, far]) socket.on("close", end).on("error", end);
  });
  await new Promise((done) => line.listen(0, "127.0.0.1", done));
  const cut = () => [...open].forEach((socket) => socket.resetAndDestroy());
  return { url: `http://127.0.0.1:${line.address().port}`, cut, stop: () => (cut(), new Promise((done) => line.close(done))) };
}
