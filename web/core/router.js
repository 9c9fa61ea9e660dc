// Routing by the fragment of the address: `#/jobs/job_1/samples?step=3`. Filters are part of its query, so that a view can be linked
// and reloaded. The paths of the server belong to the API; browsers never send the fragment to the server.
import { urlOf } from "./api.js";
import { Signal, useSignal } from "./signal.js";

/** The current route: `{path, query}`, where `query` is an object of strings. */
export const currentRoute = new Signal(parseAddress());

function parseAddress() {
  const [path, query = ""] = location.hash.replace(/^#/, "").split(/\?(.*)/s);
  return { path: path || "/", query: Object.fromEntries(new URLSearchParams(query)) };
}

addEventListener("hashchange", () => currentRoute.set(parseAddress()));

/** Returns the address of a view, for `href`. */
export const hrefOf = (path, query) => `#${urlOf(path, query)}`;

/** Opens a view. `replace` adds no entry to the browser's history. */
export function navigate(path, query, { replace = false } = {}) {
  const href = hrefOf(path, query);
  if (href === location.hash) return;
  if (!replace) {
    location.hash = href;
    return;
  }
  history.replaceState(null, "", href);
  currentRoute.set(parseAddress());
}

/** Returns the query and a function that changes parts of it: `set({q: "x", step: null})`. By default, a change adds no history entry. */
export function useFilters() {
  const { path, query } = useSignal(currentRoute);
  const set = (changes, { replace = true } = {}) => navigate(path, { ...parseAddress().query, ...changes }, { replace });
  return [query, set];
}

/** Matches a path against a pattern: `matchPath("/jobs/:id", "/jobs/j1")` is `{id: "j1"}`. Returns null if they do not match. */
export function matchPath(pattern, path) {
  const [patternParts, pathParts] = [pattern.split("/"), path.split("/")];
  if (patternParts.length !== pathParts.length) return null;
  const params = {};
  for (const [index, part] of patternParts.entries()) {
    if (part.startsWith(":")) {
      try {
        params[part.slice(1)] = decodeURIComponent(pathParts[index]);
      } catch {
        return null;
      }
    } else if (part !== pathParts[index]) return null;
  }
  return params;
}
