//! No dependency cycles between the modules of a crate: of two siblings at most one may depend on the other, directly or
//! indirectly. An import of a module also counts for its parents. A parent and its children count as one unit. Test
//! modules may import anything.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Remaining cycles: the crate, and the modules of one. The list may only shrink: shorten an entry when a cycle loses a member, and
/// remove it when the cycle is resolved.
const PERMITTED: &[(&str, &[&str])] = &[
    ("crates/client", &["api", "follow"]),
    (
        "crates/engine",
        &["ahead", "checkpoint", "refill", "relief", "report", "rollouts", "run", "scoring", "step", "watch"],
    ),
    ("crates/engine", &["backend::cuda", "backend::flat"]),
    ("crates/kernels", &["amx", "dpbf16", "gemm", "isa", "rows"]),
    (
        "crates/store",
        &[
            "artifacts",
            "attempts",
            "callbacks",
            "claims",
            "doctor",
            "events",
            "jobs",
            "journal",
            "moves",
            "server_errors",
            "workers",
        ],
    ),
    ("crates/types", &["doctor::history", "doctor::rules"]),
    ("crates/types", &["spec::document", "spec::oversight", "spec::resolve", "spec::rloo", "spec::sections"]),
    ("crates/types", &["spec::reader", "spec::schema", "spec::settings"]),
    ("crates/types", &["spec::trl::batching", "spec::trl::reading", "spec::trl::schedule"]),
];

type Module = Vec<String>;
type Edges = BTreeMap<Module, BTreeSet<Module>>;

#[test]
fn the_modules_of_a_crate_form_no_circles() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut crates = vec![root.to_owned()];
    crates.extend(std::fs::read_dir(root.join("crates")).unwrap().map(|entry| entry.unwrap().path()));
    crates.retain(|path| path.join("src").is_dir());
    assert!(crates.len() >= 9, "{crates:?}");
    let mut found = BTreeSet::new();
    for path in crates {
        let name = path.strip_prefix(root).unwrap().to_string_lossy().into_owned();
        for circle in circles(&edges(&modules(&path.join("src")))) {
            found.insert((name.clone(), circle.iter().map(|module| module.join("::")).collect::<Vec<_>>()));
        }
    }
    let permitted: BTreeSet<(String, Vec<String>)> = PERMITTED
        .iter()
        .map(|(name, circle)| ((*name).to_owned(), circle.iter().map(|module| (*module).to_owned()).collect()))
        .collect();
    let new: Vec<_> = found.difference(&permitted).collect();
    let gone: Vec<_> = permitted.difference(&found).collect();
    assert!(new.is_empty() && gone.is_empty(), "see tests/it/circles.rs: new {new:#?}, gone {gone:#?}");
}

#[test]
fn a_circle_is_found_between_neighbours_whatever_the_form_of_the_import() {
    let sources = [
        ("http", "pub mod a;\npub mod b;\npub struct State(a::A);"),
        ("http::a", "use super::{State, b::{self, B}};"),
        ("http::b", "// use crate::http::a;\n#[cfg(test)]\nmod tests { use super::super::a::A; }"),
        ("http::b::below", "fn f() { crate::http::c::g() }"),
        ("http::c", "use crate::{store::Store, http::{a::A}};"),
        ("store", "use crate::words;"),
    ];
    let sources = sources.map(|(name, code)| (name.split("::").map(str::to_owned).collect(), code.to_owned()));
    let sources = BTreeMap::from(sources);
    let names = |circles: Vec<BTreeSet<Module>>| -> Vec<Vec<String>> {
        circles.into_iter().map(|circle| circle.iter().map(|module| module.join("::")).collect()).collect()
    };
    assert_eq!(names(circles(&edges(&sources))), [["http::a", "http::b", "http::c"]]);
    let without_c = sources.into_iter().filter(|(module, _)| *module != ["http", "c"]).collect();
    assert!(circles(&edges(&without_c)).is_empty());
}

/// The modules of a crate that have files of their own, with their code; tests and the crate's root apart.
fn modules(src: &Path) -> BTreeMap<Module, String> {
    let mut files = Vec::new();
    walk(src, &mut files);
    let module = |path: &Path| -> Module {
        let path = path.strip_prefix(src).unwrap().with_extension("");
        path.iter().map(|name| name.to_string_lossy().into_owned()).collect()
    };
    let read = |path: PathBuf| (module(&path), std::fs::read_to_string(&path).unwrap());
    let is_apart = |module: &Module| matches!(module.join("::").as_str(), "lib" | "main");
    let modules = files.into_iter().map(read);
    modules.filter(|(module, _)| !is_apart(module) && !module.iter().any(|name| name == "tests")).collect()
}

fn walk(dir: &Path, files: &mut Vec<PathBuf>) {
    for path in std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            walk(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

/// Returns the dependencies between siblings.
fn edges(modules: &BTreeMap<Module, String>) -> Edges {
    let mut edges = Edges::new();
    for (module, code) in modules {
        for mut target in paths(module, &without_tests(code)) {
            while !target.is_empty() && !modules.contains_key(&target) {
                target.pop();
            }
            let shared = module.iter().zip(&target).take_while(|(one, other)| one == other).count();
            if let (Some(_), Some(_)) = (module.get(shared), target.get(shared)) {
                edges.entry(module[..=shared].to_vec()).or_default().insert(target[..=shared].to_vec());
            }
        }
    }
    edges
}

/// Code without comment lines, up to its tests.
fn without_tests(code: &str) -> String {
    let code: Vec<&str> = code.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
    let code = code.join("\n");
    let end = code.find("#[cfg(test)]\nmod tests {").unwrap_or(code.len());
    code[..end].to_owned()
}

/// Returns the paths in a module's code that begin with `crate::`, `self::` or `super::`, from the crate's
/// root, with groups expanded.
fn paths(module: &Module, code: &str) -> Vec<Module> {
    let mut found = Vec::new();
    let mut rest = code;
    while let Some(at) = ["crate::", "self::", "super::"].iter().filter_map(|word| rest.find(word)).min() {
        let is_begin = !rest[..at].ends_with(|before: char| before.is_alphanumeric() || "_:".contains(before));
        rest = &rest[at..];
        let mut base = if rest.starts_with("crate::") { Module::new() } else { module.clone() };
        while let Some(above) = rest.strip_prefix("super::") {
            base.pop();
            rest = above;
        }
        rest = ["crate::", "self::"].iter().find_map(|word| rest.strip_prefix(word)).unwrap_or(rest);
        if is_begin {
            take_apart(&base, rest, &mut found);
        }
    }
    found
}

/// Adds the paths that `rest` starts with to `found`, each prefixed with `base`.
fn take_apart(base: &Module, rest: &str, found: &mut Vec<Module>) {
    if let Some(group) = rest.strip_prefix('{') {
        for member in members(group) {
            take_apart(base, member.trim(), found);
        }
        return;
    }
    let end = rest.find(|letter: char| !letter.is_alphanumeric() && letter != '_').unwrap_or(rest.len());
    let mut path = base.clone();
    if end > 0 && &rest[..end] != "self" {
        path.push(rest[..end].to_owned());
    }
    match rest[end..].strip_prefix("::") {
        Some(rest) => take_apart(&path, rest, found),
        None => found.push(path),
    }
}

/// Returns the members of a group whose opening brace was just consumed; nested groups stay whole.
fn members(group: &str) -> Vec<&str> {
    let (mut members, mut depth, mut begin) = (Vec::new(), 0_i32, 0);
    for (at, letter) in group.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                members.push(&group[begin..at]);
                begin = at + 1;
            }
            _ => {}
        }
        if letter == '}' && begin == at + 1 {
            break;
        }
    }
    members
}

/// Returns the sets of modules that depend on each other, directly or indirectly.
fn circles(edges: &Edges) -> Vec<BTreeSet<Module>> {
    let reached = |from: &Module| {
        let (mut reached, mut open) = (BTreeSet::new(), vec![from.clone()]);
        while let Some(module) = open.pop() {
            for next in edges.get(&module).into_iter().flatten() {
                if reached.insert(next.clone()) {
                    open.push(next.clone());
                }
            }
        }
        reached
    };
    let reached: BTreeMap<&Module, BTreeSet<Module>> = edges.keys().map(|module| (module, reached(module))).collect();
    let circle = |module: &Module| -> BTreeSet<Module> {
        let other = |other: &&Module| reached[module].contains(*other) && reached[*other].contains(module);
        reached.keys().copied().filter(other).cloned().collect()
    };
    let circles: BTreeSet<BTreeSet<Module>> = edges.keys().map(circle).filter(|circle| !circle.is_empty()).collect();
    circles.into_iter().collect()
}
