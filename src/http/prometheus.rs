//! Prometheus' text format.

use std::fmt::{Display, Write as _};

/// Starts the lines of one metric.
pub(super) fn family(text: &mut String, name: &str, kind: &str, help: &str) {
    // Writing to a String cannot fail.
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

/// Adds a value; `name` includes its labels.
pub(super) fn line(text: &mut String, name: &str, value: impl Display) {
    let _ = writeln!(text, "{name} {value}");
}
