// What the charts of a page share: the steps that are shown, the smoothing, the cursor.
import { Signal } from "../core/signal.js";

let groups = 0;

export class ChartGroup {
  /** Steps shown, `[min, max]`; null = all. */
  range = new Signal(null);
  /** 0 = none, below 1. */
  smoothing = new Signal(0);
  /** The name under which cursors move together. */
  key = `charts-${++groups}`;
  /** First and last step there is. */
  extent = [0, 1];

  constructor({ range = null, smoothing = 0 } = {}) {
    this.range.value = range;
    this.smoothing.value = smoothing;
  }

  get shown() {
    return this.range.value ?? this.extent;
  }

  /** Shows `min` to `max`, at least two steps, within what there is. */
  show(min, max) {
    const [first, last] = this.extent;
    const width = Math.min(Math.max(max - min, Math.min(2, last - first)), last - first);
    if (width >= last - first) return this.range.set(null);
    const left = Math.min(Math.max(min, first), last - width);
    this.range.set([left, left + width]);
  }

  all() {
    this.range.set(null);
  }

  /** Moves by a share of what is shown. */
  pan(share) {
    const [min, max] = this.shown;
    this.moveTo(min + (max - min) * share);
  }

  /** Moves the left edge to a step, the width stays. */
  moveTo(left) {
    const [min, max] = this.shown;
    this.show(left, left + max - min);
  }

  /** Shows `factor` times as many steps; `at` stays where it is. */
  zoom(factor, at) {
    const [min, max] = this.shown;
    const centre = at ?? (min + max) / 2;
    this.show(centre - (centre - min) * factor, centre + (max - centre) * factor);
  }
}
