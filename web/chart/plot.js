// Draws one uPlot chart with downsampled, smoothed data in the colors of the theme. The only module that uses uPlot.
import uPlot from "../vendor/uplot.js";
import { number } from "../core/format.js";
import { lowerBound } from "../core/search.js";
import { theme } from "../core/theme.js";
import { color, dash, themeColors } from "./palette.js";
import { smooth } from "./smooth.js";
import { extremeIndices, indicesWithin } from "./thin.js";

const HEIGHT = 190;
const FONT = "11px system-ui, sans-serif";

/**
 * Draws `data`, `{x, series}`, into `container`. A series is `{label, values}` with optional fields: `band` (half the height of a band
 * around the line), `points` (true for sparse values: each is marked), `right` (true to use the right axis), `tint` (its index in the
 * palette). `isLog` makes the left axis logarithmic.
 */
export class Plot {
  #u = null;
  #frame = 0;
  /** Cache of the columns to draw, valid until the data or the smoothing changes. */
  #cachedColumns = null;
  /** Cache of the downsampled indices, valid until the columns or the zoom level change. */
  #cachedIndices = null;
  #dirty = true;
  #visible = false;
  #shape = "";

  constructor(container, group, { onCursor = () => {} } = {}) {
    Object.assign(this, { container, group, onCursor, data: { x: new Float64Array(0), series: [] }, isLog: false });
    const redraw = () => this.schedule();
    this.unwatch = [group.range.watch(redraw), group.smoothing.watch(redraw), theme.watch(() => this.#rebuild())];
    this.resizeObserver = new ResizeObserver(() => {
      if (this.#u && this.container.clientWidth) this.#u.setSize({ width: this.container.clientWidth, height: HEIGHT });
      this.schedule();
    });
    this.resizeObserver.observe(container);
    // A chart outside the viewport is not drawn until it is scrolled into view.
    this.visibilityObserver = new IntersectionObserver(([{ isIntersecting }]) => {
      this.#visible = isIntersecting;
      if (isIntersecting && this.#dirty) this.schedule();
    }, { rootMargin: "100px" });
    this.visibilityObserver.observe(container);
  }

  destroy() {
    cancelAnimationFrame(this.#frame);
    for (const stop of this.unwatch) stop();
    this.resizeObserver.disconnect();
    this.visibilityObserver.disconnect();
    this.#u?.destroy();
  }

  get canvas() {
    return this.#u?.ctx.canvas ?? null;
  }

  set(data, isLog) {
    Object.assign(this, { data, isLog });
    const shape = JSON.stringify([isLog, data.series.map(({ label, band, points, right, tint }) => [label, !!band, points, right, tint])]);
    if (shape !== this.#shape) {
      this.#shape = shape;
      this.#rebuild();
    }
    this.schedule();
  }

  /** Draws the chart once, in the next animation frame. */
  schedule() {
    this.#dirty = true;
    if (!this.#visible || this.#frame) return;
    this.#frame = requestAnimationFrame(() => {
      this.#frame = 0;
      this.#draw();
    });
  }

  #rebuild() {
    this.#u?.destroy();
    this.#u = null;
    this.schedule();
  }

  #draw() {
    if (!this.container.clientWidth || !this.data.series.length) return;
    this.#u ??= new uPlot(this.#options(), this.#emptyData(), this.container);
    this.#dirty = false;
    const { x } = this.data;
    const [min, max] = this.group.shown;
    const { columns, present } = this.#columns();
    const buckets = Math.max(50, Math.round(this.#u.bbox.width / (devicePixelRatio || 1)) >> (present.length > 3 ? 1 : 0));
    const indices = this.#indices(present, min, max, buckets);
    const pick = (column) => {
      const out = new Array(indices.length).fill(null);
      if (!column) return out;
      for (let at = 0; at < out.length; at++) {
        const value = column[indices[at]];
        if (value === value && (!this.isLog || value > 0)) out[at] = value;
      }
      return out;
    };
    const drawn = [Array.from(indices, (index) => x[index]), ...columns.map(pick)];
    this.#u.batch(() => {
      this.#u.setData(drawn, false);
      this.#u.setScale("x", { min, max: max > min ? max : min + 1 });
    });
  }

  /**
   * Returns the columns in the order of uPlot's series. Each series has the raw values (null unless they are drawn under a smoothed line),
   * the line itself, and the two edges of its band, if it has one. `present` holds the columns that are not null.
   */
  #columns() {
    const strength = this.group.smoothing.value;
    if (this.#cachedColumns?.data === this.data && this.#cachedColumns.strength === strength) return this.#cachedColumns;
    const { x, series } = this.data;
    const columns = series.flatMap(({ values, points, band }) => {
      const drawn = strength > 0 && !points ? [values, smooth(x, values, strength)] : [null, values];
      return band ? [...drawn, addScaled(values, band, 1), addScaled(values, band, -1)] : drawn;
    });
    this.#cachedIndices = null;
    return (this.#cachedColumns = { data: this.data, strength, columns, present: columns.filter(Boolean) });
  }

  /** Returns the indices of `x` to draw between `min` and `max`: all of them, or the extremes of about `buckets` intervals. */
  #indices(present, min, max, buckets) {
    const { x } = this.data;
    const [begin, end] = [Math.max(0, lowerBound(x, min) - 1), Math.min(x.length, lowerBound(x, max) + 2)];
    if (end - begin <= 2 * buckets) return Int32Array.from({ length: end - begin }, (_, index) => begin + index);
    // The width is rounded to a power of two, so that the intervals stay the same while the range moves or grows a little.
    const width = 2 ** Math.round(Math.log2((max - min) / buckets));
    if (this.#cachedIndices?.width !== width) this.#cachedIndices = { width, indices: extremeIndices(x, present, width) };
    return indicesWithin(this.#cachedIndices.indices, x, min, max);
  }

  #emptyData() {
    return [[], ...this.data.series.flatMap(({ band }) => (band ? [[], [], [], []] : [[], []]))];
  }

  #options() {
    const mode = theme.value;
    const { text, grid } = themeColors(mode);
    const hasRight = this.data.series.some(({ right }) => right);
    const series = [{}];
    const bands = [];
    for (const [index, { label, band, points, right, tint = index }] of this.data.series.entries()) {
      const stroke = color(tint, mode);
      const scale = right ? "right" : "y";
      const raw = { label, scale, stroke: `${stroke}4d`, width: 1, points: { show: false }, spanGaps: true };
      // A single value makes no line, so it is drawn as a point.
      const isAlone = (u, at) => u.data[at].reduce((sum, value) => sum + (value !== null), 0) === 1;
      const line = { label, scale, stroke, width: 1.75, dash: dash(tint), points: { show: isAlone, size: 6, stroke, fill: stroke }, spanGaps: true };
      if (points) line.points = { show: true, size: 6, stroke, fill: stroke };
      series.push(raw, line);
      if (band) {
        const edge = { scale, stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
        bands.push({ series: [series.length, series.length + 1], fill: `${stroke}1f` });
        series.push({ ...edge }, { ...edge });
      }
    }
    const axis = { stroke: text, font: FONT, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1, size: 4 }, gap: 4 };
    const values = (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick, 3)));
    return {
      width: this.container.clientWidth,
      height: HEIGHT,
      legend: { show: false },
      padding: [8, hasRight ? 0 : 10, 0, 0],
      scales: { x: { time: false, auto: false }, y: { distr: this.isLog ? 3 : 1 }, ...(hasRight && { right: { range: (_, low, high) => [Math.min(0, low ?? 0), Math.max(1, high ?? 1)] } }) },
      axes: [
        { ...axis, size: 26, values, space: 60 },
        { ...axis, size: 52, values, space: 28 },
        ...(hasRight ? [{ ...axis, scale: "right", side: 1, size: 40, values, space: 28, grid: { show: false } }] : []),
      ],
      cursor: { sync: { key: this.group.key, scales: ["x", null] }, drag: { x: true, y: false, setScale: false }, points: { size: 6 }, focus: { prox: -1 } },
      select: { show: true },
      series,
      bands,
      hooks: {
        setCursor: [(u) => this.onCursor(u.cursor.left >= 0 ? u.posToVal(u.cursor.left, "x") : null)],
        setSelect: [(u) => {
          const { left, width } = u.select;
          if (width > 3) this.group.show(u.posToVal(left, "x"), u.posToVal(left + width, "x"));
          if (width) u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        }],
        ready: [(u) => this.#addListeners(u)],
      },
    };
  }

  /** Handles the wheel, Shift+drag, touch and double-clicks on the plot. */
  #addListeners(u) {
    const { over } = u;
    const { group } = this;
    over.addEventListener("dblclick", () => group.showAll());
    over.addEventListener("wheel", (event) => {
      const sideways = event.shiftKey ? event.deltaY || event.deltaX : Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : 0;
      if (sideways) group.pan(Math.sign(sideways) * Math.min(0.25, Math.abs(sideways) / over.clientWidth));
      else if (event.ctrlKey || event.metaKey) group.zoom(1.002 ** event.deltaY, u.posToVal(event.offsetX, "x"));
      else return; // Let the page scroll.
      event.preventDefault();
    }, { passive: false });
    const pan = (event) => {
      const [min, max] = group.shown;
      const start = { x: event.clientX, left: min, width: max - min };
      const onMove = ({ clientX }) => group.moveTo(start.left - ((clientX - start.x) / over.clientWidth) * start.width);
      const onEnd = () => {
        removeEventListener("pointermove", onMove);
        removeEventListener("pointerup", onEnd);
        removeEventListener("pointercancel", onEnd);
      };
      addEventListener("pointermove", onMove);
      addEventListener("pointerup", onEnd);
      addEventListener("pointercancel", onEnd);
    };
    over.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch" || event.shiftKey || event.button === 1) pan(event);
    });
    // Without this, uPlot would also start a selection.
    over.addEventListener("mousedown", (event) => (event.shiftKey || event.button === 1) && event.stopImmediatePropagation(), { capture: true });
  }
}

/** Returns `values + factor * band`, element by element. */
function addScaled(values, band, factor) {
  const out = new Float64Array(values.length);
  for (let index = 0; index < out.length; index++) out[index] = values[index] + factor * band[index];
  return out;
}
