//! Checks that Cargo does not make: that each member's tests are run, that versions are shared, and that each test file
//! belongs to a binary.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use toml::Table;

/// Crates that only some packages may use.
const ONLY_IN: &[(&str, &[&str])] = &[
    ("axum", &["rlood", "rlood-commands"]),
    // The examples of the root create a model.
    ("candle-core", &["rlood", "rlood-engine"]),
    ("cudarc", &["rlood-kernels"]),
    ("reqwest", &["rlood", "rlood-client", "rlood-commands", "rlood-hub", "rlood-rewards", "rlood-worker"]),
    ("sqlx", &["rlood", "rlood-store"]),
    (
        "tokio",
        &[
            "rlood",
            "rlood-cli",
            "rlood-client",
            "rlood-commands",
            "rlood-hub",
            "rlood-rewards",
            "rlood-store",
            "rlood-worker",
        ],
    ),
];

/// Files that may use `env!("CARGO_MANIFEST_DIR")`, because they are directly below `crates`; elsewhere it breaks when a file
/// moves to another crate.
const KNOWS_ITS_FOLDER: &[&str] = &["crates/test-support/src/lib.rs"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn manifest(folder: &Path) -> Table {
    read(&folder.join("Cargo.toml")).parse().unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
}

/// The folders of all packages: the root's, and all in `crates`.
fn packages() -> Vec<PathBuf> {
    let crates = std::fs::read_dir(root().join("crates")).unwrap().map(|entry| entry.unwrap().path());
    let mut folders: Vec<PathBuf> = crates.filter(|path| path.is_dir()).collect();
    folders.push(root().to_owned());
    folders.sort();
    folders
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let Ok(entries) = std::fs::read_dir(folder) else { return found };
    for path in entries.map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found
}

/// The workspace metadata from Cargo.
fn metadata() -> Value {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--offline", "--no-deps", "--format-version", "1", "--manifest-path"])
        .arg(root().join("Cargo.toml"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_command_at_the_top_is_for_every_package() {
    let metadata = metadata();
    let set = |name: &str| -> BTreeSet<String> {
        metadata[name].as_array().unwrap().iter().map(|id| id.as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(set("workspace_default_members"), set("workspace_members"));
    let found: BTreeSet<PathBuf> = metadata["packages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|package| Path::new(package["manifest_path"].as_str().unwrap()).parent().unwrap().to_owned())
        .collect();
    assert_eq!(found, packages().into_iter().collect::<BTreeSet<_>>());
}

#[test]
fn every_package_takes_version_and_lints_of_the_workspace() {
    for folder in packages() {
        let manifest = manifest(&folder);
        let of_workspace = |table: &Table, key: &str| table[key].get("workspace") == Some(&toml::Value::Boolean(true));
        let package = manifest["package"].as_table().unwrap();
        for key in ["version", "edition", "rust-version", "license"] {
            assert!(of_workspace(package, key), "{}: package.{key}", folder.display());
        }
        if folder.ends_with("crates/kernels") {
            // It has its own lint table: all of the workspace's lints except the one against unsafe code.
            let workspace = self::manifest(root());
            let mut expected = workspace["workspace"]["lints"].clone();
            expected["rust"].as_table_mut().unwrap().remove("unsafe_code");
            assert_eq!(manifest["lints"], expected);
        } else {
            let lints = manifest["lints"].as_table().unwrap();
            assert_eq!(lints.get("workspace"), Some(&toml::Value::Boolean(true)), "{}", folder.display());
        }
    }
}

/// Returns dependency kind, name and specification of each entry in a manifest.
fn dependencies(manifest: &Table) -> Vec<(&str, &str, &toml::Value)> {
    let mut found = Vec::new();
    for kind in ["dependencies", "dev-dependencies", "build-dependencies"] {
        let table = manifest.get(kind).and_then(toml::Value::as_table).into_iter().flatten();
        found.extend(table.map(|(name, value)| (kind, name.as_str(), value)));
    }
    found
}

#[test]
fn every_version_stands_at_the_top() {
    let top = manifest(root());
    let versions = top["workspace"]["dependencies"].as_table().unwrap();
    let mut used = BTreeSet::new();
    for folder in packages() {
        let manifest = manifest(&folder);
        assert!(manifest.get("target").is_none(), "{}: dependencies of a target are not looked at", folder.display());
        for (kind, name, value) in dependencies(&manifest) {
            let table = value.as_table().unwrap_or_else(|| panic!("{}: {kind}.{name} = {value}", folder.display()));
            assert_eq!(
                table.get("workspace"),
                Some(&toml::Value::Boolean(true)),
                "{}: {kind}.{name}",
                folder.display()
            );
            // Other features would require a second build of the crate.
            let known = table.keys().all(|key| ["workspace", "optional"].contains(&key.as_str()));
            assert!(known, "{}: {kind}.{name} = {value}", folder.display());
            used.insert(name.to_owned());
        }
    }
    let unused: Vec<&String> = versions.keys().filter(|name| !used.contains(*name)).collect();
    assert!(unused.is_empty(), "Cargo.toml: nobody uses {unused:?}");
}

#[test]
fn some_crates_belong_to_some_packages_only() {
    for folder in packages() {
        let manifest = manifest(&folder);
        let package = manifest["package"]["name"].as_str().unwrap();
        for (kind, name, _) in dependencies(&manifest) {
            let Some((_, packages)) = ONLY_IN.iter().find(|(only, _)| *only == name) else { continue };
            assert!(kind == "dev-dependencies" || packages.contains(&package), "{package} may not use {name}");
        }
        let support = dependencies(&manifest).into_iter().find(|(_, name, _)| *name == "rlood-test-support");
        assert!(support.is_none_or(|(kind, ..)| kind == "dev-dependencies"), "{package} is no test");
    }
}

#[test]
fn one_integration_binary_a_package_holds_all_its_files() {
    let metadata = metadata();
    for package in metadata["packages"].as_array().unwrap() {
        let name = package["name"].as_str().unwrap();
        let targets = package["targets"].as_array().unwrap().iter();
        let mut tests: Vec<&str> = targets
            .filter(|target| target["kind"][0] == "test")
            .map(|target| target["name"].as_str().unwrap())
            .collect();
        // This test counts allocations of the whole process.
        tests.retain(|test| (name, *test) != ("rlood-engine", "allocations"));
        let folder = Path::new(package["manifest_path"].as_str().unwrap()).parent().unwrap().join("tests/it");
        let expected: &[&str] = if folder.exists() { &["it"] } else { &[] };
        assert_eq!(tests, expected, "{name}");
        if !folder.exists() {
            continue;
        }
        let main = read(&folder.join("main.rs"));
        let declared: BTreeSet<&str> =
            main.lines().filter_map(|line| line.strip_prefix("mod ")?.strip_suffix(';')).collect();
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let module = path.file_stem().unwrap().to_str().unwrap();
            assert!(module == "main" || declared.contains(module), "{name}: no binary holds {}", path.display());
        }
    }
}

#[test]
fn the_suites_that_the_project_is_judged_by_are_where_their_command_finds_them() {
    let main = read(&root().join("crates/engine/tests/it/main.rs"));
    let lines: Vec<&str> = main.lines().collect();
    for suite in ["vectors", "golden", "parity"] {
        let declaration = format!("mod {suite};");
        let at = lines.iter().position(|line| *line == declaration).unwrap_or_else(|| panic!("{suite}"));
        assert!(lines[at - 1].is_empty() || lines[at - 1].starts_with("mod "), "{suite} is built in some builds only");
    }
}

#[test]
fn what_holds_a_point_of_failure_has_the_feature_and_the_top_forwards_it() {
    let top = manifest(root());
    let forwarded = top["features"]["failpoints"].as_array().unwrap();
    let forwarded: BTreeSet<&str> = forwarded.iter().map(|feature| feature.as_str().unwrap()).collect();
    let mut expected = BTreeMap::new();
    for folder in packages() {
        let held = sources(&folder.join("src"))
            .into_iter()
            .find(|path| ["fail_point!(", "without!(", "pace!("].iter().any(|call| read(path).contains(call)));
        let manifest = manifest(&folder);
        let name = manifest["package"]["name"].as_str().unwrap().to_owned();
        // The crate that defines the macros.
        if let Some(file) = held.filter(|_| name != "rlood-types") {
            let has = manifest.get("features").is_some_and(|features| features.get("failpoints").is_some());
            assert!(has, "{} has a point, {name} no feature `failpoints`: nothing fails there", file.display());
            expected.insert(format!("{name}/failpoints"), file);
        }
    }
    assert!(expected.len() >= 2, "{expected:?}");
    let expected: BTreeSet<&str> =
        expected.keys().map(String::as_str).filter(|name| !name.starts_with("rlood/")).collect();
    assert_eq!(forwarded, expected);
}

/// rustc compiles the body of each `pub async fn` into its crate's unit tests, with all that it calls, whether a test calls it or not.
/// In `rlood` that was nearly everything: its unit tests took 175 s to compile, and 43 s without. The worker has as large entry points, and
/// what `rlood` calls of the commands would be compiled there too.
#[test]
fn the_unit_tests_of_the_top_of_the_commands_and_of_the_worker_do_not_hold_the_whole_crate() {
    // These are called from the integration tests, and call little.
    const KNOWN: &[&str] = &[
        "crates/commands/src/commands/env_check.rs: pub async fn examine",
        "crates/commands/src/commands/reward_check.rs: pub async fn examine",
        "src/http/download.rs: pub async fn send_file",
        "src/serve/retention.rs: pub async fn round",
    ];
    let mut found = Vec::new();
    for path in
        ["src", "crates/commands/src", "crates/worker/src"].iter().flat_map(|folder| sources(&root().join(folder)))
    {
        let name = path.strip_prefix(root()).unwrap().display().to_string();
        let text = read(&path);
        let functions = text.lines().filter(|line| line.starts_with("pub async fn "));
        found.extend(functions.map(|line| format!("{name}: {}", line.split(['(', '<']).next().unwrap())));
    }
    found.sort();
    assert_eq!(found, KNOWN, "`pub(crate)`, or a function that returns a boxed future");
}

#[test]
fn the_fuzz_targets_are_a_workspace_of_their_own() {
    let fuzz = manifest(&root().join("fuzz"));
    assert_eq!(fuzz["workspace"].as_table(), Some(&Table::new()));
    let top = manifest(root());
    assert_eq!(top["workspace"]["exclude"].as_array().unwrap(), &["fuzz".into()]);
}

#[test]
fn a_member_asks_the_test_support_where_files_lie() {
    for path in sources(&root().join("crates")) {
        let relative = path.strip_prefix(root()).unwrap().to_str().unwrap();
        let knows = read(&path).contains("CARGO_MANIFEST_DIR");
        assert!(!knows || KNOWS_ITS_FOLDER.contains(&relative), "{relative}: use rlood_test_support::fixture");
    }
}

#[test]
fn an_image_is_built_of_every_package() {
    let ignored = read(&root().join(".dockerignore"));
    for file in ["docker/Dockerfile", "docker/Dockerfile.cuda"] {
        let text = read(&root().join(file));
        let (before, _) = text.split_once("docker/build.sh").unwrap();
        let copied: Vec<&str> = before
            .lines()
            .filter_map(|line| line.strip_prefix("COPY ").filter(|rest| !rest.starts_with("--from")))
            .flat_map(|rest| rest.split(' ').rev().skip(1))
            .collect();
        for folder in packages() {
            let relative = folder.strip_prefix(root()).unwrap();
            let whole = copied.iter().any(|source| *source == "." || relative.starts_with(source));
            assert!(whole, "{file} does not copy {}", relative.display());
            assert!(
                !ignored.lines().any(|line| !line.is_empty() && relative.starts_with(line)),
                "{}",
                relative.display()
            );
        }
    }
}
