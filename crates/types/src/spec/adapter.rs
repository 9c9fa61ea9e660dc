//! Which linear layers an adapter covers, and with which rank: in a plan, and in PEFT's `adapter_config.json` (PEFT 0.21.2,
//! tuners_utils.py: `check_target_module_exists`, other.py: `get_pattern_key`).
//!
//! PEFT selects layers by names, regular expressions, layer numbers and exclusions. A plan has names only: of modules (`q_proj`),
//! or of modules in one layer (`layers.3.self_attn.q_proj`) if layers differ. PEFT can read both.

use std::collections::BTreeMap;

use regex::Regex;
use serde_json::Value;

use super::plan::LoraPlan;

/// Rank and alpha of one linear layer's adapter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ModuleRank {
    /// Rank of the layer's adapter.
    pub r: u32,
    /// Alpha of the layer's adapter: the numerator of its scaling.
    pub alpha: f64,
}

/// Keys of adapter_config.json that must be absent, null, false or empty, because they request something unsupported.
const UNSUPPORTED: [&str; 11] = [
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "layers_pattern",
];
const FILE: &str = "adapter_config.json";

impl LoraPlan {
    /// Creates a plan for all seven projections.
    pub fn all_linear(r: u32, alpha: f64) -> LoraPlan {
        let target_modules = super::settings::ALL_LINEAR.map(str::to_owned).to_vec();
        let (rank_pattern, alpha_pattern) = Default::default();
        LoraPlan { r, alpha, dropout: 0.0, target_modules, use_rslora: false, rank_pattern, alpha_pattern }
    }

    /// Returns the adapter of the linear layer at `path` (`self_attn.q_proj`) in a decoder layer; `None` = it has none.
    pub fn of(&self, layer: usize, path: &str) -> Option<ModuleRank> {
        let key = format!("layers.{layer}.{path}");
        let is_here = |name: &String| is_named(&key, name);
        self.target_modules.iter().any(is_here).then(|| ModuleRank {
            r: self.rank_pattern.iter().find(|(name, _)| is_here(name)).map_or(self.r, |(_, r)| *r),
            alpha: self.alpha_pattern.iter().find(|(name, _)| is_here(name)).map_or(self.alpha, |(_, alpha)| *alpha),
        })
    }

    /// Returns the scaling `s` in y = W x + b + s·B(A x).
    pub fn scaling(&self, rank: ModuleRank) -> f64 {
        let r = f64::from(rank.r);
        if self.use_rslora { rank.alpha / r.sqrt() } else { rank.alpha / r }
    }

    /// Whether the weights of one adapter fit the other: everything except dropout is equal.
    pub fn is_compatible_with(&self, other: &LoraPlan) -> bool {
        let sorted = |plan: &LoraPlan| {
            let mut names = plan.target_modules.clone();
            names.sort();
            LoraPlan { dropout: 0.0, target_modules: names, ..plan.clone() }
        };
        sorted(self) == sorted(other)
    }

    /// Reads PEFT's adapter_config.json for a model that has linear layers at these paths in each of `num_layers` decoder layers.
    ///
    /// # Errors
    /// Fails if it is another kind of adapter, uses an unsupported option, or selects no layer of this model.
    pub fn from_peft(config: &Value, paths: &[&str], num_layers: usize) -> Result<LoraPlan, String> {
        check_kind(config)?;
        let refuse = |key: &str, advice: &str| refused(config, key, advice);
        let Some(r) = config.get("r").and_then(rank) else {
            return refuse("r", "it must be a positive whole number");
        };
        let Some(alpha) = config.get("lora_alpha").and_then(finite) else {
            return refuse("lora_alpha", "it must be a number");
        };
        let dropout = config.get("lora_dropout").and_then(Value::as_f64).unwrap_or(0.0);
        if !(0.0..1.0).contains(&dropout) {
            return refuse("lora_dropout", "it must be at least 0 and less than 1");
        }
        let use_rslora = config.get("use_rslora").and_then(Value::as_bool).unwrap_or(false);

        let targets = match config.get("target_modules") {
            Some(Value::String(all)) if all == "all-linear" => Selection::All,
            Some(value) => Selection::read("target_modules", value)?,
            None => Selection::None,
        };
        let excluded = config
            .get("exclude_modules")
            .map_or(Ok(Selection::None), |value| Selection::read("exclude_modules", value))?;
        let layers = layers_of(config, num_layers)?;
        let ranks = Patterns::read(config, "rank_pattern", "positive whole numbers", rank)?;
        let alphas = Patterns::read(config, "alpha_pattern", "numbers", finite)?;

        let mut found: BTreeMap<(usize, usize), ModuleRank> = BTreeMap::new();
        for (layer, (index, path)) in
            (0..num_layers).flat_map(|layer| paths.iter().enumerate().map(move |of| (layer, of)))
        {
            let key = format!("model.layers.{layer}.{path}");
            let is_in_layer = layers.as_ref().is_none_or(|layers| layers.contains(&(layer as u64)));
            if is_in_layer && targets.has(&key) && !excluded.has(&key) {
                let (r, alpha) = (ranks.of(&key).unwrap_or(r), alphas.of(&key).unwrap_or(alpha));
                found.insert((index, layer), ModuleRank { r, alpha });
            }
        }
        if found.is_empty() {
            let names: Vec<&str> = paths.iter().map(|path| name_of(path)).collect();
            return refuse(
                "target_modules",
                &format!("the name matches no linear layer of this model, which has {}", names.join(", ")),
            );
        }
        let plan = LoraPlan { use_rslora, dropout, ..LoraPlan::all_linear(r, alpha) };
        Ok(named(plan, paths, num_layers, &found))
    }
}

fn refused<T>(config: &Value, key: &str, advice: &str) -> Result<T, String> {
    let found = config.get(key).map_or_else(|| "missing".to_owned(), brief);
    Err(format!("{FILE}: {key} is {found}; {advice}"))
}

/// Rejects a configuration that is not LoRA, or that has more than A and B.
fn check_kind(config: &Value) -> Result<(), String> {
    if config.get("peft_type").and_then(Value::as_str) != Some("LORA") {
        return refused(config, "peft_type", "the only supported adapter type is \"LORA\"");
    }
    for key in UNSUPPORTED {
        let is_neutral = match config.get(key) {
            None | Some(Value::Null | Value::Bool(false)) => true,
            Some(Value::Object(map)) => map.is_empty(),
            Some(Value::Array(list)) => list.is_empty(),
            Some(_) => false,
        };
        if !is_neutral {
            return refused(config, key, "this option of PEFT is not supported");
        }
    }
    if !matches!(config.get("bias").map(Value::as_str), None | Some(Some("none"))) {
        return refused(config, "bias", "the only supported value is \"none\"");
    }
    match config.get("init_lora_weights").and_then(Value::as_str) {
        Some(name) if ["pissa", "olora", "corda", "loftq"].iter().any(|n| name.starts_with(n)) => {
            refused(config, "init_lora_weights", "this option changes the base weights, which is not supported")
        }
        Some(_) | None => Ok(()),
    }
}

/// Reads `layers_to_transform`: one number or a list; `None` = all layers.
fn layers_of(config: &Value, num_layers: usize) -> Result<Option<Vec<u64>>, String> {
    let one = |value: &Value| value.as_u64().filter(|layer| (*layer as usize) < num_layers);
    let list: Option<Vec<u64>> = match config.get("layers_to_transform") {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Array(list)) if list.is_empty() => return Ok(None),
        Some(Value::Array(list)) => list.iter().map(one).collect(),
        Some(value) => one(value).map(|layer| vec![layer]),
    };
    match list {
        Some(list) => Ok(Some(list)),
        None => {
            let last = num_layers.saturating_sub(1);
            refused(config, "layers_to_transform", &format!("this model has layers 0 to {last}"))
        }
    }
}

/// Creates a plan from the ranks found by path and layer. A module's name stands for all layers if they are equal; otherwise there
/// is one name per layer.
fn named(
    mut plan: LoraPlan,
    paths: &[&str],
    num_layers: usize,
    found: &BTreeMap<(usize, usize), ModuleRank>,
) -> LoraPlan {
    plan.target_modules.clear();
    for (index, path) in paths.iter().enumerate() {
        let of_path: Vec<(usize, ModuleRank)> =
            found.range((index, 0)..(index + 1, 0)).map(|((_, layer), rank)| (*layer, *rank)).collect();
        let Some((_, first)) = of_path.first() else { continue };
        let is_uniform = of_path.len() == num_layers && of_path.iter().all(|(_, rank)| rank == first);
        let names: Vec<(String, ModuleRank)> = match is_uniform {
            true => vec![(name_of(path).to_owned(), *first)],
            false => of_path.iter().map(|(layer, rank)| (format!("layers.{layer}.{path}"), *rank)).collect(),
        };
        for (name, rank) in names {
            if rank.r != plan.r {
                plan.rank_pattern.insert(name.clone(), rank.r);
            }
            if rank.alpha != plan.alpha {
                plan.alpha_pattern.insert(name.clone(), rank.alpha);
            }
            plan.target_modules.push(name);
        }
    }
    plan
}

fn rank(value: &Value) -> Option<u32> {
    value.as_u64().filter(|r| (1..=1 << 16).contains(r)).map(|r| r as u32)
}

fn finite(value: &Value) -> Option<f64> {
    value.as_f64().filter(|number| number.is_finite())
}

fn name_of(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}

/// Whether a dotted key has this name: the whole key, or its end after a dot.
fn is_named(key: &str, name: &str) -> bool {
    key.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

fn brief(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(120) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// The layers selected by `target_modules` and `exclude_modules`.
enum Selection {
    None,
    All,
    Names(Vec<String>),
    /// A regular expression that the whole key must match.
    Matching(Regex),
}

impl Selection {
    fn read(key: &str, value: &Value) -> Result<Selection, String> {
        match value {
            Value::Null => Ok(Selection::None),
            Value::String(text) => match Regex::new(&format!("^(?:{text})$")) {
                Ok(regex) => Ok(Selection::Matching(regex)),
                Err(_) => Err(format!(
                    "{FILE}: {key} is {}; it is not a regular expression that rlood can read",
                    brief(value)
                )),
            },
            Value::Array(names) => match names.iter().map(|name| name.as_str().map(str::to_owned)).collect() {
                Some(names) => Ok(Selection::Names(names)),
                None => Err(format!("{FILE}: {key} is {}; it must be a list of names", brief(value))),
            },
            _ => Err(format!("{FILE}: {key} is {}; it must be a list of names, or a regular expression", brief(value))),
        }
    }

    fn has(&self, key: &str) -> bool {
        match self {
            Selection::None => false,
            Selection::All => true,
            Selection::Names(names) => names.iter().any(|name| is_named(key, name)),
            Selection::Matching(regex) => regex.is_match(key),
        }
    }
}

/// The patterns of `rank_pattern` and `alpha_pattern`. The first pattern that matches the end of a key counts.
struct Patterns<T>(Vec<(Regex, T)>);

impl<T: Copy> Patterns<T> {
    fn read(config: &Value, key: &str, what: &str, one: impl Fn(&Value) -> Option<T>) -> Result<Self, String> {
        let map = match config.get(key) {
            None | Some(Value::Null) => return Ok(Patterns(Vec::new())),
            Some(Value::Object(map)) => map,
            Some(other) => return Err(format!("{FILE}: {key} is {}; it must be an object", brief(other))),
        };
        let read = |(pattern, value): (&String, &Value)| {
            let at = format!("{FILE}: {key} has {pattern:?}: {}", brief(value));
            let regex = Regex::new(&format!("^(?:.*\\.)?(?:{pattern})$"))
                .map_err(|_| format!("{at}; its name is not a regular expression that rlood can read"))?;
            Ok((regex, one(value).ok_or_else(|| format!("{at}; the values must be {what}"))?))
        };
        map.iter().map(read).collect::<Result<_, String>>().map(Patterns)
    }

    fn of(&self, key: &str) -> Option<T> {
        self.0.iter().find(|(regex, _)| regex.is_match(key)).map(|(_, value)| *value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const PATHS: [&str; 4] = ["self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.down_proj"];

    fn read(more: Value) -> Result<LoraPlan, String> {
        let mut config = json!({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"]});
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        LoraPlan::from_peft(&config, &PATHS, 12)
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
        let by_regex =
            read(json!({"target_modules": ".*self_attn\\.(q|k)_proj", "exclude_modules": ".*k_proj"})).unwrap();
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
    fn unsupported_options_are_named() {
        for (more, words) in [
            (json!({"use_dora": true}), "use_dora is true"),
            (json!({"peft_type": "IA3"}), "peft_type"),
            (json!({"target_modules": ["c_attn"]}), "q_proj, k_proj, up_proj, down_proj"),
            (json!({"target_modules": "("}), "not a regular expression"),
            (json!({"layers_to_transform": [12]}), "layers 0 to 11"),
            (json!({"rank_pattern": {"q_proj": 0}}), "positive whole numbers"),
            (json!({"r": 0}), "r is 0"),
            (json!({"bias": "all"}), "bias"),
            (json!({"init_lora_weights": "pissa"}), "base weights"),
        ] {
            let refused = read(more.clone()).unwrap_err();
            assert!(refused.contains(words), "{more}: {refused}");
        }
    }
}
