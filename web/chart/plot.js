// One uPlot, fed with what is to be seen: thinned, smoothed, in the theme's colours. The only file that knows uPlot.
import uPlot from "../vendor/uplot.js";
import { number } from "../core/format.js";
import { lowerBound } from "../core/search.js";
import { theme } from "../core/theme.js";
import { colour, dash, frame } from "./palette.js";
import { smoothed } from "./smooth.js";
import { extremes, within } from "./thin.js";

const HEIGHT = 190;
const FONT = "11px system-ui, sans-serif";

/**
 * Draws `data` `{x, series}` into `place`. A series: `{label, values}` and perhaps `band` (± around it), `points` (few values,
 * marked and joined), `right` (its own axis), `tint` (its place in the palette). `isLog` is the left axis.
 */
export class Plot {
  #u = null;
  #frame = 0;
  /** The columns that are drawn, and which of their places, until the data or the zoom change. */
  #made = null;
  #thin = null;
  #dirty = true;
  #visible = false;
  #shape = "";

  constructor(place, group, { onCursor = () => {} } = {}) {
    Object.assign(this, { place, group, onCursor, data: { x: new Float64Array(0), series: [] }, isLog: false });
    const redraw = () => this.schedule();
    this.watched = [group.range.watch(redraw), group.smoothing.watch(redraw), theme.watch(() => this.#rebuild())];
    this.sizes = new ResizeObserver(() => {
      if (this.#u && this.place.clientWidth) this.#u.setSize({ width: this.place.clientWidth, height: HEIGHT });
      this.schedule();
    });
    this.sizes.observe(place);
    // What is not on the screen is not drawn; it is when it comes.
    this.views = new IntersectionObserver(([{ isIntersecting }]) => {
      this.#visible = isIntersecting;
      if (isIntersecting && this.#dirty) this.schedule();
    }, { rootMargin: "100px" });
    this.views.observe(place);
  }

  destroy() {
    cancelAnimationFrame(this.#frame);
    for (const end of this.watched) end();
    this.sizes.disconnect();
    this.views.disconnect();
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

  /** Draws with the next frame, once. */
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
    if (!this.place.clientWidth || !this.data.series.length) return;
    this.#u ??= new uPlot(this.#options(), this.#empty(), this.place);
    this.#dirty = false;
    const { x } = this.data;
    const [min, max] = this.group.shown;
    const { columns, told } = this.#columns();
    const buckets = Math.max(50, Math.round(this.#u.bbox.width / (devicePixelRatio || 1)) >> (told.length > 3 ? 1 : 0));
    const indices = this.#indices(told, min, max, buckets);
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

  /** In the order of uPlot's series: of each the raw course beneath a smoothed one, the course, the band's edges. `told`: all of them once. */
  #columns() {
    const strength = this.group.smoothing.value;
    if (this.#made?.data === this.data && this.#made.strength === strength) return this.#made;
    const { x, series } = this.data;
    const columns = series.flatMap(({ values, points, band }) => {
      const drawn = strength > 0 && !points ? [values, smoothed(x, values, strength)] : [null, values];
      return band ? [...drawn, sum(values, band, 1), sum(values, band, -1)] : drawn;
    });
    this.#thin = null;
    return (this.#made = { data: this.data, strength, columns, told: columns.filter(Boolean) });
  }

  /** What of `x` is drawn from `min` to `max`: everything, or of each of about `buckets` stretches the extremes. */
  #indices(told, min, max, buckets) {
    const { x } = this.data;
    const [begin, end] = [Math.max(0, lowerBound(x, min) - 1), Math.min(x.length, lowerBound(x, max) + 2)];
    if (end - begin <= 2 * buckets) return Int32Array.from({ length: end - begin }, (_, index) => begin + index);
    // A power of two: the stretches stay while the window moves, and while it grows a little.
    const width = 2 ** Math.round(Math.log2((max - min) / buckets));
    if (this.#thin?.width !== width) this.#thin = { width, indices: extremes(x, told, width) };
    return within(this.#thin.indices, x, min, max);
  }

  #empty() {
    return [[], ...this.data.series.flatMap(({ band }) => (band ? [[], [], [], []] : [[], []]))];
  }

  #options() {
    const mode = theme.value;
    const { text, grid } = frame(mode);
    const hasRight = this.data.series.some(({ right }) => right);
    const series = [{}];
    const bands = [];
    for (const [index, { label, band, points, right, tint = index }] of this.data.series.entries()) {
      const stroke = colour(tint, mode);
      const scale = right ? "right" : "y";
      const raw = { label, scale, stroke: `${stroke}4d`, width: 1, points: { show: false }, spanGaps: true };
      // One value alone makes no line.
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
      width: this.place.clientWidth,
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
        ready: [(u) => this.#listen(u)],
      },
    };
  }

  /** Wheel, shift-drag, touch and double click on the plot. */
  #listen(u) {
    const { over } = u;
    const { group } = this;
    over.addEventListener("dblclick", () => group.all());
    over.addEventListener("wheel", (event) => {
      const sideways = event.shiftKey ? event.deltaY || event.deltaX : Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : 0;
      if (sideways) group.pan(Math.sign(sideways) * Math.min(0.25, Math.abs(sideways) / over.clientWidth));
      else if (event.ctrlKey || event.metaKey) group.zoom(1.002 ** event.deltaY, u.posToVal(event.offsetX, "x"));
      else return; // The page scrolls.
      event.preventDefault();
    }, { passive: false });
    const pan = (event) => {
      const [min, max] = group.shown;
      const from = { x: event.clientX, left: min, width: max - min };
      const move = ({ clientX }) => group.moveTo(from.left - ((clientX - from.x) / over.clientWidth) * from.width);
      const end = () => {
        removeEventListener("pointermove", move);
        removeEventListener("pointerup", end);
        removeEventListener("pointercancel", end);
      };
      addEventListener("pointermove", move);
      addEventListener("pointerup", end);
      addEventListener("pointercancel", end);
    };
    over.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch" || event.shiftKey || event.button === 1) pan(event);
    });
    // uPlot begins a selection with the same press.
    over.addEventListener("mousedown", (event) => (event.shiftKey || event.button === 1) && event.stopImmediatePropagation(), { capture: true });
  }
}

function sum(values, band, sign) {
  const out = new Float64Array(values.length);
  for (let index = 0; index < out.length; index++) out[index] = values[index] + sign * band[index];
  return out;
}
