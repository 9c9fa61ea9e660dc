// The form for a new job.
import { html } from "../core/ui.js";

export default function NewJob() {
  return html`<h1>New job</h1><p class="dim">Nothing here yet.</p>`;
}
