// Client of the REST API: sends and receives JSON, throws problems (RFC 9457), adds the session's CSRF token to every write.
import { loadSession, markSignedOut, session } from "./session.js";

/** An error of the API: `{status, code, title, detail, errors: [{pointer, code, detail}], request_id, retryable}`. */
export class Problem extends Error {
  constructor(body) {
    super(body.detail || body.title || "The request failed.");
    Object.assign(this, { errors: [], retryable: false }, body);
  }

  /** Returns the errors of one field: those whose pointer is `pointer` or is nested in it. */
  errorsAt(pointer) {
    return this.errors.filter((item) => item.pointer === pointer || item.pointer.startsWith(`${pointer}/`));
  }
}

const unreachable = () =>
  new Problem({ status: 0, code: "unreachable", title: "Server unreachable", detail: "The server did not respond.", retryable: true });

/** Builds `path?query`, leaving out parameters that are undefined, null or empty. */
export function urlOf(path, query = {}) {
  const present = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return present.length ? `${path}?${new URLSearchParams(present)}` : path;
}

/** Sends a request and returns the Response, or throws a Problem. A body that is not a string, Blob or FormData is sent as JSON. */
export async function send(method, path, options = {}) {
  const { query, body, headers = {}, signal, isRetry } = options;
  const allHeaders = new Headers(headers);
  let payload = body;
  if (body !== undefined && !(typeof body === "string" || body instanceof Blob || body instanceof FormData)) {
    payload = JSON.stringify(body);
    allHeaders.set("content-type", "application/json");
  }
  if (method !== "GET" && session.value.csrf) allHeaders.set("x-csrf-token", session.value.csrf);
  let response;
  try {
    response = await fetch(urlOf(path, query), { method, headers: allHeaders, body: payload, signal, credentials: "same-origin", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw unreachable();
  }
  if (response.ok) return response;
  const problem = await readProblem(response);
  if (problem.status === 401 && path !== "/session") markSignedOut();
  // Another tab has started a new session: load its token and retry once.
  if (problem.code === "invalid_csrf_token" && !isRetry) {
    await loadSession();
    return send(method, path, { ...options, isRetry: true });
  }
  throw problem;
}

async function readProblem(response) {
  const fallback = { status: response.status, code: "http", title: response.statusText, detail: `The server responded with HTTP ${response.status}.` };
  try {
    const body = await response.json();
    return new Problem({ ...fallback, ...(body.error ? fromOpenAi(body.error) : body) });
  } catch {
    return new Problem(fallback);
  }
}

/** Converts an error of the routes under /v1, `{message, param, code}`, to the members of a problem document. */
export const fromOpenAi = ({ message, param, code }) =>
  ({ title: "The model did not answer", detail: message, code, errors: param ? [{ pointer: `/${param.replaceAll(".", "/")}`, code, detail: message }] : [] });

async function requestJson(method, path, options) {
  const response = await send(method, path, options);
  const text = await response.text();
  return text ? JSON.parse(text) : null;
}

/** A new Idempotency-Key: the server runs a request once, even if it is repeated after a lost response. */
const idempotencyKey = () => [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

export const get = (path, query, signal) => requestJson("GET", path, { query, signal });
export const patch = (path, body) => requestJson("PATCH", path, { body });
export const del = (path) => requestJson("DELETE", path);

/** Sends a POST request, and retries it once with the same Idempotency-Key if the server does not respond. */
export async function post(path, body, options = {}) {
  const headers = { "idempotency-key": idempotencyKey(), ...options.headers };
  try {
    return await requestJson("POST", path, { ...options, body, headers });
  } catch (error) {
    if (error.code !== "unreachable") throw error;
    return requestJson("POST", path, { ...options, body, headers });
  }
}

/** Reads a paged list until its end, or until it holds `limit` items or more. */
export async function getAll(path, query = {}, limit = 1000, signal) {
  const items = [];
  let after;
  do {
    const page = await get(path, { limit: 100, ...query, after }, signal);
    items.push(...page.data);
    after = page.next;
  } while (after && items.length < limit);
  return items;
}
