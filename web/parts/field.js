// A form's field: its name, its control, what it means, and what the server said is wrong, tied together for screen readers.
import { cls, html, useId } from "../core/ui.js";

/** `children` is a function of the attributes that the control needs: `(attributes) => html`<input ...${attributes} />``. */
export function Field({ label, hint, errors = [], children, optional, pointer }) {
  const id = useId();
  const isWrong = errors.length > 0;
  const described = cls(hint && `${id}-hint`, isWrong && `${id}-error`);
  const attributes = { id, "aria-describedby": described || undefined, "aria-invalid": isWrong ? "true" : undefined, "data-pointer": pointer };
  return html`<div class=${cls("field", isWrong && "wrong")}>
    <label for=${id}>${label}${optional && html` <span class="dim">optional</span>`}</label>
    ${children(attributes)}
    ${hint && html`<p class="hint" id=${`${id}-hint`}>${hint}</p>`}
    ${isWrong && html`<div class="error" id=${`${id}-error`}>${errors.map((item) => html`<p key=${item.pointer + item.code}>${item.detail}</p>`)}</div>`}
  </div>`;
}
