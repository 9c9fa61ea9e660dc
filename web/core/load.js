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

/**
 * Reads a paged list of the API: the first page at once, each further page on demand.
 * Returns `{rows, next, page, error, loading, isOutdated, loadMore, reload}`: `rows` holds all pages read so far, `page` the last response.
 * A new `path` or `query` starts from the first page; until it arrives, `isOutdated` is true.
 */
export function usePages(path, query) {
  const key = JSON.stringify([path, query]);
  const [state, setState] = useState({ key, rows: [], next: null, page: null, error: null, loading: true });
  const running = useRef(null);
  const load = async (after, before) => {
    running.current?.abort();
    const abort = (running.current = new AbortController());
    setState((old) => ({ ...old, loading: true }));
    try {
      const page = await get(path, { ...query, after }, abort.signal);
      if (!abort.signal.aborted) setState({ key, rows: [...before, ...page.data], next: page.next, page, error: null, loading: false });
    } catch (error) {
      if (!abort.signal.aborted) setState((old) => ({ ...old, error, loading: false }));
    }
  };
  useEffect(() => {
    load(undefined, []);
    return () => running.current?.abort();
  }, [key]);
  const { key: _, ...rest } = state;
  return { ...rest, isOutdated: state.key !== key, loadMore: () => state.next && load(state.next, state.rows), reload: () => load(undefined, []) };
}
