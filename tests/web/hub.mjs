// A stand-in for the Hugging Face Hub that serves the bundled model under three names: `org/model`; `org/slow-model`, whose weights arrive
// slowly; and `org/broken-model`, whose download fails. The weights of the last two do not match their announced hash, so that the server
// does not reuse an already downloaded file.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync } from "node:fs";
import { createServer } from "node:http";

const COMMIT = "0123456789abcdef0123456789abcdef01234567";

export async function startHub() {
  const folder = `${process.env.RLOOD_ASSETS}/tiny`;
  const files = new Map(readdirSync(folder).map((name) => [name, readFileSync(`${folder}/${name}`)]));
  const hash = (algorithm, ...chunks) => chunks.reduce((sum, chunk) => sum.update(chunk), createHash(algorithm)).digest("hex");
  const describe = (repo) => ([rfilename, bytes]) => ({
    rfilename, size: bytes.length, blobId: hash("sha1", `blob ${bytes.length}\0`, bytes),
    ...(rfilename.endsWith(".safetensors") && { lfs: { sha256: hash("sha256", bytes, repo === "org/model" ? "" : repo), size: bytes.length, pointerSize: 134 } }),
  });
  const server = createServer((request, response) => {
    const path = new URL(request.url, "http://hub").pathname;
    const info = path.match(/^\/api\/models\/(org\/[a-z-]+)\/revision\//);
    if (info) {
      const modelInfo = { id: info[1], sha: COMMIT, private: false, gated: false, disabled: false, tags: [], siblings: [...files].map(describe(info[1])) };
      return response.writeHead(200, { "content-type": "application/json" }).end(JSON.stringify(modelInfo));
    }
    const [, repo, name] = path.match(/^\/(org\/[a-z-]+)\/resolve\/[0-9a-f]+\/(.+)$/) ?? [];
    const bytes = files.get(name);
    if (!bytes) return response.writeHead(401, { "x-error-code": "RepoNotFound" }).end();
    const from = Number(request.headers.range?.match(/^bytes=(\d+)-/)?.[1] ?? 0);
    const range = request.headers.range ? { "content-range": `bytes ${from}-${bytes.length - 1}/${bytes.length}` } : {};
    response.writeHead(request.headers.range ? 206 : 200, { "x-repo-commit": COMMIT, "content-length": bytes.length - from, ...range });
    const body = bytes.subarray(from);
    if (repo !== "org/slow-model" || !name.endsWith(".safetensors")) return response.end(body);
    // Send 60 % at once, then 9 kB per second, and never the end: the download lasts until the client disconnects.
    let position = Math.floor(bytes.length * 0.6);
    response.write(body.subarray(0, position));
    const timer = setInterval(() => (position < body.length - 20_000 ? response.write(body.subarray(position, (position += 9_000))) : undefined), 1000);
    response.on("close", () => clearInterval(timer));
  }).listen(0, "127.0.0.1");
  await new Promise((done) => server.once("listening", done));
  return { url: `http://127.0.0.1:${server.address().port}`, stop: () => (server.closeAllConnections(), new Promise((done) => server.close(done))) };
}
