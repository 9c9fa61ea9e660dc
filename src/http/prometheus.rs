//! Prometheus' text format.

use std::fmt::{Display, Write as _};

/// Appends the `# HELP` and `# TYPE` lines of a metric.
pub(super) fn family(text: &mut String, name: &str, kind: &str, help: &str) {
    // The result is ignored, because writing to a String cannot fail.
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

/// Appends a value of a metric; `name` includes its labels.
pub(super) fn line(text: &mut String, name: &str, value: impl Display) {
    let _ = writeln!(text, "{name} {value}");
}
