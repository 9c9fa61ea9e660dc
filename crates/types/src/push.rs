//! Pushes: a checkpoint uploaded to a repository of a model hub, with a model card.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::export::ExportDtype;

/// The files that are pushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PushFormat {
    /// The adapter alone, for PEFT and vLLM beside the base model.
    Adapter,
    /// A model directory: the base weights with the adapter's update added.
    Merged,
}

impl PushFormat {
    /// Returns the name in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            PushFormat::Adapter => "adapter",
            PushFormat::Merged => "merged",
        }
    }
}

/// A request to push a checkpoint to a model hub.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PushRequest {
    /// The repository, `org/name`. It is created if it does not exist.
    #[schema(example = "org/name")]
    pub repo: String,
    /// The branch that gets the commit; null = main. It is created if it does not exist.
    #[serde(default)]
    pub revision: Option<String>,
    /// The files to push; null = the adapter, or for full fine-tuning the merged model.
    #[serde(default)]
    pub format: Option<PushFormat>,
    /// Data type of a merged model's weights; null = that of the base model.
    #[serde(default)]
    pub dtype: Option<ExportDtype>,
    /// Whether the repository is created as private. An existing public repository is then refused.
    #[serde(default)]
    pub private: bool,
    /// Whether the model card shows some prompts and completions. Without it, it contains none.
    #[serde(default)]
    pub with_samples: bool,
    /// Whether a model card is written as README.md. It replaces one that the repository has.
    #[serde(default = "yes")]
    pub card: bool,
}

fn yes() -> bool {
    true
}

impl PushRequest {
    /// Checks that the fields belong together. Returns the field that does not, and why.
    ///
    /// # Errors
    /// The name of a field, and what is wrong with it.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        match (self.format, self.dtype) {
            (_, Some(ExportDtype::Q8_0)) => {
                Err(("dtype", "q8_0 is a data type of the export format gguf: set dtype to float16".to_owned()))
            }
            (Some(PushFormat::Adapter), Some(_)) => {
                Err(("dtype", "an adapter is pushed unchanged: leave dtype out, or set format to merged".to_owned()))
            }
            _ if self.with_samples && !self.card => Err((
                "with_samples",
                "samples are a part of the model card: leave card out, or set it to true".to_owned(),
            )),
            _ => Ok(()),
        }
    }
}

/// The stage of a push.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PushStage {
    /// The merged model is being written; the progress counts weights.
    Exporting,
    /// The files are being uploaded; the progress counts bytes that the hub has.
    Uploading,
}

/// Why a push failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PushError {
    /// Stable error code in snake_case.
    pub code: String,
    /// Human-readable message in English.
    pub message: String,
}

/// The result of a push.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PushResult {
    /// The commit, 40 hexadecimal digits.
    pub commit: String,
    /// Page of the repository at the branch.
    pub url: String,
    /// Whether the push made a commit. If not, the branch had the same files already.
    pub is_new: bool,
}
