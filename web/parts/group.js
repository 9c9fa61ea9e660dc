// A prompt with its completions side by side: what each got, what it counts in the update, and how two of them differ.
import { changed, diff } from "../core/diff.js";
import { number, plural, signed } from "../core/format.js";
import { hrefOf } from "../core/router.js";
import { cls, html, useState } from "../core/ui.js";
import { Long } from "./long.js";

/** Samples as groups, in the order of their first; best completion first. */
export function groupsOf(samples) {
  const groups = new Map();
  for (const sample of samples) {
    const key = `${sample.phase} ${sample.step} ${sample.group_id}`;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(sample);
  }
  const rank = (sample) => sample.advantage ?? sample.reward ?? -Infinity;
  return [...groups].map(([key, found]) => ({ key, ...pick(found[0]), samples: found.sort((a, b) => rank(b) - rank(a)) }));
}

const pick = ({ step, phase, group_id, prompt_id, prompt }) => ({ step, phase, group_id, prompt_id, prompt });

/** `{mean, std, isTied}` of the rewards that are there. */
export function spread(samples) {
  const rewards = samples.map(({ reward }) => reward).filter((reward) => reward !== null);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  const std = Math.sqrt(rewards.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) / (rewards.length - 1));
  return { mean, std, isTied: rewards.length > 1 && rewards.every((reward) => reward === rewards[0]) };
}

/** What is less is a rounding of nothing. */
const LEAST = 1e-9;

/** The greatest advantage of either sign: what the colours are measured by. */
export const reach = (samples) => samples.reduce((most, { advantage }) => Math.max(most, Math.abs(advantage ?? 0)), 0);

/** An advantage as sign, number and colour; the colour's strength is its share of `most`. */
export function Advantage({ value, most }) {
  if (value === null) return null;
  if (Math.abs(value) < LEAST) value = 0;
  const strength = most > LEAST ? Math.round((Math.abs(value) / most) * 50) : 0;
  return html`<span class=${cls("advantage", value > 0 && "plus", value < 0 && "minus")} style=${{ "--strength": `${strength}%` }} title="Advantage: how much this completion counts in the update">
    <span aria-hidden="true">${value > 0 ? "▲" : value < 0 ? "▼" : "■"}</span><span class="unseen">advantage </span>${signed(value)}</span>`;
}

/** `whole`: completions that the group has in all; `most`: see `Advantage`. */
export function Group({ group, job, whole, most }) {
  const { samples, step, phase, prompt_id, group_id, prompt } = group;
  const [chosen, pickTwo] = useState([]);
  // A filter may take one away.
  const picked = chosen.filter((sample) => samples.includes(sample));
  const { mean, std, isTied } = spread(samples);
  const path = `/jobs/${job.id}/samples`;
  const isPart = whole !== null && samples.length < whole;
  const choose = (sample) => pickTwo(picked.includes(sample) ? picked.filter((other) => other !== sample) : [...picked, sample].slice(-2));
  return html`<section class="group panel" aria-label=${`Step ${step}, prompt ${prompt_id}`}>
    <div class="row between wrap">
      <h2>Step ${step} <span class="dim">· ${prompt_id}${phase === "eval" && " · evaluation"}</span></h2>
      <span class="row wrap small">
        ${isPart && html`<a href=${hrefOf(path, { group_id, phase })}>${samples.length} of ${whole} shown: see all</a>`}
        <a href=${hrefOf(path, { prompt_id, phase })}>Follow this prompt</a>
      </span>
    </div>
    <${Long} text=${prompt} label="Prompt" class="prompt" shown=${600} />
    <p class="small dim">${plural(samples.length, "completion")} · reward ${number(mean)}${samples.length > 1 && html` ± ${number(std, 3)}`}
      ${isTied && phase === "train" && html` · <span class="warn">all alike, so nothing is learnt from it</span>`}</p>
    <div class="completions">${samples.map((sample, index) => html`<${Completion} key=${index} sample=${sample} index=${index} count=${samples.length} job=${job} most=${most}
      isPicked=${picked.includes(sample)} onPick=${() => choose(sample)} />`)}</div>
    ${picked.length === 1 && html`<p class="small dim">Choose a second completion to see how they differ.</p>`}
    ${picked.length === 2 && html`<${Difference} picked=${picked} samples=${samples} onClose=${() => pickTwo([])} />`}
  </section>`;
}

function Completion({ sample, index, count, job, most, isPicked, onPick }) {
  const { completion, reward, rewards, advantage, kl, num_tokens, finish_reason } = sample;
  const weights = new Map(job.plan.rewards.map(({ name, weight }) => [name, weight]));
  return html`<article class=${cls("completion", isPicked && "picked")} aria-label=${`Completion ${index + 1} of ${count}`}>
    <div class="row between">
      <span class="row"><${Advantage} value=${advantage} most=${most} /> <span class="num"><span class="dim">reward</span> <b>${number(reward)}</b></span></span>
      ${count > 1 && html`<button class="mini" aria-pressed=${isPicked} aria-label=${`Compare completion ${index + 1}`} onClick=${onPick}>Compare</button>`}
    </div>
    <${Long} text=${completion} label="Completion" />
    <dl class="parts">
      ${Object.entries(rewards).map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value === null ? "missing" : number(value)}${weights.has(name) && weights.get(name) !== 1 && html` <span class="dim">× ${number(weights.get(name))}</span>`}</dd></div>`)}
      <div><dt>KL</dt><dd>${number(kl, 3)}</dd></div>
      <div><dt>tokens</dt><dd>${number(num_tokens)}</dd></div>
      <div><dt>end</dt><dd>${finish_reason === "length" ? html`<span class="warn">cut</span>` : finish_reason}</dd></div>
    </dl>
  </article>`;
}

function Difference({ picked, samples, onClose }) {
  const [one, other] = picked;
  const pieces = diff(one.completion, other.completion);
  const [gone, came] = changed(pieces);
  const name = (sample) => `Completion ${samples.indexOf(sample) + 1}`;
  return html`<section class="difference" aria-label="Difference of two completions">
    <div class="row between wrap">
      <h3>${name(one)} → ${name(other)} <span class="dim small">${one.completion === other.completion ? "the same text" : `${plural(gone, "word")} gone, ${plural(came, "word")} new`} · reward ${signed(other.reward === null || one.reward === null ? null : other.reward - one.reward)}</span></h3>
      <button class="mini" onClick=${onClose}>Close</button>
    </div>
    <${Pieces} pieces=${pieces} />
  </section>`;
}

/** A text with what was changed in it marked: pieces of `diff`. */
export const Pieces = ({ pieces }) => html`<p class="text">${pieces.map(([how, text], index) => (how < 0 ? html`<del key=${index}>${text}</del>` : how > 0 ? html`<ins key=${index}>${text}</ins>` : text))}</p>`;
