//! Translates TRL's keys of vLLM to rollout servers of rlood's own engine.

use serde_json::{Map, Value, json};

use super::keys::is_off_value;
use super::reading::Keys;

/// TRL's default of `vllm_server_port`.
const PORT: u64 = 8000;
/// TRL's default of `vllm_gpu_memory_utilization`.
const MEMORY_SHARE: f64 = 0.3;

/// The treatment of a key besides the address and the share of memory.
enum Fate {
    /// It makes no difference.
    Ignored(&'static str),
    /// It asks for something else than this value, which is TRL's default.
    RefusedUnless(&'static str, &'static str),
}

const OTHERS: &[(&str, Fate)] = &[
    ("vllm_server_timeout", Fate::Ignored("the worker waits as long as rollout.timeout_s says, then the job pauses")),
    (
        "vllm_group_port",
        Fate::Ignored("the servers load each step's adapter over HTTP, and no process group is formed"),
    ),
    (
        "vllm_max_model_length",
        Fate::Ignored("a server that is too short for the job's prompts and completions is refused"),
    ),
    ("vllm_enable_sleep_mode", Fate::Ignored("the server keeps its memory between two steps")),
    (
        "vllm_tensor_parallel_size",
        Fate::RefusedUnless("1", "start a server with --tensor-parallel-size yourself, and give it in rollout.servers"),
    ),
    (
        "vllm_model_impl",
        Fate::RefusedUnless("\"vllm\"", "start a server with --model-impl yourself, and give it in rollout.servers"),
    ),
    (
        "vllm_structured_outputs_regex",
        Fate::RefusedUnless("null", "completions are sampled freely, and no grammar constrains them: remove this key"),
    ),
];

/// Reads `use_vllm` and the keys that belong to it. Returns the job's `rollout` section; `None` = the worker samples itself.
pub(super) fn read_vllm(keys: &Keys<'_>) -> Option<Value> {
    if keys.flag("use_vllm") != Some(true) {
        return None;
    }
    keys.origin("/rollout", "use_vllm");
    let mut rollout = Map::from_iter([("engine".to_owned(), json!("vllm"))]);
    let mode = keys.value("vllm_mode").and_then(Value::as_str).unwrap_or("colocate");
    let share = keys.number("vllm_gpu_memory_utilization").unwrap_or(MEMORY_SHARE);
    let server = read_server(keys);
    match mode {
        "server" => {
            keys.warn(
                "use_vllm",
                "rollout_server",
                "the servers must be started for rlood, not with trl vllm-serve: the guide \"vLLM samples, rlood trains\" has the command; give all their addresses in rollout.servers",
            );
            rollout.insert("servers".to_owned(), json!([{ "url": server }]));
            keys.origin("/rollout/servers", "vllm_server_base_url");
        }
        "colocate" => {
            rollout.insert("colocate".to_owned(), json!(true));
            rollout.insert("memory_share".to_owned(), json!(share));
            keys.origin("/rollout/memory_share", "vllm_gpu_memory_utilization");
        }
        _ => keys.fail("vllm_mode", "invalid_value", "must be \"server\" or \"colocate\""),
    }
    for (key, fate) in OTHERS {
        let Some(value) = keys.value(key) else { continue };
        match fate {
            Fate::Ignored(reason) if !is_off_value(value) => keys.ignore(key, *reason),
            Fate::RefusedUnless(default, reason) if !is_json(value, default) => keys.refuse(key, *reason),
            Fate::Ignored(_) | Fate::RefusedUnless(..) => {}
        }
    }
    Some(Value::Object(rollout))
}

/// Whether a value is what this JSON text says.
fn is_json(value: &Value, text: &str) -> bool {
    serde_json::from_str::<Value>(text).is_ok_and(|other| other == *value)
}

/// Returns the server's address. TRL's default host means the same machine.
fn read_server(keys: &Keys<'_>) -> String {
    let host = keys.value("vllm_server_host").and_then(Value::as_str).filter(|host| *host != "0.0.0.0");
    let port = keys.count("vllm_server_port", 1).unwrap_or(PORT);
    match keys.value("vllm_server_base_url").and_then(Value::as_str) {
        Some(url) => url.to_owned(),
        None => format!("http://{}:{port}", host.unwrap_or("127.0.0.1")),
    }
}
