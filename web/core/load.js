// Hooks that load data for a view. While new data is loading, the old data stays; a response to an outdated request is dropped.
import { get } from "./api.js";
import { useCallback, useEffect, useRef, useState } from "./ui.js";

/** Calls `load(signal)`, again when one of `deps` changes, and every `every` ms while the page is visible. Returns `{data, error, loading, reload}`. */
export function useLoad(load, deps, { every = 0 } = {}) {
  const [state, setState] = useState({ data: null, error: null, loading: true });
  const run = useRef(null);
  const reload = useCallback(async () => {
    run.current?.abort();
    const abort = (run.current = new AbortController());
    setState((old) => ({ ...old, loading: true }));
    try {
      const data = await load(abort.signal);
      if (!abort.signal.aborted) setState({ data, error: null, loading: false });
    } catch (error) {
      if (!abort.signal.aborted) setState((old) => ({ ...old, error, loading: false }));
    }
  }, deps);
  useEffect(() => {
    reload();
    if (!every) return () => run.current?.abort();
    const timer = setInterval(() => document.hidden || reload(), every);
    const onVisibilityChange = () => document.hidden || reload();
    document.addEventListener("visibilitychange", onVisibilityChange);
    return () => {
      clearInterval(timer);
      document.removeEventListener("visibilitychange", onVisibilityChange);
      run.current?.abort();
    };
  }, [reload, every]);
  return { ...state, reload };
}

/** Loads one GET request with `useLoad`. */
export const useGet = (path, query, options) =>
  useLoad((signal) => get(path, query, signal), [path, JSON.stringify(query)], options);
