// A group: a prompt with its completions side by side, their rewards and advantages, and the difference between two of them.
import { countChangedWords, diff } from "../core/diff.js";
import { number, plural, signed } from "../core/format.js";
import { useGet } from "../core/load.js";
import { hrefOf } from "../core/router.js";
import { cls, html, useState } from "../core/ui.js";
import { Episode } from "./episode.js";
import { LongText } from "./text.js";

/** Groups the samples. Groups are in the order of their first samples; in each, the best completion comes first. */
export function groupsOf(samples) {
  const groups = new Map();
  for (const sample of samples) {
    const key = `${sample.phase} ${sample.step} ${sample.group_id}`;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(sample);
  }
  const rank = (sample) => sample.advantage ?? sample.reward ?? -Infinity;
  return [...groups].map(([key, members]) => ({ key, ...groupFields(members[0]), samples: members.sort((a, b) => rank(b) - rank(a)) }));
}

const groupFields = ({ step, phase, group_id, prompt_id, prompt }) => ({ step, phase, group_id, prompt_id, prompt });

/** Returns `{mean, std, isTied}` of the rewards. Samples without a reward are left out. */
export function rewardStats(samples) {
  const rewards = samples.map(({ reward }) => reward).filter((reward) => reward !== null);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  const std = Math.sqrt(rewards.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) / (rewards.length - 1));
  return { mean, std, isTied: rewards.length > 1 && rewards.every((reward) => reward === rewards[0]) };
}

/** Smaller advantages are rounding errors and are shown as 0. */
const ADVANTAGE_TOLERANCE = 1e-9;

/** Returns the largest absolute advantage, which sets the scale of the colors. */
export const maxAdvantage = (samples) => samples.reduce((largest, { advantage }) => Math.max(largest, Math.abs(advantage ?? 0)), 0);

/** An advantage as a sign, a number and a color, whose strength is the advantage relative to `largest`. */
export function Advantage({ value, largest }) {
  if (value === null) return null;
  if (Math.abs(value) < ADVANTAGE_TOLERANCE) value = 0;
  const strength = largest > ADVANTAGE_TOLERANCE ? Math.round((Math.abs(value) / largest) * 50) : 0;
  return html`<span class=${cls("advantage", value > 0 && "plus", value < 0 && "minus")} style=${{ "--strength": `${strength}%` }} title="Advantage: how strongly the update favors this completion">
    <span aria-hidden="true">${value > 0 ? "▲" : value < 0 ? "▼" : "■"}</span><span class="unseen">advantage </span>${signed(value)}</span>`;
}

/** A group. `size` is the number of completions in the whole group, or null if unknown; `largest` is passed on to `Advantage`. */
export function Group({ group, job, size, largest }) {
  const { samples, step, phase, prompt_id, group_id, prompt } = group;
  const [chosen, setChosen] = useState([]);
  // A filter may have removed a chosen completion.
  const picked = chosen.filter((sample) => samples.includes(sample));
  const { mean, std, isTied } = rewardStats(samples);
  const path = `/jobs/${job.id}/samples`;
  const isPartial = size !== null && samples.length < size;
  const toggle = (sample) => setChosen(picked.includes(sample) ? picked.filter((other) => other !== sample) : [...picked, sample].slice(-2));
  return html`<section class="group panel" aria-label=${`Step ${step}, prompt ${prompt_id}`}>
    <div class="row between wrap">
      <h2>Step ${step} <span class="dim">· ${prompt_id}${phase === "eval" && " · evaluation"}</span></h2>
      <span class="row wrap small">
        ${isPartial && html`<a href=${hrefOf(path, { group_id, phase })}>${samples.length} of ${size} shown. Show all</a>`}
        <a href=${hrefOf(path, { prompt_id, phase })}>Follow this prompt</a>
      </span>
    </div>
    ${job.plan.runtime && html`<${Images} dataset=${job.plan.dataset.id} row=${prompt_id.slice(4)} />`}
    <${LongText} text=${prompt} label="Prompt" class="prompt" shown=${600} />
    <p class="small dim">${plural(samples.length, "completion")} · reward ${number(mean)}${samples.length > 1 && html` ± ${number(std, 3)}`}
      ${isTied && phase === "train" && html` · <span class="warn">all rewards are equal, so this group adds nothing to the update</span>`}</p>
    <div class="completions">${samples.map((sample, index) => html`<${Completion} key=${index} sample=${sample} index=${index} count=${samples.length} job=${job} largest=${largest}
      isPicked=${picked.includes(sample)} onPick=${() => toggle(sample)} />`)}</div>
    ${picked.length === 1 && html`<p class="small dim">Choose a second completion to compare.</p>`}
    ${picked.length === 2 && html`<${Difference} picked=${picked} samples=${samples} onClose=${() => setChosen([])} />`}
  </section>`;
}

/** The images of a prompt. They are found in the row of the dataset. */
function Images({ dataset, row }) {
  const { data } = useGet(`/datasets/${dataset}/rows`, { from: row, limit: 1 });
  return data?.data[0]?.record.images?.map(({ sha256, width, height }, index) => html`<img key=${index} class="thumb" loading="lazy" src=${`/datasets/${dataset}/images/${sha256}`} alt=${`Image ${index + 1} of the prompt, ${width} × ${height} pixels`} />`);
}

function Completion({ sample, index, count, job, largest, isPicked, onPick }) {
  const { completion, reward, rewards, advantage, kl, num_tokens, finish_reason, episode } = sample;
  const weights = new Map(job.plan.rewards.map(({ name, weight }) => [name, weight]));
  return html`<article class=${cls("completion", isPicked && "picked")} aria-label=${`Completion ${index + 1} of ${count}`}>
    <div class="row between">
      <span class="row"><${Advantage} value=${advantage} largest=${largest} /> <span class="num"><span class="dim">reward</span> <b>${number(reward)}</b></span></span>
      ${count > 1 && html`<button class="mini" aria-pressed=${isPicked} aria-label=${`Compare completion ${index + 1}`} onClick=${onPick}>Compare</button>`}
    </div>
    ${episode ? html`<${Episode} episode=${episode} />` : html`<${LongText} text=${completion} label="Completion" />`}
    <dl class="parts">
      ${Object.entries(rewards).map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value === null ? "missing" : number(value)}${weights.has(name) && weights.get(name) !== 1 && html` <span class="dim">× ${number(weights.get(name))}</span>`}</dd></div>`)}
      <div><dt>KL</dt><dd>${number(kl, 3)}</dd></div>
      <div><dt>tokens</dt><dd>${number(num_tokens)}</dd></div>
      <div><dt>finish</dt><dd>${finish_reason === "length" ? html`<span class="warn">truncated</span>` : finish_reason}</dd></div>
    </dl>
  </article>`;
}

function Difference({ picked, samples, onClose }) {
  const [first, second] = picked;
  const pieces = diff(first.completion, second.completion);
  const [removed, added] = countChangedWords(pieces);
  const name = (sample) => `Completion ${samples.indexOf(sample) + 1}`;
  return html`<section class="difference" aria-label="Text difference between two completions">
    <div class="row between wrap">
      <h3>${name(first)} → ${name(second)} <span class="dim small">${first.completion === second.completion ? "identical" : `${plural(removed, "word")} removed, ${plural(added, "word")} added`} · reward ${signed(second.reward === null || first.reward === null ? null : second.reward - first.reward)}</span></h3>
      <button class="mini" onClick=${onClose}>Close</button>
    </div>
    <${MarkedText} pieces=${pieces} />
  </section>`;
}

/** A text with its deletions and insertions marked. `pieces` is the result of `diff`. */
export const MarkedText = ({ pieces }) => html`<p class="text">${pieces.map(([change, text], index) => (change < 0 ? html`<del key=${index}>${text}</del>` : change > 0 ? html`<ins key=${index}>${text}</ins>` : text))}</p>`;
