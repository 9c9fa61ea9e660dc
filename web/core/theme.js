// Light or dark: the system's choice until someone presses the button. Only this word is kept in localStorage.
import { Signal } from "./signal.js";

const KEY = "rlood-theme";
const system = matchMedia("(prefers-color-scheme: dark)");

function stored() {
  try {
    const word = localStorage.getItem(KEY);
    return ["light", "dark"].includes(word) ? word : "auto";
  } catch {
    return "auto"; // Storage is switched off.
  }
}

/** `auto`, `light` or `dark`. */
export const choice = new Signal(stored());
/** What is drawn: `light` or `dark`. */
export const theme = new Signal(shown());

function shown() {
  return choice.value === "auto" ? (system.matches ? "dark" : "light") : choice.value;
}

function apply() {
  document.documentElement.dataset.theme = shown();
  theme.set(shown());
}

export function choose(word) {
  try {
    if (word === "auto") localStorage.removeItem(KEY);
    else localStorage.setItem(KEY, word);
  } catch {
    // Then it lasts as long as the page.
  }
  choice.set(word);
}

choice.watch(apply);
system.addEventListener("change", apply);
apply();
