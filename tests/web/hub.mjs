// A hub that has the bundled model: as `org/model`, whole; as `org/slow-model`, whose weights come slowly; as `org/broken-model`. The
// weights of the last two are not those that they announce, so each is a file of its own, and the broken one's download fails.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync } from "node:fs";
import { createServer } from "node:http";

const COMMIT = "0123456789abcdef0123456789abcdef01234567";

export async function startHub() {
  const folder = `${process.env.RLOOD_ASSETS}/tiny`;
  const files = new Map(readdirSync(folder).map((name) => [name, readFileSync(`${folder}/${name}`)]));
  const hash = (kind, ...parts) => parts.reduce((sum, part) => sum.update(part), createHash(kind)).digest("hex");
  const describe = (repo) => ([rfilename, bytes]) => ({
    rfilename, size: bytes.length, blobId: hash("sha1", `blob ${bytes.length}\0`, bytes),
    ...(rfilename.endsWith(".safetensors") && { lfs: { sha256: hash("sha256", bytes, repo === "org/model" ? "" : repo), size: bytes.length, pointerSize: 134 } }),
  });
  const server = createServer((request, reply) => {
    const path = new URL(request.url, "http://hub").pathname;
    const info = path.match(/^\/api\/models\/(org\/[a-z-]+)\/revision\//);
    if (info) {
      const about = { id: info[1], sha: COMMIT, private: false, gated: false, disabled: false, tags: [], siblings: [...files].map(describe(info[1])) };
      return reply.writeHead(200, { "content-type": "application/json" }).end(JSON.stringify(about));
    }
    const [, repo, name] = path.match(/^\/(org\/[a-z-]+)\/resolve\/[0-9a-f]+\/(.+)$/) ?? [];
    const bytes = files.get(name);
    if (!bytes) return reply.writeHead(401, { "x-error-code": "RepoNotFound" }).end();
    const from = Number(request.headers.range?.match(/^bytes=(\d+)-/)?.[1] ?? 0);
    const range = request.headers.range ? { "content-range": `bytes ${from}-${bytes.length - 1}/${bytes.length}` } : {};
    reply.writeHead(request.headers.range ? 206 : 200, { "x-repo-commit": COMMIT, "content-length": bytes.length - from, ...range });
    const sent = bytes.subarray(from);
    if (repo !== "org/slow-model" || !name.endsWith(".safetensors")) return reply.end(sent);
    // A few kilobytes a second, until somebody hangs up.
    let at = Math.floor(bytes.length * 0.6);
    reply.write(sent.subarray(0, at));
    const timer = setInterval(() => (at < sent.length - 20_000 ? reply.write(sent.subarray(at, (at += 9_000))) : undefined), 1000);
    reply.on("close", () => clearInterval(timer));
  }).listen(0, "127.0.0.1");
  await new Promise((done) => server.once("listening", done));
  return { url: `http://127.0.0.1:${server.address().port}`, stop: () => (server.closeAllConnections(), new Promise((done) => server.close(done))) };
}
