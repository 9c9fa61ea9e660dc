//! Parses a claim that a worker received. Unknown fields are errors.

use serde::Deserialize;
use serde_json::Value;

use super::Claim;

/// Why a claim is rejected.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// A field is missing, or has an invalid value.
    #[error("the job that the server sent has a missing or invalid field")]
    Form(#[source] serde_json::Error),
    /// The claim has a field that this version does not know.
    #[error("the job that the server sent has the field '{0}', which this version of rlood does not know")]
    Unknown(String),
}

/// Parses a claim as the server sent it. An unknown field anywhere is an error, because the run would differ without it.
///
/// # Errors
/// Fails if the value is not a claim; names the path of the first unknown field.
pub fn read_claim(sent: &Value) -> Result<Claim, ClaimError> {
    let claim = Claim::deserialize(sent).map_err(ClaimError::Form)?;
    let read = serde_json::to_value(&claim).map_err(ClaimError::Form)?;
    match lost(sent, &read) {
        None => Ok(claim),
        Some(path) => Err(ClaimError::Unknown(path)),
    }
}

/// Returns the path of the first field of `sent` that is missing in `read`. Known fields survive a round trip through the types.
/// serde's `deny_unknown_fields` would do the same, but does not work for rewards, whose plans are flattened.
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
