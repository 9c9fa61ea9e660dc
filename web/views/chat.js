// The chat: several turns with a checkpoint, and with the base model beside it. Both answer as streams of /v1.
import { announce } from "../core/announce.js";
import { streamAnswer } from "../core/answer.js";
import { checkpointInterval, number, percent, plural } from "../core/format.js";
import { useGet } from "../core/load.js";
import { useFilters } from "../core/router.js";
import { useCheckpoints } from "../core/run.js";
import { hasScope } from "../core/session.js";
import { cls, html, useEffect, useLayoutEffect, useRef, useState } from "../core/ui.js";
import { useAction } from "../core/action.js";
import { parseNumber } from "../form/setting.js";
import { Input } from "../parts/field.js";
import { jobView } from "../parts/job-page.js";
import { Loading, ProblemBox } from "../parts/problem.js";
import { Select } from "../parts/switch.js";
import { Empty, TokenText } from "../parts/text.js";

/** Settings: name in the request, label, hint. */
const SETTINGS = [
  ["temperature", "Temperature", "0 = greedy"],
  ["max_tokens", "Maximum tokens", "Tokens per answer"],
  ["seed", "Seed", "The same seed gives the same answer"],
];
/** Distance from the end of the page within which the page follows the answers, in CSS pixels. */
const END_PX = 80;

const Chat = jobView("/chat", ChatOf);
export default Chat;

function ChatOf({ run, job }) {
  const { data, error, reload } = useCheckpoints(run);
  const model = useGet(`/models/${encodeURIComponent(job.plan.model.id)}`);
  if (!data || (!model.data && !model.error)) return html`<${Loading} error=${error} retry=${reload} />`;
  if (!data.length) return html`<${Empty} title="No checkpoint yet"><p>The chat is with a checkpoint. This job saves one every ${checkpointInterval(job.plan.checkpoints)} and after its last step.</p><//>`;
  if (!hasScope("submit")) return html`<p class="notice">Your API key is read-only. To chat, sign in with a key that has the <code>submit</code> scope.</p>`;
  return html`<${Conversation} job=${job} checkpoints=${data} hasTemplate=${model.data?.card?.has_chat_template !== false} />`;
}

const textOf = (answer) => answer.pieces.map(({ text }) => text).join("");

/** Whether a model gave no answer, not even an empty one. */
const isMissing = (answer) => !answer?.pieces.length && !["complete", "truncated"].includes(answer?.state);

/** Lists the earlier turns that a model has answered, as `[message, answer]`. Each model sees its own answers only. */
const historyOf = (turns, side) =>
  turns.map(({ message, answers }) => [message, answers.find((answer) => answer.side === side)]).filter(([, answer]) => !isMissing(answer)).map(([message, answer]) => [message, textOf(answer)]);

/** Builds path and body of a request. A model without a chat template gets the conversation as plain text. */
function requestOf({ model, history, system, message, settings, hasTemplate, withLogprobs }) {
  const common = { model, ...settings };
  if (!hasTemplate) {
    const prompt = [...history.map((pair) => pair.join("")), message].join("\n");
    return ["/v1/completions", { ...common, prompt, ...(withLogprobs && { logprobs: 0 }) }];
  }
  const turns = history.flatMap(([content, answer]) => [{ role: "user", content }, { role: "assistant", content: answer }]);
  const messages = [...(system.trim() ? [{ role: "system", content: system }] : []), ...turns, { role: "user", content: message }];
  return ["/v1/chat/completions", { ...common, messages, ...(withLogprobs && { logprobs: true }) }];
}

/** The turns of a conversation: `{turns, ask, clear}`. `ask` streams the answers of all models to a message, and returns them. */
function useTurns() {
  const [turns, setTurns] = useState([]);
  const ask = async (message, models, makeRequest, signal) => {
    const answers = models.map((model) => ({ ...model, pieces: [], state: "running", tokens: null, error: null }));
    // A turn without any answer is replaced by the next one.
    const earlier = turns.filter(({ answers }) => !answers.every(isMissing));
    // A copy for each change, so that the view is drawn again.
    const show = () => setTurns([...earlier, { message, answers: answers.map((answer) => ({ ...answer })) }]);
    const follow = async (answer) => {
      try {
        const [path, body] = makeRequest(answer, earlier);
        const onPiece = (piece) => {
          if (piece.text || piece.tokens.length) answer.pieces = [...answer.pieces, piece];
          show();
        };
        const { finish, tokens } = await streamAnswer(path, body, { signal, onPiece });
        Object.assign(answer, { state: finish === "length" ? "truncated" : "complete", tokens });
      } catch (error) {
        Object.assign(answer, error.name === "AbortError" ? { state: "stopped" } : { state: "failed", error });
      }
      show();
    };
    show();
    await Promise.all(answers.map(follow));
    return answers;
  };
  return { turns, ask, clear: () => setTurns([]) };
}

/** Keeps the end of the page visible while answers grow, unless the user has scrolled up. */
function useFollowing(turns) {
  const isAtEnd = useRef(true);
  useEffect(() => {
    const onScroll = () => (isAtEnd.current = document.documentElement.scrollHeight - innerHeight - scrollY < END_PX);
    addEventListener("scroll", onScroll, { passive: true });
    return () => removeEventListener("scroll", onScroll);
  }, []);
  useLayoutEffect(() => {
    if (turns.length && isAtEnd.current) scrollTo(0, document.documentElement.scrollHeight);
  }, [turns]);
  return () => (isAtEnd.current = true);
}

function Conversation({ job, checkpoints, hasTemplate }) {
  const [query, setQuery] = useFilters();
  const checkpoint = checkpoints.find(({ id }) => id === query.checkpoint) ?? checkpoints[0];
  const [withBase, setWithBase] = useState(true);
  const [withLogprobs, setWithLogprobs] = useState(false);
  const [system, setSystem] = useState("");
  const [message, setMessage] = useState("");
  const [settings, setSettings] = useState({});
  const [errors, setErrors] = useState([]);
  const { turns, ask, clear } = useTurns();
  const { busy, error, run, submit } = useAction();
  const abort = useRef(null);
  const followEnd = useFollowing(turns);
  // Leaving the page aborts the requests, and the server then stops to generate.
  useEffect(() => () => abort.current?.abort(), []);

  const { temperature, max_completion_length } = job.plan.sampling;
  const defaults = { temperature, max_tokens: max_completion_length };
  const send = async () => {
    abort.current = new AbortController();
    const given = Object.entries(settings).map(([name, text]) => [name, parseNumber(text)]).filter(([, value]) => value !== undefined);
    const shared = { settings: { ...defaults, ...Object.fromEntries(given) }, system, message, hasTemplate, withLogprobs };
    const makeRequest = ({ side, model }, turns) => requestOf({ ...shared, model, history: historyOf(turns, side) });
    const base = { side: "base", model: job.plan.model.id, title: "Base model", about: job.plan.model.id };
    const trained = { side: "trained", model: checkpoint.id, title: `Step ${checkpoint.step}`, about: "checkpoint" };
    setMessage("");
    setErrors([]);
    followEnd();
    const answers = await ask(message, withBase ? [base, trained] : [trained], makeRequest, abort.current.signal);
    setErrors(answers.flatMap(({ error }) => error?.errors ?? []).filter(({ pointer }, index, all) => all.findIndex((other) => other.pointer === pointer) === index));
    if (answers.every(isMissing)) setMessage((text) => text || message);
    announce(answers.every(({ state }) => state === "failed") ? "The request failed" : plural(answers.length, "answer"));
  };
  const errorsAt = (name) => errors.filter(({ pointer }) => pointer === `/${name}`);
  const onKeyDown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!busy) event.target.form.requestSubmit();
  };
  const options = checkpoints.map(({ id, step, best }) => [id, `step ${step}${best ? " ★ best" : ""}`]);
  return html`<section class="panel stack" aria-label="Settings">
      <div class="row wrap">
        <label class="inline">Checkpoint <${Select} value=${checkpoint.id} options=${options} set=${(id) => setQuery({ checkpoint: id })} /></label>
        <${Check} checked=${withBase} set=${setWithBase}>Base model beside it<//>
        <${Check} checked=${withLogprobs} set=${setWithLogprobs}>Log-probabilities of tokens<//>
      </div>
      ${withLogprobs && html`<p class="dim small">A token is shaded if it was unlikely. Point at a token to read its log-probability.</p>`}
      <div class="fields numbers">
        ${SETTINGS.map(([name, label, hint]) => html`<${Input} key=${name} label=${label} hint=${hint} errors=${errorsAt(name)} inputmode="decimal" autocomplete="off"
          placeholder=${defaults[name] ?? "random"} value=${settings[name] ?? ""} set=${(text) => setSettings({ ...settings, [name]: text })} />`)}
      </div>
      ${hasTemplate
        ? html`<details><summary>System message</summary><${Input} label="System message" optional rows="2" value=${system} set=${setSystem} /></details>`
        : html`<p class="warn small">This model has no chat template. It receives the conversation as plain text, one line per turn, and continues it.</p>`}
    </section>
    ${turns.map((turn, index) => html`<${Turn} key=${index} turn=${turn} index=${index} />`)}
    <form class="composer stack" onSubmit=${submit(send)} onKeyDown=${onKeyDown}>
      <${Input} label="Message" rows="2" required hint="Enter sends the message, Shift+Enter starts a new line." value=${message} set=${setMessage} />
      <div class="row wrap"><button class="primary" disabled=${busy}>${busy ? "Answering…" : "Send"}</button>
        ${busy && html`<button type="button" onClick=${() => abort.current.abort()}>Stop</button>`}
        ${!busy && turns.length > 0 && html`<button type="button" onClick=${() => run(async () => clear())}>New chat</button>`}</div>
      <${ProblemBox} error=${error} />
    </form>`;
}

const Check = ({ checked, set, children }) => html`<label class="inline"><input type="checkbox" checked=${checked} onChange=${({ target }) => set(target.checked)} /> ${children}</label>`;

const Turn = ({ turn: { message, answers }, index }) => html`<section class="turn" aria-label=${`Turn ${index + 1}`}>
  <p class="said text">${message}</p>
  <div class="beside">${answers.map((answer) => html`<${Answer} key=${answer.side} answer=${answer} />`)}</div>
</section>`;

const STATES = { running: "answering…", complete: "complete", truncated: "truncated at the maximum", stopped: "stopped" };

function Answer({ answer: { title, about, pieces, state, tokens, error } }) {
  const hasLogprobs = pieces.some((piece) => piece.tokens.length);
  const text = pieces.map((piece) => piece.text).join("");
  const probability = (piece) => Math.exp(Math.min(0, ...piece.tokens.map(([, logprob]) => logprob)));
  const explain = (piece) => piece.tokens.map(([token, logprob]) => `${JSON.stringify(token)}: ${number(logprob)} nats, ${percent(Math.exp(logprob), 1)}`).join("\n");
  return html`<article class="completion panel">
    <h3>${title} <span class="dim small">${about}</span></h3>
    ${hasLogprobs
      ? html`<${TokenText} label="Answer" pieces=${pieces.map((piece) => [piece.text, explain(piece), 1 - probability(piece)])} />`
      : html`<div class="text" role="group" aria-label="Answer">${text || (["complete", "truncated"].includes(state) ? html`<span class="dim">(empty)</span>` : "")}</div>`}
    ${!error && html`<p class="dim small">${tokens !== null && `${plural(tokens, "token")} · `}<span class=${cls(["truncated", "stopped"].includes(state) && "warn")}>${STATES[state]}</span></p>`}
    <${ProblemBox} error=${error} />
  </article>`;
}
