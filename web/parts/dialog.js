// A modal dialog over the browser's own: it keeps the focus, and Escape closes it.
import { html, useEffect, useId, useRef, useState } from "../core/ui.js";
import { ProblemBox } from "./problem.js";

export function Dialog({ title, onClose, children, wide }) {
  const element = useRef(null);
  const id = useId();
  useEffect(() => {
    const before = document.activeElement;
    element.current.showModal();
    return () => before?.focus?.();
  }, []);
  return html`<dialog ref=${element} class=${wide ? "wide" : ""} aria-labelledby=${id} onClose=${onClose}
    onClick=${(event) => event.target === element.current && onClose()}>
    <div class="dialog">
      <div class="row between"><h2 id=${id}>${title}</h2><button class="quiet" aria-label="Close" onClick=${onClose}>✕</button></div>
      ${children}
    </div>
  </dialog>`;
}

/** Asks before something is done; shows the server's problem if it is not. */
export function Confirm({ title, children, action, danger, onDone, onClose }) {
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const run = async () => {
    setBusy(true);
    try {
      await onDone();
      onClose();
    } catch (problem) {
      setError(problem);
      setBusy(false);
    }
  };
  return html`<${Dialog} title=${title} onClose=${onClose}>
    <div>${children}</div>
    <${ProblemBox} error=${error} />
    <div class="row end">
      <button onClick=${onClose}>Keep it as it is</button>
      <button class=${danger ? "danger" : "primary"} disabled=${busy} onClick=${run}>${action}</button>
    </div>
  <//>`;
}
