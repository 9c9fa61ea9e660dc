// The page around the views: the header, the sign-in form, and the view that matches the address.
import { announce, LiveRegion } from "./core/announce.js";
import { currentRoute, hrefOf, matchPath } from "./core/router.js";
import { hasScope, loadSession, session, signOut } from "./core/session.js";
import { useSignal } from "./core/signal.js";
import { chooseTheme, theme, themeChoice } from "./core/theme.js";
import { centerInRow, html, render, useEffect, useRef, useState } from "./core/ui.js";
import { routes, topLinks } from "./routes.js";
import SignIn from "./views/sign-in.js";

/** Returns the first route whose pattern matches `path`, or null. */
function findRoute(path) {
  for (const [pattern, title, View] of routes) {
    const params = matchPath(pattern, path);
    if (params) return { pattern, title, View, params };
  }
  return null;
}

function Header() {
  const { path } = useSignal(currentRoute);
  const { state } = useSignal(session);
  const { value: mode } = themeChoice;
  const [problem, setProblem] = useState(null);
  const onSignOut = () => signOut().catch((error) => setProblem(`Sign-out failed: ${error.message}`));
  useSignal(theme);
  useSignal(themeChoice);
  const isCurrent = (to) => (to === "/" ? path === "/" || path.startsWith("/jobs/") : path.startsWith(to));
  const next = { auto: "dark", dark: "light", light: "auto" }[mode];
  return html`<header class="top">
    <a class="brand" href="#/"><svg viewBox="0 0 32 32" aria-hidden="true"><path d="M4 24l8-9 5 5 11-14" /></svg>rlood</a>
    <nav aria-label="Main">
      ${topLinks.map(([to, name]) => html`<a key=${to} href=${hrefOf(to)} aria-current=${isCurrent(to) ? "page" : undefined} ref=${isCurrent(to) ? centerInRow : undefined}>${name}</a>`)}
    </nav>
    <div class="tools">
      <a class="button quiet" href="/guide/">Guide</a>
      ${hasScope("submit") && html`<a class="button primary" href="#/new">New job</a>`}
      <button class="quiet" title=${`Theme: ${mode}`} aria-label=${`Theme: ${mode}. Switch to ${next}`} onClick=${() => chooseTheme(next)}>
        ${{ auto: "◐", dark: "●", light: "○" }[mode]}
      </button>
      ${problem && html`<span class="bad small" role="alert">${problem}</span>`}
      ${state === "in" && html`<button class="quiet" onClick=${onSignOut}>Sign out</button>`}
    </div>
  </header>`;
}

function Page({ isHidden }) {
  const { path } = useSignal(currentRoute);
  const route = findRoute(path);
  const title = route?.title ?? "Page not found";
  const main = useRef(null);
  const isFirst = useRef(true);
  useEffect(() => {
    if (isHidden) return;
    document.title = `${title} · rlood`;
    if (isFirst.current) {
      isFirst.current = false;
      return;
    }
    // A change of view loads no document, so screen-reader and keyboard users are moved to the new view here.
    main.current.focus({ preventScroll: true });
    scrollTo(0, 0);
    announce(title);
  }, [path, isHidden]);
  return html`<main ref=${main} tabindex="-1" id="main" hidden=${isHidden}>
    ${route ? html`<${route.View} key=${route.pattern + JSON.stringify(route.params)} params=${route.params} />` : html`<h1>${title}</h1><p><a href="#/">Go to all jobs</a></p>`}
  </main>`;
}

function App() {
  const { state, expired, owner, name } = useSignal(session);
  const { path } = useSignal(currentRoute);
  const user = useRef("");
  if (state === "unknown") return html`<main aria-busy="true"></main>`;
  const isOut = state === "out";
  if (!isOut) user.current = JSON.stringify([owner, name]);
  // When a session expires, the new-job form stays mounted (hidden), so that its input is still there after the same user signs in
  // again. Every other view is unmounted: its polling would only get 401.
  return html`
    ${isOut ? html`<main><${SignIn} /></main>` : html`<a class="skip" href="#main" onClick=${(event) => (event.preventDefault(), document.getElementById("main").focus())}>Skip to content</a><${Header} />`}
    ${(!isOut || (expired && path === "/new")) && html`<${Page} key=${user.current} isHidden=${isOut} />`}<${LiveRegion} />`;
}

loadSession();
render(html`<${App} />`, document.getElementById("app"));
