// A modal dialog over the browser's own: it keeps the focus, and Escape closes it.
import { html, useId, useLayoutEffect, useRef } from "../core/ui.js";
import { useWork } from "../core/work.js";
import { ProblemBox } from "./problem.js";
import { Code } from "./text.js";

export function Dialog({ title, onClose, children }) {
  const element = useRef(null);
  const id = useId();
  // A press beside it closes it; a selection that ends beside it does not.
  const pressed = useRef(null);
  // At once: what is typed next belongs into it.
  useLayoutEffect(() => {
    const before = document.activeElement;
    element.current.showModal();
    return () => before?.focus?.();
  }, []);
  return html`<dialog ref=${element} aria-labelledby=${id} onClose=${onClose} onMouseDown=${({ target }) => (pressed.current = target)}
    onClick=${({ target }) => target === element.current && pressed.current === target && onClose()}>
    <div class="dialog">
      <div class="row between"><h2 id=${id}>${title}</h2><button class="quiet" aria-label="Close" onClick=${onClose}>✕</button></div>
      ${children}
    </div>
  </dialog>`;
}

/** Asks before something is done; shows the server's problem if it is not. */
export function Confirm({ title, children, action, onDone, onClose }) {
  const { busy, error, run } = useWork();
  const press = () => run(async () => {
    await onDone();
    onClose();
  });
  return html`<${Dialog} title=${title} onClose=${onClose}>
    <div>${children}</div>
    <${ProblemBox} error=${error} />
    <div class="row end">
      <button onClick=${onClose}>Keep it as it is</button>
      <button class="danger" disabled=${busy} onClick=${press}>${action}</button>
    </div>
  <//>`;
}

/** A form in a dialog; `work` is a `useWork`. */
export const FormDialog = ({ title, children, action, work: { busy, error, submit }, onSubmit, onClose }) => html`<${Dialog} title=${title} onClose=${onClose}><form onSubmit=${submit(onSubmit)}>
  ${children}
  <${ProblemBox} error=${error} hasFields />
  <div class="row end"><button type="button" onClick=${onClose}>Close</button><button class="primary" disabled=${busy}>${action}</button></div>
</form><//>`;

/** What is shown once: an answer that had to be asked for twice has it no more. */
export const Shown = ({ title, about, text, label, onClose }) => html`<${Dialog} title=${title} onClose=${onClose}>
  ${text ? html`<p>${about}</p><${Code} text=${text} label=${label} />` : html`<p class="notice">It is made, but the answer that showed it got lost: make another one.</p>`}
  <div class="row end"><button class="primary" onClick=${onClose}>I have it</button></div><//>`;
