// Controls that choose one of several options, `[value, text]`: a row of buttons, or a select.
import { html } from "../core/ui.js";

export const Switch = ({ label, options, value, set }) => html`<span class="switch" role="group" aria-label=${label}>${options.map(([one, text]) =>
  html`<button key=${one} type="button" aria-pressed=${one === value} onClick=${() => set(one)}>${text}</button>`)}</span>`;

/** A select. `set` receives the chosen value. */
export const Select = ({ options, value, set, ...rest }) => html`<select ...${rest} value=${value} onChange=${({ target }) => set(target.value)}>${options.map(([one, text]) =>
  html`<option key=${one} value=${one}>${text}</option>`)}</select>`;
