//! Paths and test cases that the tests of several crates share.

use std::path::{Path, PathBuf};

pub mod images;
pub mod templates;

/// Returns the absolute path of a file or folder that is given relative to the top of the repository.
pub fn in_repository(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name)
}

/// Returns the path of a file or folder below `tests/fixtures`.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name)
}

/// Returns the folder that an environment variable names, relative to the workspace; if it is not set, the given test fixture.
pub fn folder_of(variable: &str, fixture_name: &str) -> PathBuf {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    std::env::var_os(variable).map_or_else(|| fixture(fixture_name), |folder| workspace.join(folder))
}

/// Returns the path of the model that `rlood demo` trains.
pub fn tiny_model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny")
}
