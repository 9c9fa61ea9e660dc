// A placeholder for a view that has no data yet: what the view is for, and what to do next.
import { html } from "../core/ui.js";

export const Empty = ({ title, children }) => html`<div class="empty"><h2>${title}</h2>${children}</div>`;
