// Preact and htm under one name: every view and part takes what it draws with from here.
import { h, render } from "../vendor/preact.js";
import { useCallback, useEffect, useId, useLayoutEffect, useMemo, useRef, useState } from "../vendor/hooks.js";
import htm from "../vendor/htm.js";

export { h, render, useCallback, useEffect, useId, useLayoutEffect, useMemo, useRef, useState };

/** Tagged template that makes nodes. Values become text nodes or attributes, never markup. */
export const html = htm.bind(h);

/** Class names that are set: `cls("row", isOld && "old")`. */
export const cls = (...names) => names.filter(Boolean).join(" ");
