// Starts the binary under test on a free port, with its own data directory.
import { spawn } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { createServer as createHttpServer, request as httpRequest } from "node:http";
import { createConnection, createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";

export const WORKER_TOKEN = "a-token-for-the-tests-of-the-pages";

/** Starts `rlood serve`. `stop` ends the server and removes its data. With `devices` "none", the server starts no worker. */
export async function startServer({ devices = "none", env = {}, args = [] } = {}) {
  const data = mkdtempSync(join(tmpdir(), "rlood-web-"));
  const child = spawn(process.env.RLOOD, ["serve", "--listen", "127.0.0.1:0", "--data-dir", data, "--devices", devices, ...args], {
    // Verdicts start only when a test requests them.
    env: { ...process.env, RLOOD_WORKER_TOKEN: WORKER_TOKEN, RLOOD_AUTO_VERDICT: "false", ...env },
    stdio: ["ignore", "pipe", "pipe"],
  });
  let stderr = "";
  child.stderr.on("data", (text) => (stderr += text));
  const url = await new Promise((resolve, reject) => {
    let stdout = "";
    child.stdout.on("data", (text) => {
      stdout += text;
      const line = stdout.match(/^listening on (\S+)/m);
      if (line) resolve(line[1]);
    });
    child.on("exit", (code) => reject(new Error(`rlood ended with ${code}: ${stderr}`)));
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

/** Starts a TCP proxy between browser and server. `disconnect()` resets every connection through it. */
export async function startProxy(url) {
  const { hostname, port } = new URL(url);
  const clients = new Set();
  const proxy = createServer((client) => {
    const upstream = createConnection(Number(port), hostname);
    clients.add(client);
    client.pipe(upstream);
    upstream.pipe(client);
    const close = () => {
      clients.delete(client);
      client.destroy();
      upstream.destroy();
    };
    for (const socket of [client, upstream]) socket.on("close", close).on("error", close);
  });
  await new Promise((done) => proxy.listen(0, "127.0.0.1", done));
  const disconnect = () => [...clients].forEach((socket) => socket.resetAndDestroy());
  return { url: `http://127.0.0.1:${proxy.address().port}`, disconnect, stop: () => (disconnect(), new Promise((done) => proxy.close(done))) };
}

/** Starts a server in front of another one. `answer(request, body, response)` answers a request itself, or returns false to pass it on. */
export async function startFront(url, answer) {
  const { hostname, port, host, origin } = new URL(url);
  const front = createHttpServer(async (request, response) => {
    const chunks = [];
    for await (const chunk of request) chunks.push(chunk);
    const body = Buffer.concat(chunks);
    if (answer(request, body.toString(), response) !== false) return;
    const headers = { ...request.headers, host, ...(request.headers.origin && { origin }) };
    const passed = httpRequest({ hostname, port, path: request.url, method: request.method, headers }, (got) => {
      response.writeHead(got.statusCode, got.headers);
      got.pipe(response);
      response.on("close", () => got.destroy());
    });
    passed.on("error", () => response.destroy());
    passed.end(body);
  });
  await new Promise((done) => front.listen(0, "127.0.0.1", done));
  return { url: `http://127.0.0.1:${front.address().port}`, stop: () => (front.closeAllConnections(), new Promise((done) => front.close(done))) };
}
