// A table of metrics: one row per step, one column of numbers per key. A value that arrives again replaces the old one.

export class MetricTable {
  /** Number of steps in the table. */
  size = 0;
  #steps = new Float64Array(256);
  /** Columns by key; NaN marks a missing value. */
  #columns = new Map();

  get keys() {
    return [...this.#columns.keys()];
  }

  /** The steps in ascending order. */
  get steps() {
    return this.#steps.subarray(0, this.size);
  }

  /** Returns the values of a key, one per step; NaN marks a missing value. */
  column(key) {
    return this.#columns.get(key)?.subarray(0, this.size) ?? new Float64Array(this.size).fill(NaN);
  }

  has(key) {
    return this.#columns.has(key);
  }

  /** Returns the latest value of a key, or null if there is none. */
  last(key) {
    const value = this.column(key).findLast((value) => value === value);
    return value === undefined ? null : value;
  }

  /** Adds rows `{step, KEY: number | null}`, which must be in ascending order of their steps. */
  merge(rows) {
    if (!rows.length) return;
    const rowIndices = this.#indicesOf(rows.map((row) => row.step));
    for (const [index, row] of rows.entries()) {
      for (const key in row) {
        if (key === "step") continue;
        let column = this.#columns.get(key);
        if (!column) this.#columns.set(key, (column = new Float64Array(this.#steps.length).fill(NaN)));
        const value = row[key];
        column[rowIndices[index]] = typeof value === "number" ? value : NaN;
      }
    }
  }

  /** Returns the index of each step. Adds the steps that are not in the table yet. */
  #indicesOf(added) {
    const last = this.size ? this.#steps[this.size - 1] : -Infinity;
    if (added.every((step, index) => step > (index ? added[index - 1] : last))) {
      const begin = this.size;
      this.#grow(begin + added.length);
      this.#steps.set(added, begin);
      this.size += added.length;
      return added.map((_, index) => begin + index);
    }
    const indexOf = new Map();
    this.steps.forEach((step, index) => indexOf.set(step, index));
    if (added.some((step) => !indexOf.has(step))) {
      const merged = Float64Array.from(new Set([...this.steps, ...added])).sort();
      const capacity = merged.length + 256;
      const moved = new Map();
      for (const [key, column] of this.#columns) {
        const wider = new Float64Array(capacity).fill(NaN);
        merged.forEach((step, index) => indexOf.has(step) && (wider[index] = column[indexOf.get(step)]));
        moved.set(key, wider);
      }
      this.#columns = moved;
      this.#steps = new Float64Array(capacity);
      this.#steps.set(merged);
      this.size = merged.length;
      indexOf.clear();
      merged.forEach((step, index) => indexOf.set(step, index));
    }
    return added.map((step) => indexOf.get(step));
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

  /** Removes every step after `step`: the run resumed from a checkpoint at that step. */
  rewind(step) {
    let newSize = this.size;
    while (newSize > 0 && this.#steps[newSize - 1] > step) newSize--;
    for (const column of this.#columns.values()) column.fill(NaN, newSize, this.size);
    this.size = newSize;
  }
}
