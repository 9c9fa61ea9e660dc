// The rewards of the job: a row each, its own settings, and a test before anything depends on it.
import { post, Problem } from "../core/api.js";
import { number, words } from "../core/format.js";
import { cls, html, useEffect, useRef, useState } from "../core/ui.js";
import { useWork } from "../core/work.js";
import { Input } from "../parts/field.js";
import { ProblemBox } from "../parts/problem.js";
import { Setting } from "./setting.js";

const COMMON = ["name", "weight"];
/** Of the many settings of a type, those that are shown at once, beside what it requires. */
const SHOWN = ["url", "secret", "column", "text", "pattern", "model", "min_words", "max_words", "tags", "schema", "operation", "reference", "template"];

export const typeOf = (schema) => schema.properties.type.enum?.[0] ?? schema.properties.type.const;

export function Rewards({ form }) {
  const rewards = form.spec.rewards ?? [];
  const types = form.schema.rewards.map(typeOf);
  // A row keeps its test when one before it goes.
  const { current: ids } = useRef([]);
  while (ids.length < rewards.length) ids.push(Symbol());
  const adder = useRef(null);
  const remove = (index) => {
    ids.splice(index, 1);
    form.set(`/rewards/${index}`, undefined);
    adder.current.focus();
  };
  const add = () => form.set("/rewards", [...rewards, { type: rewards.length ? "length" : "exact_match" }]);
  return html`<fieldset class="panel" data-pointer="/rewards"><legend>Rewards</legend>
    <p class="dim">Each completion gets the weighted sum of them. Weight 0 measures beside it.</p>
    ${form.errorsAt("/rewards", true).map((item) => html`<p key=${item.code} class="bad small">${item.detail}</p>`)}
    ${rewards.map((reward, index) => html`<${Reward} key=${ids[index]} form=${form} index=${index} reward=${reward} types=${types} remove=${() => remove(index)} />`)}
    <div><button type="button" ref=${adder} onClick=${add}>Add a reward</button></div>
  </fieldset>`;
}

function Reward({ form, index, reward, types, remove }) {
  const [isTested, setTested] = useState(false);
  const at = `/rewards/${index}`;
  const schema = form.schema.rewards.find((one) => typeOf(one) === reward.type);
  const names = Object.keys(schema?.properties ?? {}).filter((name) => name !== "type");
  const required = schema?.required ?? [];
  const isShown = (name) => !COMMON.includes(name) && (required.includes(name) || SHOWN.includes(name));
  const order = (list) => list.toSorted((a, b) => required.includes(b) - required.includes(a));
  const setting = (name) => html`<${Setting} key=${name} form=${form} pointer=${`${at}/${name}`} schema=${schema.properties[name]}
    label=${`${words(name)}${required.includes(name) ? " *" : ""}`} placeholder=${name === "name" ? reward.function || reward.type : undefined} />`;
  return html`<div class="reward" role="group" aria-label=${`Reward ${index + 1}`} data-pointer=${at}>
    <div class="fields">
      <${Input} label="Type" hint=${(schema?.description ?? "").split("\n")[0]} errors=${form.errorsAt(`${at}/type`)} pointer=${`${at}/type`}
        options=${types.map((type) => [type, type])} value=${reward.type} set=${(type) => form.set(at, { type, name: reward.name, weight: reward.weight })} />
      ${schema && COMMON.map(setting)}
      ${schema && order(names.filter(isShown)).map(setting)}
    </div>
    ${form.errorsAt(at, true).map((item) => html`<p key=${item.code} class="bad small">${item.detail}</p>`)}
    ${schema && html`<details><summary>More settings of this reward</summary><div class="fields">${names.filter((name) => !COMMON.includes(name) && !isShown(name)).map(setting)}</div></details>`}
    <div class="row"><button type="button" aria-expanded=${isTested} onClick=${() => setTested(!isTested)}>Test</button>
      <button type="button" class="quiet" aria-label=${`Remove reward ${index + 1}`} onClick=${remove}>Remove</button></div>
    ${isTested && html`<${Trial} reward=${reward} rows=${form.rows} />`}
  </div>`;
}

const textOf = (prompt) => (typeof prompt === "string" ? prompt : JSON.stringify(prompt));

/** A text, or the chat messages that it is. */
function promptFrom(text) {
  try {
    const messages = JSON.parse(text);
    return messages[0].role ? messages : text;
  } catch {
    return text;
  }
}

/** Asks the reward about completions that somebody types. */
function Trial({ reward, rows }) {
  const { prompt = "What is 2 + 2?", ...columns } = rows?.[0] ?? { answer: "4" };
  const [form, setForm] = useState({ prompt: textOf(prompt), completion: typeof columns.answer === "string" ? columns.answer : "4", columns: JSON.stringify(columns) });
  const [answer, setAnswer] = useState(null);
  const { busy, error, setError, run } = useWork();
  // What was said of other settings.
  useEffect(() => setError(null), [reward]);
  const text = (name) => ({ rows: 2, value: form[name], set: (value) => setForm({ ...form, [name]: value }) });
  const score = async () => {
    setAnswer(null);
    let given;
    try {
      given = JSON.parse(form.columns || "{}");
    } catch ({ message }) {
      throw new Problem({ title: "The columns are no JSON", detail: message });
    }
    const prompt = promptFrom(form.prompt);
    const samples = form.completion.split("\n---\n").map((completion) => ({ prompt, columns: given, completion }));
    setAnswer({ ...(await post("/rewards/test", { reward, samples })), samples, reward });
  };
  return html`<div class="trial">
    <div class="fields">
      <${Input} label="Prompt" hint="Text, or chat messages as JSON." ...${text("prompt")} />
      <${Input} label="Completion" hint="Several: a line --- between them." ...${text("completion")} />
      <${Input} label="Columns" hint="JSON, as in the dataset." class="mono" ...${text("columns")} />
    </div>
    <div><button type="button" disabled=${busy} onClick=${() => run(score)}>${busy ? "Asking…" : "Score it"}</button></div>
    <${ProblemBox} error=${error} />
    ${answer?.reward === reward && html`<div role="status">
      <p class=${answer.ok ? "good" : "bad"}>${answer.ok ? "Every completion has a value" : "Not every completion has a value"} · ${number(answer.latency_ms, 3)} ms</p>
      <table class="tight"><thead><tr><th scope="col">Completion</th><th scope="col" class="num">Reward</th><th scope="col">Why</th></tr></thead>
        <tbody>${answer.results.map((result, index) => html`<tr key=${index}><td class="text">${answer.samples[index].completion}</td><td class="num">${result.not_applicable ? "not applicable" : number(result.reward)}</td>
          <td class=${cls(result.error && "bad")}>${result.error?.message ?? result.error?.code ?? result.reason ?? ""}</td></tr>`)}</tbody></table>
      ${answer.warnings.map((text) => html`<p key=${text} class="warn">${text}</p>`)}
      ${answer.exchanges.length > 0 && html`<details><summary>What went over the wire</summary>${answer.exchanges.map((exchange, index) => html`<pre key=${index} tabindex="0">${JSON.stringify(exchange, null, 2)}</pre>`)}</details>`}
    </div>`}
  </div>`;
}
