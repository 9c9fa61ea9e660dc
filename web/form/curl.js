// The job as a command: what the form sends, for a terminal.

const SECRETS = new Map([["secret", "whsec_…"], ["previous_secret", "whsec_…"], ["headers", "…"]]);

/** As JSON, the secrets of rewards left for the reader to fill in; a label that is called like one is none. */
const specText = (spec) => JSON.stringify(veiled({ ...spec, eval: veiled(spec.eval) }), null, 2);

/** Rewards that are half typed are not known yet from their secrets. */
const veiled = (part) => (part?.rewards === undefined ? part : { ...part, rewards: Array.isArray(part.rewards) ? part.rewards.map(veiledReward) : "…" });

function veiledReward(reward) {
  if (reward === null || typeof reward !== "object") return reward;
  const veil = (key, value) => (value !== null && typeof value === "object" ? Object.fromEntries(Object.keys(value).map((name) => [name, SECRETS.get(key)])) : SECRETS.get(key));
  return Object.fromEntries(Object.entries(reward).map(([key, value]) => [key, SECRETS.has(key) ? veil(key, value) : value]));
}

/** POSIX shell: nothing between single quotes is special but the quote. */
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export function curlOf(spec, origin, needsKey) {
  const lines = [`curl ${origin}/jobs`, "  -H 'content-type: application/json'"];
  if (needsKey) lines.push('  -H "authorization: Bearer $RLOOD_API_KEY"');
  return [...lines, `  -d ${quoted(specText(spec))}`].join(" \\\n");
}
