// Runs side by side: curves aligned, settings that differ.
import { html } from "../core/ui.js";

export default function Compare() {
  return html`<h1>Compare runs</h1><p class="dim">Nothing here yet.</p>`;
}
