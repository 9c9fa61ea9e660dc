// Streams an answer of a model: a request to the API of OpenAI under /v1, and the pieces of text that arrive.
import { fromOpenAi, Problem, send } from "./api.js";
import { Parser } from "./events.js";

/**
 * Sends `body` to `/v1/chat/completions` or `/v1/completions` as a stream. Calls `onPiece({text, tokens})` for each piece of text;
 * `tokens` lists `[token, log-probability]` if the body asks for them. Returns `{finish, tokens}`: the reason for the end (`stop` or
 * `length`) and the number of tokens. Throws the server's Problem, also one that arrives in the stream.
 */
export async function streamAnswer(path, body, { signal, onPiece }) {
  const response = await send("POST", path, { body: { ...body, stream: true, stream_options: { include_usage: true } }, signal });
  const result = { finish: null, tokens: null };
  let isDone = false;
  const parser = new Parser(({ data }) => {
    if (data === "[DONE]") return (isDone = true);
    const { error, choices, usage } = JSON.parse(data);
    if (error) throw new Problem({ status: response.status, ...fromOpenAi(error) });
    const [choice] = choices;
    if (choice) {
      result.finish = choice.finish_reason ?? result.finish;
      onPiece({ text: choice.delta?.content ?? choice.text ?? "", tokens: tokensOf(choice.logprobs) });
    }
    if (usage) result.tokens = usage.completion_tokens;
  });
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  try {
    while (!isDone) {
      const { done, value } = await reader.read();
      if (done) throw cutOff();
      parser.push(decoder.decode(value, { stream: true }));
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof Problem) throw error;
    throw cutOff();
  } finally {
    reader.cancel().catch(() => {});
  }
  return result;
}

const cutOff = () =>
  new Problem({ status: 0, code: "connection_lost", title: "The model did not answer", detail: "The connection ended before the answer was complete. Send the message again." });

/** Reads the log-probabilities of a chat's piece, or of a completion's. */
const tokensOf = (logprobs) =>
  logprobs?.content?.map(({ token, logprob }) => [token, logprob]) ?? logprobs?.tokens?.map((token, index) => [token, logprobs.token_logprobs[index]]) ?? [];
