// Small text components: code with a copy button, relative times, ids, facts, long texts, tokens, placeholders.
import { announce } from "../core/announce.js";
import { count, formatDateTime, shortId, timeAgo } from "../core/format.js";
import { cls, html, useEffect, useState } from "../core/ui.js";

/** A button that copies `text` to the clipboard. */
export function Copy({ text, label = "Copy" }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      announce("Copied");
      setDone(true);
      setTimeout(() => setDone(false), 1500);
    } catch {
      announce("The browser blocked copying. Select the text and copy it.");
    }
  };
  return html`<button type="button" class="copy" onClick=${copy}>${done ? "Copied" : label}</button>`;
}

/** A block of code with a button that copies it. */
export const Code = ({ text, label }) => html`<div class="code"><pre tabindex="0" aria-label=${label}>${text}</pre><${Copy} text=${text} /></div>`;

/** The age of a time, such as "5 min ago", with the full time as a tooltip. */
export function Ago({ time }) {
  const [, redraw] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => redraw((n) => n + 1), 30_000);
    return () => clearInterval(timer);
  }, []);
  return html`<time datetime=${time} title=${formatDateTime(time)}>${timeAgo(time)}</time>`;
}

export const Id = ({ id }) => html`<code class="id" title=${id}>${shortId(id)}</code>`;

/** A row of facts, `[[name, value, note]]`. Facts without a value are left out. */
export const Facts = ({ facts, panel }) => html`<dl class=${cls("stats", panel && "panel")}>${facts.filter(([, value]) => value).map(([name, value, note]) =>
  html`<div key=${name}><dt>${name}</dt><dd>${value}</dd>${note && html`<dd class="dim small">${note}</dd>`}</div>`)}</dl>`;

/** Default length of a truncated text, in characters. */
const TRUNCATED_LENGTH = 1200;

/** A text that is truncated if it is long, with a button that shows all of it. */
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

/** Text with a number for each token: `pieces` are `[text, tooltip, strength]`, with a strength from 0 to 1. */
export const TokenText = ({ pieces, label }) => html`<div class="text" role="group" aria-label=${label}>${pieces.map(([text, title, strength], index) =>
  html`<span key=${index} class="token" title=${title} style=${{ "--strength": `${Math.round(strength * 45)}%` }}>${text}</span>`)}</div>`;

/** A placeholder for a view that has no data yet: what the view is for, and what to do next. */
export const Empty = ({ title, children }) => html`<div class="empty"><h2>${title}</h2>${children}</div>`;
