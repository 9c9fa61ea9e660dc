// A stand-in for the part of the Hugging Face Hub that accepts pushes to the account `ann`. `hold(true)` stops uploads of LFS objects halfway.
import { createHash } from "node:crypto";
import { createServer } from "node:http";

/** The token that may write. */
export const WRITE_TOKEN = "hf_write_and_secret";

const hash = (algorithm, bytes) => createHash(algorithm).update(bytes).digest("hex");

export async function startPushHub() {
  /** By id: `{private, sha, files}`, where `files` maps names to bytes. */
  const repos = new Map();
  const objects = new Map();
  const tokens = new Set();
  let isHeld = false;
  const answer = (response, status, body, headers = {}) => response.writeHead(status, { "content-type": "application/json", ...headers }).end(JSON.stringify(body));
  const describe = ([rfilename, bytes]) => ({
    rfilename, size: bytes.length, blobId: hash("sha1", Buffer.concat([Buffer.from(`blob ${bytes.length}\0`), bytes])),
    ...(rfilename.endsWith(".safetensors") && { lfs: { sha256: hash("sha256", bytes), size: bytes.length, pointerSize: 134 } }),
  });
  const commit = (repo, lines) => {
    for (const { key, value } of lines) {
      if (key === "file") repo.files.set(value.path, Buffer.from(value.content, "base64"));
      if (key === "lfsFile") repo.files.set(value.path, objects.get(value.oid));
    }
    repo.sha = hash("sha1", JSON.stringify(lines));
    return { success: true, commitOid: repo.sha, commitUrl: "", hookOutput: "" };
  };
  /** Receives an object. While uploads are held, it reads no further. */
  const receive = async (request, response, oid) => {
    const chunks = [];
    for await (const chunk of request) {
      chunks.push(chunk);
      while (isHeld && !request.destroyed) await new Promise((done) => setTimeout(done, 20));
    }
    objects.set(oid, Buffer.concat(chunks));
    response.writeHead(200).end();
  };
  const server = createServer(async (request, response) => {
    const { pathname } = new URL(request.url, "http://hub");
    if (pathname.startsWith("/lfs/")) return receive(request, response, pathname.slice(5)).catch(() => response.destroy());
    tokens.add(request.headers.authorization);
    if (request.headers.authorization !== `Bearer ${WRITE_TOKEN}`) return answer(response, 401, { error: "Invalid credentials in Authorization header" });
    let text = "";
    for await (const chunk of request) text += chunk;
    const origin = `http://${request.headers.host}`;
    if (pathname === "/api/repos/create") {
      const { name, organization, private: isPrivate } = JSON.parse(text);
      if (organization !== "ann") return answer(response, 403, { error: `You don't have the rights to create a model under the namespace "${organization}"` });
      repos.set(`ann/${name}`, { private: isPrivate, sha: "0".repeat(40), files: new Map() });
      return answer(response, 200, { url: `${origin}/ann/${name}` });
    }
    if (pathname.endsWith(".git/info/lfs/objects/batch")) {
      const upload = ({ oid, size }) => ({ oid, size, ...(!objects.has(oid) && { actions: { upload: { href: `${origin}/lfs/${oid}` } } }) });
      return answer(response, 200, { transfer: "basic", objects: JSON.parse(text).objects.map(upload) }, { "content-type": "application/vnd.git-lfs+json" });
    }
    const [, id, operation] = pathname.match(/^\/api\/models\/([^/]+\/[^/]+)\/([a-z]+)\/main$/) ?? [];
    const repo = repos.get(id);
    if (!repo) return answer(response, 404, { error: "Repository not found" }, { "x-error-code": "RepoNotFound" });
    if (operation === "preupload") return answer(response, 200, { files: JSON.parse(text).files.map(({ path }) => ({ path, uploadMode: path.endsWith(".safetensors") ? "lfs" : "regular", shouldIgnore: false })) });
    if (operation === "commit") return answer(response, 200, commit(repo, text.trim().split("\n").map((line) => JSON.parse(line))));
    answer(response, 200, { id, sha: repo.sha, private: repo.private, gated: false, disabled: false, tags: [], siblings: [...repo.files].map(describe) });
  }).listen(0, "127.0.0.1");
  await new Promise((done) => server.once("listening", done));
  const url = `http://127.0.0.1:${server.address().port}`;
  return { url, repos, tokens, hold: (value) => (isHeld = value), stop: () => (server.closeAllConnections(), new Promise((done) => server.close(done))) };
}
