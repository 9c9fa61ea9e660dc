// What a screen reader should say without the focus moving: one live region, written by whoever has news.
import { Signal, useSignal } from "./signal.js";
import { html } from "./ui.js";

const polite = new Signal("");

/** Says `text`; the same text twice is said twice. */
export function announce(text) {
  polite.set("");
  setTimeout(() => polite.set(text), 50);
}

export const LiveRegion = () => html`<div class="unseen" role="status" aria-live="polite">${useSignal(polite)}</div>`;
