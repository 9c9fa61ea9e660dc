//! Exports: a checkpoint's weights in another format, for other programs.
//!
//! The server passes an [`ExportTask`] to a child process (`rlood_worker::exporter`), which writes a directory and
//! reports its progress ([`ExportLine`]).

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::one_shot::ChildLine;
use crate::protocol::FileEntry;
use crate::spec::FourBitPlan;

/// Data type of exported weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ExportDtype {
    /// 32-bit IEEE floating point.
    Float32,
    /// 16-bit IEEE floating point.
    Float16,
    /// 16-bit brain float (bfloat16).
    Bfloat16,
    /// Blocks of 32 8-bit codes with a scale in float16, about 8.5 bits per weight. Only for the format gguf.
    Q8_0,
}

impl ExportDtype {
    /// Returns the name in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            ExportDtype::Float32 => "float32",
            ExportDtype::Float16 => "float16",
            ExportDtype::Bfloat16 => "bfloat16",
            ExportDtype::Q8_0 => "q8_0",
        }
    }
}

/// Format of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ExportFormat {
    /// A model directory: the base weights with the adapter's update added.
    Merged,
    /// The same weights and the tokenizer as one file for llama.cpp, `model.gguf`.
    Gguf,
    /// The adapter alone for llama.cpp, `adapter.gguf`, to be used with the base model as GGUF.
    GgufAdapter,
}

/// A request for an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExportRequest {
    /// Format of the export.
    pub format: ExportFormat,
    /// Data type of the weights; null = that of the base model, and float32 for gguf_adapter. q8_0 is for gguf only; gguf_adapter
    /// takes float32 and float16.
    #[serde(default)]
    pub dtype: Option<ExportDtype>,
    /// The context length that gguf writes, in tokens; null = that of the model. llama.cpp ignores attention windows, so a model with one needs
    /// a context that is not longer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context_length: Option<u64>,
}

impl ExportRequest {
    /// Checks that the fields belong together. Returns the field that does not, and why.
    ///
    /// # Errors
    /// The name of a field, and what is wrong with it.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        let dtype = self.dtype.map_or("", ExportDtype::as_str);
        match (self.format, self.dtype) {
            (ExportFormat::Merged, Some(ExportDtype::Q8_0)) => Err((
                "dtype",
                "q8_0 is a data type of the format gguf: set format to gguf, or dtype to float16".to_owned(),
            )),
            (ExportFormat::GgufAdapter, Some(ExportDtype::Bfloat16 | ExportDtype::Q8_0)) => {
                Err(("dtype", format!("the format gguf_adapter has no {dtype}: set dtype to float32 or float16")))
            }
            (ExportFormat::Merged | ExportFormat::GgufAdapter, _) if self.context_length.is_some() => {
                Err(("context_length", "only the format gguf has a context length: leave it out".to_owned()))
            }
            _ if self.context_length == Some(0) => Err(("context_length", "must be at least 1".to_owned())),
            _ => Ok(()),
        }
    }
}

/// The task of an export process, sent to its standard input as one line of JSON.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ExportTask {
    /// Directory of the base model.
    pub model_dir: PathBuf,
    /// Directory of the checkpoint.
    pub checkpoint_dir: PathBuf,
    /// Whether the checkpoint is an adapter.
    pub is_adapter: bool,
    /// The 4-bit format to which the job quantized the base model when it was loaded.
    #[serde(default)]
    pub four_bit: Option<FourBitPlan>,
    /// The request for the export.
    pub request: ExportRequest,
    /// The output directory, which is empty.
    pub out_dir: PathBuf,
}

/// The last line of an export process: its result.
pub type ExportLine = ChildLine<(), ExportReport>;

/// The result of an export process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExportReport {
    /// The output directory contains the complete export.
    Exported(ExportResult),
    /// Nothing was exported, for this reason.
    Failed(ExportError),
}

/// Why an export failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExportError {
    /// Stable error code in snake_case.
    pub code: String,
    /// Human-readable message in English.
    pub message: String,
}

/// The content of an export.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExportResult {
    /// Data type of the weights.
    pub dtype: ExportDtype,
    /// Files of the export, sorted by name.
    pub files: Vec<FileEntry>,
    /// How much of the adapter's update survives rounding; null without an adapter.
    pub survived: Option<Survived>,
    /// Advice if too little of the update survives; null otherwise.
    pub advice: Option<String>,
}

/// How much of an adapter's update survives rounding to the export's data type.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Survived {
    /// Fraction of the update that survives; 1 = all of it.
    pub fraction: f64,
    /// Cosine between the update before and after rounding; 1 = same direction.
    pub cosine: f64,
}

/// Cosine below which an export advises another format.
pub const LOW_COSINE: f64 = 0.95;
/// Largest finite 16-bit float.
const LARGEST_FLOAT16: f32 = 65504.0;

/// Returns advice if too little of the update survives; `largest` is the largest merged weight.
pub fn advice(dtype: ExportDtype, survived: Survived, largest: f32) -> Option<String> {
    if survived.cosine >= LOW_COSINE {
        return None;
    }
    let instead = match dtype {
        ExportDtype::Bfloat16 if largest < LARGEST_FLOAT16 => {
            "export with dtype float32 or float16, or use the adapter itself"
        }
        ExportDtype::Q8_0 => "export with dtype float32 or float16, or use gguf_adapter",
        ExportDtype::Bfloat16 | ExportDtype::Float16 => "export with dtype float32, or use the adapter itself",
        ExportDtype::Float32 => "use the adapter itself, without merging it",
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
