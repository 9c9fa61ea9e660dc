// Small text components: code with a copy button, relative times, ids, facts.
import { announce } from "../core/announce.js";
import { formatDateTime, shortId, timeAgo } from "../core/format.js";
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
