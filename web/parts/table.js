// A table that scrolls by itself. Columns of numbers have a name that begins with #, columns without a visible name one that begins with !.
import { html } from "../core/ui.js";

const heading = (name, at) => {
  const text = typeof name === "string" ? name.replace(/^[#!]/, "") : name;
  return html`<th key=${at} scope="col" class=${name[0] === "#" ? "num" : undefined}>${name[0] === "!" ? html`<span class="unseen">${text}</span>` : text}</th>`;
};

export const Table = ({ label, head, name, children }) => html`<div class="scroll" tabindex="0" role="region" aria-label=${label}><table class=${`list ${name ?? ""}`}>
  <thead><tr>${head.map(heading)}</tr></thead><tbody>${children}</tbody></table></div>`;
