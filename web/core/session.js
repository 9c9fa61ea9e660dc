// The browser session. The API key is sent once and not stored; the session cookie is HttpOnly, so scripts cannot read it.
import { send } from "./api.js";
import { Signal } from "./signal.js";

/** `state` is `unknown` (before the first response), `open` (the server has no keys), `in` or `out`. `scopes` are those of the key. */
export const session = new Signal({ state: "unknown", scopes: [], csrf: null });

const OPEN = { state: "open", scopes: ["read", "submit", "admin"], csrf: null };
const OUT = { state: "out", scopes: [], csrf: null };

/** Reads the current session from the server. */
export async function loadSession() {
  try {
    const response = await fetch("/session", { credentials: "same-origin", cache: "no-store" });
    if (response.ok) return session.set(sessionFrom(await response.json()));
    // 404: the server has no sessions. If it requires a key, the first request fails with 401.
    session.set(response.status === 404 ? OPEN : OUT);
  } catch {
    session.set({ ...OUT, unreachable: true });
  }
}

function sessionFrom({ keys_required, scopes, csrf_token, key_name, owner }) {
  return { state: keys_required ? "in" : "open", scopes, csrf: csrf_token ?? null, name: key_name ?? null, owner: owner ?? null };
}

/** Signs in with an API key. Throws the server's Problem. */
export async function signIn(key) {
  const response = await send("POST", "/session", { body: { key } });
  session.set(sessionFrom(await response.json()));
}

export async function signOut() {
  await send("DELETE", "/session");
  session.set(OUT);
}

/** Records that the server rejected the session cookie. */
export function markSignedOut() {
  if (session.value.state !== "out") session.set({ ...OUT, expired: session.value.state === "in" });
}

/** Whether the session has `scope` (`read`, `submit` or `admin`). The scope `admin` includes the others. */
export const hasScope = (scope) => session.value.scopes.includes(scope) || session.value.scopes.includes("admin");
