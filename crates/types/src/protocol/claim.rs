//! A claim as a worker reads it: nothing in it may be unknown.

use serde::Deserialize;
use serde_json::Value;

use super::Claim;

/// Why a claim is not taken.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// Something is missing, or is not what it should be.
    #[error("the claim is not one")]
    Form(#[source] serde_json::Error),
    /// It holds more than is known here.
    #[error("'{0}' is not known here")]
    Unknown(String),
}

/// Reads a claim as the server sent it. What this version does not know is an error, wherever it stands: a run without it
/// would be another run.
///
/// # Errors
/// Where it is not a claim, or the path of the first field that is not known.
pub fn read_claim(sent: &Value) -> Result<Claim, ClaimError> {
    let claim = Claim::deserialize(sent).map_err(ClaimError::Form)?;
    let read = serde_json::to_value(&claim).map_err(ClaimError::Form)?;
    match lost(sent, &read) {
        None => Ok(claim),
        Some(path) => Err(ClaimError::Unknown(path)),
    }
}

/// The first field of `sent` that is not in `read`, as a path. What is known survives being read and written; serde's
/// `deny_unknown_fields` would do the same but for rewards, whose plans are flattened.
fn lost(sent: &Value, read: &Value) -> Option<String> {
    let below = |name: &str, path: String| if path.is_empty() { name.to_owned() } else { format!("{name}.{path}") };
    match (sent, read) {
        (Value::Object(sent), Value::Object(read)) => sent.iter().find_map(|(name, sent)| match read.get(name) {
            Some(read) => lost(sent, read).map(|path| below(name, path)),
            None => Some(below(name, String::new())),
        }),
        (Value::Array(sent), Value::Array(read)) => {
            let mut pairs = sent.iter().zip(read).enumerate();
            pairs.find_map(|(index, (sent, read))| lost(sent, read).map(|path| below(&index.to_string(), path)))
        }
        _ => None,
    }
}
