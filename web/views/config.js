// The resolved configuration of a job, in a form that can be submitted again.
import { send } from "../core/api.js";
import { useLoad } from "../core/load.js";
import { hrefOf, useFilters } from "../core/router.js";
import { html } from "../core/ui.js";
import { jobView } from "../parts/job-page.js";
import { ProblemBox } from "../parts/problem.js";
import { Switch } from "../parts/switch.js";
import { Code, Id } from "../parts/text.js";

const FORMATS = ["json", "yaml", "toml"];

const Config = jobView("/config", ConfigOf);
export default Config;

function ConfigOf({ run, job }) {
  const [query, set] = useFilters();
  const format = FORMATS.includes(query.format) ? query.format : "yaml";
  const { data, error, reload } = useLoad(async (signal) => (await send("GET", `${run.path}/config`, { query: { format }, signal })).text(), [run, format]);
  const { parent, metadata } = job;
  const metadataEntries = Object.entries(metadata ?? {});
  return html`
    <div class="row between wrap">
      <${Switch} label="Format" options=${FORMATS.map((one) => [one, one.toUpperCase()])} value=${format} set=${(format) => set({ format })} />
      <span class="row wrap">${parent && html`<a class="button" href=${hrefOf("/compare", { ids: `${parent},${job.id}` })}>Compare with <${Id} id=${parent} /></a>`}<a class="button" href=${hrefOf("/new", { from: job.id })}>Clone</a></span>
    </div>
    <p class="dim small">Includes all defaults and can be submitted again. Secrets are left out.${metadataEntries.map(([key, value]) => html` <span key=${key} class="tag">${key}: ${value}</span>`)}</p>
    <${ProblemBox} error=${error} retry=${reload} />
    ${data && html`<${Code} text=${format === "json" ? prettyJson(data) : data} label="Configuration" />`}`;
}

function prettyJson(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
