// A text that is truncated if it is long, with a button that shows all of it.
import { count } from "../core/format.js";
import { cls, html, useState } from "../core/ui.js";

/** Default length of a truncated text, in characters. */
const TRUNCATED_LENGTH = 1200;

export function LongText({ text, label, class: name, shown = TRUNCATED_LENGTH }) {
  const [isOpen, setOpen] = useState(false);
  const isLong = text.length > shown * 1.25;
  return html`<div class=${cls("long", name)}>
    <div class="text" aria-label=${label} role=${label && "group"}>${text === "" ? html`<span class="dim">(empty)</span>` : isLong && !isOpen ? truncate(text, shown) : text}</div>
    ${isLong && html`<button class="mini" aria-expanded=${isOpen} onClick=${() => setOpen(!isOpen)}>${isOpen ? "Show less" : `Show all ${count(text.length)} characters`}</button>`}
  </div>`;
}

/** Truncates text to `length` UTF-16 code units, without splitting a surrogate pair. */
export function truncate(text, length) {
  if (text.length <= length) return text;
  const end = /[\ud800-\udbff]/.test(text[length - 1]) ? length - 1 : length;
  return `${text.slice(0, end)}…`;
}
