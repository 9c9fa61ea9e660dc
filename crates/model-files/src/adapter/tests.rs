//! Reads adapters as trainers write them, and adapters that are damaged or of another kind.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::{CONFIG, WEIGHTS, read, read_for};
use crate::ModelDescription;

const PATHS: [(&str, usize, usize); 2] = [("self_attn.q_proj", 64, 64), ("mlp.up_proj", 128, 64)];
const PREFIXES: [&str; 3] = ["model", "model.language_model", "language_model.model"];

fn model() -> ModelDescription {
    let config = json!({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3,
        "intermediate_size": 128, "vocab_size": 320, "max_position_embeddings": 256});
    ModelDescription::from_json("config.json", &config).unwrap()
}

/// The tensors of an adapter of rank 4 on two linear layers of each decoder layer, by name and shape.
fn tensors(prefix: &str) -> Map<String, Value> {
    let mut all = Map::new();
    for layer in 0..3 {
        for (path, out, input) in PATHS {
            let name = format!("base_model.model.{prefix}.layers.{layer}.{path}");
            all.insert(format!("{name}.lora_A.weight"), json!([4, input]));
            all.insert(format!("{name}.lora_B.weight"), json!([out, 4]));
        }
    }
    all
}

/// Writes an adapter whose tensors are all zero.
fn adapter(tensors: &Map<String, Value>, more: &Value) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut config = json!({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"]});
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    std::fs::write(dir.path().join(CONFIG), config.to_string()).unwrap();
    let (mut header, mut end) = (Map::new(), 0);
    for (name, shape) in tensors {
        let begin = end;
        end += 4 * shape.as_array().unwrap().iter().map(|size| size.as_u64().unwrap()).product::<u64>();
        header.insert(name.clone(), json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}));
    }
    let header = Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + end as usize, 0);
    std::fs::write(dir.path().join(WEIGHTS), bytes).unwrap();
    dir
}

fn errors(dir: &Path) -> [String; 2] {
    [read(dir).unwrap_err().to_string(), read_for(dir, &model()).unwrap_err().to_string()]
}

#[test]
fn the_adapter_of_a_multimodal_model_is_read_by_names_and_by_regular_expressions() {
    let plain = read_for(adapter(&tensors("model"), &json!({})).path(), &model()).unwrap();
    assert_eq!(plain.target_modules, ["q_proj", "up_proj"]);
    for prefix in PREFIXES {
        let whole: Vec<String> =
            (0..3).flat_map(|layer| PATHS.map(|(path, ..)| format!("{prefix}.layers.{layer}.{path}"))).collect();
        for targets in [
            json!(["q_proj", "up_proj"]),
            json!(whole),
            json!(format!(".*{prefix}.*\\.(q_proj|up_proj)")),
            json!("(?!.*vision).*\\.(q_proj|up_proj)"),
        ] {
            let dir =
                adapter(&tensors(prefix), &json!({"target_modules": targets, "exclude_modules": "(?=.*tower).*"}));
            assert_eq!(read(dir.path()).unwrap().num_layers, 3, "{prefix}: {targets}");
            assert_eq!(read_for(dir.path(), &model()).unwrap(), plain, "{prefix}: {targets}");
        }
    }
    // A pattern of Python that decides a rank is not needed; one that decides an alpha is.
    let python = "(?<!x)q_proj";
    let mut others = tensors("model.language_model");
    for layer in 0..3 {
        let name = format!("base_model.model.model.language_model.layers.{layer}.self_attn.q_proj");
        others.insert(format!("{name}.lora_A.weight"), json!([2, 64]));
        others.insert(format!("{name}.lora_B.weight"), json!([64, 2]));
    }
    let alphas = json!({".*language_model.*q_proj": 3});
    let dir = adapter(&others, &json!({"rank_pattern": {python: 2}, "alpha_pattern": alphas}));
    let plan = read_for(dir.path(), &model()).unwrap();
    assert_eq!((plan.rank_pattern["q_proj"], plan.alpha_pattern["q_proj"]), (2, 3.0));
    for error in errors(adapter(&others, &json!({"alpha_pattern": {python: 3}})).path()) {
        assert!(error.starts_with("adapter_config.json: alpha_pattern has"), "{error}");
    }
}

#[test]
fn an_adapter_of_another_kind_is_refused_by_its_key_and_not_by_its_tensors() {
    let extra = "base_model.model.model.layers.0.self_attn.q_proj";
    for (key, value, tensor) in [
        ("use_dora", json!(true), format!("{extra}.lora_magnitude_vector")),
        ("lora_bias", json!(true), format!("{extra}.lora_B.bias")),
        ("bias", json!("all"), format!("{extra}.bias")),
        ("modules_to_save", json!(["lm_head"]), "base_model.model.lm_head.weight".to_owned()),
    ] {
        let mut tensors = tensors("model");
        tensors.insert(tensor.clone(), json!([64]));
        for error in errors(adapter(&tensors, &json!({key: value})).path()) {
            assert!(error.starts_with(&format!("adapter_config.json: {key} is ")), "{error}");
        }
        for error in errors(adapter(&tensors, &json!({})).path()) {
            assert!(error.contains(&tensor), "{error}");
        }
    }
}

#[test]
fn tensors_that_do_not_belong_together_are_refused_by_name() {
    let a = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight";
    let other = "base_model.model.language_model.model.layers.1.mlp.up_proj.lora_A.weight";
    type Change = fn(&mut Map<String, Value>, &str, &str);
    let cases: [(Change, &str); 3] = [
        (|tensors, a, _| drop(tensors.remove(a)), "[None, Some(4)]"),
        (|tensors, a, _| drop(tensors.insert(a.to_owned(), json!([8, 64]))), "[Some(8), Some(4)]"),
        (|tensors, _, other| drop(tensors.insert(other.to_owned(), json!([4, 64]))), "under two names"),
    ];
    for (change, words) in cases {
        let mut tensors = tensors("model");
        change(&mut tensors, a, other);
        for error in errors(adapter(&tensors, &json!({})).path()) {
            assert!(error.starts_with("adapter_model.safetensors: ") && error.contains(words), "{error}");
        }
    }
    // Whether tensors are missing depends on the model.
    let mut some = tensors("model");
    some.retain(|name, _| !name.contains(".2."));
    let dir = adapter(&some, &json!({}));
    assert_eq!(read(dir.path()).unwrap().num_layers, 2);
    let error = read_for(dir.path(), &model()).unwrap_err().to_string();
    assert!(error.contains("layers.2.self_attn.q_proj has no tensors"), "{error}");
    let error = errors(adapter(&Map::new(), &json!({})).path());
    assert!(error.iter().all(|error| error.contains("no tensors of an adapter")), "{error:?}");
}
