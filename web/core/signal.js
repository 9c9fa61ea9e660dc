// A value that several components observe, such as the session, the theme or the state of a run.
import { useEffect, useState } from "./ui.js";

export class Signal {
  #watchers = new Set();

  constructor(value) {
    this.value = value;
  }

  set(value) {
    if (Object.is(value, this.value)) return;
    this.value = value;
    for (const watcher of [...this.#watchers]) watcher(value);
  }

  /** Calls `watcher` with each new value. Returns a function that stops the calls. */
  watch(watcher) {
    this.#watchers.add(watcher);
    return () => this.#watchers.delete(watcher);
  }
}

/** Returns the signal's value, and renders the component again when the value changes. */
export function useSignal(signal) {
  const [, redraw] = useState(0);
  useEffect(() => {
    redraw((count) => count + 1); // The value may have changed between rendering and this effect.
    return signal.watch(() => redraw((count) => count + 1));
  }, [signal]);
  return signal.value;
}
