// A list of the API, page after page: the first at once, the next when somebody asks for it.
import { get } from "./api.js";
import { useEffect, useRef, useState } from "./ui.js";

/** `{rows, next, page, error, loading, more, reload}`: `rows` of all pages read so far, `page` the last answer; another `path` or `query` begins anew. */
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
  return { ...rest, isOld: state.key !== key, more: () => state.next && load(state.next, state.rows), reload: () => load(undefined, []) };
}
