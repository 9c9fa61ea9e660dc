// The base model beside a job's adapter.
import { html } from "../core/ui.js";

export default function Playground() {
  return html`<h1>Playground</h1><p class="dim">Nothing here yet.</p>`;
}
