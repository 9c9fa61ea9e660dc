// Data for a view: loads, reloads, keeps the old rows while new ones come, and never draws an answer that came too late.
import { get } from "./api.js";
import { useCallback, useEffect, useRef, useState } from "./ui.js";

/** `{data, error, loading, reload}` of `load(signal)`, run again when one of `deps` changes and every `every` ms while the page is seen. */
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
    const seen = () => document.hidden || reload();
    document.addEventListener("visibilitychange", seen);
    return () => {
      clearInterval(timer);
      document.removeEventListener("visibilitychange", seen);
      run.current?.abort();
    };
  }, [reload, every]);
  return { ...state, reload };
}

/** `useLoad` of one GET. */
export const useGet = (path, query, options) =>
  useLoad((signal) => get(path, query, signal), [path, JSON.stringify(query)], options);
