// Groups: a prompt with its completions, and the table of all samples.
import { html } from "../core/ui.js";
import { JobPage } from "../parts/job-page.js";

export default function Samples({ params }) {
  return html`<${JobPage} id=${params.id} tab="/samples">${(run, job) => html`<p class="dim">Nothing here yet for ${job.id}.</p>`}</${JobPage}>`;
}
