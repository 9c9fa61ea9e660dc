// The control of one setting of a job, built from its schema in the OpenAPI document: type, default, limits.
import { sentenceCase } from "../core/format.js";
import { html, useState } from "../core/ui.js";
import { CheckboxGroup, Field } from "../parts/field.js";
import { Select } from "../parts/switch.js";
import { schemaAt, valueAt } from "./document.js";

const isType = (schema, type) => [schema.type].flat().includes(type);

/** Upper limits from this value on are not shown: no real job reaches them. */
const MAX_SHOWN_LIMIT = 1e6;

/** Describes the limits of a number: "at least 1", "1 to 64", "greater than 0, less than 1". */
function describeLimits({ minimum, maximum, exclusiveMinimum, exclusiveMaximum }) {
  const high = maximum < MAX_SHOWN_LIMIT ? `at most ${maximum}` : exclusiveMaximum !== undefined ? `less than ${exclusiveMaximum}` : "";
  if (minimum !== undefined && maximum < MAX_SHOWN_LIMIT) return `${minimum} to ${maximum}`;
  const low = exclusiveMinimum !== undefined ? `greater than ${exclusiveMinimum}` : minimum > 0 || (minimum === 0 && high) ? `at least ${minimum}` : "";
  return [low, high].filter(Boolean).join(", ");
}

/** Returns the first paragraph of a description, without the backticks of Markdown. */
export const firstParagraph = (text) => (text ?? "").split("\n\n")[0].replaceAll("\n", " ").replaceAll("`", "");

/** The field of the setting at `pointer`. `form` is `{schema, spec, set, errorsAt}`. */
export function Setting({ form, pointer, schema = schemaAt(form.schema, pointer), label, placeholder }) {
  const name = pointer.split("/").at(-1);
  const value = valueAt(form.spec, pointer);
  const set = (next) => form.set(pointer, next);
  // The text as typed is kept until the field loses the focus: an unfinished number such as "1e-" must survive a new render.
  const [draft, setDraft] = useState(null);
  const typed = (text, parse) => ({
    value: draft ?? text, autocomplete: "off", spellcheck: false, onBlur: () => setDraft(null),
    onInput: ({ target }) => {
      setDraft(target.value);
      set(parse(target.value));
    },
  });
  const resolved = form.schema.resolve(schema);
  const { default: defaultValue } = schema;
  const limits = describeLimits(resolved);
  const hint = [firstParagraph(schema.description), limits && `Range: ${limits}.`].filter(Boolean).join(" ");
  const [, section, key] = pointer.split("/");
  const title = label ?? form.schema.sections.find(({ name }) => name === section)?.labels[key] ?? sentenceCase(name);
  const choices = resolved.oneOf?.find(({ items }) => items?.enum)?.items.enum;
  // The other variant of such a union is one word that stands for all choices, so unset means that all are checked.
  if (choices) return html`<div class="field" data-pointer=${pointer}><${CheckboxGroup} label=${title} options=${choices.map((one) => [one, one])} chosen=${Array.isArray(value) ? value : choices}
    errors=${form.errorsAt(pointer)} set=${(list) => set(list.length < choices.length ? list : undefined)} /><p class="hint">${hint}</p></div>`;
  const jsonError = isJson(resolved) && draft === null && typeof value === "string" && findJsonError(value);
  return html`<${Field} label=${title} hint=${hint} errors=${jsonError ? [{ pointer, code: "json", detail: jsonError }] : form.errorsAt(pointer)} pointer=${pointer}>
    ${(attributes) => renderControl({ attributes, resolved, value, defaultValue, set, typed, placeholder, name })}<//>`;
}

/** Whether a setting is edited as JSON text. */
const isJson = (schema) => isType(schema, "array") || isType(schema, "object");

function renderControl({ attributes, resolved, value, defaultValue, set, typed, placeholder, name }) {
  const options = resolved.enum ?? resolved.oneOf?.flatMap((one) => one.enum ?? (one.const === undefined ? [] : [one.const]));
  const select = (list, parse) => html`<${Select} ...${attributes} options=${list} value=${value === undefined || value === defaultValue ? "" : String(value)} set=${(text) => set(text === "" ? undefined : parse(text))} />`;
  const defaultOption = (text) => ["", defaultValue === undefined ? "default" : `${text} (default)`];
  if (options?.length) return select([defaultOption(defaultValue), ...options.filter((option) => option !== defaultValue).map((option) => [option, option])], String);
  if (isType(resolved, "boolean")) return select([defaultOption(defaultValue ? "yes" : "no"), [true, "yes"], [false, "no"]], (text) => text === "true");
  if (isType(resolved, "integer") || isType(resolved, "number")) {
    return html`<input ...${attributes} inputmode="decimal" placeholder=${placeholder ?? (defaultValue === undefined || defaultValue === null ? "" : String(defaultValue))}
      ...${typed(value ?? "", parseNumber)} />`;
  }
  if (isType(resolved, "string")) {
    const isSecret = resolved.writeOnly || name === "secret";
    return html`<input ...${attributes} ...${typed(value ?? "", (text) => text || undefined)} type=${isSecret ? "password" : "text"} autocomplete=${isSecret ? "new-password" : "off"}
      placeholder=${placeholder ?? (typeof defaultValue === "string" ? defaultValue : "")} />`;
  }
  const text = value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value);
  return html`<textarea ...${attributes} ...${typed(text, parseJson)} class="mono" rows="2" placeholder=${placeholder ?? (defaultValue === undefined ? "JSON" : JSON.stringify(defaultValue))}></textarea>`;
}

/** Parses a number. Other text is returned as it is, so that the server's error for the field explains what is wrong. */
export function parseNumber(text) {
  const trimmed = text.trim();
  if (!trimmed) return undefined;
  const value = Number(trimmed);
  return Number.isFinite(value) ? value : trimmed;
}

/** Returns a message if the text is not valid JSON. */
function findJsonError(text) {
  try {
    JSON.parse(text);
  } catch ({ message }) {
    return `Invalid JSON: ${message}`;
  }
}

/** Parses JSON. Text that is not valid JSON is returned as it is. */
function parseJson(text) {
  if (!text.trim()) return undefined;
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}
