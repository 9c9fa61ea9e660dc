//! Checks that adapter_config.json is read as PEFT reads it.

use super::*;
use serde_json::json;

const PATHS: [&str; 4] = ["self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.down_proj"];
const NUM_LAYERS: usize = 12;

fn config(more: &Value) -> Value {
    let mut config = json!({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"]});
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config
}

/// The plan of an adapter that has the layers and ranks that its config asks for, in a model with this prefix.
fn read_in(prefix: &str, more: &Value) -> Result<LoraPlan, String> {
    let config = config(more);
    let config = PeftConfig::read(&config)?;
    let mut stored = Vec::new();
    for layer in 0..NUM_LAYERS {
        for path in PATHS {
            let name = format!("{prefix}.layers.{layer}.{path}");
            if config.selects(&name) != Some(false) {
                let r = config.ranks.of(&name).unwrap_or(config.r);
                stored.push(StoredModule { layer, path: path.to_owned(), name, r });
            }
        }
    }
    config.plan(&stored, &PATHS, NUM_LAYERS, |_, _| true)
}

fn read(more: Value) -> Result<LoraPlan, String> {
    read_in("model", &more)
}

fn stored(name: &str, r: u32) -> [StoredModule; 1] {
    [StoredModule { layer: 0, path: PATHS[0].to_owned(), name: format!("{name}.layers.0.{}", PATHS[0]), r }]
}

#[test]
fn a_plan_has_the_ranks_that_peft_gives_each_layer() {
    let plain = read(json!({})).unwrap();
    assert_eq!(plain.target_modules, ["q_proj", "up_proj"]);
    assert_eq!(plain.of(11, "mlp.up_proj"), Some(ModuleRank { r: 4, alpha: 8.0 }));
    assert_eq!(plain.of(3, "mlp.down_proj"), None);

    let patterns =
        json!({"rank_pattern": {"layers\\.1\\.mlp\\.up_proj": 2, "q_proj": 8}, "alpha_pattern": {"q_proj": 4}});
    let plan = read(patterns).unwrap();
    assert_eq!(plan.of(1, "mlp.up_proj"), Some(ModuleRank { r: 2, alpha: 8.0 }));
    // A name that ends in 11 also ends in 1, but it names a different layer.
    assert_eq!(plan.of(11, "mlp.up_proj"), Some(ModuleRank { r: 4, alpha: 8.0 }));
    assert_eq!(plan.of(5, "self_attn.q_proj"), Some(ModuleRank { r: 8, alpha: 4.0 }));
    assert_eq!((plan.rank_pattern["q_proj"], plan.alpha_pattern["q_proj"]), (8, 4.0));

    let some = read(json!({"layers_to_transform": [0, 11], "exclude_modules": ["layers.11.mlp.up_proj"]})).unwrap();
    assert_eq!(
        some.target_modules,
        ["layers.0.self_attn.q_proj", "layers.11.self_attn.q_proj", "layers.0.mlp.up_proj"]
    );
    let by_regex = read(json!({"target_modules": ".*self_attn\\.(q|k)_proj", "exclude_modules": ".*k_proj"})).unwrap();
    assert_eq!(by_regex.target_modules, ["q_proj"]);
    assert_eq!(read(json!({"target_modules": "all-linear"})).unwrap().target_modules.len(), 4);

    // Writing a plan as adapter_config.json and reading it again gives the same plan.
    for plan in [plain, plan, some] {
        let again = json!({"target_modules": plan.target_modules, "rank_pattern": plan.rank_pattern, "alpha_pattern": plan.alpha_pattern});
        assert_eq!(read(again).unwrap(), plan);
        let stored = serde_json::to_value(&plan).unwrap();
        assert_eq!(serde_json::from_value::<LoraPlan>(stored).unwrap(), plan);
    }
}

#[test]
fn the_layers_of_a_multimodal_model_are_matched_by_their_whole_names() {
    for prefix in ["model.language_model", "language_model.model"] {
        let whole = format!("{prefix}.layers.3.self_attn.q_proj");
        let named = read_in(prefix, &json!({"target_modules": [whole], "layers_to_transform": 5})).unwrap();
        assert_eq!(named.target_modules, ["layers.3.self_attn.q_proj"]);
        let regex = json!({
            "target_modules": ".*language_model.*\\.(q_proj|up_proj)",
            "exclude_modules": format!("{prefix}\\.layers\\.0\\..*up_proj"),
            "rank_pattern": {format!("{prefix}.layers.2.self_attn.q_proj"): 2},
            "alpha_pattern": {"language_model\\..*q_proj": 3},
        });
        let plan = read_in(prefix, &regex).unwrap();
        assert_eq!(plan.of(2, "self_attn.q_proj"), Some(ModuleRank { r: 2, alpha: 3.0 }));
        assert_eq!(plan.of(3, "self_attn.q_proj"), Some(ModuleRank { r: 4, alpha: 3.0 }));
        assert_eq!((plan.of(0, "mlp.up_proj"), plan.of(0, "self_attn.k_proj")), (None, None));
        assert_eq!(plan.of(1, "mlp.up_proj"), Some(ModuleRank { r: 4, alpha: 8.0 }));
    }
}

#[test]
fn the_tensors_decide_where_a_regular_expression_is_python_s() {
    let lookahead = "(?!.*vision).*";
    let all = read(json!({"target_modules": lookahead, "exclude_modules": "(?=.*tower).*"})).unwrap();
    assert_eq!(all.target_modules.len(), 4);
    let config = config(&json!({"target_modules": lookahead, "rank_pattern": {"(?<!x)q_proj": 2}}));
    let plan = PeftConfig::read(&config).unwrap().plan(&stored("model", 2), &PATHS, 1, |_, _| true).unwrap();
    assert_eq!(plan.of(0, PATHS[0]), Some(ModuleRank { r: 2, alpha: 8.0 }));
    let refused = read(json!({"alpha_pattern": {"(?<!x)q_proj": 2}})).unwrap_err();
    assert!(refused.contains("alpha_pattern") && refused.contains("not a regular expression"), "{refused}");
}

#[test]
fn a_layers_pattern_is_that_of_peft() {
    let layers = |more: Value| {
        let mut all = json!({"target_modules": ["q_proj"], "layers_to_transform": [1, 2]});
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        read_in("model.language_model", &all).map(|plan| plan.target_modules)
    };
    let both = ["layers.1.self_attn.q_proj", "layers.2.self_attn.q_proj"].map(str::to_owned).to_vec();
    for pattern in [json!(null), json!(""), json!([]), json!("layers"), json!(["h", "layers"]), json!("l[a-z]+")] {
        assert_eq!(layers(json!({"layers_pattern": pattern})).as_ref(), Ok(&both), "{pattern}");
    }
    for pattern in [json!("h"), json!(["h"]), json!("ayers")] {
        assert!(layers(json!({"layers_pattern": pattern})).is_err(), "{pattern}");
    }
    assert!(layers(json!({"layers_pattern": 3})).unwrap_err().contains("layers_pattern"));
    // Without layers_to_transform the pattern has no effect.
    assert_eq!(read(json!({"layers_pattern": "h"})).unwrap().target_modules, ["q_proj", "up_proj"]);
}

#[test]
fn unsupported_options_are_named() {
    for (more, words) in [
        (json!({"use_dora": true}), "use_dora is true"),
        (json!({"peft_type": "IA3"}), "peft_type"),
        (json!({"target_modules": 3}), "target_modules is 3"),
        (json!({"target_modules": ["c_attn"]}), "no tensors"),
        (json!({"layers_to_transform": [12]}), "layers 0 to 11"),
        (json!({"layers_to_transform": ["x"]}), "layers_to_transform"),
        (json!({"rank_pattern": {"q_proj": 0}}), "positive whole numbers"),
        (json!({"r": 0}), "r is 0"),
        (json!({"bias": "all"}), "bias"),
        (json!({"init_lora_weights": "pissa"}), "base weights"),
    ] {
        let refused = read(more.clone()).unwrap_err();
        assert!(refused.contains(words), "{more}: {refused}");
    }
}

#[test]
fn tensors_that_the_config_does_not_ask_for_are_refused_by_key() {
    for (more, r, words) in [
        (
            json!({"target_modules": ["c_attn"]}),
            4,
            "target_modules is [\"c_attn\"]; this does not select model.layers.0",
        ),
        (json!({"exclude_modules": ["q_proj"]}), 4, "exclude_modules is"),
        (json!({"layers_to_transform": 1}), 4, "layers_to_transform is 1"),
        (json!({}), 8, "4 by r and rank_pattern, 8 in the file's tensors"),
    ] {
        let config = config(&more);
        let refused =
            PeftConfig::read(&config).unwrap().plan(&stored("model", r), &PATHS, NUM_LAYERS, |_, _| true).unwrap_err();
        assert!(refused.contains(words), "{more}: {refused}");
    }
    let config = config(&json!({}));
    let refused =
        PeftConfig::read(&config).unwrap().plan(&stored("model", 4), &["mlp.up_proj"], 1, |_, _| true).unwrap_err();
    assert!(refused.contains("no linear layer of this model: it has up_proj"), "{refused}");
}
