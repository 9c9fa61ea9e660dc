// Formats the request that the form sends as a curl command.

const SECRETS = new Map([["secret", "whsec_…"], ["previous_secret", "whsec_…"], ["headers", "…"]]);

/** Formats the job as JSON. The secrets of rewards become placeholders; equal keys elsewhere, for example in `metadata`, do not. */
const specJson = (spec) => JSON.stringify(redactSecrets({ ...spec, eval: redactSecrets(spec.eval) }), null, 2);

/** Rewards that are not valid JSON yet are redacted as a whole: the secrets in them cannot be located. */
const redactSecrets = (section) => (section?.rewards === undefined ? section : { ...section, rewards: Array.isArray(section.rewards) ? section.rewards.map(redactReward) : "…" });

function redactReward(reward) {
  if (reward === null || typeof reward !== "object") return reward;
  const redact = (key, value) => (value !== null && typeof value === "object" ? Object.fromEntries(Object.keys(value).map((name) => [name, SECRETS.get(key)])) : SECRETS.get(key));
  return Object.fromEntries(Object.entries(reward).map(([key, value]) => [key, SECRETS.has(key) ? redact(key, value) : value]));
}

/** Quotes text for a POSIX shell: between single quotes, only the single quote is special. */
const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** Formats the curl command that submits `spec`. */
export function curlCommand(spec, origin, needsKey) {
  const lines = [`curl ${origin}/jobs`, "  -H 'content-type: application/json'"];
  if (needsKey) lines.push('  -H "authorization: Bearer $RLOOD_API_KEY"');
  return [...lines, `  -d ${quote(specJson(spec))}`].join(" \\\n");
}
