// The token of one request for gated and private models and datasets of the Hugging Face Hub.
import { html } from "../core/ui.js";
import { Input } from "./field.js";

export const tokenHeaders = (token) => (token ? { "x-hub-token": token.trim() } : {});

export const HubToken = ({ value, set, hint = "For gated and private repositories. The server does not store the token." }) => html`<${Input} label="Hugging Face token" optional type="password" autocomplete="off"
  hint=${hint} value=${value} set=${set} />`;
