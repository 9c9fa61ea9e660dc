//! The fuzz targets as a library; see README.md.

/// Where the fixtures lie, from this crate.
const FIXTURES: &str = "../tests/fixtures";

pub mod targets {
    use super::FIXTURES;
    include!("targets.rs");
}
