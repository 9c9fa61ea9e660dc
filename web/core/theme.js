// The light or dark theme: the system's until the user chooses one. The choice is the only thing stored in localStorage.
import { Signal } from "./signal.js";

const KEY = "rlood-theme";
const systemDark = matchMedia("(prefers-color-scheme: dark)");

function storedChoice() {
  try {
    const name = localStorage.getItem(KEY);
    return ["light", "dark"].includes(name) ? name : "auto";
  } catch {
    return "auto"; // The browser blocks localStorage.
  }
}

/** The user's choice: `auto`, `light` or `dark`. */
export const themeChoice = new Signal(storedChoice());
/** The theme in use: `light` or `dark`. */
export const theme = new Signal(activeTheme());

function activeTheme() {
  return themeChoice.value === "auto" ? (systemDark.matches ? "dark" : "light") : themeChoice.value;
}

function applyTheme() {
  document.documentElement.dataset.theme = activeTheme();
  theme.set(activeTheme());
}

export function chooseTheme(name) {
  try {
    if (name === "auto") localStorage.removeItem(KEY);
    else localStorage.setItem(KEY, name);
  } catch {
    // The browser blocks localStorage: the choice is lost when the page is closed.
  }
  themeChoice.set(name);
}

themeChoice.watch(applyTheme);
systemDark.addEventListener("change", applyTheme);
applyTheme();
