// The page for whoever is not signed in. The key goes to the server once; then there is only the cookie.
import { session, signIn } from "../core/session.js";
import { useSignal } from "../core/signal.js";
import { html, useState } from "../core/ui.js";
import { Field } from "../parts/field.js";

export default function SignIn() {
  const { expired, unreachable } = useSignal(session);
  const [key, setKey] = useState("");
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    try {
      await signIn(key.trim());
    } catch (problem) {
      setError(problem);
      setBusy(false);
    }
  };
  return html`<form class="sign-in panel" onSubmit=${submit}>
    <h1>rlood</h1>
    <p>${expired ? "The session is over. Sign in again." : unreachable ? "The server does not answer. Try again in a moment." : "This server asks for a key."}</p>
    <${Field} label="Key" errors=${error ? [{ pointer: "/key", code: error.code, detail: error.message }] : []} hint="One that begins with rld_, or the server's RLOOD_API_KEY.">
      ${(attributes) => html`<input ...${attributes} type="password" name="key" autocomplete="current-password" autofocus required value=${key} onInput=${(event) => setKey(event.target.value)} />`}
    <//>
    <button class="primary" disabled=${busy || !key.trim()}>Sign in</button>
  </form>`;
}
