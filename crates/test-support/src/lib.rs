//! What the tests of several crates share.

use std::path::{Path, PathBuf};

pub mod templates;

/// A file or folder, by its path from the top of the repository.
pub fn in_repository(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name)
}

/// A file or folder below `tests/fixtures`.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name)
}

/// The folder that an environment variable names, relative to the workspace; else this fixture.
pub fn folder_of(variable: &str, fixture_name: &str) -> PathBuf {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    std::env::var_os(variable).map_or_else(|| fixture(fixture_name), |folder| workspace.join(folder))
}

/// The model of the demo.
pub fn tiny_model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny")
}
