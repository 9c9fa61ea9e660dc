//! Lists the dashboard's files for `src/http/web.rs`.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::{env, fs};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=web");
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR")).join("web");
    let (mut files, mut folders) = (BTreeMap::new(), vec![root.clone()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
            let path = entry.expect("web can be read").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end != "md") {
                let name = path.strip_prefix(&root).expect("below web").to_string_lossy().replace('\\', "/");
                let bytes = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
                files.insert(name, (path, bytes));
            }
        }
    }
    let mut hasher = DefaultHasher::new();
    let mut list = String::new();
    for (name, (path, bytes)) in &files {
        (name, bytes).hash(&mut hasher);
        list.push_str(&format!("    ({name:?}, include_bytes!({path:?})),\n"));
    }
    let text = format!("(\n\"{:016x}\",\n&[\n{list}],\n)\n", hasher.finish());
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    fs::write(out.join("web_files.rs"), text).expect("OUT_DIR can be written");
}
