// What the job does: the resolved configuration.
import { html } from "../core/ui.js";
import { JobPage } from "../parts/job-page.js";

export default function Config({ params }) {
  return html`<${JobPage} id=${params.id} tab="/config">${(run, job) => html`<p class="dim">Nothing here yet for ${job.id}.</p>`}</${JobPage}>`;
}
