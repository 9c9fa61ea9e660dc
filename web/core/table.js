// Metrics by step as columns of numbers. A step stands in it once, whatever came how often: the last word counts, key by key.

export class MetricTable {
  /** Steps in it. */
  size = 0;
  #steps = new Float64Array(256);
  /** By key; NaN where there is no value. */
  #columns = new Map();

  get keys() {
    return [...this.#columns.keys()];
  }

  /** Ascending. */
  get steps() {
    return this.#steps.subarray(0, this.size);
  }

  /** The values of a key, one a step; NaN = none. */
  column(key) {
    return this.#columns.get(key)?.subarray(0, this.size) ?? new Float64Array(this.size).fill(NaN);
  }

  has(key) {
    return this.#columns.has(key);
  }

  /** The latest value of a key, or null. */
  last(key) {
    const value = this.column(key).findLast((value) => value === value);
    return value === undefined ? null : value;
  }

  /** Rows `{step, KEY: number | null}`, ascending by step. */
  merge(rows) {
    if (!rows.length) return;
    const places = this.#places(rows.map((row) => row.step));
    for (const [index, row] of rows.entries()) {
      for (const key in row) {
        if (key === "step") continue;
        let column = this.#columns.get(key);
        if (!column) this.#columns.set(key, (column = new Float64Array(this.#steps.length).fill(NaN)));
        const value = row[key];
        column[places[index]] = typeof value === "number" ? value : NaN;
      }
    }
  }

  /** Where each of the steps stands; those that are new get a place. */
  #places(added) {
    const last = this.size ? this.#steps[this.size - 1] : -Infinity;
    if (added.every((step, index) => step > (index ? added[index - 1] : last))) {
      const begin = this.size;
      this.#grow(begin + added.length);
      this.#steps.set(added, begin);
      this.size += added.length;
      return added.map((_, index) => begin + index);
    }
    const at = new Map();
    this.steps.forEach((step, index) => at.set(step, index));
    if (added.some((step) => !at.has(step))) {
      const merged = Float64Array.from(new Set([...this.steps, ...added])).sort();
      const capacity = merged.length + 256;
      const moved = new Map();
      for (const [key, column] of this.#columns) {
        const wider = new Float64Array(capacity).fill(NaN);
        merged.forEach((step, index) => at.has(step) && (wider[index] = column[at.get(step)]));
        moved.set(key, wider);
      }
      this.#columns = moved;
      this.#steps = new Float64Array(capacity);
      this.#steps.set(merged);
      this.size = merged.length;
      at.clear();
      merged.forEach((step, index) => at.set(step, index));
    }
    return added.map((step) => at.get(step));
  }

  #grow(size) {
    if (size <= this.#steps.length) return;
    const capacity = size * 2;
    const wider = (old) => {
      const column = new Float64Array(capacity).fill(NaN);
      column.set(old.subarray(0, this.size));
      return column;
    };
    this.#steps = wider(this.#steps);
    for (const [key, column] of this.#columns) this.#columns.set(key, wider(column));
  }

  /** Forgets what comes after `step`: the run went back to it. */
  rewind(step) {
    let keep = this.size;
    while (keep > 0 && this.#steps[keep - 1] > step) keep--;
    for (const column of this.#columns.values()) column.fill(NaN, keep, this.size);
    this.size = keep;
  }
}
