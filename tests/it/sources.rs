//! Rules for the sources: `unsafe` only in the kernels, where their README explains each use.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

const KERNELS: &str = "crates/kernels";

fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Whether code (not a comment, not a string) contains `unsafe`.
fn is_unsafe(code: &str) -> bool {
    code.lines().filter(|line| !line.trim_start().starts_with("//")).any(|line| {
        line.match_indices("unsafe").any(|(at, word)| {
            let alone =
                !line[..at].ends_with(|before: char| before.is_alphanumeric() || before == '_' || before == '-');
            let after = line[at + word.len()..].trim_start();
            let rest = ["{", "fn ", "impl", "trait ", "extern "];
            alone && rest.iter().any(|start| after.starts_with(start))
        })
    })
}

#[test]
fn unsafe_code_is_where_the_list_says_why_and_nowhere_else() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = vec![root.join("build.rs")];
    for dir in ["src", "examples", "tests", "crates"] {
        sources(&root.join(dir), &mut files);
    }
    let uses: BTreeSet<String> = files
        .into_iter()
        .filter(|path| is_unsafe(&std::fs::read_to_string(path).unwrap()))
        .map(|path| path.strip_prefix(root).unwrap().to_string_lossy().into_owned())
        // This file's tests contain examples of such code.
        .filter(|path| path != "tests/it/sources.rs")
        .collect();
    let list = std::fs::read_to_string(root.join(KERNELS).join("README.md")).unwrap();
    let rows = list.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` | "));
    let mut listed = BTreeSet::new();
    for (file, reason) in rows {
        assert!(reason.trim_end_matches('|').trim().len() > 20, "{KERNELS}/README.md gives no reason for {file}");
        assert!(listed.insert(format!("{KERNELS}/{file}")), "{KERNELS}/README.md lists {file} twice");
    }
    let missing: Vec<_> = uses.difference(&listed).collect();
    let stale: Vec<_> = listed.difference(&uses).collect();
    assert!(
        missing.is_empty() && stale.is_empty(),
        "{KERNELS}/README.md: not listed {missing:?}, not unsafe any more {stale:?}"
    );
}

#[test]
fn every_crate_but_the_kernels_forbids_unsafe_code() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &Path| std::fs::read_to_string(path).unwrap();
    let top = read(&root.join("Cargo.toml"));
    let (_, lints) = top.split_once("[workspace.lints.rust]").unwrap();
    assert!(lints.split("\n[").next().unwrap().contains("unsafe_code = \"forbid\""), "{lints}");
    let mut members: Vec<PathBuf> =
        std::fs::read_dir(root.join("crates")).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(members.len() >= 3, "{members:?}");
    members.push(root.to_owned());
    for member in members {
        let takes_them = read(&member.join("Cargo.toml")).contains("[lints]\nworkspace = true\n");
        assert_eq!(takes_them, !member.ends_with(KERNELS), "{}", member.display());
    }
}

#[test]
fn a_word_in_a_text_is_not_unsafe_code() {
    assert!(
        is_unsafe("let x = unsafe { f() };")
            && is_unsafe("pub unsafe fn f() {}")
            && is_unsafe("unsafe impl Send for A {}")
    );
    assert!(
        !is_unsafe("// unsafe { f() }")
            && !is_unsafe("style-src 'unsafe-inline' {")
            && !is_unsafe("#[expect(unsafe_code)]")
    );
}
