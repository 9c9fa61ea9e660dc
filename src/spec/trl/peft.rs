//! PEFT's LoraConfig (as `adapter_config.json` has it, or TRL's flat `lora_*` keys) as `lora`.

use serde_json::{Map, Value, json};

use super::keys::Refused;
use super::reading::{Findings, Keys};
use crate::spec::reader::shown;

/// LoraConfig's keys that say nothing here.
const IGNORED: &[&str] = &[
    "inference_mode",
    "fan_in_fan_out",
    "auto_mapping",
    "peft_version",
    "revision",
    "runtime_config",
    "megatron_config",
    "megatron_core",
    "qalora_group_size",
    "ensure_weight_tying",
];

const PLAIN_ONLY: &str = "plain LoRA on the linear layers only: remove it";

const REFUSED: &[Refused] = &[
    Refused { keys: &["bias"], off: &["\"none\""], reason: "biases stay frozen: remove it, or set it to \"none\"" },
    Refused {
        keys: &["init_lora_weights"],
        off: &["true", "\"true\"", "\"kaiming\""],
        reason: "A starts uniform (Kaiming) and B at zero, as PEFT's default does: remove it",
    },
    Refused { keys: &["task_type"], off: &["\"CAUSAL_LM\""], reason: "the task is CAUSAL_LM: remove it" },
    Refused {
        keys: &["modules_to_save", "trainable_token_indices", "target_parameters", "lora_bias"],
        off: &[],
        reason: "only the adapter's own matrices are trained: remove it",
    },
    Refused {
        keys: &[
            "use_dora",
            "use_qalora",
            "use_bdlora",
            "layers_to_transform",
            "layers_pattern",
            "rank_pattern",
            "alpha_pattern",
            "layer_replication",
            "loftq_config",
            "eva_config",
            "corda_config",
            "lora_ga_config",
            "velora_config",
            "monteclora_config",
            "kasa_config",
            "arrow_config",
            "alora_invocation_tokens",
        ],
        off: &[],
        reason: PLAIN_ONLY,
    },
];

/// PEFT's names of an adapter's settings, and their defaults.
struct Names {
    r: &'static str,
    alpha: &'static str,
    dropout: &'static str,
    targets: &'static str,
    default_r: f64,
    default_alpha: f64,
    default_dropout: f64,
}

/// peft.LoraConfig (0.21).
const LORA_CONFIG: Names = Names {
    r: "r",
    alpha: "lora_alpha",
    dropout: "lora_dropout",
    targets: "target_modules",
    default_r: 8.0,
    default_alpha: 8.0,
    default_dropout: 0.0,
};

/// trl.ModelConfig (1.16).
const MODEL_CONFIG: Names = Names {
    r: "lora_r",
    alpha: "lora_alpha",
    dropout: "lora_dropout",
    targets: "lora_target_modules",
    default_r: 16.0,
    default_alpha: 32.0,
    default_dropout: 0.05,
};

/// A LoraConfig at `pointer` of what was sent; also the base model that it names.
pub(super) fn of_peft_config<'v>(
    map: &'v Map<String, Value>,
    pointer: &str,
    findings: &'v Findings,
) -> (Map<String, Value>, Option<&'v str>) {
    let keys = Keys::new(map, pointer, findings);
    if let Some(kind) = keys.word("peft_type").filter(|kind| kind != "lora") {
        keys.refuse("peft_type", format!("'{}' is not supported: only LORA is", shown(&kind)));
    }
    let lora = adapter(&keys, &LORA_CONFIG);
    let base = keys.value("base_model_name_or_path").and_then(Value::as_str);
    for (key, value) in keys.rest() {
        let refused = REFUSED.iter().find(|entry| entry.keys.contains(&key.as_str()));
        if let Some(entry) = refused {
            if !entry.is_off(value) {
                keys.refuse(key, entry.reason);
            }
        } else if IGNORED.contains(&key.as_str()) {
            if !value.is_null() {
                keys.ignore(key, "it makes no difference here");
            }
        } else if !value.is_null() {
            keys.refuse(key, "not a key of PEFT's LoraConfig that is known here: r, lora_alpha, lora_dropout, target_modules and use_rslora are");
        }
    }
    (lora, base)
}

/// The flat keys of TRL's ModelConfig.
pub(super) fn of_flat_keys(keys: &Keys<'_>) -> Map<String, Value> {
    adapter(keys, &MODEL_CONFIG)
}

/// Whether one of the flat keys stands there.
pub(super) fn has_flat_keys(keys: &Keys<'_>) -> bool {
    [MODEL_CONFIG.r, MODEL_CONFIG.alpha, MODEL_CONFIG.dropout, MODEL_CONFIG.targets].iter().any(|key| keys.has(key))
}

fn adapter(keys: &Keys<'_>, names: &Names) -> Map<String, Value> {
    let mut lora = Map::new();
    let mut put = |ours: &str, theirs: &str, value: Value| {
        lora.insert(ours.to_owned(), value);
        keys.origin(&format!("/lora/{ours}"), theirs);
    };
    put("r", names.r, super::schedule::number(keys.number(names.r).unwrap_or(names.default_r)));
    put("alpha", names.alpha, super::schedule::number(keys.number(names.alpha).unwrap_or(names.default_alpha)));
    put("dropout", names.dropout, json!(keys.number(names.dropout).unwrap_or(names.default_dropout)));
    put("target_modules", names.targets, targets(keys, names.targets));
    put("use_rslora", "use_rslora", json!(keys.flag("use_rslora").unwrap_or(false)));
    lora
}

/// PEFT's default for llama, qwen, mistral and gemma models is q_proj and v_proj.
fn targets(keys: &Keys<'_>, key: &'static str) -> Value {
    let excluded: Vec<&str> = match keys.value("exclude_modules") {
        Some(Value::String(name)) => vec![name],
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let all =
        || ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"].map(Value::from).to_vec();
    let mut named = match keys.value(key) {
        None => vec!["q_proj".into(), "v_proj".into()],
        Some(Value::String(text)) if text == "all-linear" && excluded.is_empty() => return text.as_str().into(),
        Some(Value::String(text)) if text == "all-linear" => all(),
        // A single name; anything else is a regular expression, which the reader of the spec refuses.
        Some(Value::String(text)) => vec![text.as_str().into()],
        Some(Value::Array(names)) if names.len() == 1 && names[0] == "all-linear" && excluded.is_empty() => {
            return "all-linear".into();
        }
        Some(other) => match other.as_array() {
            Some(names) => names.clone(),
            None => return other.clone(),
        },
    };
    for name in &excluded {
        if !all().iter().any(|known| known == name) {
            keys.refuse(
                "exclude_modules",
                format!(
                    "'{}' is not one of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj",
                    shown(name)
                ),
            );
        }
    }
    named.retain(|name| name.as_str().is_none_or(|name| !excluded.contains(&name)));
    Value::Array(named)
}
