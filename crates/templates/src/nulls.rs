//! Null values, which the templates of a mapping may not turn into text.

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

/// Error text for a null in a text, in an environment that refuses it.
pub const NULL_IN_TEXT: &str = "a null value cannot be part of a text";

/// Refuses null.
pub(super) fn refuse_null(value: &Value) -> Result<(), Error> {
    if value.is_none() { Err(Error::new(ErrorKind::InvalidOperation, NULL_IN_TEXT)) } else { Ok(()) }
}

/// Refuses arguments of which one is null.
pub(super) fn refuse_null_in(values: &[Value]) -> Result<(), Error> {
    values.iter().try_for_each(refuse_null)
}

/// Refuses null, and a list that contains null.
pub(super) fn refuse_null_items(value: &Value) -> Result<(), Error> {
    refuse_null(value)?;
    if value.kind() != ValueKind::Seq {
        return Ok(());
    }
    value.try_iter()?.try_for_each(|item| refuse_null(&item))
}
