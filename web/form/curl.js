// The job as a command: what the form sends, for a terminal.

const SECRETS = { secret: "whsec_…", headers: "…" };

/** As JSON, secrets left for the reader to fill in. */
export function specText(spec) {
  return JSON.stringify(spec, (key, value) => {
    if (value === undefined || !(key in SECRETS)) return value;
    return typeof value === "object" ? Object.fromEntries(Object.keys(value).map((name) => [name, SECRETS[key]])) : SECRETS[key];
  }, 2);
}

/** POSIX shell: nothing between single quotes is special but the quote. */
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export function curlOf(spec, origin, needsKey) {
  const lines = [`curl ${origin}/jobs`, "  -H 'content-type: application/json'"];
  if (needsKey) lines.push('  -H "authorization: Bearer $RLOOD_API_KEY"');
  return [...lines, `  -d ${quoted(specText(spec))}`].join(" \\\n");
}
