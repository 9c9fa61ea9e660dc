// Screen-reader announcements: one live region that any module writes to, so that the focus stays where it is.
import { Signal, useSignal } from "./signal.js";
import { html } from "./ui.js";

const polite = new Signal("");

/** Announces `text`. The region is emptied first: screen readers ignore a text that does not change. */
export function announce(text) {
  polite.set("");
  setTimeout(() => polite.set(text), 50);
}

export const LiveRegion = () => html`<div class="unseen" role="status" aria-live="polite">${useSignal(polite)}</div>`;
