// Who is signed in. The key is sent once and kept nowhere; the cookie is HttpOnly, so this page never sees it.
import { send } from "./api.js";
import { Signal } from "./signal.js";

/** `state`: `unknown` (before the first answer), `open` (a server without keys), `in` or `out`. `scopes`: what may be done. */
export const session = new Signal({ state: "unknown", scopes: [], csrf: null });

const OPEN = { state: "open", scopes: ["read", "submit", "admin"], csrf: null };
const OUT = { state: "out", scopes: [], csrf: null };

/** Asks the server who we are. */
export async function whoAmI() {
  try {
    const response = await fetch("/session", { credentials: "same-origin", cache: "no-store" });
    if (response.ok) return session.set(signedIn(await response.json()));
    // 404: a server that knows no sessions; then its key, if it has one, shows at the first request.
    session.set(response.status === 404 ? OPEN : OUT);
  } catch {
    session.set({ ...OUT, unreachable: true });
  }
}

function signedIn({ keys_required, scopes, csrf_token, key_name, owner }) {
  return { state: keys_required ? "in" : "open", scopes, csrf: csrf_token ?? null, name: key_name ?? null, owner: owner ?? null };
}

/** Signs in with a key; throws the server's problem. */
export async function signIn(key) {
  const response = await send("POST", "/session", { body: { key } });
  session.set(signedIn(await response.json()));
}

export async function signOut() {
  await send("DELETE", "/session");
  session.set(OUT);
}

/** The server did not take our cookie. */
export function signedOut() {
  if (session.value.state !== "out") session.set({ ...OUT, expired: session.value.state === "in" });
}

/** Whether the session may do what needs `scope`: `read`, `submit` or `admin`. */
export const may = (scope) => session.value.scopes.includes(scope) || session.value.scopes.includes("admin");
