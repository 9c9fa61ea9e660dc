//! Typed access to the columns of a row, and its errors.

use std::str::FromStr;

use serde::Serialize;
use serde::de::{DeserializeOwned, IntoDeserializer};
use serde_json::Value;
use sqlx::sqlite::SqliteRow;
use sqlx::{Row, Sqlite};

use super::StoreError;
use crate::id::IdError;

/// Adds the purpose of an SQL statement to its error.
pub(super) trait Doing<T> {
    fn doing(self, doing: &'static str) -> Result<T, StoreError>;
}

impl<T> Doing<T> for Result<T, sqlx::Error> {
    fn doing(self, doing: &'static str) -> Result<T, StoreError> {
        self.map_err(|source| StoreError::Database { doing, source })
    }
}

/// Creates the error for a stored value that cannot be parsed, from its column and the cause.
pub(super) fn corrupt<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
    what: &'static str,
) -> impl FnOnce(E) -> StoreError {
    move |source| StoreError::Corrupt { what, source: source.into() }
}

pub(super) fn column<'r, T>(row: &'r SqliteRow, name: &'static str) -> Result<T, StoreError>
where
    T: sqlx::Decode<'r, Sqlite> + sqlx::Type<Sqlite>,
{
    row.try_get(name).map_err(corrupt(name))
}

/// Reads a column that contains JSON.
pub(super) fn json_column<T: DeserializeOwned>(row: &SqliteRow, name: &'static str) -> Result<T, StoreError> {
    serde_json::from_str(column::<&str>(row, name)?).map_err(corrupt(name))
}

/// Reads a column that contains an id.
pub(super) fn id_column<T: FromStr<Err = IdError>>(row: &SqliteRow, name: &'static str) -> Result<T, StoreError> {
    column::<&str>(row, name)?.parse().map_err(corrupt(name))
}

/// Reads a column with a number that is never negative.
pub(super) fn count_column(row: &SqliteRow, name: &'static str) -> Result<u64, StoreError> {
    u64::try_from(column::<i64>(row, name)?).map_err(corrupt(name))
}

/// Reads a column with the serde name of a plain enum, or NULL.
pub(super) fn variant_column<T: DeserializeOwned>(
    row: &SqliteRow,
    name: &'static str,
) -> Result<Option<T>, StoreError> {
    column::<Option<&str>>(row, name)?
        .map(|word| T::deserialize(IntoDeserializer::<serde::de::value::Error>::into_deserializer(word)))
        .transpose()
        .map_err(corrupt(name))
}

/// Returns the serde name of a plain enum's variant.
pub(super) fn variant_name<T: Serialize>(value: &T) -> Result<String, StoreError> {
    match serde_json::to_value(value).map_err(corrupt("word"))? {
        Value::String(word) => Ok(word),
        other => Err(corrupt("word")(format!("the value {other} is not a text"))),
    }
}

/// Serializes a value for a JSON column.
pub(super) fn to_json<T: Serialize>(what: &'static str, value: &T) -> Result<String, StoreError> {
    serde_json::to_string(value).map_err(corrupt(what))
}

/// Converts a count to SQLite's signed integer. No real count is near the limit; an absurd one from a client just does not match.
pub(super) fn int(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
