//! `rlood convert`: converts a TRL run to a job, without a server.
//!
//! Standard output contains only the job, so that it can be piped. Standard error lists refused keys, keys without
//! effect, and missing fields.

use std::io::{IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::{Value, json};

use crate::config::{ConvertArgs, ConvertFormat};
use crate::spec::format::{Format, FormatError, write_job};
use crate::spec::trl::{Conversion, convert};
use crate::spec::{JobSpec, check_metrics};

/// Why a run could not be converted at all.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// The file cannot be read.
    #[error("could not read the file {}", .path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the underlying operation.
        #[source]
        source: std::io::Error,
    },
    /// The file is not valid YAML, JSON or TOML.
    #[error("could not parse the file {}", .path.display())]
    Parse {
        /// Path of the file.
        path: PathBuf,
        /// Position and reason of the syntax error.
        #[source]
        source: FormatError,
    },
    /// The job cannot be represented in the requested format.
    #[error("could not write the job in the requested format")]
    Print(#[source] FormatError),
    /// Standard output is closed.
    #[error("could not write to standard output")]
    Output(#[source] std::io::Error),
}

/// Runs the command. Exit code 1 when a key of the run is refused or not supported.
///
/// # Errors
/// Fails when a file cannot be read or parsed, or the job cannot be printed.
pub fn run(args: &ConvertArgs) -> Result<ExitCode, ConvertError> {
    let mut document = read(&args.trl)?;
    if let Some(path) = &args.peft {
        let peft = read(path)?;
        if let Some(object) = document.as_object_mut() {
            object.insert("peft_config".to_owned(), peft);
        }
    }
    let conversion = convert(&document, None);
    let format = match args.format {
        ConvertFormat::Json => Format::Json,
        ConvertFormat::Yaml => Format::Yaml,
        ConvertFormat::Toml => Format::Toml,
    };
    let text = write_job(&conversion.spec, format).map_err(ConvertError::Print)?;
    let (remarks, refused) = remarks(&conversion);
    std::io::stdout().write_all(text.as_bytes()).map_err(ConvertError::Output)?;
    for line in remarks {
        eprintln!("{line}");
    }
    Ok(if refused { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Returns the remarks about the conversion, one line each, and whether the run is refused.
fn remarks(conversion: &Conversion) -> (Vec<String>, bool) {
    let mut spec = conversion.spec.clone();
    let mut missing = Vec::new();
    let has_rewards = spec.get("rewards").is_some_and(|rewards| !rewards.is_null());
    for (key, what) in [
        ("model", "the id of a registered model"),
        ("dataset", "{\"id\": \"ds_…\"} of an uploaded dataset, or {\"records\": […]}"),
        ("rewards", "a list of rewards, such as [{\"type\": \"length\"}]"),
    ] {
        if spec.get(key).is_none_or(Value::is_null) {
            missing.push(format!("missing: {key}, {what}"));
        }
    }
    // Missing required fields get placeholders, so that only fields of the run are validated.
    for (key, value) in [
        ("model", json!("model")),
        ("dataset", json!({"records": [{"prompt": "x"}]})),
        ("rewards", json!([{"type": "length"}])),
    ] {
        if spec.get(key).is_none_or(Value::is_null) {
            spec[key] = value;
        }
    }
    let eval_dataset_missing = spec.get("eval").is_some_and(|eval| eval.get("dataset").is_none());
    if eval_dataset_missing {
        missing.push("missing: eval.dataset, the evaluation prompts".to_owned());
        spec["eval"]["dataset"] = json!({"records": [{"prompt": "x"}]});
    }
    let (spec, found) = JobSpec::read(spec);
    let mut metrics = check_metrics(&spec);
    // Without rewards the names of reward metrics cannot be checked.
    metrics.retain(|error| has_rewards || !error.detail.contains("rewards/"));
    let wrong: Vec<_> = conversion.errors.iter().cloned().chain(found).chain(metrics).collect();
    let refused = !wrong.is_empty() || !conversion.unsupported.is_empty();
    let wrong = wrong.into_iter().map(|error| {
        let error = conversion.at_submitted_key(error);
        format!("refused: {}: {}", error.pointer, error.detail)
    });
    let unsupported = conversion.unsupported.iter().map(|key| format!("not supported: {}: {}", key.key, key.reason));
    let warnings =
        conversion.warnings.iter().map(|warning| format!("warning: {}: {}", warning.pointer, warning.detail));
    let ignored = conversion.ignored.iter().map(|key| format!("no effect: {}: {}", key.key, key.reason));
    (wrong.chain(unsupported).chain(warnings).chain(ignored).chain(missing).collect(), refused)
}

/// Reads a file, or standard input for `-`.
fn read(path: &Path) -> Result<Value, ConvertError> {
    let unreadable = |source| ConvertError::Read { path: path.to_owned(), source };
    let text = if path == Path::new("-") {
        let mut text = String::new();
        let mut input = std::io::stdin();
        if input.is_terminal() {
            eprintln!("reading the job from standard input");
        }
        input.read_to_string(&mut text).map_err(unreadable)?;
        text
    } else {
        std::fs::read_to_string(path).map_err(unreadable)?
    };
    let format = Format::of_file_name(&path.to_string_lossy());
    format.read(&text).map_err(|source| ConvertError::Parse { path: path.to_owned(), source })
}
