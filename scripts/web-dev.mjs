// The dashboard from the files in web/, before a running server: edit, reload, no build.
// usage: node scripts/web-dev.mjs SERVER_URL [PORT]
import { createServer, request } from "node:http";
import { readFile } from "node:fs/promises";
import { extname, join, normalize } from "node:path";

const [server = "http://127.0.0.1:8080", port = "8090"] = process.argv.slice(2);
const web = join(import.meta.dirname, "../web");
const TYPES = { ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml" };
// As src/http/web.rs says it.
const POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

createServer(async (asked, answer) => {
  const { pathname } = new URL(asked.url, "http://localhost");
  const file = pathname === "/" ? "index.html" : pathname.startsWith("/web/") ? normalize(pathname.slice(5)) : null;
  if (file && !file.startsWith("..")) {
    try {
      const bytes = await readFile(join(web, file));
      answer.writeHead(200, { "content-type": TYPES[extname(file)] ?? "text/plain", "content-security-policy": POLICY, "cache-control": "no-store" });
      return answer.end(bytes);
    } catch {
      return answer.writeHead(404).end();
    }
  }
  const { hostname, port: to } = new URL(server);
  const headers = { ...asked.headers, host: new URL(server).host };
  if (headers.origin) headers.origin = new URL(server).origin;
  const passed = request({ hostname, port: to, path: asked.url, method: asked.method, headers }, (got) => {
    answer.writeHead(got.statusCode, got.headers);
    got.pipe(answer);
    answer.on("close", () => got.destroy());
  });
  passed.on("error", () => (answer.headersSent ? answer.destroy() : answer.writeHead(502).end()));
  asked.pipe(passed);
}).listen(Number(port), "127.0.0.1", () => console.log(`http://127.0.0.1:${port}`));
