//! Why a completion ended.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Why a completion ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// An end-of-sequence token or a stop string was generated.
    Stop,
    /// The completion reached `max_completion_length` and is truncated.
    Length,
}
