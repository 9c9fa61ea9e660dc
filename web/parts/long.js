// A text of any length: its beginning, and all of it when asked for.
import { count } from "../core/format.js";
import { cls, html, useState } from "../core/ui.js";

/** Characters that are shown at first. */
const SHOWN_CHARACTERS = 1200;

export function Long({ text, label, class: name, shown = SHOWN_CHARACTERS }) {
  const [isOpen, open] = useState(false);
  const isLong = text.length > shown * 1.25;
  return html`<div class=${cls("long", name)}>
    <div class="text" aria-label=${label} role=${label && "group"}>${text === "" ? html`<span class="dim">(empty)</span>` : isLong && !isOpen ? beginning(text, shown) : text}</div>
    ${isLong && html`<button class="mini" aria-expanded=${isOpen} onClick=${() => open(!isOpen)}>${isOpen ? "Show less" : `Show all ${count(text.length)} characters`}</button>`}
  </div>`;
}

/** Cut between characters, not within one. */
export function beginning(text, length) {
  if (text.length <= length) return text;
  const end = /[\ud800-\udbff]/.test(text[length - 1]) ? length - 1 : length;
  return `${text.slice(0, end)}…`;
}
