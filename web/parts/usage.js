// Commands and code that use a checkpoint in other programs.

/** Values that vLLM accepts for --max-lora-rank. */
const VLLM_RANKS = [1, 8, 16, 32, 64, 128, 256, 320, 512];
/** The address that the command line uses if no other is configured. */
const DEFAULT_SERVER = "http://127.0.0.1:8080";

/** Makes a folder name from the name of a job. */
const folderName = (job, checkpoint) => {
  const name = (job.name ?? "").toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-+|-+$/g, "").slice(0, 40);
  return `${name || job.id}-step${checkpoint.step}`;
};

/** Quotes text for a POSIX shell, if needed. */
const quoteShell = (text) => (/^[\w./:@%+=-]+$/.test(text) && !text.startsWith("-") ? text : `'${text.replaceAll("'", `'\\''`)}'`);
/** Quotes text for Python: a JSON string is also a Python string. */
const quotePython = (text) => JSON.stringify(text);
/** The option that names this server to the command line. */
const serverOption = (origin) => (origin === DEFAULT_SERVER ? "" : ` --server ${quoteShell(origin)}`);

/**
 * Returns `[[title, description, code]]`. With `needsKey`, the commands send the API key in $RLOOD_API_KEY. Without `hasTemplate`, the
 * model has no chat template, and the examples send plain text.
 */
export function usageExamples({ job, checkpoint, origin, needsKey, hasTemplate = true }) {
  const isAdapter = checkpoint.files.some(({ name }) => name === "adapter_model.safetensors");
  const folder = folderName(job, checkpoint);
  const model = job.plan.model.id;
  const key = needsKey ? ' -H "Authorization: Bearer $RLOOD_API_KEY"' : "";
  // Programs such as vLLM load every safetensors file as weights, so the optimizer state is left out.
  const exclude = isAdapter ? "" : " --exclude optimizer.safetensors";
  const download = `mkdir -p ${folder}\ncurl -fsS${key} ${origin}/checkpoints/${checkpoint.id}/archive.tar | tar -xC ${folder}${exclude}`;
  const facts = { job, checkpoint, model, folder, hasTemplate, key, origin, needsKey, server: serverOption(origin) };
  return [["Download", isAdapter ? "Saves the adapter to a folder." : "Saves the model to a folder.", download], ...serverExamples(facts), ...(isAdapter ? adapterExamples(facts) : modelExamples(facts))];
}

/** Returns the command that checks by the certificate whether a server applies the checkpoint. */
export const verifyCommand = ({ job, checkpoint, origin }) =>
  `rlood verify ${checkpoint.id} --url http://127.0.0.1:8000/v1 --model ${folderName(job, checkpoint)}${serverOption(origin)}`;

/** Examples that ask this server. */
function serverExamples({ job, checkpoint, hasTemplate, key, origin, needsKey, folder, server }) {
  const most = job.plan.sampling.max_completion_length;
  const [method, content, answer] = hasTemplate ? ["chat.completions", 'messages=[{"role": "user", "content": "Hello"}]', "message.content"] : ["completions", 'prompt="Hello"', "text"];
  const apiKey = needsKey ? 'os.environ["RLOOD_API_KEY"]' : '"none"';
  const openai = [...(needsKey ? ["import os", ""] : []), "from openai import OpenAI", "", `client = OpenAI(base_url=${quotePython(`${origin}/v1`)}, api_key=${apiKey})`,
    `answer = client.${method}.create(`, `    model="${checkpoint.id}",`, `    ${content},`, `    max_tokens=${most},`, ")", `print(answer.choices[0].${answer})`];
  return [
    ["openai", "This server answers. Requires: pip install openai.", lines(...openai)],
    ["curl", "This server answers.", curlRequest({ origin, name: checkpoint.id, hasTemplate, key, most })],
    ["rlood", "Downloads the checkpoint and checks its hashes. An interrupted download resumes.", `rlood pull ${checkpoint.id} -o ${folder}${server}`],
  ];
}

function adapterExamples({ job, checkpoint, model, folder, hasTemplate, server }) {
  const rank = VLLM_RANKS.find((rank) => rank >= (job.plan.lora?.r ?? 16)) ?? VLLM_RANKS.at(-1);
  const serve = `vllm serve ${quoteShell(model)} --enable-lora --max-lora-rank ${rank} --lora-modules ${folder}=./${folder}`;
  return [
    ["vLLM", "Requires: pip install vllm. The request works once the server has started.", lines(`rlood pull ${checkpoint.id} -o ${folder}${server}`, `# ${baseModelComment}`, serve, "", curlRequest({ name: folder, hasTemplate }))],
    ["transformers", "Requires: pip install peft transformers torch.",
      lines(importTransformers, "", `# ${baseModelComment}`, loadModel(model), `model.load_adapter(${quotePython(folder)})`, "", generate(hasTemplate))],
    ["PEFT", "Requires: pip install peft transformers torch. To merge the adapter into the model, call merge_and_unload().",
      lines("from peft import PeftModel", importTransformers, "", `# ${baseModelComment}`, loadModel(model), `model = PeftModel.from_pretrained(model, ${quotePython(folder)})`, "", generate(hasTemplate))],
    ["llama.cpp", "Requires llama-server, and the base model as GGUF. For one file with both, choose GGUF model under Exports.",
      lines(`rlood export ${checkpoint.id} --gguf-adapter -o ${folder}-gguf${server}`, `llama-server -m BASE.gguf --lora ${folder}-gguf/adapter.gguf`)],
  ];
}

function modelExamples({ checkpoint, folder, hasTemplate, server }) {
  return [
    ["vLLM", "Requires: pip install vllm. The request works once the server has started.", lines(`rlood pull ${checkpoint.id} -o ${folder}${server}`, `vllm serve ./${folder} --served-model-name ${folder}`, "", curlRequest({ name: folder, hasTemplate }))],
    ["transformers", "Requires: pip install transformers torch.", lines(importTransformers, "", loadModel(`./${folder}`), "", generate(hasTemplate))],
    ["llama.cpp", "Requires llama-server.", lines(`rlood export ${checkpoint.id} --gguf -o ${folder}-gguf${server}`, `llama-server -m ${folder}-gguf/model.gguf`)],
  ];
}

// A list of lines, so that the indentation of this file does not become part of the text.
const lines = (...list) => list.join("\n");
const importTransformers = "from transformers import AutoModelForCausalLM, AutoTokenizer";
const baseModelComment = "Replace this with the base model's Hugging Face id or local path if it differs.";
const loadModel = (model) =>
  lines(`tokenizer = AutoTokenizer.from_pretrained(${quotePython(model)})`, `model = AutoModelForCausalLM.from_pretrained(${quotePython(model)}, dtype="auto", device_map="auto")`);
const generate = (hasTemplate) => lines(
  ...(hasTemplate
    ? ['messages = [{"role": "user", "content": "Hello"}]', 'inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True).to(model.device)']
    : ['inputs = tokenizer("Hello", return_tensors="pt").to(model.device)']),
  "output = model.generate(**inputs, max_new_tokens=256)",
  'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))',
);
/** A request to this server, or without `origin` to vLLM. `most` is the maximum length of the answer. */
function curlRequest({ origin = "http://localhost:8000", name, hasTemplate, key = "", most }) {
  const [path, content] = hasTemplate ? ["chat/completions", { messages: [{ role: "user", content: "Hello" }] }] : ["completions", { prompt: "Hello" }];
  return lines(`curl ${origin}/v1/${path}${key} -H "content-type: application/json" \\`, `  -d '${JSON.stringify({ model: name, ...content, max_tokens: most })}'`);
}
