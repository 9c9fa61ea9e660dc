// Where we are: `#/jobs/job_1/samples?step=3`. Filters live in the query, so that a view can be linked and reloaded.
// The API has the paths of the server's root for itself; the part behind # never leaves the browser.
import { urlOf } from "./api.js";
import { Signal, useSignal } from "./signal.js";

/** `{path, query}`; query is an object of strings. */
export const place = new Signal(read());

function read() {
  const [path, query = ""] = location.hash.replace(/^#/, "").split(/\?(.*)/s);
  return { path: path || "/", query: Object.fromEntries(new URLSearchParams(query)) };
}

addEventListener("hashchange", () => place.set(read()));

/** The address of a view, for `href`. */
export const hrefOf = (path, query) => `#${urlOf(path, query)}`;

/** Goes to a view; `replace` leaves no step in the history. */
export function go(path, query, { replace = false } = {}) {
  const href = hrefOf(path, query);
  if (href === location.hash) return;
  if (!replace) {
    location.hash = href;
    return;
  }
  history.replaceState(null, "", href);
  place.set(read());
}

/** The query and a function that changes some of it: `set({q: "x", step: null})`. Typing replaces, it makes no history. */
export function useFilters() {
  const { path, query } = useSignal(place);
  const set = (changes, { replace = true } = {}) => go(path, { ...read().query, ...changes }, { replace });
  return [query, set];
}

/** `matchPath("/jobs/:id", "/jobs/j1")` is `{id: "j1"}`, or null. */
export function matchPath(pattern, path) {
  const [wanted, given] = [pattern.split("/"), path.split("/")];
  if (wanted.length !== given.length) return null;
  const params = {};
  for (const [index, part] of wanted.entries()) {
    if (part.startsWith(":")) {
      try {
        params[part.slice(1)] = decodeURIComponent(given[index]);
      } catch {
        return null;
      }
    } else if (part !== given[index]) return null;
  }
  return params;
}
