// A value that many components look at: the session, the theme, a run that is followed.
import { useEffect, useState } from "./ui.js";

export class Signal {
  #watchers = new Set();

  constructor(value) {
    this.value = value;
  }

  set(value) {
    if (Object.is(value, this.value)) return;
    this.value = value;
    this.touch();
  }

  /** Tells the watchers that something inside the value changed. */
  touch() {
    for (const watcher of [...this.#watchers]) watcher(this.value);
  }

  /** Calls `watcher` with each new value; returns what ends that. */
  watch(watcher) {
    this.#watchers.add(watcher);
    return () => this.#watchers.delete(watcher);
  }
}

/** The signal's value; the component is drawn again when it changes. */
export function useSignal(signal) {
  const [, redraw] = useState(0);
  useEffect(() => {
    redraw((count) => count + 1); // It may have changed before the effect ran.
    return signal.watch(() => redraw((count) => count + 1));
  }, [signal]);
  return signal.value;
}
