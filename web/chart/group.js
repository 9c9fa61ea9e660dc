// The state shared by the charts of a page: the range of steps, the smoothing, the cursor.
import { Signal } from "../core/signal.js";

let groups = 0;

export class ChartGroup {
  /** The range of steps shown, `[min, max]`; null shows all steps. */
  range = new Signal(null);
  /** Smoothing strength, from 0 (none) to less than 1. */
  smoothing = new Signal(0);
  /** The key by which uPlot synchronizes the cursors of the group. */
  key = `charts-${++groups}`;
  /** The first and last step of the data. */
  extent = [0, 1];

  constructor({ range = null, smoothing = 0 } = {}) {
    this.range.value = range;
    this.smoothing.value = smoothing;
  }

  get shown() {
    return this.range.value ?? this.extent;
  }

  /** Shows the steps from `min` to `max`: at least two steps, limited to the extent of the data. */
  show(min, max) {
    const [first, last] = this.extent;
    const width = Math.min(Math.max(max - min, Math.min(2, last - first)), last - first);
    if (width >= last - first) return this.range.set(null);
    const left = Math.min(Math.max(min, first), last - width);
    this.range.set([left, left + width]);
  }

  showAll() {
    this.range.set(null);
  }

  /** Moves the range by a fraction of its width. */
  pan(fraction) {
    const [min, max] = this.shown;
    this.moveTo(min + (max - min) * fraction);
  }

  /** Moves the left edge of the range to a step, without changing its width. */
  moveTo(left) {
    const [min, max] = this.shown;
    this.show(left, left + max - min);
  }

  /** Shows `factor` times as many steps. The step `fixed` keeps its position; by default, the center does. */
  zoom(factor, fixed) {
    const [min, max] = this.shown;
    const center = fixed ?? (min + max) / 2;
    this.show(center - (center - min) * factor, center + (max - center) * factor);
  }
}
