"""Exports as GGUF beside llama.cpp: log-probs of base, merged model and adapter; token ids of adversarial texts.

usage: tests/gguf/check.py BINARY

Needs xllamacpp (llama.cpp as a wheel), tokenizers, safetensors and numpy. The references are transformers' logits in
tests/fixtures/parity, and the ids of the `tokenizers` library that transformers uses.
"""

import json
import math
import pathlib
import random
import subprocess
import sys
import tempfile
import time
import unicodedata
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
CASES = ROOT / "tests/fixtures/parity"
# Largest difference of log-probs in float32.
TOLERANCE = 1e-4
# How far each format may be off. The weights of these models are random: trained ones differ less.
LOOSE = {"float16": 0.05, "bfloat16": 0.3, "q8_0": 0.8}
# What each case is exported with, and a case of each reason to refuse.
WITH = {
    "llama": {}, "llama3rope": {}, "llama_linear": {}, "llama_own_head": {}, "llama_patterns": {}, "llama_nf4_skip": {}, "llama_fp4": {},
    "mistral": {"context_length": 8}, "qwen2": {}, "qwen3": {}, "qwen3_sharded": {}, "qwen3_nf4": {}, "qwen3_fp8": {},
}
REFUSED = {
    "gemma2": "model_type", "phi3": "model_type", "olmo2": "model_type", "granite": "model_type", "smollm3": "model_type",
    "llama_yarn": "rope_type 'yarn'", "llama_dynamic": "rope_type 'dynamic'", "mistral": "sliding_window",
}
SPLITS = {
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


# ---------------------------------------------------------------- llama.cpp, in a process of its own

def ask():
    """Reads {model, adapter, contexts, texts} from standard input; writes the next token's log-probs of each context, and the ids of
    each text."""
    import xllamacpp

    given = json.load(sys.stdin)
    params = xllamacpp.CommonParams()
    params.model.path = given["model"]
    params.n_ctx, params.n_parallel, params.warmup, params.port, params.n_gpu_layers = 512, 1, False, 0, 0
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.verbosity = -1
    if given.get("adapter"):
        lora = xllamacpp.CommonAdapterLoraInfo()
        lora.path, lora.scale = given["adapter"], 1.0
        params.lora_adapters = [lora]
    server = xllamacpp.Server(params)

    def post(path, body):
        request = urllib.request.Request(server.listening_address + path, json.dumps(body).encode(), {"content-type": "application/json"})
        return json.load(urllib.request.urlopen(request, timeout=60))

    answer = {"logprobs": [], "ids": []}
    for context in given.get("contexts", []):
        # The answer leaves out a token that is no whole text, so one that is gets chosen; log-probs are those before the bias.
        got = post("/completion", {"prompt": context, "n_predict": 1, "n_probs": given["vocab"], "temperature": 1.0, "cache_prompt": False,
                                   "logit_bias": [[given["ascii"], 1000.0]], "samplers": [], "post_sampling_probs": False})
        top = got["completion_probabilities"][0]["top_logprobs"]
        answer["logprobs"].append({str(token["id"]): token["logprob"] for token in top})
    for text in given.get("texts", []):
        answer["ids"].append(post("/tokenize", {"content": text, "add_special": False, "parse_special": False})["tokens"])
    with open(given["out"], "w") as file:
        json.dump(answer, file)


def asked(folder, **given):
    out = folder / "answer.json"
    done = subprocess.run([sys.executable, __file__, "--ask"], input=json.dumps({**given, "out": str(out)}), text=True,
                          capture_output=True, timeout=300)
    if not out.exists():
        sys.exit(f"llama.cpp failed on {given['model']}: {done.stderr[-2000:]}")
    answer = json.loads(out.read_text())
    out.unlink()
    return answer


# ---------------------------------------------------------------- rlood

def export(binary, model, checkpoint, is_adapter, out, **request):
    """One export by the server's own process. Returns the report."""
    out.mkdir(parents=True)
    task = {"model_dir": str(model), "checkpoint_dir": str(checkpoint), "is_adapter": is_adapter, "request": request, "out_dir": str(out)}
    # It ends when its standard input does, as when its server goes.
    child = subprocess.Popen([binary, "export-checkpoint", "--log", "error"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child.stdin.write(json.dumps(task) + "\n")
    child.stdin.flush()
    last = None
    for line in child.stdout:
        last = line
    child.stdin.close()
    child.wait()
    if last is None:
        sys.exit(f"the export of {model} printed nothing")
    return last


def log_softmax(logits):
    most = max(logits)
    total = math.log(sum(math.exp(value - most) for value in logits)) + most
    return [value - total for value in logits]


def contexts_of(section, most):
    """Contexts, and the log-probs that transformers gives the next token: of all tokens, or of the one that follows."""
    pairs = []
    for check in section.get("logits_check", []):
        for position, logits in zip(check["positions"], check["logits"]):
            pairs.append((check["ids"][: position + 1], dict(enumerate(log_softmax(logits)))))
    for row in section.get("completions", []) if not pairs else []:
        for index, (token, logprob) in enumerate(zip(row["completion_ids"], row["logprobs"])):
            pairs.append((row["prompt_ids"] + row["completion_ids"][:index], {token: logprob}))
    return [(ids, wanted) for ids, wanted in pairs if len(ids) <= most]


def apart(folder, vocab, pairs, model, adapter=None, ascii_token=0):
    """The largest difference of log-probs. llama.cpp's answer leaves out tokens that are no whole text."""
    got = asked(folder, model=str(model), adapter=adapter and str(adapter), contexts=[ids for ids, _ in pairs], vocab=vocab, ascii=ascii_token)
    worst, compared = 0.0, 0
    for found, (_, wanted) in zip(got["logprobs"], pairs):
        for token, logprob in wanted.items():
            if str(token) in found:
                worst, compared = max(worst, abs(found[str(token)] - logprob)), compared + 1
    total = sum(len(wanted) for _, wanted in pairs)
    assert compared >= 0.4 * total > 0, f"only {compared} of {total} log-probs"
    return worst


def made(report, file):
    """Stops unless an export wrote its file."""
    if not file.exists() or '"exported"' not in report:
        sys.exit(f"{file}: {report}")


def check_case(binary, name, options, work):
    case = CASES / name
    expected = json.loads((case / "expected.json").read_text())
    config = json.loads((case / "config.json").read_text())
    vocab, most = config["vocab_size"], options.get("context_length", 10**9)
    tokens = json.loads((case / "tokenizer.json").read_text())["model"]["vocab"]
    ascii_token = next(id for token, id in sorted(tokens.items()) if token.isascii() and token.isalpha())
    pairs = contexts_of({"logits_check": expected["logits_check"]}, most)
    folder = work / name
    base = folder / "base/model.gguf"
    made(export(binary, case, case, False, base.parent, format="gguf", dtype="float32", **options), base)
    figures = {"base": apart(folder, vocab, pairs, base, None, ascii_token)}
    sections = [section for section in ("lora", "lora_rank_stabilised", "lora_rs") if section in expected]
    for section in sections:
        lora = case / expected[section]["dir"]
        pairs = contexts_of(expected[section], most)
        merged, adapter = folder / f"{section}-merged/model.gguf", folder / f"{section}-adapter/adapter.gguf"
        made(export(binary, case, lora, True, merged.parent, format="gguf", dtype="float32", **options), merged)
        made(export(binary, case, lora, True, adapter.parent, format="gguf_adapter"), adapter)
        figures[f"{section} merged"] = apart(folder, vocab, pairs, merged, None, ascii_token)
        figures[f"{section} as an adapter"] = apart(folder, vocab, pairs, base, adapter, ascii_token)
    for what, worst in figures.items():
        assert worst <= TOLERANCE, f"{name} {what}: log-probs {worst} apart"
    shown = ", ".join(f"{what} {worst:.1e}" for what, worst in figures.items())
    print(f"gguf {name}: {shown}", flush=True)
    if name in ("llama", "qwen3"):
        for dtype, loose in LOOSE.items():
            export(binary, case, case / "lora", True, folder / dtype, format="gguf", dtype=dtype)
            worst = apart(folder, vocab, contexts_of(expected["lora"], most), folder / dtype / "model.gguf", None, ascii_token)
            assert worst <= loose, f"{name} {dtype}: log-probs {worst} apart"
            print(f"gguf {name} {dtype}: {worst:.1e}", flush=True)


def check_refusals(binary, work):
    for name, why in REFUSED.items():
        report = export(binary, CASES / name, CASES / name, False, work / f"refused-{name}", format="gguf", dtype="float32")
        assert '"unsupported"' in report and why in report, f"{name}: {report}"
    print(f"gguf refused by name: {', '.join(REFUSED)}", flush=True)


# ---------------------------------------------------------------- token ids

WORDS = "the quick brown fox jumps over lazy dogs while reading naïve café menus in Zürich und trinkt heißen Tee mañana señor".split()
CJK = "日本語の文章を読むことは難しい 中文字符测试句子很长 한국어 문장도 있습니다 繁體字與注音"
EMOJI = "🙂🙃😀👍🏽👩‍👩‍👧‍👦🏳️‍🌈🇯🇵✨🔥💯"
CODE = ["for (int i = 0; i < n; ++i) {\n    sum += a[i] * b[i];\n}", "def f(x):\n\treturn x**2  # square\n", "SELECT * FROM t WHERE a <> 'it''s';",
        "<div class=\"x\">&nbsp;</div>", "let v: Vec<&'static str> = vec![\"a\", \"b\"];", "$ curl -s http://x.y/z?q=1&r=2 | jq '.[]'"]


def texts(count, seed):
    """Texts that tokenizers split differently: digits, apostrophes, spaces, line ends, scripts, emoji, code."""
    draw = random.Random(seed)
    made = ["", " ", "  ", "\n", "\n\n", " \n \n", "\t", "\r\n", "a\r\nb", "1", "12", "123", "1234", "12345678901", "3.14159", "1,234,567.89",
            "I'm", "don't", "WE'LL", "it's'", "'s", "  leading", "trailing  ", "a  b   c    d", "...!?", "--->", "snake_case_name", "camelCaseName",
            "ALLCAPS", "éèê", "e\u0301", "ﬁ", "Ⅷ", "½", "²³", "٣٤", "x\u00a0y", "x\u200by", "\u3000全角", "\ufeffbom", EMOJI, CJK, *CODE]
    while len(made) < count:
        pieces = []
        for _ in range(draw.randint(1, 8)):
            pieces.append(draw.choice([
                draw.choice(WORDS), str(draw.randint(0, 10 ** draw.randint(1, 12))), draw.choice(CJK.split())[: draw.randint(1, 6)],
                EMOJI[draw.randint(0, 8):][: draw.randint(1, 5)], draw.choice(CODE)[draw.randint(0, 10):], draw.choice(["'s", "'RE", "n't", "…", "—", "“q”"]),
                "".join(draw.choice("ab1 .,\n\t") for _ in range(draw.randint(1, 9)))]))
        made.append(draw.choice(["", " ", "  ", "\n"]).join(pieces))
    return made


def vocabulary_model(folder, pre, ignore_merges, nfc):
    """A tiny model with a tokenizer of 8,192 tokens, made for this."""
    import numpy
    import tokenizers
    from safetensors.numpy import save_file

    folder.mkdir()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=ignore_merges))
    if nfc:
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    if pre == "gpt2":
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif pre == "smollm":
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
            [tokenizers.pre_tokenizers.Digits(individual_digits=True), tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)])
    else:
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(SPLITS[pre]), "isolated")
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    draw = random.Random(5)
    syllables = [a + b for a in "b c d f g k l m n p r s t v z st tr".split() for b in "a e i o u ai ou".split()]
    made = ["".join(draw.choice(syllables) for _ in range(draw.randint(1, 4))) for _ in range(6000)]
    corpus = [" ".join(draw.choice(made) for _ in range(12)) + draw.choice([".", "!", "?\n", " 'll"]) for _ in range(6000)] + texts(1500, 1) + [str(n) for n in range(3000)]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=8192, special_tokens=["<|end|>", "<|user|>"], show_progress=False,
                                             initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(corpus, trainer)
    assert tokenizer.get_vocab_size() >= 8000, tokenizer.get_vocab_size()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    hidden, inner, vocab = 64, 64, tokenizer.get_vocab_size()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 1,
              "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": vocab, "rms_norm_eps": 1e-5, "hidden_act": "silu",
              "max_position_embeddings": 256, "rope_theta": 10000.0, "tie_word_embeddings": True, "eos_token_id": 0, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    layer = "model.layers.0."
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,), layer + "input_layernorm.weight": (hidden,),
              layer + "post_attention_layernorm.weight": (hidden,), layer + "self_attn.q_proj.weight": (64, hidden),
              layer + "self_attn.k_proj.weight": (32, hidden), layer + "self_attn.v_proj.weight": (32, hidden), layer + "self_attn.o_proj.weight": (hidden, 64),
              layer + "mlp.gate_proj.weight": (inner, hidden), layer + "mlp.up_proj.weight": (inner, hidden), layer + "mlp.down_proj.weight": (hidden, inner)}
    draw = numpy.random.default_rng(3)
    save_file({name: draw.normal(0, 0.05, shape).astype(numpy.float32) for name, shape in shapes.items()}, folder / "model.safetensors")
    return tokenizer


def check_tokens(binary, work):
    # As Qwen's: it normalizes to NFC, which llama.cpp does not, so only texts that are NFC already have the same ids.
    for pre, ignore_merges, nfc in (("gpt2", False, False), ("smollm", False, False), ("qwen2", False, False), ("qwen2", False, True), ("llama3", True, False), ("llama3", False, False)):
        asked_texts = [text for text in texts(320, 2) if not nfc or unicodedata.is_normalized("NFC", text)]
        name = f"{pre}{'-ignoring-merges' if ignore_merges else ''}{'-nfc' if nfc else ''}"
        folder = work / f"tokens-{name}"
        tokenizer = vocabulary_model(folder, pre, ignore_merges, nfc)
        report = export(binary, folder, folder, False, work / f"tokens-{name}-gguf", format="gguf", dtype="float32")
        model = work / f"tokens-{name}-gguf/model.gguf"
        made(report, model)
        got = asked(folder, model=str(model), texts=asked_texts)["ids"]
        for text, ids in zip(asked_texts, got):
            want = tokenizer.encode(text, add_special_tokens=False).ids
            assert ids == want, f"{name}: {text!r}: llama.cpp {ids}, tokenizers {want}"
        print(f"gguf tokens {name}: {len(asked_texts)} texts with the same ids, {sum(map(len, got))} ids of {tokenizer.get_vocab_size()}", flush=True)


def main():
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        work = pathlib.Path(work)
        binary = sys.argv[1]
        check_refusals(binary, work)
        check_tokens(binary, work)
        for name, options in WITH.items():
            check_case(binary, name, options, work)
    print(f"figure: models compared with llama.cpp: {len(WITH)}, tokenizers: 6, seconds: {time.monotonic() - begun:.0f}")


if __name__ == "__main__":
    ask() if sys.argv[1:] == ["--ask"] else main()
