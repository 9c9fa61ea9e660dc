// The sign-in page. The API key is sent to the server once; from then on, the session cookie is used.
import { session, signIn } from "../core/session.js";
import { useSignal } from "../core/signal.js";
import { html, useEffect, useState } from "../core/ui.js";
import { useAction } from "../core/action.js";
import { Input } from "../parts/field.js";

export default function SignIn() {
  const { expired, unreachable } = useSignal(session);
  const [key, setKey] = useState("");
  const { busy, error, submit } = useAction();
  // The autofocus attribute works only while the document loads, but this page may appear later.
  useEffect(() => document.querySelector(".sign-in input").focus(), []);
  return html`<form class="sign-in panel" onSubmit=${submit(() => signIn(key.trim()))}>
    <h1>rlood</h1>
    <p>${expired ? "Your session has expired. Sign in again." : unreachable ? "The server did not respond. Try again in a moment." : "This server requires an API key."}</p>
    <${Input} label="API key" errors=${error ? [{ pointer: "/key", code: error.code, detail: error.message }] : []} hint="A key that starts with rld_, or the server's RLOOD_API_KEY."
      type="password" name="key" autocomplete="current-password" required value=${key} set=${setKey} />
    <button class="primary" disabled=${busy || !key.trim()}>Sign in</button>
  </form>`;
}
