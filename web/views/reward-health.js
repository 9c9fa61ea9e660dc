// How the job's rewards are doing: values, latency, errors.
import { html } from "../core/ui.js";
import { JobPage } from "../parts/job-page.js";

export default function RewardHealth({ params }) {
  return html`<${JobPage} id=${params.id} tab="/rewards">${(run, job) => html`<p class="dim">Nothing here yet for ${job.id}.</p>`}</${JobPage}>`;
}
