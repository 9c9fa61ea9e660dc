// The base model beside a checkpoint: what each says to a prompt, with the same random numbers.
import { announce } from "../core/announce.js";
import { post } from "../core/api.js";
import { changed, diff } from "../core/diff.js";
import { duration, number, plural, savesEvery } from "../core/format.js";
import { usePages } from "../core/pages.js";
import { useFilters } from "../core/router.js";
import { useCheckpoints } from "../core/run.js";
import { may } from "../core/session.js";
import { html, useEffect, useRef, useState } from "../core/ui.js";
import { useWork } from "../core/work.js";
import { numberOf } from "../form/setting.js";
import { Empty } from "../parts/empty.js";
import { Input } from "../parts/field.js";
import { Pieces } from "../parts/group.js";
import { jobView } from "../parts/job-page.js";
import { beginning, Long } from "../parts/long.js";
import { Loading, ProblemBox } from "../parts/problem.js";
import { Select } from "../parts/switch.js";

/** How the text is meant: as what a user says, as it is, or as a list of messages. */
const WAYS = [["user", "a user's message"], ["text", "text as it is"], ["chat", "chat messages, as JSON"]];
/** Pointer, label, and what stands there unless somebody says otherwise. */
const SETTINGS = [
  ["/sampling/temperature", "Temperature", "0 = greedy"],
  ["/sampling/max_completion_length", "Longest completion", "tokens"],
  ["/sampling/top_p", "Top p", ""],
  ["/sampling/top_k", "Top k", "0 = off"],
  ["/num_generations", "Completions of each", "1 to 8"],
  ["/seed", "Seed", "the same question, the same answer"],
];

const Playground = jobView("/playground", PlaygroundOf);
export default Playground;

function PlaygroundOf({ run, job }) {
  const { data, error, reload } = useCheckpoints(run);
  if (!data) return html`<${Loading} error=${error} retry=${reload} />`;
  if (!data.length) return html`<${Empty} title="Nothing to compare yet"><p>The playground asks the base model and a checkpoint the same. This job saves one every ${savesEvery(job.plan.checkpoints)}, and its last.</p><//>`;
  if (!may("submit")) return html`<p class="notice">Your key may only read: asking the models needs a key with the scope submit.</p>`;
  return html`<${Asking} run=${run} job=${job} checkpoints=${data} />`;
}

/** A row's prompt as text, and how it is meant. */
function shownAs(prompt) {
  if (typeof prompt === "string") return { text: prompt, way: "text" };
  const [only, more] = prompt;
  return !more && only?.role === "user" && Object.keys(only).length === 2 ? { text: only.content, way: "user" } : { text: JSON.stringify(prompt, null, 2), way: "chat" };
}

/** What is sent: text that is no JSON goes as it is, and the server says what is wrong. */
function promptOf({ text, way }) {
  if (way === "user") return [{ role: "user", content: text }];
  try {
    return way === "chat" ? JSON.parse(text) : text;
  } catch {
    return text;
  }
}

function Asking({ run, job, checkpoints }) {
  const [{ step }, setQuery] = useFilters();
  const rows = usePages(`/datasets/${job.plan.dataset.id}/rows`, { limit: 100 });
  const [typed, type] = useState(null);
  const [settings, set] = useState({});
  const [answer, setAnswer] = useState(null);
  const { busy, error, at, submit } = useWork();
  const stop = useRef(null);
  // Whoever leaves does not wait: the server ends its process then.
  useEffect(() => () => stop.current?.abort(), []);

  const first = rows.rows[0]?.record.prompt;
  const asked = typed ?? (first ? shownAs(first) : { text: "", way: "user" });
  const ask = async () => {
    stop.current = new AbortController();
    const body = { prompt: promptOf(asked), ...(step && { checkpoint: numberOf(step) }), sampling: {} };
    for (const [pointer, text] of Object.entries(settings)) {
      const [, section, name] = pointer.split("/");
      if (numberOf(text) !== undefined) Object.assign(name ? body.sampling : body, { [name ?? section]: numberOf(text) });
    }
    setAnswer(null);
    setAnswer(await post(`${run.path}/generate`, body, { signal: stop.current.signal }));
    announce("Both have answered");
  };
  const { sampling, training } = job.plan;
  const usual = { ...sampling, num_generations: 1, seed: training.seed };
  const options = [["", "the job's result"], ...checkpoints.map(({ step, best }) => [step, `step ${step}${best ? " ★ best" : ""}`])];
  const takeRow = (index) => index !== "" && type(shownAs(rows.rows[index].record.prompt));
  const keys = (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.target.form?.requestSubmit();
  return html`<form class="panel stack" onSubmit=${submit(ask)} onKeyDown=${keys}>
      <div class="filters">
        <label class="inline">Checkpoint <${Select} value=${step ?? ""} options=${options} set=${(step) => setQuery({ step })} /></label>
        <label class="inline">Take a prompt from the dataset <${Select} class="clip" value="" set=${takeRow}
          options=${[["", rows.error ? "its rows are gone" : "choose a row"], ...rows.rows.map(({ record }, index) => [index, `${index}: ${beginning(shownAs(record.prompt).text, 60)}`])]} /></label>
        ${rows.next && html`<button type="button" class="mini" disabled=${rows.loading} onClick=${rows.more}>More rows</button>`}
      </div>
      ${at("/checkpoint").map(({ detail }) => html`<p class="bad small">${detail}</p>`)}
      <${Input} label="Prompt" errors=${at("/prompt")} hint="Ctrl+Enter asks." rows="4" class=${asked.way === "chat" && "mono"} required value=${asked.text} set=${(text) => type({ ...asked, text })} />
      <div class="fields">
        <${Input} label="Sent as" options=${WAYS} value=${asked.way} set=${(way) => type({ ...asked, way })} />
        ${SETTINGS.map(([pointer, label, hint]) => html`<${Input} key=${pointer} label=${label} hint=${hint} errors=${at(pointer)} inputmode="decimal" autocomplete="off"
          placeholder=${usual[pointer.split("/").at(-1)]} value=${settings[pointer] ?? ""} set=${(text) => set({ ...settings, [pointer]: text })} />`)}
      </div>
      <div class="row wrap"><button class="primary" disabled=${busy}>${busy ? "Asking both…" : "Ask both"}</button>
        ${busy && html`<button type="button" onClick=${() => stop.current.abort()}>Stop</button>`}
        <span class="dim small">Both draw the same random numbers, on the server's processor beside its jobs.</span></div>
      <${ProblemBox} error=${error} hasFields=${error && at("/prompt").length + at("/checkpoint").length + SETTINGS.flatMap(([pointer]) => at(pointer)).length} />
    </form>
    ${answer && html`<${Answer} answer=${answer} />`}`;
}

function Answer({ answer }) {
  const { model, step, weights, prompt, base, trained, seconds, sampling, seed } = answer;
  const [isMarked, mark] = useState(false);
  return html`<section aria-label="Answers">
    <div class="row between wrap"><h2>Answers</h2><span class="dim small">temperature ${number(sampling.temperature)} · at most ${plural(sampling.max_completion_length, "token")} · seed ${seed} · ${duration(seconds)}</span></div>
    <details><summary>The prompt as the models saw it, ${plural(prompt.num_tokens, "token")}</summary><pre class="prompt" tabindex="0">${prompt.text}</pre></details>
    <p><label class="inline"><input type="checkbox" checked=${isMarked} onChange=${({ target }) => mark(target.checked)} /> Mark what differs</label></p>
    <div class="beside">${base.map((one, index) => html`
      <${Said} key=${`base ${index}`} one=${one} title="Base model" about=${model} />
      <${Said} key=${index} one=${trained[index]} title=${`Step ${step}`} about=${weights === "adapter" ? "with its adapter" : "all weights trained"} before=${one} isMarked=${isMarked} />`)}
    </div></section>`;
}

function Said({ one, title, about, before, isMarked }) {
  const { completion, num_tokens, finish_reason } = one;
  const isSame = before?.completion === completion;
  const pieces = isMarked && !isSame && diff(before.completion, completion);
  return html`<article class="completion panel">
    <h3>${title} <span class="dim small">${about}</span></h3>
    ${pieces ? html`<${Pieces} pieces=${pieces} />` : html`<${Long} text=${completion} label="Completion" />`}
    <p class="dim small">${plural(num_tokens, "token")} · ${finish_reason === "length" ? html`<span class="warn">cut</span>` : "ended by itself"}${isSame && " · the same as the base model's"}${pieces && ` · ${plural(changed(pieces)[1], "new word")}`}</p>
  </article>`;
}
