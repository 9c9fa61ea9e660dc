// Events and the workers' log, as they come.
import { html } from "../core/ui.js";
import { JobPage } from "../parts/job-page.js";

export default function Logs({ params }) {
  return html`<${JobPage} id=${params.id} tab="/logs">${(run, job) => html`<p class="dim">Nothing here yet for ${job.id}.</p>`}</${JobPage}>`;
}
