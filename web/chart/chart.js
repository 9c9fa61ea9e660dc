// A chart with its controls: a legend with the values at the cursor, log scale, table, downloads, and a summary for screen readers.
import { number } from "../core/format.js";
import { lowerBound } from "../core/search.js";
import { useSignal } from "../core/signal.js";
import { theme } from "../core/theme.js";
import { html, useEffect, useId, useRef, useState } from "../core/ui.js";
import { download, toCsv, toPng } from "./export.js";
import { color, dash } from "./palette.js";
import { Plot } from "./plot.js";
import { summarize } from "./summary.js";

/** Maximum number of rows in the table. The CSV file has all of them. */
const MAX_TABLE_ROWS = 200;

/**
 * Draws `series`, `[{label, key, values, band, points, right, tint}]`, over `x`, as described in plot.js. `version` changes with the data.
 * `onCsv` replaces the download of the CSV file, for charts whose data is only partly loaded.
 */
export function Chart({ title, note, group, x, series, version, onCsv }) {
  const id = useId();
  const container = useRef(null);
  const plot = useRef(null);
  const [isLog, setLog] = useState(false);
  const [isTable, setTable] = useState(false);
  const [cursor, setCursor] = useState(null);
  const mode = useSignal(theme);

  useEffect(() => {
    if (isTable) return;
    plot.current = new Plot(container.current, group, { onCursor: setCursor });
    return () => {
      plot.current.destroy();
      plot.current = null;
    };
  }, [group, isTable]);
  useEffect(() => plot.current?.set({ x, series }, isLog), [x, series, version, isLog, isTable]);

  const onKeyDown = (event) => {
    const action = { ArrowLeft: () => group.pan(-0.2), ArrowRight: () => group.pan(0.2), "+": () => group.zoom(0.5), "=": () => group.zoom(0.5), "-": () => group.zoom(2), 0: () => group.showAll() }[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    action();
  };
  const name = title.toLowerCase().replace(/[^a-z0-9]+/g, "-");
  const hasValues = series.some(({ values }) => values.some((value) => value === value));
  const summary = summarize(title, x, series);
  return html`<figure class="chart" aria-labelledby=${`${id}-title`}>
    <div class="chart-head">
      <h3 id=${`${id}-title`}>${title}${note && html` <span class="dim small">${note}</span>`}</h3>
      <div class="chart-tools">
        <button class="mini" aria-pressed=${isLog} onClick=${() => setLog(!isLog)}>Log</button>
        <button class="mini" aria-pressed=${isTable} onClick=${() => setTable(!isTable)}>Table</button>
        <button class="mini" disabled=${!hasValues} aria-label=${`Download ${title} as CSV`} onClick=${() => (onCsv ? onCsv(name) : download(`${name}.csv`, toCsv(x, series), "text/csv"))}>CSV</button>
        <button class="mini" disabled=${!hasValues || isTable} aria-label=${`Download ${title} as PNG`}
          onClick=${async () => plot.current?.canvas && download(`${name}.png`, await toPng(plot.current.canvas, title, series, mode))}>PNG</button>
      </div>
    </div>
    <${Legend} x=${x} series=${series} cursor=${cursor} mode=${mode} />
    ${isTable
      ? html`<${ValueTable} title=${title} x=${x} series=${series} />`
      : html`<div class="plot" ref=${container} tabindex="0" role="img" aria-label=${summary} onKeyDown=${onKeyDown}></div>`}
    ${!hasValues && !isTable && html`<p class="no-values dim">No values yet</p>`}
  </figure>`;
}

/** The label of each line, with its value at the cursor, or its latest value. */
function Legend({ x, series, cursor, mode }) {
  const at = cursor === null ? x.length - 1 : nearestIndex(x, cursor);
  return html`<ul class="legend">
    ${cursor !== null && x.length > 0 && html`<li class="dim num">step ${x[at]}</li>`}
    ${series.map(({ label, values, tint }, index) => html`<li key=${label}>
      <svg viewBox="0 0 22 8" aria-hidden="true"><path d="M0 4H22" stroke=${color(tint ?? index, mode)} stroke-width="2.5" stroke-dasharray=${dash(tint ?? index).join(" ")} /></svg>
      <span>${label}</span> <b class="num">${number(valueAtOrBefore(values, at))}</b></li>`)}
  </ul>`;
}

function nearestIndex(x, value) {
  const at = lowerBound(x, value);
  if (at === 0) return 0;
  if (at >= x.length) return x.length - 1;
  return x[at] - value < value - x[at - 1] ? at : at - 1;
}

/** Returns the value at an index, or the last value before it, or null. */
function valueAtOrBefore(values, at) {
  for (let index = at; index >= 0; index--) if (values[index] === values[index]) return values[index];
  return null;
}

function ValueTable({ title, x, series }) {
  const rows = [];
  for (let index = x.length - 1; index >= 0 && rows.length < MAX_TABLE_ROWS; index--) {
    if (series.some(({ values }) => values[index] === values[index])) rows.push(index);
  }
  return html`<div class="scroll values" tabindex="0" role="region" aria-label=${`${title}: values`}><table>
    <thead><tr><th scope="col" class="num">Step</th>${series.map(({ label }) => html`<th key=${label} scope="col" class="num">${label}</th>`)}</tr></thead>
    <tbody>${rows.map((index) => html`<tr key=${x[index]}><th scope="row" class="num">${x[index]}</th>
      ${series.map(({ label, values }) => html`<td key=${label} class="num">${number(values[index], 6)}</td>`)}</tr>`)}</tbody>
  </table></div>`;
}
