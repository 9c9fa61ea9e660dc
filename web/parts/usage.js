// How a checkpoint is used elsewhere: lines that can be run as they are.

/** What vLLM takes for --max-lora-rank. */
const RANKS = [1, 8, 16, 32, 64, 128, 256, 320, 512];

/** A folder's name out of a job's. */
const folderOf = (job, checkpoint) => {
  const name = (job.name ?? "").toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-+|-+$/g, "").slice(0, 40);
  return `${name || job.id}-step${checkpoint.step}`;
};

/** For a shell: in single quotes where it needs them. */
const shell = (text) => (/^[\w./:@%+=-]+$/.test(text) && !text.startsWith("-") ? text : `'${text.replaceAll("'", `'\\''`)}'`);
/** For Python: JSON's strings are Python's. */
const python = (text) => JSON.stringify(text);

/** `[[title, what it is, lines]]`. `needsKey`: requests carry a key. */
export function usage({ job, checkpoint, origin, needsKey }) {
  const isAdapter = checkpoint.files.some(({ name }) => name === "adapter_model.safetensors");
  const folder = folderOf(job, checkpoint);
  const model = job.plan.model.id;
  const key = needsKey ? ' -H "Authorization: Bearer $RLOOD_API_KEY"' : "";
  // Serving programs take every file of tensors for weights.
  const without = isAdapter ? "" : " --exclude optimizer.safetensors";
  const fetched = `mkdir -p ${folder}\ncurl -fsS${key} ${origin}/checkpoints/${checkpoint.id}/archive.tar | tar -xC ${folder}${without}`;
  return isAdapter ? adapterUsage({ job, model, folder, fetched }) : modelUsage({ folder, fetched });
}

function adapterUsage({ job, model, folder, fetched }) {
  const rank = RANKS.find((rank) => rank >= (job.plan.lora?.r ?? 16)) ?? RANKS.at(-1);
  return [
    ["Download", "The adapter, into a folder.", fetched],
    ["PEFT", "pip install peft transformers torch; merge_and_unload() makes one model of both",
      lines("from peft import PeftModel", imported, "", `# ${theBase}`, base(model), `model = PeftModel.from_pretrained(model, ${python(folder)})`, "", generated)],
    ["transformers", "Its own adapter loading; pip install peft transformers torch",
      lines(imported, "", `# ${theBase}`, base(model), `model.load_adapter(${python(folder)})`, "", generated)],
    ["vLLM", "pip install vllm", lines(`# ${theBase}`, `vllm serve ${shell(model)} --enable-lora --max-lora-rank ${rank} --lora-modules ${folder}=./${folder}`, "", curlFor(folder))],
  ];
}

function modelUsage({ folder, fetched }) {
  return [
    ["Download", "The whole model, into a folder.", fetched],
    ["transformers", "pip install transformers torch", lines(imported, "", base(`./${folder}`), "", generated)],
    ["vLLM", "pip install vllm", lines(`vllm serve ./${folder} --served-model-name ${folder}`, "", curlFor(folder))],
  ];
}

// A list of lines: indentation and empty lines of this file are not sent.
const lines = (...list) => list.join("\n");
const imported = "from transformers import AutoModelForCausalLM, AutoTokenizer";
const theBase = "The base model, by its id here: put its name on the hub or its folder, if that is another.";
const base = (model) =>
  lines(`tokenizer = AutoTokenizer.from_pretrained(${python(model)})`, `model = AutoModelForCausalLM.from_pretrained(${python(model)}, dtype="auto", device_map="auto")`);
const generated = lines(
  'messages = [{"role": "user", "content": "Hello"}]',
  'inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True).to(model.device)',
  "output = model.generate(**inputs, max_new_tokens=256)",
  'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))',
);
const curlFor = (name) =>
  lines('curl http://localhost:8000/v1/chat/completions -H "content-type: application/json" \\', `  -d '{"model": "${name}", "messages": [{"role": "user", "content": "Hello"}]}'`);
