// Checkpoints: metrics at the step, hashes, downloads, how to use them.
import { html } from "../core/ui.js";
import { JobPage } from "../parts/job-page.js";

export default function Checkpoints({ params }) {
  return html`<${JobPage} id=${params.id} tab="/checkpoints">${(run, job) => html`<p class="dim">Nothing here yet for ${job.id}.</p>`}</${JobPage}>`;
}
