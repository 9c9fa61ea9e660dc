// The rewards of a job: one panel for each, with its settings and a tester.
import { post, Problem } from "../core/api.js";
import { number, sentenceCase } from "../core/format.js";
import { cls, html, useEffect, useRef, useState } from "../core/ui.js";
import { useAction } from "../core/action.js";
import { Input } from "../parts/field.js";
import { ProblemBox } from "../parts/problem.js";
import { firstParagraph, Setting } from "./setting.js";

const COMMON = ["name", "weight"];
/** Settings that are always visible, in addition to the required ones. The others are under "More settings". */
const SHOWN = ["url", "secret", "column", "text", "pattern", "model", "min_words", "max_words", "tags", "schema", "operation", "reference", "template"];

export const typeOf = (schema) => schema.properties.type.enum?.[0] ?? schema.properties.type.const;

export function Rewards({ form }) {
  const rewards = form.spec.rewards ?? [];
  const types = form.schema.rewards.map(typeOf);
  // Stable keys, so that a reward keeps its tester when an earlier one is removed.
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
    <p class="dim">A completion's reward is the weighted sum. A reward with weight 0 is logged but not trained on.</p>
    ${form.errorsAt("/rewards", true).map((item) => html`<p key=${item.code} class="bad small">${item.detail}</p>`)}
    ${rewards.map((reward, index) => html`<${Reward} key=${ids[index]} form=${form} index=${index} reward=${reward} types=${types} remove=${() => remove(index)} />`)}
    <div><button type="button" ref=${adder} onClick=${add}>Add a reward</button></div>
  </fieldset>`;
}

function Reward({ form, index, reward, types, remove }) {
  const [showsTester, setShowsTester] = useState(false);
  const at = `/rewards/${index}`;
  const schema = form.schema.rewards.find((one) => typeOf(one) === reward.type);
  const names = Object.keys(schema?.properties ?? {}).filter((name) => name !== "type");
  const required = schema?.required ?? [];
  const isShown = (name) => !COMMON.includes(name) && (required.includes(name) || SHOWN.includes(name));
  const order = (list) => list.toSorted((a, b) => required.includes(b) - required.includes(a));
  const setting = (name) => html`<${Setting} key=${name} form=${form} pointer=${`${at}/${name}`} schema=${schema.properties[name]}
    label=${`${sentenceCase(name)}${required.includes(name) ? " *" : ""}`} placeholder=${name === "name" ? reward.function || reward.type : undefined} />`;
  return html`<div class="reward" role="group" aria-label=${`Reward ${index + 1}`} data-pointer=${at}>
    <div class="fields">
      <${Input} label="Type" hint=${firstParagraph(schema?.description)} errors=${form.errorsAt(`${at}/type`)} pointer=${`${at}/type`}
        options=${types.map((type) => [type, type])} value=${reward.type} set=${(type) => form.set(at, { type, name: reward.name, weight: reward.weight })} />
      ${schema && COMMON.map(setting)}
      ${schema && order(names.filter(isShown)).map(setting)}
    </div>
    ${form.errorsAt(at, true).map((item) => html`<p key=${item.code} class="bad small">${item.detail}</p>`)}
    ${schema && html`<details><summary>More settings</summary><div class="fields">${names.filter((name) => !COMMON.includes(name) && !isShown(name)).map(setting)}</div></details>`}
    <div class="row"><button type="button" aria-expanded=${showsTester} onClick=${() => setShowsTester(!showsTester)}>Test</button>
      <button type="button" class="quiet" aria-label=${`Remove reward ${index + 1}`} onClick=${remove}>Remove</button></div>
    ${showsTester && html`<${RewardTester} reward=${reward} rows=${form.rows} />`}
  </div>`;
}

const textOf = (prompt) => (typeof prompt === "string" ? prompt : JSON.stringify(prompt));

/** Parses a prompt: a JSON list of chat messages, or else plain text. */
function parsePrompt(text) {
  try {
    const messages = JSON.parse(text);
    return messages[0].role ? messages : text;
  } catch {
    return text;
  }
}

/** Scores completions that the user types, with the reward's current settings. */
function RewardTester({ reward, rows }) {
  const { prompt = "What is 2 + 2?", ...columns } = rows?.[0] ?? { answer: "4" };
  const [form, setForm] = useState({ prompt: textOf(prompt), completion: typeof columns.answer === "string" ? columns.answer : "4", columns: JSON.stringify(columns) });
  const [answer, setAnswer] = useState(null);
  const { busy, error, setError, run } = useAction();
  // An error refers to the settings at that time.
  useEffect(() => setError(null), [reward]);
  const text = (name) => ({ rows: 2, value: form[name], set: (value) => setForm({ ...form, [name]: value }) });
  const score = async () => {
    setAnswer(null);
    let columns;
    try {
      columns = JSON.parse(form.columns || "{}");
    } catch ({ message }) {
      throw new Problem({ title: "Invalid JSON in the columns", detail: message });
    }
    const prompt = parsePrompt(form.prompt);
    const samples = form.completion.split("\n---\n").map((completion) => ({ prompt, columns, completion }));
    setAnswer({ ...(await post("/rewards/test", { reward, samples })), samples, reward });
  };
  return html`<div class="trial">
    <div class="fields">
      <${Input} label="Prompt" hint="Text, or chat messages as JSON." ...${text("prompt")} />
      <${Input} label="Completion" hint="Separate several completions with a line ---." ...${text("completion")} />
      <${Input} label="Columns" hint="The other columns of the row, as JSON." class="mono" ...${text("columns")} />
    </div>
    <div><button type="button" disabled=${busy} onClick=${() => run(score)}>${busy ? "Scoring…" : "Score"}</button></div>
    <${ProblemBox} error=${error} />
    ${answer?.reward === reward && html`<div role="status">
      <p class=${answer.ok ? "good" : "bad"}>${answer.ok ? "Every completion was scored" : "Some completions were not scored"} · ${number(answer.latency_ms, 3)} ms</p>
      <table class="tight"><thead><tr><th scope="col">Completion</th><th scope="col" class="num">Reward</th><th scope="col">Reason</th></tr></thead>
        <tbody>${answer.results.map((result, index) => html`<tr key=${index}><td class="text">${answer.samples[index].completion}</td><td class="num">${result.not_applicable ? "not applicable" : number(result.reward)}</td>
          <td class=${cls(result.error && "bad")}>${result.error?.message ?? result.error?.code ?? result.reason ?? ""}</td></tr>`)}</tbody></table>
      ${answer.warnings.map((text) => html`<p key=${text} class="warn">${text}</p>`)}
      ${answer.exchanges.length > 0 && html`<details><summary>Requests and responses</summary>${answer.exchanges.map((exchange, index) => html`<pre key=${index} tabindex="0">${JSON.stringify(exchange, null, 2)}</pre>`)}</details>`}
    </div>`}
  </div>`;
}
