// The playground: completions of the base model and of a checkpoint for the same prompt, with the same seed.
import { announce } from "../core/announce.js";
import { post } from "../core/api.js";
import { countChangedWords, diff } from "../core/diff.js";
import { checkpointInterval, duration, number, plural } from "../core/format.js";
import { usePages } from "../core/load.js";
import { useFilters } from "../core/router.js";
import { useCheckpoints } from "../core/run.js";
import { hasScope } from "../core/session.js";
import { html, useEffect, useRef, useState } from "../core/ui.js";
import { useAction } from "../core/action.js";
import { parseNumber } from "../form/setting.js";
import { Input } from "../parts/field.js";
import { MarkedText } from "../parts/group.js";
import { jobView } from "../parts/job-page.js";
import { Loading, ProblemBox } from "../parts/problem.js";
import { Select } from "../parts/switch.js";
import { Empty, LongText, truncate } from "../parts/text.js";

/** Prompt formats: the text is one user message, the whole prompt (no chat template), or a JSON list of messages. */
const FORMATS = [["user", "user message"], ["text", "plain text, no chat template"], ["chat", "chat messages (JSON)"]];
/** Settings: pointer, label, hint. */
const SETTINGS = [
  ["/sampling/temperature", "Temperature", "0 = greedy"],
  ["/sampling/max_completion_length", "Maximum length", "Tokens per completion"],
  ["/sampling/top_p", "Top p", "1 = off"],
  ["/sampling/top_k", "Top k", "0 = off"],
  ["/num_generations", "Completions", "Completions per model, 1 to 8"],
  ["/seed", "Seed", "The same seed gives the same completions"],
];

const Playground = jobView("/playground", PlaygroundOf);
export default Playground;

function PlaygroundOf({ run, job }) {
  const { data, error, reload } = useCheckpoints(run);
  if (!data) return html`<${Loading} error=${error} retry=${reload} />`;
  if (!data.length) return html`<${Empty} title="No checkpoint yet"><p>The playground compares a checkpoint with the base model. This job saves a checkpoint every ${checkpointInterval(job.plan.checkpoints)} and after its last step.</p><//>`;
  if (!hasScope("submit")) return html`<p class="notice">Your API key is read-only. To use the playground, sign in with a key that has the <code>submit</code> scope.</p>`;
  return html`<${PromptForm} run=${run} job=${job} checkpoints=${data} />`;
}

/** Converts the prompt of a row to `{text, format}` for the form. */
function toFormText(prompt) {
  if (typeof prompt === "string") return { text: prompt, format: "text" };
  const [first, second] = prompt;
  return !second && first?.role === "user" && Object.keys(first).length === 2 ? { text: first.content, format: "user" } : { text: JSON.stringify(prompt, null, 2), format: "chat" };
}

/** Converts the form's text to a prompt. Invalid JSON is sent as it is, so that the server's error explains what is wrong. */
function toPrompt({ text, format }) {
  if (format === "user") return [{ role: "user", content: text }];
  try {
    return format === "chat" ? JSON.parse(text) : text;
  } catch {
    return text;
  }
}

function PromptForm({ run, job, checkpoints }) {
  const [{ step }, setQuery] = useFilters();
  const rows = usePages(`/datasets/${job.plan.dataset.id}/rows`, { limit: 100 });
  const [edited, setEdited] = useState(null);
  const [settings, setSettings] = useState({});
  const [answer, setAnswer] = useState(null);
  const { busy, error, errorsAt, submit } = useAction();
  const abort = useRef(null);
  // Leaving the page aborts the request, and the server then stops the process that generates.
  useEffect(() => () => abort.current?.abort(), []);

  const firstPrompt = rows.rows[0]?.record.prompt;
  const current = edited ?? (firstPrompt ? toFormText(firstPrompt) : { text: "", format: "user" });
  const generate = async () => {
    abort.current = new AbortController();
    const body = { prompt: toPrompt(current), ...(step && { checkpoint: parseNumber(step) }), sampling: {} };
    for (const [pointer, text] of Object.entries(settings)) {
      const [, section, name] = pointer.split("/");
      if (parseNumber(text) !== undefined) Object.assign(name ? body.sampling : body, { [name ?? section]: parseNumber(text) });
    }
    setAnswer(null);
    setAnswer(await post(`${run.path}/generate`, body, { signal: abort.current.signal }));
    announce("The completions are ready");
  };
  const { sampling, training } = job.plan;
  const defaults = { ...sampling, num_generations: 1, seed: training.seed };
  const options = [["", "result of the job"], ...checkpoints.map(({ step, best }) => [step, `step ${step}${best ? " ★ best" : ""}`])];
  const chooseRow = (index) => index !== "" && setEdited(toFormText(rows.rows[index].record.prompt));
  const onKeyDown = (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.target.form?.requestSubmit();
  return html`<form class="panel stack" onSubmit=${submit(generate)} onKeyDown=${onKeyDown}>
      <div class="filters">
        <label class="inline">Checkpoint <${Select} value=${step ?? ""} options=${options} set=${(step) => setQuery({ step })} /></label>
        <label class="inline">Prompt from the dataset <${Select} class="clip" value="" set=${chooseRow}
          options=${[["", rows.error ? "Dataset rows not available" : "Choose a dataset row"], ...rows.rows.map(({ record }, index) => [index, `${index}: ${truncate(toFormText(record.prompt).text, 60)}`])]} /></label>
        ${rows.next && html`<button type="button" class="mini" disabled=${rows.loading} onClick=${rows.loadMore}>Load more rows</button>`}
      </div>
      ${errorsAt("/checkpoint").map(({ detail }) => html`<p class="bad small">${detail}</p>`)}
      <${Input} label="Prompt" errors=${errorsAt("/prompt")} hint="Press Ctrl+Enter to generate." rows="4" class=${current.format === "chat" && "mono"} required value=${current.text} set=${(text) => setEdited({ ...current, text })} />
      <div class="fields">
        <${Input} label="Prompt format" options=${FORMATS} value=${current.format} set=${(format) => setEdited({ ...current, format })} />
        ${SETTINGS.map(([pointer, label, hint]) => html`<${Input} key=${pointer} label=${label} hint=${hint} errors=${errorsAt(pointer)} inputmode="decimal" autocomplete="off"
          placeholder=${defaults[pointer.split("/").at(-1)]} value=${settings[pointer] ?? ""} set=${(text) => setSettings({ ...settings, [pointer]: text })} />`)}
      </div>
      <div class="row wrap"><button class="primary" disabled=${busy}>${busy ? "Generating…" : "Generate with both models"}</button>
        ${busy && html`<button type="button" onClick=${() => abort.current.abort()}>Stop</button>`}
        <span class="dim small">Both use the same seed. The server generates alongside training.</span></div>
      <${ProblemBox} error=${error} hasFields=${error && errorsAt("/prompt").length + errorsAt("/checkpoint").length + SETTINGS.flatMap(([pointer]) => errorsAt(pointer)).length} />
    </form>
    ${answer && html`<${Answer} answer=${answer} />`}`;
}

function Answer({ answer }) {
  const { model, step, weights, prompt, base, trained, seconds, sampling, seed } = answer;
  const [isMarked, setMarked] = useState(false);
  return html`<section aria-label="Completions">
    <div class="row between wrap"><h2>Completions</h2><span class="dim small">temperature ${number(sampling.temperature)} · at most ${plural(sampling.max_completion_length, "token")} · seed ${seed} · ${duration(seconds)}</span></div>
    <details><summary>Formatted prompt, ${plural(prompt.num_tokens, "token")}</summary><pre class="prompt" tabindex="0">${prompt.text}</pre></details>
    <p><label class="inline"><input type="checkbox" checked=${isMarked} onChange=${({ target }) => setMarked(target.checked)} /> Mark differences</label></p>
    <div class="beside">${base.map((one, index) => html`
      <${Completion} key=${`base ${index}`} result=${one} title="Base model" about=${model} />
      <${Completion} key=${index} result=${trained[index]} title=${`Step ${step}`} about=${weights === "adapter" ? "adapter" : "all weights"} baseResult=${one} isMarked=${isMarked} />`)}
    </div></section>`;
}

/** One completion. `baseResult` is the base model's, to compare with. */
function Completion({ result, title, about, baseResult, isMarked }) {
  const { completion, num_tokens, finish_reason } = result;
  const isSame = baseResult?.completion === completion;
  const pieces = isMarked && !isSame && diff(baseResult.completion, completion);
  return html`<article class="completion panel">
    <h3>${title} <span class="dim small">${about}</span></h3>
    ${pieces ? html`<${MarkedText} pieces=${pieces} />` : html`<${LongText} text=${completion} label="Completion" />`}
    <p class="dim small">${plural(num_tokens, "token")} · ${finish_reason === "length" ? html`<span class="warn">truncated</span>` : "complete"}${isSame && " · same as the base model"}${pieces && ` · ${plural(countChangedWords(pieces)[1], "new word")}`}</p>
  </article>`;
}
