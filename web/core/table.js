// Metrics by step as columns. A step stands in it once, whatever came how often: the last word counts, key by key.

export class MetricTable {
  /** Ascending. */
  steps = [];
  /** By key, a value a step; null where there is none. */
  columns = new Map();

  get keys() {
    return [...this.columns.keys()];
  }

  column(key) {
    return this.columns.get(key) ?? new Array(this.steps.length).fill(null);
  }

  /** The latest value of a key that is not null. */
  last(key) {
    return this.columns.get(key)?.findLast((value) => value !== null) ?? null;
  }

  /** Rows `{step, KEY: number | null}`, ascending by step. */
  merge(rows) {
    if (!rows.length) return;
    const places = this.#places(rows.map((row) => row.step));
    for (const [index, row] of rows.entries()) {
      for (const key of Object.keys(row)) {
        if (key === "step") continue;
        let column = this.columns.get(key);
        if (!column) this.columns.set(key, (column = new Array(this.steps.length).fill(null)));
        column[places[index]] = row[key];
      }
    }
  }

  /** Where each of the steps stands; those that are new get a place. */
  #places(added) {
    const last = this.steps.at(-1) ?? -Infinity;
    const isAppended = added.every((step, index) => step > (index ? added[index - 1] : last));
    if (isAppended) {
      const begin = this.steps.length;
      this.steps.push(...added);
      for (const column of this.columns.values()) while (column.length < this.steps.length) column.push(null);
      return added.map((_, index) => begin + index);
    }
    const at = new Map(this.steps.map((step, index) => [step, index]));
    if (added.some((step) => !at.has(step))) {
      const old = this.steps;
      this.steps = [...new Set([...old, ...added])].sort((a, b) => a - b);
      const from = this.steps.map((step) => at.get(step));
      for (const [key, column] of this.columns) this.columns.set(key, from.map((index) => (index === undefined ? null : column[index])));
      at.clear();
      this.steps.forEach((step, index) => at.set(step, index));
    }
    return added.map((step) => at.get(step));
  }

  /** Forgets what comes after `step`: the run went back to it. */
  rewind(step) {
    let keep = this.steps.length;
    while (keep > 0 && this.steps[keep - 1] > step) keep--;
    this.steps.length = keep;
    for (const column of this.columns.values()) column.length = keep;
  }
}
