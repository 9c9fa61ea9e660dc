// Controls shared by all charts of a group: smoothing and the range of steps.
import { count } from "../core/format.js";
import { useSignal } from "../core/signal.js";
import { html } from "../core/ui.js";

export function ChartControls({ group, children }) {
  const range = useSignal(group.range);
  const smoothing = useSignal(group.smoothing);
  const [min, max] = group.shown;
  return html`<div class="chart-controls" role="group" aria-label="Charts">
    <label class="inline">Smoothing <input type="range" min="0" max="0.99" step="0.01" value=${smoothing} onInput=${(event) => group.smoothing.set(Number(event.target.value))} /> <span class="num">${smoothing.toFixed(2)}</span></label>
    <span class="row">
      <button class="mini" aria-label="Earlier" disabled=${!range} onClick=${() => group.pan(-0.5)}>←</button>
      <button class="mini" aria-label="Zoom in" onClick=${() => group.zoom(0.5)}>+</button>
      <button class="mini" aria-label="Zoom out" disabled=${!range} onClick=${() => group.zoom(2)}>−</button>
      <button class="mini" aria-label="Later" disabled=${!range} onClick=${() => group.pan(0.5)}>→</button>
      <button class="mini" disabled=${!range} onClick=${() => group.showAll()}>All steps</button>
    </span>
    <span class="dim small num">${range ? `steps ${count(Math.round(min))} to ${count(Math.round(max))}` : ""}</span>
    ${children}
    <span class="dim small hint-keys">Drag to zoom, Shift+drag to pan, double-click to reset. Keys on a chart: ← → + −</span>
  </div>`;
}
