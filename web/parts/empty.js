// A place without anything in it yet: what it is for and what to do.
import { html } from "../core/ui.js";

export const Empty = ({ title, children }) => html`<div class="empty"><h2>${title}</h2>${children}</div>`;
