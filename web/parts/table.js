// A table that scrolls independently of the page. A heading that starts with # marks a column of numbers; one that starts with ! is hidden.
import { html } from "../core/ui.js";

const heading = (name, at) => {
  const text = typeof name === "string" ? name.replace(/^[#!]/, "") : name;
  return html`<th key=${at} scope="col" class=${name[0] === "#" ? "num" : undefined}>${name[0] === "!" ? html`<span class="unseen">${text}</span>` : text}</th>`;
};

export const Table = ({ label, head, name, children }) => html`<div class="scroll" tabindex="0" role="region" aria-label=${label}><table class=${`list ${name ?? ""}`}>
  <thead><tr>${head.map(heading)}</tr></thead><tbody>${children}</tbody></table></div>`;
