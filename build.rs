//! Lists the dashboard's files for `src/http/web.rs`, and the documents for `src/http/guide.rs`.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"));
    let web = files_below(&root.join("web"), |name| !name.ends_with(".md"));
    let mut hasher = DefaultHasher::new();
    for (name, path) in &web {
        (name, read(path)).hash(&mut hasher);
    }
    write("web_files.rs", &format!("(\n\"{:016x}\",\n{},\n)\n", hasher.finish(), list(&web)));
    // The pictures of pages in docs/images/pages are for reviews only.
    let docs = files_below(&root.join("docs"), |name| {
        !name.starts_with("images/pages/") && (name.ends_with(".md") || name.ends_with(".png"))
    });
    write("guide_files.rs", &format!("{}\n", list(&docs)));
}

/// The files below a folder that a filter takes, by their names in it.
fn files_below(root: &Path, is_wanted: impl Fn(&str) -> bool) -> BTreeMap<String, PathBuf> {
    println!("cargo::rerun-if-changed={}", root.display());
    let (mut files, mut folders) = (BTreeMap::new(), vec![root.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
            let path = entry.expect("the folder can be read").path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let name = path.strip_prefix(root).expect("below the folder").to_string_lossy().replace('\\', "/");
            if is_wanted(&name) {
                files.insert(name, path);
            }
        }
    }
    files
}

fn read(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The files as a Rust expression: an array of names and contents.
fn list(files: &BTreeMap<String, PathBuf>) -> String {
    let lines = files.iter().map(|(name, path)| format!("    ({name:?}, include_bytes!({path:?})),\n"));
    format!("&[\n{}]", lines.collect::<String>())
}

fn write(name: &str, text: &str) {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    fs::write(out.join(name), text).expect("OUT_DIR can be written");
}
