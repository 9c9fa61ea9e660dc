//! Exports: a checkpoint's weights in another form, for other programs.
//!
//! The server hands an [`ExportTask`] to a process of its own (`rlood_worker::exporter`), which writes a directory and tells how far
//! it is ([`ExportLine`]).

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::one_shot::ChildLine;
use crate::protocol::FileEntry;

/// How weights are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ExportDtype {
    /// 32-bit float.
    Float32,
    /// 16-bit IEEE float.
    Float16,
    /// bfloat16.
    Bfloat16,
}

impl ExportDtype {
    /// The name in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            ExportDtype::Float32 => "float32",
            ExportDtype::Float16 => "float16",
            ExportDtype::Bfloat16 => "bfloat16",
        }
    }
}

/// What an export is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ExportFormat {
    /// A model directory: base weights with the adapter's update added.
    Merged,
}

/// An export, as asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExportRequest {
    /// What it is.
    pub format: ExportFormat,
    /// How the weights are stored; null = as the base model's.
    #[serde(default)]
    pub dtype: Option<ExportDtype>,
}

/// What to write; goes to the child's standard input as one line of JSON.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ExportTask {
    /// The base model's directory.
    pub model_dir: PathBuf,
    /// The checkpoint's directory.
    pub checkpoint_dir: PathBuf,
    /// Whether the checkpoint is an adapter.
    pub is_adapter: bool,
    /// What was asked for.
    pub request: ExportRequest,
    /// An empty directory.
    pub out_dir: PathBuf,
}

/// A line of the child's report.
pub type ExportLine = ChildLine<(), ExportReport>;

/// What came of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExportReport {
    /// The directory is whole.
    Exported(ExportResult),
    /// Nothing was written: why.
    Failed(ExportError),
}

/// Why there is no export.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExportError {
    /// Stable, snake_case.
    pub code: String,
    /// For people.
    pub message: String,
}

/// What an export holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExportResult {
    /// How the weights are stored.
    pub dtype: ExportDtype,
    /// Its files, by name.
    pub files: Vec<FileEntry>,
    /// What of the adapter's update survives rounding; null without an adapter.
    pub survived: Option<Survived>,
    /// What to do where too little of it survives.
    pub advice: Option<String>,
}

/// What of an adapter's update survives the rounding to the dtype.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Survived {
    /// The part of the update that is still there: 1 = all of it.
    pub fraction: f64,
    /// The cosine between the update and what became of it: 1 = nothing but the update.
    pub cosine: f64,
}

/// Below this cosine an export says what to do instead.
pub const LOW_COSINE: f64 = 0.95;
/// The largest number of 16-bit floats.
const LARGEST_FLOAT16: f32 = 65504.0;

/// What to do where too little of the update survives; `largest` is the largest merged weight.
pub fn advice(dtype: ExportDtype, survived: Survived, largest: f32) -> Option<String> {
    if survived.cosine >= LOW_COSINE {
        return None;
    }
    let instead = match dtype {
        ExportDtype::Bfloat16 if largest < LARGEST_FLOAT16 => {
            "export with dtype float32 or float16, or use the adapter itself"
        }
        ExportDtype::Bfloat16 | ExportDtype::Float16 => "export with dtype float32, or use the adapter itself",
        ExportDtype::Float32 => "use the adapter itself",
    };
    Some(format!(
        "rounding to {} keeps {:.0} % of the adapter's update (cosine {:.2}), so the merged model behaves more like the base model: {instead}",
        dtype.as_str(),
        survived.fraction * 100.0,
        survived.cosine
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_is_given_where_the_update_is_lost() {
        let left = |fraction, cosine| Survived { fraction, cosine };
        assert_eq!(advice(ExportDtype::Bfloat16, left(1.0, 0.987), 1.0), None);
        let lost = advice(ExportDtype::Bfloat16, left(0.53, 0.639), 1.0).unwrap();
        assert!(lost.contains("keeps 53 %") && lost.contains("float32 or float16"), "{lost}");
        assert!(!advice(ExportDtype::Bfloat16, left(0.53, 0.639), 1e6).unwrap().contains("or float16"));
        assert!(advice(ExportDtype::Float16, left(0.45, 0.582), 1.0).unwrap().contains("float32"));
    }
}
