// Text whose tokens have a number: a tooltip with the number, and a background that becomes stronger with `strength`, 0 to 1.
import { html } from "../core/ui.js";

/** `pieces` are `[text, tooltip, strength]`. */
export const TokenText = ({ pieces, label }) => html`<div class="text" role="group" aria-label=${label}>${pieces.map(([text, title, strength], index) =>
  html`<span key=${index} class="token" title=${title} style=${{ "--strength": `${Math.round(strength * 45)}%` }}>${text}</span>`)}</div>`;
