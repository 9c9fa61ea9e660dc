// Small pieces of text: copied code, times that grow older, ids.
import { announce } from "../core/announce.js";
import { ago, moment, shortId } from "../core/format.js";
import { cls, html, useEffect, useState } from "../core/ui.js";

/** Copies `text`; says so. */
export function Copy({ text, label = "Copy" }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      announce("Copied");
      setDone(true);
      setTimeout(() => setDone(false), 1500);
    } catch {
      announce("The browser does not allow copying; select the text instead");
    }
  };
  return html`<button type="button" class="copy" onClick=${copy}>${done ? "Copied" : label}</button>`;
}

/** Lines to use elsewhere, with a button that copies them. */
export const Code = ({ text, label }) => html`<div class="code"><pre tabindex="0" aria-label=${label}>${text}</pre><${Copy} text=${text} /></div>`;

/** "5 min ago", with the full time for whoever points at it. */
export function Ago({ time }) {
  const [, redraw] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => redraw((n) => n + 1), 30_000);
    return () => clearInterval(timer);
  }, []);
  return html`<time datetime=${time} title=${moment(time)}>${ago(time)}</time>`;
}

export const Id = ({ id }) => html`<code class="id" title=${id}>${shortId(id)}</code>`;

/** `[[name, value, note]]` beside each other; those without a value are left out. */
export const Facts = ({ facts, panel }) => html`<dl class=${cls("stats", panel && "panel")}>${facts.filter(([, value]) => value).map(([name, value, note]) =>
  html`<div key=${name}><dt>${name}</dt><dd>${value}</dd>${note && html`<dd class="dim small">${note}</dd>`}</div>`)}</dl>`;
