// A hook that reads a paged list of the API: the first page at once, each further page on demand.
import { get } from "./api.js";
import { useEffect, useRef, useState } from "./ui.js";

/**
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
