// What reads bytes of strangers, one function each: whatever comes, it returns. Shared by cargo-fuzz (`fuzz/fuzz_targets`) and by
// the tests' own mutator (`tests/it/fuzz.rs`).

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;

use axum::http::{HeaderMap, HeaderValue, Method, header};
use rlood::chat::{ParseContext, ToolParser, Tools};
use rlood::data::{Options, Source, convert, preview};
use rlood::dataset::{Format, Reader, Recipe, RecipeMap};
use rlood::event::FinishReason;
use rlood::http::download::{Download, send_file};
use rlood::modelcard::template::ChatTemplate;
use rlood::modelcard::text::Text;
use rlood::protocol;
use rlood::reward::webhook::read_answer;
use rlood::rollout::RewardSample;
use rlood::spec::{JobSpec, PeftConfig, RewardPlan, StoredModule, format, trl};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

/// A target.
pub type Target = fn(&[u8]);

/// By the name of its corpus.
pub const TARGETS: [(&str, Target); 13] = [
    ("jsonl", jsonl),
    ("data_file", data_file),
    ("data_map", data_map),
    ("job_spec", job_spec),
    ("safetensors_header", safetensors_header),
    ("safetensors_index", safetensors_index),
    ("adapter_config", adapter_config),
    ("tokenizer", tokenizer),
    ("chat_template", chat_template),
    ("tool_calls", tool_calls),
    ("range_header", range_header),
    ("reward_response", reward_response),
    ("worker_protocol", worker_protocol),
];

/// A dataset in each form, in pieces of a size that the first byte chooses.
pub fn jsonl(bytes: &[u8]) {
    let size = usize::from(bytes.first().copied().unwrap_or(1)).max(1);
    for format in [Format::Ndjson, Format::Csv, Format::Json] {
        let (mut reader, mut rows) = (Reader::new(format), Vec::new());
        bytes.chunks(size).for_each(|piece| reader.push(piece, &mut rows));
        if let Ok(summary) = reader.finish(&mut rows) {
            // What is accepted is canonical: as many lines of JSON as it says.
            let lines = rows.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
            let read = lines.map(|line| serde_json::from_slice::<Map<String, Value>>(line).expect("a canonical row"));
            assert_eq!(read.count() as u64, summary.num_rows);
        }
    }
}

/// Rows that a file becomes by a recipe: what is accepted is as many canonical rows as it says.
fn converted(bytes: &[u8], recipe: &Recipe) {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), bytes).expect("a file");
    let sources = [Source::file("rows", file.path())];
    let cancelled = AtomicBool::new(false);
    let options = Options { format: None, chat_default: true, answers: false, max_bytes: 1 << 20, cancelled: &cancelled, images: None };
    let _ = preview(&sources, recipe, &options, 5);
    let mut rows = Vec::new();
    if let Ok(converted) = convert(&sources, recipe, &options, &mut rows) {
        let lines = rows.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        assert_eq!(lines.count() as u64, converted.summary.num_rows);
    }
}

/// A file of rows: parquet, texts, and both inside gzip or zstd, as its content says.
pub fn data_file(bytes: &[u8]) {
    converted(bytes, &Recipe::default());
    let map = RecipeMap { prompt: Some("question".to_owned()), ..RecipeMap::default() };
    converted(bytes, &Recipe { map: Some(map), ..Recipe::default() });
}

/// A mapping, `recipe`, of `rows`.
pub fn data_map(bytes: &[u8]) {
    let Ok(document) = serde_json::from_slice::<Value>(bytes) else { return };
    let Ok(recipe) = serde_json::from_value::<Recipe>(document["recipe"].clone()) else { return };
    let rows = document["rows"].as_array().map(|rows| rows.iter().map(|row| format!("{row}\n")).collect::<String>());
    converted(rows.unwrap_or_default().as_bytes(), &recipe);
}

/// A job's document, in each of its forms, and as a run of TRL's.
pub fn job_spec(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    for form in [format::Format::Json, format::Format::Yaml, format::Format::Toml] {
        let Ok(document) = form.read(&text) else { continue };
        let (_, errors) = JobSpec::read(document.clone());
        assert!(errors.iter().all(|error| error.pointer.is_empty() || error.pointer.starts_with('/')), "{errors:?}");
        trl::convert(&document, Some(100));
        let _ = form.write(&document);
    }
}

/// The smallest model's files, copied where a target may replace one.
fn model() -> PathBuf {
    static FROM: OnceLock<PathBuf> = OnceLock::new();
    thread_local! {
        static DIR: RefCell<Option<tempfile::TempDir>> = const { RefCell::new(None) };
    }
    let from = FROM.get_or_init(|| Path::new(env!("CARGO_MANIFEST_DIR")).join(FIXTURES).join("parity/qwen3"));
    DIR.with_borrow_mut(|dir| {
        let memory = Path::new("/dev/shm");
        let make = || tempfile::tempdir_in(memory).or_else(|_| tempfile::tempdir()).expect("a directory");
        let dir = dir.get_or_insert_with(make);
        for name in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
            std::fs::copy(from.join(name), dir.path().join(name)).expect("a fixture");
        }
        let _ = std::fs::remove_file(dir.path().join("model.safetensors.index.json"));
        dir.path().to_owned()
    })
}

fn replaced(name: &str, bytes: &[u8]) -> PathBuf {
    let dir = model();
    std::fs::write(dir.join(name), bytes).expect("room");
    dir
}

/// Weights whose header, or all, is a stranger's.
pub fn safetensors_header(bytes: &[u8]) {
    let _ = rlood::modelcard::read(&replaced("model.safetensors", bytes));
}

/// A sharded model's index.
pub fn safetensors_index(bytes: &[u8]) {
    let _ = rlood::modelcard::read(&replaced("model.safetensors.index.json", bytes));
    let dir = replaced("model.safetensors.index.json", bytes);
    let _ = std::fs::remove_file(dir.join("model.safetensors"));
    let _ = rlood::modelcard::read(&dir);
}

/// PEFT's configuration of an adapter; the model's own beside it.
pub fn adapter_config(bytes: &[u8]) {
    if let Ok(value) = serde_json::from_slice::<Value>(bytes)
        && let Ok(config) = PeftConfig::read(&value)
    {
        let path = "mlp.down_proj";
        let stored = |layer| {
            let name = format!("model.language_model.layers.{layer}.{path}");
            StoredModule { layer, path: path.to_owned(), name, r: 4 }
        };
        let selected: Vec<StoredModule> =
            (0..3).map(stored).filter(|module| config.selects(&module.name) != Some(false)).collect();
        if let Ok(plan) = config.plan(&selected, &["self_attn.q_proj", path], 3, |_, _| true) {
            let ranks = (0..3).filter_map(|layer| plan.of(layer, path));
            assert!(ranks.into_iter().all(|rank| plan.scaling(rank).is_finite()));
        }
    }
    let _ = rlood::modelcard::read(&replaced("config.json", bytes));
}

/// A tokenizer, and what stands beside it; whatever loads must also encode.
pub fn tokenizer(bytes: &[u8]) {
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        if let Ok(text) = Text::load(&replaced(name, bytes))
            && let Ok(ids) = text.encode("Hello, wörld! 12345", true)
        {
            let _ = text.decode(&ids, false);
        }
    }
}

/// A chat template of the model's author.
pub fn chat_template(bytes: &[u8]) {
    let source = String::from_utf8_lossy(bytes).into_owned();
    let Ok(template) = ChatTemplate::new(source, vec![("bos_token".into(), "<s>".into())]) else { return };
    let messages = [json!({"role": "system", "content": "s"}), json!({"role": "user", "content": "u"})];
    let _ = template.render(&messages, true, &Map::new());
}

/// The turn of a model, read by every parser of tool calls.
pub fn tool_calls(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let parameters = json!({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": ["string", "null"]}}});
    let tools = Tools::new(&[json!({"type": "function", "function": {"name": "add", "parameters": parameters}})]);
    let tools = tools.expect("a valid tool");
    for (_, parser) in ToolParser::NAMES {
        for opens_reasoning in [false, true] {
            let _ = parser.parse(&text, &ParseContext { tools: &tools, turn: 0, opens_reasoning });
        }
    }
}

/// The headers that ask for a part of a file, one a line: Range, If-Range, If-None-Match.
pub fn range_header(bytes: &[u8]) {
    let file = Download {
        path: model().join("config.json"),
        name: "config.json".into(),
        size_bytes: std::fs::metadata(model().join("config.json")).expect("a fixture").len(),
        sha256: rlood::digest::Sha256Digest::of(""),
    };
    let mut headers = HeaderMap::new();
    let names = [header::RANGE, header::IF_RANGE, header::IF_NONE_MATCH, header::IF_MATCH];
    for (name, line) in names.into_iter().zip(bytes.split(|byte| *byte == b'\n')) {
        if let Ok(value) = HeaderValue::from_bytes(line) {
            headers.insert(name, value);
        }
    }
    thread_local! {
        static RUNTIME: tokio::runtime::Runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    }
    RUNTIME.with(|runtime| {
        runtime.block_on(async {
            for method in [Method::GET, Method::HEAD] {
                let Ok(response) = send_file(&method, &headers, &file).await else { continue };
                let length = response.headers().get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
                let body = axum::body::to_bytes(response.into_body(), 1 << 24).await.expect("a body");
                if method == Method::GET {
                    assert!(length.is_none_or(|length| length == body.len() as u64), "{length:?} {}", body.len());
                }
            }
        });
    });
}

fn samples() -> Vec<RewardSample> {
    let sample = |index: usize| RewardSample {
        sample_id: format!("s_{index}"),
        group_id: "g_0".into(),
        prompt_id: "row_0".into(),
        source: None,
        prompt: "What?".into(),
        messages: None,
        completion: "c".into(),
        finish_reason: FinishReason::Stop,
        num_tokens: 3,
        completion_ids: None,
        columns: Map::new(),
        episode: None,
    };
    (0..3).map(sample).collect()
}

/// What a reward service answers, in every dialect.
pub fn reward_response(bytes: &[u8]) {
    static PLANS: OnceLock<Vec<RewardPlan>> = OnceLock::new();
    let plans = PLANS.get_or_init(|| {
        let types = [
            json!({"type": "webhook", "url": "https://rm.example/"}),
            json!({"type": "openrlhf", "url": "https://rm.example/"}),
            json!({"type": "slime", "url": "https://rm.example/"}),
            json!({"type": "llamafactory", "url": "https://rm.example/", "model": "m"}),
            json!({"type": "tei_predict", "url": "https://rm.example/"}),
            json!({"type": "tei_rerank", "url": "https://rm.example/"}),
            json!({"type": "vllm_classify", "url": "https://rm.example/", "model": "m"}),
            json!({"type": "vllm_score", "url": "https://rm.example/", "model": "m"}),
            json!({"type": "vllm_pooling", "url": "https://rm.example/", "model": "m"}),
            json!({"type": "sglang_classify", "url": "https://rm.example/", "model": "m"}),
            json!({"type": "hf_text_classification", "url": "https://rm.example/"}),
            json!({"type": "openai_judge", "url": "https://rm.example/", "model": "m", "rubric": "Good?"}),
        ];
        let plan = |reward: &Value| rlood::spec::read_single_reward(&json!({"reward": reward})).ok().map(|(plan, _)| plan);
        types.iter().filter_map(plan).collect()
    });
    assert!(plans.len() >= 6, "{} dialects", plans.len());
    let samples = samples();
    for plan in plans {
        if let Ok(found) = read_answer(&plan.kind, bytes, "rwr_1", &samples) {
            // Some dialects ask for one sample at a time.
            assert!(found <= samples.len(), "{found} for {} samples", samples.len());
        }
    }
}

/// The messages between server and worker.
pub fn worker_protocol(bytes: &[u8]) {
    fn read<T: DeserializeOwned>(bytes: &[u8]) {
        let _ = serde_json::from_slice::<T>(bytes);
    }
    read::<protocol::Register>(bytes);
    read::<protocol::ClaimRequest>(bytes);
    read::<protocol::Claim>(bytes);
    read::<protocol::Heartbeat>(bytes);
    read::<protocol::HeartbeatReply>(bytes);
    read::<protocol::EventBatch>(bytes);
    read::<protocol::Publish>(bytes);
    read::<protocol::JournalBatch>(bytes);
    read::<protocol::JournalPage>(bytes);
    read::<protocol::Finish>(bytes);
    if let Ok(claim) = serde_json::from_slice::<Value>(bytes) {
        let _ = protocol::read_claim(&claim);
    }
}
