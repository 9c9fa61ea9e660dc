//! Translates the keys of TRL that only TRL itself can do. They select the runtime `trl`.

use serde_json::{Map, Value, json};

use super::reading::Keys;

/// Reads a base model in 8 bits, and DeepSpeed.
pub(super) fn read_runtime(keys: &Keys<'_>, runtime: &mut Map<String, Value>) {
    if keys.flag("load_in_8bit") == Some(true) {
        load_in_8bit(keys, "load_in_8bit", runtime);
    }
    match keys.value("deepspeed") {
        None => {}
        Some(config @ Value::Object(_)) => read_deepspeed(keys, config, runtime),
        Some(_) => keys.refuse(
            "deepspeed",
            "the server cannot read this file: send its content in place of its path, or use runtime {\"name\": \"trl\", \"zero_stage\": 3} with resources {\"devices\": N}",
        ),
    }
    if !runtime.is_empty() {
        runtime.insert("name".to_owned(), json!("trl"));
    }
}

/// Selects a base model in 8 bits, which `key` asks for.
pub(super) fn load_in_8bit(keys: &Keys<'_>, key: &str, runtime: &mut Map<String, Value>) {
    runtime.insert("load_in_8bit".to_owned(), json!(true));
    keys.origin("/runtime", key);
}

fn read_deepspeed(keys: &Keys<'_>, config: &Value, runtime: &mut Map<String, Value>) {
    let zero = &config["zero_optimization"];
    let stage = zero["stage"].as_u64().unwrap_or(0);
    if !matches!(stage, 2 | 3) {
        return keys.refuse(
            "deepspeed",
            "only the stages 2 and 3 of ZeRO are supported: set zero_optimization.stage, or remove this key",
        );
    }
    let device = |part: &str| zero[part]["device"].as_str().unwrap_or("none");
    let devices = [device("offload_optimizer"), device("offload_param")];
    if devices.iter().any(|device| !matches!(*device, "none" | "cpu")) {
        return keys.refuse(
            "deepspeed",
            "weights and moments can be kept in the memory of the CPU only, not on a disk: use the device cpu",
        );
    }
    runtime.insert("zero_stage".to_owned(), json!(stage));
    runtime.insert("offload".to_owned(), json!(devices.contains(&"cpu")));
    keys.origin("/runtime", "deepspeed");
    keys.warn(
        "deepspeed",
        "deepspeed_devices",
        "of DeepSpeed's settings the stage and the offload are used; the number of processes is resources.devices",
    );
}
