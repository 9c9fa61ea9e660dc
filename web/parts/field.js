// A form's field: its name, its control, what it means, and what the server said is wrong, tied together for screen readers.
import { cls, html, useId } from "../core/ui.js";
import { Select } from "./switch.js";

/** `children` is a function of the attributes that the control needs: `(attributes) => html`<input ...${attributes} />``. */
export function Field({ label, hint, errors = [], children, optional, pointer }) {
  const id = useId();
  const isWrong = errors.length > 0;
  const described = cls(hint && `${id}-hint`, isWrong && `${id}-error`);
  const attributes = { id, "aria-describedby": described || undefined, "aria-invalid": isWrong || undefined, "data-pointer": pointer };
  return html`<div class=${cls("field", isWrong && "wrong")}>
    <label for=${id}>${label}${optional && html` <span class="dim">optional</span>`}</label>
    ${children(attributes)}
    ${hint && html`<p class="hint" id=${`${id}-hint`}>${hint}</p>`}
    ${isWrong && html`<div class="error" id=${`${id}-error`}>${errors.map((item) => html`<p key=${item.pointer + item.code}>${item.detail}</p>`)}</div>`}
  </div>`;
}

/** A field of text, in several lines with `rows`, or of one of the `options`; `set` is told the text. The rest are attributes of the control. */
export const Input = ({ label, hint, errors, optional, pointer, set, ...rest }) => html`<${Field} label=${label} hint=${hint} errors=${errors} optional=${optional} pointer=${pointer}>${(attributes) => {
  const onInput = ({ target }) => set(target.value);
  if (rest.options) return html`<${Select} ...${attributes} ...${rest} set=${set} />`;
  return rest.rows ? html`<textarea ...${attributes} ...${rest} onInput=${onInput}></textarea>` : html`<input ...${attributes} ...${rest} onInput=${onInput} />`;
}}<//>`;

/** Several of some: `options` are `[value, text]`, `chosen` the values; `set` is told them. */
export const Picks = ({ label, options, chosen, errors, set }) => html`<fieldset class="field"><legend>${label}</legend>
  ${options.map(([value, text]) => html`<label key=${value} class="pick"><input type="checkbox" checked=${chosen.includes(value)}
    onChange=${({ target }) => set(target.checked ? [...chosen, value] : chosen.filter((other) => other !== value))} /> <span>${text}</span></label>`)}
  ${errors.map(({ code, detail }) => html`<p key=${code} class="bad small">${detail}</p>`)}</fieldset>`;
