// Reads and changes the job document by JSON pointer, and looks up the schema of each setting in the OpenAPI document.
import { get } from "../core/api.js";

const splitPointer = (pointer) => pointer.split("/").slice(1).map((part) => part.replaceAll("~1", "/").replaceAll("~0", "~"));

export function valueAt(document, pointer) {
  return splitPointer(pointer).reduce((value, part) => value?.[part], document);
}

/** Returns a copy of the document with `value` at `pointer`. If `value` is undefined, removes it and every object that becomes empty. */
export function withValue(document, pointer, value) {
  const [part, ...rest] = splitPointer(pointer);
  const inner = rest.length ? withValue(document?.[part] ?? {}, `/${rest.join("/")}`, value) : value;
  if (Array.isArray(document)) return inner === undefined ? document.toSpliced(Number(part), 1) : document.with(Number(part), inner);
  const { [part]: _, ...others } = document ?? {};
  const isEmpty = inner === undefined || (rest.length && !Array.isArray(inner) && typeof inner === "object" && inner !== null && !Object.keys(inner).length);
  return isEmpty ? others : { ...document, [part]: inner };
}

/**
 * Reads the schema of a job from the server's OpenAPI document. `first` and `sections` come from its extension `x-form`: the pointers of the
 * settings that the form shows first, and the sections of the others.
 */
export async function loadJobSchema() {
  const { components } = await get("/openapi.json");
  const { schemas } = components;
  const resolve = (schema) => {
    if (!schema?.$ref) return schema;
    const { $ref, ...siblings } = schema;
    return { ...schemas[$ref.split("/").at(-1)], ...siblings };
  };
  const job = schemas.JobSpec;
  const { sections, first } = job["x-form"];
  return {
    job, resolve, first,
    rewards: resolve(job.properties.rewards.items).oneOf.map(resolve),
    sections: sections.map((name) => {
      const { properties, "x-form": layout } = resolveUnion(resolve(job.properties[name]), resolve);
      return { name, properties, ...layout };
    }),
  };
}

/** Returns the schema at a pointer. References are resolved, and `null` is removed from unions. */
export function schemaAt({ job, resolve }, pointer) {
  let schema = job;
  for (const part of splitPointer(pointer)) schema = resolveUnion(resolve(schema?.properties?.[part] ?? {}), resolve);
  return schema;
}

function resolveUnion(schema, resolve) {
  const options = (schema.oneOf ?? schema.anyOf)?.map(resolve);
  if (!options) return schema;
  const present = options.filter(({ type }) => type !== "null");
  // An enum whose values have descriptions of their own is a union of constants.
  if (present.every((option) => option.enum || option.const !== undefined)) return { ...schema, type: "string", enum: present.flatMap((option) => option.enum ?? [option.const]) };
  return { ...present.find((option) => option.type === "object") ?? present[0], ...schema };
}
