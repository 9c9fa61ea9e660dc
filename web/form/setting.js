// One setting of the job, as the OpenAPI document describes it: its control, its default, its limits.
import { words } from "../core/format.js";
import { html } from "../core/ui.js";
import { Field } from "../parts/field.js";
import { Select } from "../parts/switch.js";
import { schemaAt, valueAt } from "./document.js";

const isType = (schema, type) => [schema.type].flat().includes(type);

/** Limits in words: "0 or more", "1 to 64". */
function limits({ minimum, maximum, exclusiveMinimum }) {
  if (minimum !== undefined && maximum !== undefined) return `${minimum} to ${maximum}`;
  if (exclusiveMinimum !== undefined) return `more than ${exclusiveMinimum}`;
  return minimum > 0 ? `${minimum} or more` : "";
}

const firstLine = (text) => (text ?? "").split("\n\n")[0].replaceAll("\n", " ").replaceAll("`", "");

/** `form`: `{schema, spec, set, errorsAt}`. */
export function Setting({ form, pointer, schema = schemaAt(form.schema, pointer), label, placeholder }) {
  const name = pointer.split("/").at(-1);
  const value = valueAt(form.spec, pointer);
  const set = (next) => form.set(pointer, next);
  const resolved = form.schema.resolve(schema);
  const { default: usual } = schema;
  const hint = [firstLine(schema.description), limits(resolved)].filter(Boolean).join(" · ");
  return html`<${Field} label=${label ?? words(name)} hint=${hint} errors=${form.errorsAt(pointer)} pointer=${pointer}>
    ${(attributes) => control({ attributes, resolved, value, usual, set, placeholder, name })}<//>`;
}

function control({ attributes, resolved, value, usual, set, placeholder, name }) {
  const options = resolved.enum ?? resolved.oneOf?.flatMap((one) => one.enum ?? (one.const === undefined ? [] : [one.const]));
  const choice = (list, read) => html`<${Select} ...${attributes} options=${list} value=${value === undefined ? "" : String(value)} set=${(text) => set(text === "" ? undefined : read(text))} />`;
  const first = (text) => ["", usual === undefined ? "default" : `${text} (default)`];
  if (options?.length) return choice([first(usual), ...options.filter((option) => option !== usual).map((option) => [option, option])], String);
  if (isType(resolved, "boolean")) return choice([first(usual ? "yes" : "no"), [true, "yes"], [false, "no"]], (text) => text === "true");
  if (isType(resolved, "integer") || isType(resolved, "number")) {
    return html`<input ...${attributes} inputmode="decimal" autocomplete="off" placeholder=${placeholder ?? (usual === undefined || usual === null ? "" : String(usual))}
      value=${value ?? ""} onChange=${(event) => set(numberOf(event.target.value))} />`;
  }
  if (isType(resolved, "string")) {
    const isSecret = resolved.writeOnly || name === "secret";
    return html`<input ...${attributes} type=${isSecret ? "password" : "text"} autocomplete=${isSecret ? "new-password" : "off"} spellcheck=${false}
      placeholder=${placeholder ?? (typeof usual === "string" ? usual : "")} value=${value ?? ""} onChange=${(event) => set(event.target.value || undefined)} />`;
  }
  const text = value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value);
  return html`<input ...${attributes} class="mono" autocomplete="off" spellcheck=${false} placeholder=${usual === undefined ? "JSON" : JSON.stringify(usual)}
    value=${text} onChange=${(event) => set(jsonOf(event.target.value))} />`;
}

/** What is no number goes to the server as it is: it says what is wrong, at this field. */
export function numberOf(text) {
  const trimmed = text.trim();
  if (!trimmed) return undefined;
  const value = Number(trimmed);
  return Number.isFinite(value) ? value : trimmed;
}

function jsonOf(text) {
  if (!text.trim()) return undefined;
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}
