//! Translates PEFT's LoraConfig (from `adapter_config.json`, or TRL's flat `lora_*` keys) to `lora`.

use serde_json::{Map, Value};

use super::keys::Refused;
use super::reading::{Findings, Keys};
use crate::spec::reader::shown;
use crate::spec::settings::{ALL_LINEAR, Form, LORA, Trl, Values};

/// LoraConfig keys that have no effect here.
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

const PLAIN_ONLY: &str = "only plain LoRA on the linear layers is supported: remove this key";

const REFUSED: &[Refused] = &[
    Refused {
        keys: &["bias"],
        off: &["\"none\""],
        reason: "biases stay frozen: remove this key, or set it to \"none\"",
    },
    Refused {
        keys: &["init_lora_weights"],
        off: &["true", "\"true\"", "\"kaiming\""],
        reason: "A starts uniform (Kaiming) and B at zero, as PEFT's default does: remove this key",
    },
    Refused { keys: &["task_type"], off: &["\"CAUSAL_LM\""], reason: "the task is always CAUSAL_LM: remove this key" },
    Refused {
        keys: &["modules_to_save", "trainable_token_indices", "target_parameters", "lora_bias"],
        off: &[],
        reason: "only the adapter's own matrices are trained: remove this key",
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

/// Translates a LoraConfig at `pointer` of the submitted configuration; also returns the base model that it names.
pub(super) fn of_peft_config<'v>(
    map: &'v Map<String, Value>,
    pointer: &str,
    findings: &'v Findings,
) -> (Map<String, Value>, Option<&'v str>) {
    let keys = Keys::new(map, pointer, findings);
    if let Some(kind) = keys.lowercase("peft_type").filter(|kind| kind != "lora") {
        keys.refuse("peft_type", format!("the adapter type '{}' is not supported: only LORA is", shown(&kind)));
    }
    let lora = adapter(&keys, Source::LoraConfig);
    let base = keys.value("base_model_name_or_path").and_then(Value::as_str);
    for (key, value) in keys.rest() {
        let refused = REFUSED.iter().find(|entry| entry.keys.contains(&key.as_str()));
        if let Some(entry) = refused {
            if !entry.is_off(value) {
                keys.refuse(key, entry.reason);
            }
        } else if IGNORED.contains(&key.as_str()) {
            if !value.is_null() {
                keys.ignore(key, "this key makes no difference here");
            }
        } else if !value.is_null() {
            keys.refuse(key, "this is not a key of PEFT's LoraConfig that is known here: r, lora_alpha, lora_dropout, target_modules and use_rslora are");
        }
    }
    (lora, base)
}

/// Translates the flat keys of TRL's ModelConfig.
pub(super) fn of_flat_keys(keys: &Keys<'_>) -> Map<String, Value> {
    adapter(keys, Source::ModelConfig)
}

/// Whether one of the flat keys that only an adapter has is present.
pub(super) fn has_flat_keys(keys: &Keys<'_>) -> bool {
    flat_keys().any(|key| key.starts_with("lora_") && keys.has(key))
}

/// Returns the flat keys of TRL's ModelConfig that describe an adapter.
pub(super) fn flat_keys() -> impl Iterator<Item = &'static str> {
    LORA.settings.iter().filter_map(|setting| match setting.trl {
        Trl::Adapter(_, (flat, _), _) => Some(flat),
        Trl::Absent | Trl::Always(_) | Trl::Key(..) | Trl::Own(_) => None,
    })
}

/// The class whose names and defaults describe an adapter.
#[derive(Clone, Copy)]
enum Source {
    /// PEFT's class for adapters, `peft.LoraConfig`.
    LoraConfig,
    /// TRL's class for models, `trl.ModelConfig`.
    ModelConfig,
}

fn adapter(keys: &Keys<'_>, source: Source) -> Map<String, Value> {
    let mut lora = Map::new();
    for setting in LORA.settings {
        let Trl::Adapter(form, flat, peft) = setting.trl else { continue };
        let (key, default) = match source {
            Source::LoraConfig => peft,
            Source::ModelConfig => flat,
        };
        let default = || default.value(&Values::default());
        let value = match form {
            Form::Modules => targets(keys, key, default()),
            Form::Number | Form::Plain | Form::Count | Form::Flag | Form::AsSent => {
                keys.read(key, form).unwrap_or_else(default)
            }
        };
        lora.insert(setting.name.to_owned(), value);
        keys.origin(&format!("/lora/{}", setting.name), key);
    }
    lora
}

/// Returns the projections that get an adapter, without the excluded ones.
fn targets(keys: &Keys<'_>, key: &'static str, default: Value) -> Value {
    let excluded: Vec<&str> = match keys.value("exclude_modules") {
        Some(Value::String(name)) => vec![name],
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let all = || ALL_LINEAR.map(Value::from).to_vec();
    let mut named = match keys.value(key) {
        None => default.as_array().cloned().unwrap_or_default(),
        Some(Value::String(text)) if text == "all-linear" && excluded.is_empty() => return text.as_str().into(),
        Some(Value::String(text)) if text == "all-linear" => all(),
        // A single name. Anything else is a regular expression, which the reader of the spec rejects.
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
            keys.refuse("exclude_modules", format!("'{}' is not one of {}", shown(name), ALL_LINEAR.join(", ")));
        }
    }
    named.retain(|name| name.as_str().is_none_or(|name| !excluded.contains(&name)));
    Value::Array(named)
}
