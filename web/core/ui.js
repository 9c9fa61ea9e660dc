// The one module that imports Preact and htm; views and parts import the hooks and `html` from here.
import { h, render } from "../vendor/preact.js";
import { useCallback, useEffect, useId, useLayoutEffect, useMemo, useRef, useState } from "../vendor/hooks.js";
import htm from "../vendor/htm.js";

export { h, render, useCallback, useEffect, useId, useLayoutEffect, useMemo, useRef, useState };

/** Template tag that builds nodes. Values become text nodes or attributes, never markup. */
export const html = htm.bind(h);

/** Scrolls a horizontal row of links so that `link` is in its center. Used as a `ref`, so `link` is null when it is removed. */
export function centerInRow(link) {
  const row = link?.parentElement;
  if (row) row.scrollLeft = link.offsetLeft - row.offsetLeft - (row.clientWidth - link.offsetWidth) / 2;
}

/** Joins the class names that are truthy: `cls("row", isOld && "old")`. */
export const cls = (...names) => names.filter(Boolean).join(" ");
