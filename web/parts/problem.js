// Shows an error of the API, with its request ID and a retry button; and a placeholder for data that is loading.
import { html } from "../core/ui.js";

/** An error. With `hasFields`, an error that belongs to fields is left out here: the fields show it. */
export function ProblemBox({ error, retry, hasFields }) {
  if (!error || (hasFields && error.errors?.length)) return null;
  const items = (error.errors ?? []).filter((item) => item.detail !== error.detail);
  return html`<div class="problem" role="alert">
    <strong>${error.title ?? "The request failed"}</strong>
    <p>${error.message}</p>
    ${items.length > 0 && html`<ul>${items.map((item) => html`<li key=${item.pointer + item.code}><code>${item.pointer}</code> ${item.detail}</li>`)}</ul>`}
    <p class="dim small">${error.code}${error.request_id && ` · ${error.request_id}`} ${retry && html`<button onClick=${retry}>Try again</button>`}</p>
  </div>`;
}

export const Loading = ({ error, retry }) => (error ? html`<${ProblemBox} error=${error} retry=${retry} />` : html`<div class="loading" aria-busy="true">Loading…</div>`);
