//! The documents: their links, their shell commands, the generated reference pages, and the guide that a server shows.

mod commands;
mod guide;
mod links;
mod reference;

use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The Markdown files that readers find: those at the top, and all of `docs`.
fn pages() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root().join("docs")];
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else {
                found.push(path);
            }
        }
    }
    found.extend(std::fs::read_dir(root()).unwrap().map(|entry| entry.unwrap().path()));
    found.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    found.sort();
    found
}
