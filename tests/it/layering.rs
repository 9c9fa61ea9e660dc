//! Import rules: modules may import only what is below them in the list in `src/lib.rs`, never upward.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Top-level names that are modules of other crates, which every module may import: plain types and settings.
const OF_OTHER_CRATES: &[&str] = &[
    "callback",
    "chat",
    "config",
    "data",
    "dataset",
    "digest",
    "doctor",
    "environment",
    "error_text",
    "event",
    "failpoint",
    "export",
    "generate",
    "hub",
    "id",
    "jinja",
    "job",
    "one_shot",
    "modelcard",
    "openai",
    "outgoing",
    "preflight",
    "protocol",
    "push",
    "rollout",
    "scopes",
    "serving",
    "spec",
    "storage",
    "strict_json",
    "task",
    "verdict",
    "webhooks",
];

/// Each module, and what it may import besides plain types and itself.
const ALLOWED: &[(&str, &[&str])] = &[
    ("command_line", &["commands", "demo", "engine", "exporter", "http", "judge", "reward_server", "serve", "worker"]),
    ("supervisor", &[]),
    // The bundled model and data.
    ("bundle", &[]),
    // Child processes run preflights and generation.
    ("http", &["bundle", "downloads", "files", "listen", "store", "supervisor"]),
    // The caller provides the hub client.
    ("downloads", &["store"]),
    // Uses the engine only to find out which kernels the machine can run.
    ("serve", &["webhook_sender", "downloads", "engine", "files", "http", "listen", "reward", "store", "supervisor"]),
    // Lifecycle messages use the same signatures and HTTP client as rewards.
    ("webhook_sender", &["reward", "store"]),
    ("demo", &["bundle", "files", "reward", "serve"]),
];

/// Single files that may use a module or a crate that is not allowed for their module, with the reason.
const EXCEPTIONS: &[(&str, &str)] = &[
    // The test endpoint calls a reward as a worker does.
    ("http/rewards.rs", "reward"),
    ("http/reward_test_journal.rs", "reward"),
    // The test endpoint plays episodes by the rules of a job, and asks the environment as a worker does.
    ("http/environments.rs", "engine"),
    ("http/environments.rs", "reward"),
    // The document shows the very types that the client of environments sends and reads.
    ("http/contract.rs", "reward"),
    // A callback of an environment is read by the rules for its answers.
    ("http/callbacks.rs", "reward"),
    // The hub client is built like that of rewards.
    ("http/models/hub.rs", "reward"),
    // One of its tests calls the example service.
    ("http/rewards.rs", "demo"),
    // A re-score calls a reward on stored samples.
    ("http/rescore.rs", "reward"),
    // The secrets of webhooks have the same form as those of rewards.
    ("http/webhooks.rs", "reward"),
    // The database's own error tells whether the disk is full.
    ("http/error.rs", "sqlx"),
];

/// Crates that only some modules may use.
const CRATES: &[(&str, &[&str])] = &[
    ("axum", &["demo", "http"]),
    ("reqwest", &["webhook_sender"]),
    ("rlood_cli", &["command_line"]),
    ("rlood_client", &["demo"]),
    ("sqlx", &["serve"]),
    ("tokio", &["command_line", "webhook_sender", "demo", "downloads", "http", "serve", "supervisor"]),
];

#[test]
fn nothing_imports_upward() {
    let mut refused = Vec::new();
    for (file, module, code) in sources() {
        for target in crate_paths(&code) {
            let own = target == module;
            let word = OF_OTHER_CRATES.contains(&target.as_str());
            let allowed = ALLOWED.iter().any(|(from, to)| *from == module && to.contains(&target.as_str()));
            let exception = EXCEPTIONS.contains(&(file.as_str(), target.as_str()));
            if !(own || word || allowed || exception) {
                refused.push(format!("src/{file}: {module} may not import {target}"));
            }
        }
        for (name, modules) in CRATES {
            let exception = EXCEPTIONS.contains(&(file.as_str(), name));
            if !modules.contains(&module.as_str()) && !exception && uses_crate(&code, name) {
                refused.push(format!("src/{file}: {module} may not use the crate {name}"));
            }
        }
    }
    assert!(refused.is_empty(), "see tests/it/layering.rs:\n{}", refused.join("\n"));
}

#[test]
fn every_module_has_its_place_in_the_table() {
    let known: BTreeSet<&str> = ALLOWED.iter().map(|(module, _)| *module).collect();
    let found: BTreeSet<String> = sources().into_iter().map(|(_, module, _)| module).collect();
    let found: BTreeSet<&str> = found.iter().map(String::as_str).collect();
    assert_eq!(known, found);
}

#[test]
fn paths_are_found_in_groups_and_inline_and_not_in_comments() {
    let code = without_comments("use crate::{store::Store, files};\n// crate::http\nfn f(_: crate::engine::Host) {}\n");
    let found: Vec<String> = crate_paths(&code).into_iter().collect();
    assert_eq!(found, ["engine", "files", "store"]);
    assert!(uses_crate("use tokio::sync;", "tokio"));
    assert!(!uses_crate("use my_tokio::sync; tokio_util::x", "tokio"));
}

/// File relative to `src`, its top module, and its code without comment lines; without the roots `lib.rs` and `main.rs`.
fn sources() -> Vec<(String, String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    walk(&root, &mut files);
    files
        .into_iter()
        .map(|path| {
            let relative = path.strip_prefix(&root).expect("walked below the root").to_string_lossy().into_owned();
            let module = relative.split(['/', '.']).next().unwrap_or_default().to_owned();
            let code = std::fs::read_to_string(&path).expect("a source file reads");
            (relative, module, without_comments(&code))
        })
        .filter(|(_, module, _)| !matches!(module.as_str(), "lib" | "main"))
        .collect()
}

fn walk(dir: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).expect("src lists").flatten() {
        let path = entry.path();
        if path.is_dir() {
            walk(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

fn without_comments(code: &str) -> String {
    code.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// Returns the first name of every path that begins with `crate::`, including groups.
fn crate_paths(code: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for rest in code.split("crate::").skip(1) {
        match rest.strip_prefix('{') {
            Some(group) => found.extend(members(group).iter().map(|member| first_name(member.trim()))),
            None => drop(found.insert(first_name(rest))),
        }
    }
    found.remove("");
    found
}

/// Returns the members of a group whose opening brace was just consumed; nested groups stay whole.
fn members(group: &str) -> Vec<&str> {
    let (mut members, mut depth, mut begin) = (Vec::new(), 0_i32, 0);
    for (at, letter) in group.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' if depth == 0 => {
                members.push(&group[begin..at]);
                begin = at + 1;
            }
            '}' => {
                members.push(&group[begin..at]);
                break;
            }
            _ => {}
        }
    }
    members
}

fn first_name(path: &str) -> String {
    path.chars().take_while(|letter| letter.is_alphanumeric() || *letter == '_').collect()
}

fn uses_crate(code: &str, name: &str) -> bool {
    code.match_indices(&format!("{name}::"))
        .any(|(at, _)| !code[..at].ends_with(|before: char| before.is_alphanumeric() || before == '_' || before == ':'))
}

/// The lines that import modules, in a file or in all files below a folder.
fn import_lines(path: &Path) -> Vec<String> {
    if path.is_dir() {
        return std::fs::read_dir(path).unwrap().flat_map(|entry| import_lines(&entry.unwrap().path())).collect();
    }
    let code = std::fs::read_to_string(path).unwrap();
    code.lines().filter(|line| line.starts_with("use ") || line.starts_with("pub use ")).map(str::to_owned).collect()
}

#[test]
fn the_gpu_queue_and_the_drivers_know_of_each_other_only_the_device_api() {
    let root = rlood_test_support::in_repository("crates/kernels");
    let names = |path: &str, modules: &[&str]| {
        let named: Vec<String> = import_lines(&root.join(path))
            .into_iter()
            .filter(|line| modules.iter().any(|module| line.contains(module)))
            .collect();
        assert!(named.is_empty(), "{path}: {named:?}");
    };
    names("src/cuda/driver", &["nvidia", "emulated"]);
    for driver in ["src/cuda/device_api.rs", "src/cuda/nvidia.rs", "src/cuda/nvidia", "testing/emulated.rs"] {
        names(driver, &["super::driver", "cuda::driver", "nvidia", "emulated"]);
    }
}
