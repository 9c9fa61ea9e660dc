// Modal dialogs, built on the browser's <dialog>, which traps the focus and closes on Escape.
import { html, useId, useLayoutEffect, useRef } from "../core/ui.js";
import { useAction } from "../core/action.js";
import { ProblemBox } from "./problem.js";
import { Code } from "./text.js";

export function Dialog({ title, onClose, children }) {
  const element = useRef(null);
  const id = useId();
  // A click on the backdrop closes the dialog. A text selection that only ends there does not.
  const pressed = useRef(null);
  // A layout effect opens the dialog before the next key press is handled.
  useLayoutEffect(() => {
    const previousFocus = document.activeElement;
    element.current.showModal();
    return () => previousFocus?.focus?.();
  }, []);
  return html`<dialog ref=${element} aria-labelledby=${id} onClose=${onClose} onMouseDown=${({ target }) => (pressed.current = target)}
    onClick=${({ target }) => target === element.current && pressed.current === target && onClose()}>
    <div class="dialog">
      <div class="row between"><h2 id=${id}>${title}</h2><button class="quiet" aria-label="Close" onClick=${onClose}>✕</button></div>
      ${children}
    </div>
  </dialog>`;
}

/** Asks the user to confirm an action. If the action fails, the dialog stays open and shows the error. */
export function Confirm({ title, children, action, onConfirm, onClose }) {
  const { busy, error, run } = useAction();
  const onPress = () => run(async () => {
    await onConfirm();
    onClose();
  });
  return html`<${Dialog} title=${title} onClose=${onClose}>
    <div>${children}</div>
    <${ProblemBox} error=${error} />
    <div class="row end">
      <button onClick=${onClose}>Go back</button>
      <button class="danger" disabled=${busy} onClick=${onPress}>${action}</button>
    </div>
  <//>`;
}

/** A form in a dialog. `request` is the result of `useAction`. */
export const FormDialog = ({ title, children, action, request: { busy, error, submit }, onSubmit, onClose }) => html`<${Dialog} title=${title} onClose=${onClose}><form onSubmit=${submit(onSubmit)}>
  ${children}
  <${ProblemBox} error=${error} hasFields />
  <div class="row end"><button type="button" onClick=${onClose}>Cancel</button><button class="primary" disabled=${busy}>${action}</button></div>
</form><//>`;

/**
 * Shows a new secret. `text` is missing if the first response got lost: the response to the retried request does not repeat the secret.
 */
export const SecretDialog = ({ title, about, text, label, onClose }) => html`<${Dialog} title=${title} onClose=${onClose}>
  ${text ? html`<p>${about}</p><${Code} text=${text} label=${label} />` : html`<p class="notice">It was created, but the response that contained it was lost. Create another one.</p>`}
  <div class="row end"><button class="primary" onClick=${onClose}>Done</button></div><//>`;
