//! Paths and test cases that the tests of several crates share.

use std::path::{Path, PathBuf};

pub mod templates;

/// Path of a file or folder, relative to the top of the repository.
pub fn in_repository(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name)
}

/// Path of a file or folder below `tests/fixtures`.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name)
}

/// The folder that an environment variable names, relative to the workspace; without the variable, this fixture.
pub fn folder_of(variable: &str, fixture_name: &str) -> PathBuf {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    std::env::var_os(variable).map_or_else(|| fixture(fixture_name), |folder| workspace.join(folder))
}

/// Path of the demo's model.
pub fn tiny_model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny")
}
