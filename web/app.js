// The page: who is signed in, which view is shown, what stands around it.
import { announce, LiveRegion } from "./core/announce.js";
import { hrefOf, matchPath, place } from "./core/router.js";
import { may, session, signOut, whoAmI } from "./core/session.js";
import { useSignal } from "./core/signal.js";
import { choice, choose, theme } from "./core/theme.js";
import { html, render, useEffect, useRef, useState } from "./core/ui.js";
import { routes, topLinks } from "./routes.js";
import SignIn from "./views/sign-in.js";

function match(path) {
  for (const [pattern, title, View] of routes) {
    const params = matchPath(pattern, path);
    if (params) return { pattern, title, View, params };
  }
  return null;
}

function Header() {
  const { path } = useSignal(place);
  const { state } = useSignal(session);
  const { value: mode } = choice;
  const [problem, setProblem] = useState(null);
  const leave = () => signOut().catch((error) => setProblem(`You are still signed in: ${error.message}`));
  useSignal(theme);
  useSignal(choice);
  const here = (to) => (to === "/" ? path === "/" || path.startsWith("/jobs/") : path.startsWith(to));
  const next = { auto: "dark", dark: "light", light: "auto" }[mode];
  return html`<header class="top">
    <a class="brand" href="#/"><svg viewBox="0 0 32 32" aria-hidden="true"><path d="M4 24l8-9 5 5 11-14" /></svg>rlood</a>
    <nav aria-label="Main">
      ${topLinks.map(([to, name]) => html`<a key=${to} href=${hrefOf(to)} aria-current=${here(to) ? "page" : undefined}>${name}</a>`)}
    </nav>
    <div class="tools">
      <a class="button quiet" href="/guide/">Guide</a>
      ${may("submit") && html`<a class="button primary" href="#/new">New job</a>`}
      <button class="quiet" title=${`Colours: ${mode}`} aria-label=${`Colours: ${mode}; switch to ${next}`} onClick=${() => choose(next)}>
        ${{ auto: "◐", dark: "●", light: "○" }[mode]}
      </button>
      ${problem && html`<span class="bad small" role="alert">${problem}</span>`}
      ${state === "in" && html`<button class="quiet" onClick=${leave}>Sign out</button>`}
    </div>
  </header>`;
}

function Page({ isHidden }) {
  const { path } = useSignal(place);
  const found = match(path);
  const title = found?.title ?? "There is no such page";
  const main = useRef(null);
  const isFirst = useRef(true);
  useEffect(() => {
    if (isHidden) return;
    document.title = `${title} · rlood`;
    if (isFirst.current) {
      isFirst.current = false;
      return;
    }
    // A new page for whoever listens or goes by keyboard.
    main.current.focus({ preventScroll: true });
    scrollTo(0, 0);
    announce(title);
  }, [path, isHidden]);
  return html`<main ref=${main} tabindex="-1" id="main" hidden=${isHidden}>
    ${found ? html`<${found.View} key=${found.pattern + JSON.stringify(found.params)} params=${found.params} />` : html`<h1>${title}</h1><p><a href="#/">All jobs</a></p>`}
  </main>`;
}

function App() {
  const { state, expired, owner, name } = useSignal(session);
  const { path } = useSignal(place);
  const who = useRef("");
  if (state === "unknown") return html`<main aria-busy="true"></main>`;
  const isOut = state === "out";
  if (!isOut) who.current = JSON.stringify([owner, name]);
  // A form that is filled in waits below for the same key; other pages would go on asking the server.
  return html`
    ${isOut ? html`<main><${SignIn} /></main>` : html`<a class="skip" href="#main" onClick=${(event) => (event.preventDefault(), document.getElementById("main").focus())}>To the content</a><${Header} />`}
    ${(!isOut || (expired && path === "/new")) && html`<${Page} key=${who.current} isHidden=${isOut} />`}<${LiveRegion} />`;
}

whoAmI();
render(html`<${App} />`, document.getElementById("app"));
