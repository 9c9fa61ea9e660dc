// Commands and code that use a checkpoint in other programs.

/** Values that vLLM accepts for --max-lora-rank. */
const VLLM_RANKS = [1, 8, 16, 32, 64, 128, 256, 320, 512];

/** Makes a folder name from the name of a job. */
const folderName = (job, checkpoint) => {
  const name = (job.name ?? "").toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-+|-+$/g, "").slice(0, 40);
  return `${name || job.id}-step${checkpoint.step}`;
};

/** Quotes text for a POSIX shell, if needed. */
const quoteShell = (text) => (/^[\w./:@%+=-]+$/.test(text) && !text.startsWith("-") ? text : `'${text.replaceAll("'", `'\\''`)}'`);
/** Quotes text for Python: a JSON string is also a Python string. */
const quotePython = (text) => JSON.stringify(text);

/** Returns `[[title, description, code]]`. With `needsKey`, the commands send the API key in $RLOOD_API_KEY. */
export function usageExamples({ job, checkpoint, origin, needsKey }) {
  const isAdapter = checkpoint.files.some(({ name }) => name === "adapter_model.safetensors");
  const folder = folderName(job, checkpoint);
  const model = job.plan.model.id;
  const key = needsKey ? ' -H "Authorization: Bearer $RLOOD_API_KEY"' : "";
  // Programs such as vLLM load every safetensors file as weights, so the optimizer state is left out.
  const exclude = isAdapter ? "" : " --exclude optimizer.safetensors";
  const download = `mkdir -p ${folder}\ncurl -fsS${key} ${origin}/checkpoints/${checkpoint.id}/archive.tar | tar -xC ${folder}${exclude}`;
  return isAdapter ? adapterExamples({ job, checkpoint, model, folder, download }) : modelExamples({ checkpoint, folder, download });
}

function adapterExamples({ job, checkpoint, model, folder, download }) {
  const rank = VLLM_RANKS.find((rank) => rank >= (job.plan.lora?.r ?? 16)) ?? VLLM_RANKS.at(-1);
  return [
    ["Download", "Saves the adapter to a folder.", download],
    ["PEFT", "Requires: pip install peft transformers torch. To merge the adapter into the model, call merge_and_unload().",
      lines("from peft import PeftModel", importTransformers, "", `# ${baseModelComment}`, loadModel(model), `model = PeftModel.from_pretrained(model, ${quotePython(folder)})`, "", generate)],
    ["transformers", "Requires: pip install peft transformers torch.",
      lines(importTransformers, "", `# ${baseModelComment}`, loadModel(model), `model.load_adapter(${quotePython(folder)})`, "", generate)],
    ["llama.cpp", "Requires llama-server, and the base model as GGUF. For one file with both, choose GGUF model under Exports.",
      lines(`rlood export ${checkpoint.id} --gguf-adapter -o ${folder}-gguf`, `llama-server -m BASE.gguf --lora ${folder}-gguf/adapter.gguf`)],
    ["vLLM", "Requires: pip install vllm.", lines(`# ${baseModelComment}`, `vllm serve ${quoteShell(model)} --enable-lora --max-lora-rank ${rank} --lora-modules ${folder}=./${folder}`, "", curlRequest(folder))],
  ];
}

function modelExamples({ checkpoint, folder, download }) {
  return [
    ["Download", "Saves the model to a folder.", download],
    ["transformers", "Requires: pip install transformers torch.", lines(importTransformers, "", loadModel(`./${folder}`), "", generate)],
    ["llama.cpp", "Requires llama-server.", lines(`rlood export ${checkpoint.id} --gguf -o ${folder}-gguf`, `llama-server -m ${folder}-gguf/model.gguf`)],
    ["vLLM", "Requires: pip install vllm.", lines(`vllm serve ./${folder} --served-model-name ${folder}`, "", curlRequest(folder))],
  ];
}

// A list of lines, so that the indentation of this file does not become part of the text.
const lines = (...list) => list.join("\n");
const importTransformers = "from transformers import AutoModelForCausalLM, AutoTokenizer";
const baseModelComment = "Replace this with the base model's Hugging Face id or local path if it differs.";
const loadModel = (model) =>
  lines(`tokenizer = AutoTokenizer.from_pretrained(${quotePython(model)})`, `model = AutoModelForCausalLM.from_pretrained(${quotePython(model)}, dtype="auto", device_map="auto")`);
const generate = lines(
  'messages = [{"role": "user", "content": "Hello"}]',
  'inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True).to(model.device)',
  "output = model.generate(**inputs, max_new_tokens=256)",
  'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))',
);
const curlRequest = (name) =>
  lines('curl http://localhost:8000/v1/chat/completions -H "content-type: application/json" \\', `  -d '{"model": "${name}", "messages": [{"role": "user", "content": "Hello"}]}'`);
