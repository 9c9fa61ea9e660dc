//! Translates the reward functions of a TRL run to rewards of a job. TRL's scripts accept names of functions in TRL, dotted paths
//! of others (`my_lib.rewards.accuracy`) and models; code passes function objects, of which a dump has only the name.

use serde_json::{Map, Value, json};

use super::reading::Keys;
use crate::spec::reader::shown;

/// Keys under which reward functions are named.
pub(super) const REWARD_FUNCS: [&str; 3] = ["reward_funcs", "reward_func", "reward_functions"];
/// Functions of TRL's own module `trl.rewards`.
const TRL_FUNCTIONS: [&str; 3] = ["accuracy_reward", "reasoning_accuracy_reward", "think_format_reward"];
/// TRL's factory of a soft overlong punishment, and the values that its scripts pass to it.
const SOFT_OVERLONG: (&str, u64, u64) = ("get_soft_overlong_punishment", 1280, 256);
/// Address at which TRL's functions are served.
const SERVED_AT: &str = "http://127.0.0.1:8090";
/// Placeholder for an unknown file of reward functions.
const PLACEHOLDER_FILE: &str = "rewards.py";

/// Returns the rewards that the TRL configuration names; `None` if it names none. With `given`, rewards next to
/// the config replace them.
pub(super) fn named_rewards(keys: &Keys<'_>, given: bool) -> Option<Value> {
    let mut rewards = Vec::new();
    let (mut of_trl, mut named) = (Vec::new(), None);
    for key in REWARD_FUNCS {
        let Some(value) = keys.value(key) else { continue };
        if given {
            keys.ignore(key, "the rewards are given by 'rewards', so this key is ignored");
            continue;
        }
        let list = match value {
            Value::Array(list) => list.clone(),
            one => vec![one.clone()],
        };
        for one in &list {
            match one.as_str().map(str::trim).filter(|name| !name.is_empty()) {
                Some(name) => rewards.push(reward_of(keys, key, name, &mut of_trl)),
                None => {
                    let detail = format!(
                        "reward_funcs must name functions, such as \"my_lib.rewards.accuracy\", not {}",
                        shown(&one.to_string())
                    );
                    keys.fail(key, "invalid_type", detail);
                }
            }
        }
        named = Some(key);
    }
    let key = named?;
    if !of_trl.is_empty() {
        let functions = of_trl.join(",");
        let detail = format!(
            "TRL's own reward functions need a service: before the job, run `rlood reward serve trl.rewards:{functions}` in an environment that has trl"
        );
        keys.warn(key, "reward_to_be_served", detail);
    }
    keys.origin("/rewards", key);
    make_names_unique(&mut rewards);
    (!rewards.is_empty()).then(|| rewards.into_iter().map(Value::Object).collect())
}

fn reward_of(keys: &Keys<'_>, key: &'static str, name: &str, of_trl: &mut Vec<String>) -> Map<String, Value> {
    // The form in which Python prints a function: <function accuracy at 0x7f…>.
    let name = name.strip_prefix("<function ").and_then(|rest| rest.split(' ').next()).unwrap_or(name);
    let name = name.strip_prefix("trl.rewards.").unwrap_or(name);
    let (overlong, max_tokens, cache_tokens) = SOFT_OVERLONG;
    let reward = if TRL_FUNCTIONS.contains(&name) {
        of_trl.push(name.to_owned());
        json!({"type": "webhook", "name": name, "url": format!("{SERVED_AT}/{name}"), "completion_ids": true})
    } else if name == overlong {
        json!({"type": "soft_overlong", "max_tokens": max_tokens, "cache_tokens": cache_tokens})
    } else if let Some((file, function)) = name.rsplit_once(':') {
        let file = if file.ends_with(".py") { file.to_owned() } else { file_of_module(file) };
        python(keys, key, &file, function)
    } else if name.contains('/') {
        json!({"type": "reward_model", "model": name})
    } else if let Some((module, function)) = name.rsplit_once('.') {
        python(keys, key, &file_of_module(module), function)
    } else {
        let detail = format!(
            "the file of '{name}' is not named: replace {PLACEHOLDER_FILE} with the file that defines the function; it must be in a folder of the server's --python-rewards, or be served with `rlood reward serve {PLACEHOLDER_FILE}:{name}`"
        );
        keys.warn(key, "reward_file_assumed", detail);
        json!({"type": "python", "file": PLACEHOLDER_FILE, "function": name})
    };
    match reward {
        Value::Object(reward) => reward,
        _ => Map::new(),
    }
}

fn python(keys: &Keys<'_>, key: &'static str, file: &str, function: &str) -> Value {
    let detail = format!(
        "{file} must be in a folder of the server's --python-rewards; on a server without this option, serve it with `rlood reward serve {file}:{function}` and name the address in a webhook"
    );
    keys.warn(key, "reward_runs_python", detail);
    json!({"type": "python", "file": file, "function": function})
}

/// Returns the file of a module: `my_lib.rewards` is `my_lib/rewards.py`.
fn file_of_module(module: &str) -> String {
    format!("{}.py", module.replace('.', "/"))
}

/// Renames rewards that would have the same name as an earlier one.
fn make_names_unique(rewards: &mut [Map<String, Value>]) {
    let mut names: Vec<String> = Vec::new();
    for reward in rewards {
        let text = |field: &str| reward.get(field).and_then(Value::as_str).map(str::to_owned);
        let name = text("name").or_else(|| text("function")).or_else(|| text("type")).unwrap_or_default();
        let mut unique = name.clone();
        let mut number = 2;
        while names.contains(&unique) {
            unique = format!("{name}_{number}");
            number += 1;
        }
        if unique != name {
            reward.insert("name".to_owned(), json!(unique));
        }
        names.push(unique);
    }
}
