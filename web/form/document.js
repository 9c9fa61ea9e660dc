// The job that the form makes: reading and changing it by JSON pointer, and what the OpenAPI document says of each place.
import { get } from "../core/api.js";

const parts = (pointer) => pointer.split("/").slice(1).map((part) => part.replaceAll("~1", "/").replaceAll("~0", "~"));

export function valueAt(document, pointer) {
  return parts(pointer).reduce((value, part) => value?.[part], document);
}

/** A copy with the value there; undefined takes it away, and whatever is empty then. */
export function withValue(document, pointer, value) {
  const [part, ...rest] = parts(pointer);
  const inner = rest.length ? withValue(document?.[part] ?? {}, `/${rest.join("/")}`, value) : value;
  if (Array.isArray(document)) return inner === undefined ? document.toSpliced(Number(part), 1) : document.with(Number(part), inner);
  const { [part]: _, ...others } = document ?? {};
  const isEmpty = inner === undefined || (rest.length && !Array.isArray(inner) && typeof inner === "object" && inner !== null && !Object.keys(inner).length);
  return isEmpty ? others : { ...document, [part]: inner };
}

/** What the server's OpenAPI document says of a job: `first` and `sections` are how its settings are shown, from `x-form`. */
export async function jobSchema() {
  const { components } = await get("/openapi.json");
  const { schemas } = components;
  const resolve = (schema) => {
    if (!schema?.$ref) return schema;
    const { $ref, ...beside } = schema;
    return { ...schemas[$ref.split("/").at(-1)], ...beside };
  };
  const job = schemas.JobSpec;
  const { sections, first } = job["x-form"];
  return {
    job, resolve, first,
    rewards: resolve(job.properties.rewards.items).oneOf.map(resolve),
    sections: sections.map((name) => {
      const { properties, "x-form": layout } = plain(resolve(job.properties[name]), resolve);
      return { name, properties, ...layout };
    }),
  };
}

/** The schema of a place, references and unions of one thing and null resolved. */
export function schemaAt({ job, resolve }, pointer) {
  let schema = job;
  for (const part of parts(pointer)) schema = plain(resolve(schema?.properties?.[part] ?? {}), resolve);
  return schema;
}

function plain(schema, resolve) {
  const options = (schema.oneOf ?? schema.anyOf)?.map(resolve);
  if (!options) return schema;
  const some = options.filter(({ type }) => type !== "null");
  // Words, each with its own description.
  if (some.every((option) => option.enum || option.const !== undefined)) return { ...schema, type: "string", enum: some.flatMap((option) => option.enum ?? [option.const]) };
  return { ...some.find((option) => option.type === "object") ?? some[0], ...schema };
}
