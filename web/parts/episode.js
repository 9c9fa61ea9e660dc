// An episode: the turns of the model, and what its environment said. The model reads that and is not trained on it, so it is shaded.
import { number, plural } from "../core/format.js";
import { html } from "../core/ui.js";
import { LongText } from "./text.js";

const Context = ({ message: { role, content } }) => html`<div class="turn context"><div class="small dim">${role}</div><${LongText} text=${content} label=${role} shown=${600} /></div>`;

function Turn({ turn, index }) {
  const { text, num_tokens, tool_calls = [], parse_error, observations = [], reward, latency_ms } = turn;
  const facts = [plural(num_tokens, "token"), reward !== null && `reward ${number(reward)}`, latency_ms !== null && `${number(latency_ms)} ms`, parse_error && `invalid call: ${parse_error}`];
  return html`<div class="turn">
      <div class="small dim">Turn ${index + 1} · ${facts.filter(Boolean).join(" · ")}</div>
      <${LongText} text=${text} label=${`Turn ${index + 1}`} />
      ${tool_calls.map(({ id, function: { name, arguments: given } }) => html`<div key=${id}><code>${name}(${given})</code></div>`)}
    </div>
    ${observations.map((message, index) => html`<${Context} key=${index} message=${message} />`)}`;
}

/** The turns of an episode with tool calls, rewards and the time that the environment took, and why it ended. */
export const Episode = ({ episode: { opening = [], turns, stop, restarts } }) => html`<div class="long">
  ${opening.map((message, index) => html`<${Context} key=${index} message=${message} />`)}
  ${turns.map((turn, index) => html`<${Turn} key=${index} turn=${turn} index=${index} />`)}
  <p class="small dim">ended: ${stop.replaceAll("_", " ")}${restarts > 0 && ` · begun again ${plural(restarts, "time")}`}</p>
</div>`;
