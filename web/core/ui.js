// Preact and htm under one name: every view and part takes what it draws with from here.
import { h, render, createContext, Fragment } from "../vendor/preact.js";
import htm from "../vendor/htm.js";

export { h, render, createContext, Fragment };
export {
  useState, useEffect, useLayoutEffect, useMemo, useRef, useCallback, useContext, useId, useReducer,
} from "../vendor/hooks.js";

/** Tagged template that makes nodes. Values become text nodes or attributes, never markup. */
export const html = htm.bind(h);

/** Class names that are set: `cls("row", isOld && "old")`. */
export const cls = (...names) => names.filter(Boolean).join(" ");
