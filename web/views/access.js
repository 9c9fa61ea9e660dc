// Keys and webhooks.
import { html } from "../core/ui.js";

export default function Access() {
  return html`<h1>Keys and webhooks</h1><p class="dim">Nothing here yet.</p>`;
}
