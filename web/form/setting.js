// One setting of the job, as the OpenAPI document describes it: its control, its default, its limits.
import { words } from "../core/format.js";
import { html, useState } from "../core/ui.js";
import { Field, Picks } from "../parts/field.js";
import { Select } from "../parts/switch.js";
import { schemaAt, valueAt } from "./document.js";

const isType = (schema, type) => [schema.type].flat().includes(type);

/** A limit that no job comes near says nothing. */
const FAR = 1e6;

/** Limits in words: "1 or more", "1 to 64", "more than 0, less than 1". */
export function limits({ minimum, maximum, exclusiveMinimum, exclusiveMaximum }) {
  const high = maximum < FAR ? `at most ${maximum}` : exclusiveMaximum !== undefined ? `less than ${exclusiveMaximum}` : "";
  if (minimum !== undefined && maximum < FAR) return `${minimum} to ${maximum}`;
  const low = exclusiveMinimum !== undefined ? `more than ${exclusiveMinimum}` : minimum > 0 || (minimum === 0 && high) ? `${minimum} or more` : "";
  return [low, high].filter(Boolean).join(", ");
}

const firstLine = (text) => (text ?? "").split("\n\n")[0].replaceAll("\n", " ").replaceAll("`", "");

/** `form`: `{schema, spec, set, errorsAt}`. */
export function Setting({ form, pointer, schema = schemaAt(form.schema, pointer), label, placeholder }) {
  const name = pointer.split("/").at(-1);
  const value = valueAt(form.spec, pointer);
  const set = (next) => form.set(pointer, next);
  // What is typed stays as it is until the field is left, however often the form is drawn: half a number is none yet.
  const [draft, setDraft] = useState(null);
  const typed = (text, read) => ({
    value: draft ?? text, autocomplete: "off", spellcheck: false, onBlur: () => setDraft(null),
    onInput: ({ target }) => {
      setDraft(target.value);
      set(read(target.value));
    },
  });
  const resolved = form.schema.resolve(schema);
  const { default: usual } = schema;
  const hint = [firstLine(schema.description), limits(resolved)].filter(Boolean).join(" · ");
  const [, section, key] = pointer.split("/");
  const title = label ?? form.schema.sections.find(({ name }) => name === section)?.labels[key] ?? words(name);
  const several = resolved.oneOf?.find(({ items }) => items?.enum)?.items.enum;
  // Their other form is a word for all of them.
  if (several) return html`<div class="field" data-pointer=${pointer}><${Picks} label=${title} options=${several.map((one) => [one, one])} chosen=${Array.isArray(value) ? value : several}
    errors=${form.errorsAt(pointer)} set=${(list) => set(list.length < several.length ? list : undefined)} /><p class="hint">${hint}</p></div>`;
  const slip = isJson(resolved) && draft === null && typeof value === "string" && slipOf(value);
  return html`<${Field} label=${title} hint=${hint} errors=${slip ? [{ pointer, code: "json", detail: slip }] : form.errorsAt(pointer)} pointer=${pointer}>
    ${(attributes) => control({ attributes, resolved, value, usual, set, typed, placeholder, name })}<//>`;
}

/** What no control but text is for. */
const isJson = (schema) => isType(schema, "array") || isType(schema, "object");

function control({ attributes, resolved, value, usual, set, typed, placeholder, name }) {
  const options = resolved.enum ?? resolved.oneOf?.flatMap((one) => one.enum ?? (one.const === undefined ? [] : [one.const]));
  const choice = (list, read) => html`<${Select} ...${attributes} options=${list} value=${value === undefined || value === usual ? "" : String(value)} set=${(text) => set(text === "" ? undefined : read(text))} />`;
  const first = (text) => ["", usual === undefined ? "default" : `${text} (default)`];
  if (options?.length) return choice([first(usual), ...options.filter((option) => option !== usual).map((option) => [option, option])], String);
  if (isType(resolved, "boolean")) return choice([first(usual ? "yes" : "no"), [true, "yes"], [false, "no"]], (text) => text === "true");
  if (isType(resolved, "integer") || isType(resolved, "number")) {
    return html`<input ...${attributes} inputmode="decimal" placeholder=${placeholder ?? (usual === undefined || usual === null ? "" : String(usual))}
      ...${typed(value ?? "", numberOf)} />`;
  }
  if (isType(resolved, "string")) {
    const isSecret = resolved.writeOnly || name === "secret";
    return html`<input ...${attributes} ...${typed(value ?? "", (text) => text || undefined)} type=${isSecret ? "password" : "text"} autocomplete=${isSecret ? "new-password" : "off"}
      placeholder=${placeholder ?? (typeof usual === "string" ? usual : "")} />`;
  }
  const text = value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value);
  return html`<textarea ...${attributes} ...${typed(text, jsonOf)} class="mono" rows="2" placeholder=${placeholder ?? (usual === undefined ? "JSON" : JSON.stringify(usual))}></textarea>`;
}

/** What is no number goes to the server as it is: it says what is wrong, at this field. */
export function numberOf(text) {
  const trimmed = text.trim();
  if (!trimmed) return undefined;
  const value = Number(trimmed);
  return Number.isFinite(value) ? value : trimmed;
}

function slipOf(text) {
  try {
    JSON.parse(text);
  } catch ({ message }) {
    return `This is no JSON: ${message}`;
  }
}

function jsonOf(text) {
  if (!text.trim()) return undefined;
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}
