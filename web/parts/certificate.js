// The certificate of a checkpoint: how far it is from its base model on a few prompts, and the command that checks a server by it.
import { get } from "../core/api.js";
import { number, plural } from "../core/format.js";
import { html, useState } from "../core/ui.js";
import { useAction } from "../core/action.js";
import { useLoad } from "../core/load.js";
import { ProblemBox } from "./problem.js";
import { Table } from "./table.js";
import { Code, Facts, TokenText } from "./text.js";

/** Difference of a token's log-probabilities that has the strongest shade, in nats. */
const STRONGEST_NATS = 1;

const isFile = ({ name }) => name === "certificate.json";

export function Certificate({ checkpoint, command }) {
  const { id, files } = checkpoint;
  const hasFile = files.some(isFile);
  const [computed, setComputed] = useState(null);
  const { data, error, reload } = useLoad((signal) => (hasFile ? get(`/checkpoints/${id}/certificate`, undefined, signal) : null), [id, hasFile]);
  const { busy, error: refused, run } = useAction();
  const certificate = data ?? computed;
  return html`<section aria-label="Certificate">
    <h3>Certificate</h3>
    <${ProblemBox} error=${error} retry=${reload} />
    ${!hasFile && !computed && html`<div class="row wrap"><span class="dim">This checkpoint was saved without a certificate.</span>
      <button disabled=${busy} onClick=${() => run(async () => setComputed(await get(`/checkpoints/${id}/certificate`)))}>${busy ? "Computing…" : "Compute"}</button></div>`}
    <${ProblemBox} error=${refused} />
    ${certificate && html`<${Content} certificate=${certificate} checkpoint=${checkpoint} command=${command} />`}
  </section>`;
}

function Content({ certificate: { effect, dtype, model, load_in_4bit, lora, prompts }, checkpoint: { id, files }, command }) {
  const precision = load_in_4bit ? `${dtype}, base model in 4 bits` : dtype;
  return html`<p class="dim small">What base model and checkpoint compute for ${plural(prompts.length, "prompt")}. With it, <code>rlood verify</code> tells whether a server applies the checkpoint.</p>
    <${Facts} facts=${[["Effect", `${number(effect.rms_nats)} nats`, `root mean square of ${plural(effect.num_tokens, "token")}`], ["Largest difference", `${number(effect.max_nats)} nats`], ["Precision", precision], ["Base model", model.name], !lora && ["Weights", "all trained"]].filter(Boolean)} />
    <div class="usage"><h4>Check a server</h4><${Code} text=${command} label="Verify" /></div>
    <details><summary>${plural(prompts.length, "prompt")} on which base model and checkpoint differ most</summary>
      <${Table} label="Prompts of the certificate" head=${["Prompt", "Continuation of the checkpoint", "#Total difference", "#Largest"]}>${prompts.map((prompt, index) => html`<${Prompt} key=${index} prompt=${prompt} />`)}<//>
      <p class="dim small">Absolute differences of the log-probabilities of the tokens of a prompt and its continuation, in nats. A token of the continuation is shaded if base model and checkpoint differ; point at it to read both.</p></details>
    ${!files.some(isFile) && html`<p><a href=${`/checkpoints/${id}/certificate`} download="certificate.json">certificate.json</a></p>`}`;
}

function Prompt({ prompt: { text, prompt_ids, continuation, base, trained } }) {
  // Base model and checkpoint by token, from the prompt's second one on. The base model's are null where they are not known.
  const pairs = trained.map((logprob, index) => [base[index], logprob]);
  const differences = pairs.filter(([one]) => one !== null).map(([one, other]) => Math.abs(one - other));
  const total = differences.reduce((sum, difference) => sum + difference, 0);
  const pieces = continuation.map((token, index) => {
    const [one, other] = pairs[prompt_ids.length - 1 + index];
    const title = `${JSON.stringify(token)}: base model ${number(one)}, checkpoint ${number(other)} nats`;
    return [token, title, one === null ? 0 : Math.min(1, Math.abs(one - other) / STRONGEST_NATS)];
  });
  return html`<tr><td class="words">${text}</td><td class="words"><${TokenText} label="Continuation" pieces=${pieces} /></td>
    <td class="num">${number(total)}</td><td class="num">${number(Math.max(...differences))}</td></tr>`;
}
