// The page for whoever is not signed in. The key goes to the server once; then there is only the cookie.
import { session, signIn } from "../core/session.js";
import { useSignal } from "../core/signal.js";
import { html, useEffect, useState } from "../core/ui.js";
import { useWork } from "../core/work.js";
import { Input } from "../parts/field.js";

export default function SignIn() {
  const { expired, unreachable } = useSignal(session);
  const [key, setKey] = useState("");
  const { busy, error, submit } = useWork();
  // It may take the place of a page, long after the document's own autofocus.
  useEffect(() => document.querySelector(".sign-in input").focus(), []);
  return html`<form class="sign-in panel" onSubmit=${submit(() => signIn(key.trim()))}>
    <h1>rlood</h1>
    <p>${expired ? "The session is over. Sign in again." : unreachable ? "The server does not answer. Try again in a moment." : "This server asks for a key."}</p>
    <${Input} label="Key" errors=${error ? [{ pointer: "/key", code: error.code, detail: error.message }] : []} hint="One that begins with rld_, or the server's RLOOD_API_KEY."
      type="password" name="key" autocomplete="current-password" required value=${key} set=${setKey} />
    <button class="primary" disabled=${busy || !key.trim()}>Sign in</button>
  </form>`;
}
