// Form fields: a label, a control, a hint and the server's errors, linked for screen readers.
import { cls, html, useId } from "../core/ui.js";
import { Select } from "./switch.js";

/** A field. `children` is a function that receives the attributes of the control: `(attributes) => html`<input ...${attributes} />``. */
export function Field({ label, hint, errors = [], children, optional, pointer }) {
  const id = useId();
  const isInvalid = errors.length > 0;
  const describedBy = cls(hint && `${id}-hint`, isInvalid && `${id}-error`);
  const attributes = { id, "aria-describedby": describedBy || undefined, "aria-invalid": isInvalid || undefined, "data-pointer": pointer };
  return html`<div class="field">
    <label for=${id}>${label}${optional && html` <span class="dim">optional</span>`}</label>
    ${children(attributes)}
    ${hint && html`<p class="hint" id=${`${id}-hint`}>${hint}</p>`}
    ${isInvalid && html`<div class="error" id=${`${id}-error`}>${errors.map((item) => html`<p key=${item.pointer + item.code}>${item.detail}</p>`)}</div>`}
  </div>`;
}

/** A text field, a text area (with `rows`) or a select (with `options`). `set` receives the text. Other properties become attributes. */
export const Input = ({ label, hint, errors, optional, pointer, set, ...rest }) => html`<${Field} label=${label} hint=${hint} errors=${errors} optional=${optional} pointer=${pointer}>${(attributes) => {
  const onInput = ({ target }) => set(target.value);
  if (rest.options) return html`<${Select} ...${attributes} ...${rest} set=${set} />`;
  return rest.rows ? html`<textarea ...${attributes} ...${rest} onInput=${onInput}></textarea>` : html`<input ...${attributes} ...${rest} onInput=${onInput} />`;
}}<//>`;

/** A group of checkboxes. `options` are `[value, text]`, `chosen` lists the checked values, and `set` receives the new list. */
export const CheckboxGroup = ({ label, options, chosen, errors, set }) => html`<fieldset class="field"><legend>${label}</legend>
  ${options.map(([value, text]) => html`<label key=${value} class="pick"><input type="checkbox" checked=${chosen.includes(value)}
    onChange=${({ target }) => set(target.checked ? [...chosen, value] : chosen.filter((other) => other !== value))} /> <span>${text}</span></label>`)}
  ${errors.map(({ code, detail }) => html`<p key=${code} class="bad small">${detail}</p>`)}</fieldset>`;
