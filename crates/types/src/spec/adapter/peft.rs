//! PEFT's `adapter_config.json` (PEFT 0.21.2, tuners_utils.py: `check_target_module_exists`, other.py: `get_pattern_key`).
//!
//! The tensors in an adapter's file say which linear layers it covers, and with which ranks. The config must say the same, as far as
//! its regular expressions can be evaluated here: those of Python know more, such as `(?!…)`. Alphas are in the config only.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use regex::Regex;
use serde_json::Value;

use super::{ModuleRank, is_named};
use crate::spec::plan::LoraPlan;

/// Keys of adapter_config.json that must be absent, null, false or empty, because they request something unsupported.
const UNSUPPORTED: [&str; 10] = [
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
];
const FILE: &str = "adapter_config.json";

/// A linear layer for which an adapter's file has LoRA matrices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredModule {
    /// Index of the decoder layer, from 0.
    pub layer: usize,
    /// Path of the linear layer within the decoder layer, such as `self_attn.q_proj`.
    pub path: String,
    /// Name of the linear layer in the model that was trained, such as `model.language_model.layers.0.self_attn.q_proj`.
    pub name: String,
    /// Rank of the LoRA matrices.
    pub r: u32,
}

/// The content of PEFT's adapter_config.json.
#[derive(Debug)]
pub struct PeftConfig<'a> {
    json: &'a Value,
    r: u32,
    alpha: f64,
    dropout: f64,
    use_rslora: bool,
    targets: Selection,
    excluded: Selection,
    layers: Option<Layers>,
    ranks: Patterns<u32>,
    alphas: Patterns<f64>,
}

impl<'a> PeftConfig<'a> {
    /// Parses adapter_config.json.
    ///
    /// # Errors
    /// Fails if it describes another kind of adapter, or uses an unsupported option; the error names the key.
    pub fn read(json: &'a Value) -> Result<PeftConfig<'a>, String> {
        check_kind(json)?;
        let Some(r) = json.get("r").and_then(rank) else {
            return refused(json, "r", "it must be a positive whole number");
        };
        let Some(alpha) = json.get("lora_alpha").and_then(finite) else {
            return refused(json, "lora_alpha", "it must be a number");
        };
        let dropout = json.get("lora_dropout").and_then(Value::as_f64).unwrap_or(0.0);
        if !(0.0..1.0).contains(&dropout) {
            return refused(json, "lora_dropout", "it must be at least 0 and less than 1");
        }
        let targets = match json.get("target_modules") {
            // PEFT chooses by the model's architecture, and stores its choice.
            None | Some(Value::Null) => Selection::Unknown,
            Some(Value::String(text)) if text.eq_ignore_ascii_case("all-linear") => Selection::All,
            Some(_) => Selection::read(json, "target_modules")?,
        };
        let alphas = Patterns::read(json, "alpha_pattern", "numbers", finite)?;
        if let Some(pattern) = &alphas.unknown {
            return Err(format!(
                "{FILE}: alpha_pattern has {pattern:?}; it is not a regular expression that rlood can read"
            ));
        }
        Ok(PeftConfig {
            json,
            r,
            alpha,
            dropout,
            use_rslora: json.get("use_rslora").and_then(Value::as_bool).unwrap_or(false),
            targets,
            excluded: Selection::read(json, "exclude_modules")?,
            layers: Layers::read(json)?,
            ranks: Patterns::read(json, "rank_pattern", "positive whole numbers", rank)?,
            alphas,
        })
    }

    /// Returns whether PEFT adapts a linear layer with this name; `None` = it depends on a regular expression that cannot be evaluated
    /// here.
    pub fn selects(&self, name: &str) -> Option<bool> {
        match (self.excluded.has(name), self.targets.has(name), self.is_in_layers(name)) {
            (Some(true), _, _) | (_, Some(false), _) | (_, _, Some(false)) => Some(false),
            (Some(false), Some(true), Some(true)) => Some(true),
            _ => None,
        }
    }

    /// Whether `layers_to_transform` includes the layer. As in PEFT, it does not apply to a linear layer whose whole name is in
    /// target_modules.
    fn is_in_layers(&self, name: &str) -> Option<bool> {
        let is_whole_name =
            matches!(&self.targets, Selection::Names(names) if names.iter().any(|target| target == name));
        match &self.layers {
            Some(layers) if !is_whole_name => layers.has(name),
            _ => Some(true),
        }
    }

    /// Returns rank and alpha of a linear layer.
    ///
    /// # Errors
    /// Fails if the config does not select the layer, or gives it another rank than its matrices have.
    pub fn rank_of(&self, module: &StoredModule) -> Result<ModuleRank, String> {
        let StoredModule { name, r, .. } = module;
        if self.selects(name) == Some(false) {
            let key = match (self.excluded.has(name), self.targets.has(name)) {
                (Some(true), _) => "exclude_modules",
                (_, Some(false)) => "target_modules",
                _ => "layers_to_transform",
            };
            return refused(self.json, key, &format!("this does not select {name}, for which the file has tensors"));
        }
        let wanted = self.ranks.of(name).unwrap_or(self.r);
        if wanted != *r && self.ranks.unknown.is_none() {
            return Err(format!(
                "{FILE}: the ranks of {name} differ: {wanted} by r and rank_pattern, {r} in the file's tensors; the two do not belong \
                 together"
            ));
        }
        Ok(ModuleRank { r: *r, alpha: self.alphas.of(name).unwrap_or(self.alpha) })
    }

    /// Creates the plan of an adapter with these linear layers, for a model with `num_layers` decoder layers that have linear layers at
    /// these `paths`, as far as `has(layer, path)` says.
    ///
    /// # Errors
    /// Fails if the config or the model does not match one of the layers, or if there are none. An error about the config begins with
    /// `adapter_config.json: `.
    pub fn plan(
        &self,
        stored: &[StoredModule],
        paths: &[&str],
        num_layers: usize,
        has: impl Fn(usize, &str) -> bool,
    ) -> Result<LoraPlan, String> {
        if let Some(layers) = &self.layers
            && layers.indices.iter().any(|layer| *layer as usize >= num_layers)
        {
            let last = num_layers.saturating_sub(1);
            return refused(self.json, "layers_to_transform", &format!("this model has layers 0 to {last}"));
        }
        let mut found: BTreeMap<(usize, usize), ModuleRank> = BTreeMap::new();
        for module in stored {
            let rank = self.rank_of(module)?;
            match paths.iter().position(|path| *path == module.path) {
                Some(index) if module.layer < num_layers && has(module.layer, &module.path) => {
                    found.insert((index, module.layer), rank)
                }
                _ => {
                    let names: Vec<&str> = paths.iter().map(|path| name_of(path)).collect();
                    return Err(format!(
                        "the file has tensors for {}, which is no linear layer of this model: it has {} in layers 0 to {}",
                        module.name,
                        names.join(", "),
                        num_layers.saturating_sub(1)
                    ));
                }
            };
        }
        if found.is_empty() {
            return Err("the file has no tensors of an adapter".to_owned());
        }
        let plan =
            LoraPlan { use_rslora: self.use_rslora, dropout: self.dropout, ..LoraPlan::all_linear(self.r, self.alpha) };
        let count = |path: &str| (0..num_layers).filter(|layer| has(*layer, path)).count();
        Ok(named(plan, paths, count, &found))
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

/// Creates a plan from the ranks found by path and layer; `count` returns the number of layers that have a path. A module's name
/// stands for all layers if they are equal; otherwise there is one name per layer.
fn named(
    mut plan: LoraPlan,
    paths: &[&str],
    count: impl Fn(&str) -> usize,
    found: &BTreeMap<(usize, usize), ModuleRank>,
) -> LoraPlan {
    plan.target_modules.clear();
    for (index, path) in paths.iter().enumerate() {
        let of_path: Vec<(usize, ModuleRank)> =
            found.range((index, 0)..(index + 1, 0)).map(|((_, layer), rank)| (*layer, *rank)).collect();
        let Some((_, first)) = of_path.first() else { continue };
        let is_uniform = of_path.len() == count(path) && of_path.iter().all(|(_, rank)| rank == first);
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

fn brief(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(120) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// The linear layers that `target_modules` or `exclude_modules` names.
#[derive(Debug)]
enum Selection {
    None,
    All,
    Names(Vec<String>),
    /// A regular expression that the whole name must match.
    Matching(Regex),
    /// A regular expression that cannot be evaluated here.
    Unknown,
}

impl Selection {
    fn read(config: &Value, key: &str) -> Result<Selection, String> {
        let advice = "it must be a list of names, or a regular expression";
        match config.get(key) {
            None | Some(Value::Null) => Ok(Selection::None),
            Some(Value::String(text)) => {
                Ok(Regex::new(&format!("^(?:{text})$")).map_or(Selection::Unknown, Selection::Matching))
            }
            Some(Value::Array(names)) => match names.iter().map(|name| name.as_str().map(str::to_owned)).collect() {
                Some(names) => Ok(Selection::Names(names)),
                None => refused(config, key, advice),
            },
            Some(_) => refused(config, key, advice),
        }
    }

    /// Whether the selection includes a name; `None` = it cannot be evaluated.
    fn has(&self, key: &str) -> Option<bool> {
        match self {
            Selection::None => Some(false),
            Selection::All => Some(true),
            Selection::Names(names) => Some(names.iter().any(|name| is_named(key, name))),
            Selection::Matching(regex) => Some(regex.is_match(key)),
            Selection::Unknown => None,
        }
    }
}

/// The decoder layers of `layers_to_transform`, and how `layers_pattern` finds a layer's number in a name.
#[derive(Debug)]
struct Layers {
    indices: Vec<u64>,
    /// Each pattern captures the number of a layer. The first one that matches counts. None = it cannot be evaluated.
    patterns: Vec<Option<Regex>>,
}

impl Layers {
    fn read(config: &Value) -> Result<Option<Layers>, String> {
        let key = "layers_to_transform";
        let indices: Option<Vec<u64>> = match config.get(key) {
            None | Some(Value::Null) => return Ok(None),
            Some(Value::Array(list)) if list.is_empty() => return Ok(None),
            Some(Value::Array(list)) => list.iter().map(Value::as_u64).collect(),
            Some(value) => value.as_u64().map(|layer| vec![layer]),
        };
        let Some(indices) = indices else { return refused(config, key, "it must be whole numbers") };
        let key = "layers_pattern";
        let names: Option<Vec<&str>> = match config.get(key) {
            None | Some(Value::Null) => Some(Vec::new()),
            Some(Value::String(name)) if name.is_empty() => Some(Vec::new()),
            Some(Value::String(name)) => Some(vec![name.as_str()]),
            Some(Value::Array(names)) => names.iter().map(Value::as_str).collect(),
            Some(_) => None,
        };
        let Some(names) = names else { return refused(config, key, "it must be a name, or a list of names") };
        // An empty pattern counts as no pattern: the first number in the name counts.
        let patterns = match names.is_empty() {
            true => vec![r".*?\.[^.]*\.(?P<index>\d+)\.".to_owned()],
            false => names.iter().map(|name| format!(r"(?:^|.*?\.){name}\.(?P<index>\d+)\.")).collect(),
        };
        let patterns = patterns.iter().map(|pattern| Regex::new(&format!("^(?:{pattern})")).ok()).collect();
        Ok(Some(Layers { indices, patterns }))
    }

    fn has(&self, name: &str) -> Option<bool> {
        for pattern in &self.patterns {
            if let Some(found) = pattern.as_ref()?.captures(name) {
                let index = found.name("index").and_then(|index| index.as_str().parse::<u64>().ok());
                return Some(index.is_some_and(|index| self.indices.contains(&index)));
            }
        }
        Some(false)
    }
}

/// The patterns of `rank_pattern` or `alpha_pattern`. The first pattern that matches the end of a name counts.
#[derive(Debug)]
struct Patterns<T> {
    known: Vec<(Regex, T)>,
    /// A pattern that cannot be evaluated here.
    unknown: Option<String>,
}

impl<T: Copy> Patterns<T> {
    fn read(config: &Value, key: &str, what: &str, one: impl Fn(&Value) -> Option<T>) -> Result<Self, String> {
        let mut patterns = Patterns { known: Vec::new(), unknown: None };
        let map = match config.get(key) {
            None | Some(Value::Null) => return Ok(patterns),
            Some(Value::Object(map)) => map,
            Some(_) => return refused(config, key, "it must be an object"),
        };
        for (pattern, value) in map {
            let Some(number) = one(value) else {
                return Err(format!("{FILE}: {key} has {pattern:?}: {}; the values must be {what}", brief(value)));
            };
            match Regex::new(&format!("^(?:.*\\.)?(?:{pattern})$")) {
                Ok(regex) => patterns.known.push((regex, number)),
                Err(_) => patterns.unknown = Some(pattern.clone()),
            }
        }
        Ok(patterns)
    }

    fn of(&self, name: &str) -> Option<T> {
        self.known.iter().find(|(regex, _)| regex.is_match(name)).map(|(_, number)| *number)
    }
}
