// The REST API: JSON in and out, problems (RFC 9457) as exceptions, the session's token on every change.
import { session, signedOut, whoAmI } from "./session.js";

/** An error of the API: `{status, code, title, detail, errors: [{pointer, code, detail}], request_id, retryable}`. */
export class Problem extends Error {
  constructor(body) {
    super(body.detail || body.title || "The request failed.");
    Object.assign(this, { errors: [], retryable: false }, body);
  }

  /** What belongs to one field: items whose pointer is `pointer` or lies below it. */
  at(pointer) {
    return this.errors.filter((item) => item.pointer === pointer || item.pointer.startsWith(`${pointer}/`));
  }
}

const unreachable = () =>
  new Problem({ status: 0, code: "unreachable", title: "No answer", detail: "The server does not answer.", retryable: true });

/** `path?query` without the parameters that are undefined, null or empty. */
export function urlOf(path, query = {}) {
  const set = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return set.length ? `${path}?${new URLSearchParams(set)}` : path;
}

/** Sends a request and returns the Response, or throws a Problem. Bodies that are not strings, forms or files go as JSON. */
export async function send(method, path, options = {}) {
  const { query, body, headers = {}, signal, isAgain } = options;
  const all = new Headers(headers);
  let payload = body;
  if (body !== undefined && !(typeof body === "string" || body instanceof Blob || body instanceof FormData)) {
    payload = JSON.stringify(body);
    all.set("content-type", "application/json");
  }
  if (method !== "GET" && session.value.csrf) all.set("x-csrf-token", session.value.csrf);
  let response;
  try {
    response = await fetch(urlOf(path, query), { method, headers: all, body: payload, signal, credentials: "same-origin", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw unreachable();
  }
  if (response.ok) return response;
  const problem = await problemOf(response);
  if (problem.status === 401 && path !== "/session") signedOut();
  // Another tab signed in anew.
  if (problem.code === "invalid_csrf_token" && !isAgain) {
    await whoAmI();
    return send(method, path, { ...options, isAgain: true });
  }
  throw problem;
}

async function problemOf(response) {
  const fallback = { status: response.status, code: "http", title: response.statusText, detail: `The server answered ${response.status}.` };
  try {
    return new Problem({ ...fallback, ...(await response.json()) });
  } catch {
    return new Problem(fallback);
  }
}

async function json(method, path, options) {
  const response = await send(method, path, options);
  const text = await response.text();
  return text ? JSON.parse(text) : null;
}

/** One key per press of a button: a repeat after a lost answer does the thing once. */
const idempotencyKey = () => [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

export const get = (path, query, signal) => json("GET", path, { query, signal });
export const patch = (path, body) => json("PATCH", path, { body });
export const del = (path) => json("DELETE", path);

/** POST, tried once more with the same Idempotency-Key when no answer came. */
export async function post(path, body, options = {}) {
  const headers = { "idempotency-key": idempotencyKey(), ...options.headers };
  try {
    return await json("POST", path, { ...options, body, headers });
  } catch (error) {
    if (error.code !== "unreachable") throw error;
    return json("POST", path, { ...options, body, headers });
  }
}

/** Every item of a list, page by page, at most `most`. */
export async function all(path, query = {}, most = 1000, signal) {
  const items = [];
  let after;
  do {
    const page = await get(path, { limit: 100, ...query, after }, signal);
    items.push(...page.data);
    after = page.next;
  } while (after && items.length < most);
  return items;
}
