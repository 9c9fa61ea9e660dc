// Devices, workers, the queue.
import { html } from "../core/ui.js";

export default function System() {
  return html`<h1>System</h1><p class="dim">Nothing here yet.</p>`;
}
