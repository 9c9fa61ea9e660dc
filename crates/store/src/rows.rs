//! Columns of a row as the types they hold, and what goes wrong with them.

use std::str::FromStr;

use serde::Serialize;
use serde::de::{DeserializeOwned, IntoDeserializer};
use serde_json::Value;
use sqlx::sqlite::SqliteRow;
use sqlx::{Row, Sqlite};

use super::StoreError;
use crate::id::IdError;

/// Says what a statement was for when it fails.
pub(super) trait Doing<T> {
    fn doing(self, doing: &'static str) -> Result<T, StoreError>;
}

impl<T> Doing<T> for Result<T, sqlx::Error> {
    fn doing(self, doing: &'static str) -> Result<T, StoreError> {
        self.map_err(|source| StoreError::Database { doing, source })
    }
}

/// What a stored value is not: the column, and why.
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

/// A column that holds JSON.
pub(super) fn json_column<T: DeserializeOwned>(row: &SqliteRow, name: &'static str) -> Result<T, StoreError> {
    serde_json::from_str(column::<&str>(row, name)?).map_err(corrupt(name))
}

/// A column that holds an id.
pub(super) fn id_column<T: FromStr<Err = IdError>>(row: &SqliteRow, name: &'static str) -> Result<T, StoreError> {
    column::<&str>(row, name)?.parse().map_err(corrupt(name))
}

/// A column that holds a number that is never negative.
pub(super) fn count_column(row: &SqliteRow, name: &'static str) -> Result<u64, StoreError> {
    u64::try_from(column::<i64>(row, name)?).map_err(corrupt(name))
}

/// A column that holds the serde name of a plain enum, or NULL.
pub(super) fn word_column<T: DeserializeOwned>(row: &SqliteRow, name: &'static str) -> Result<Option<T>, StoreError> {
    column::<Option<&str>>(row, name)?
        .map(|word| T::deserialize(IntoDeserializer::<serde::de::value::Error>::into_deserializer(word)))
        .transpose()
        .map_err(corrupt(name))
}

/// The serde name of a plain enum.
pub(super) fn word<T: Serialize>(value: &T) -> Result<String, StoreError> {
    match serde_json::to_value(value).map_err(corrupt("word"))? {
        Value::String(word) => Ok(word),
        other => Err(corrupt("word")(format!("{other} is not a word"))),
    }
}

/// A value as a column holds it.
pub(super) fn to_json<T: Serialize>(what: &'static str, value: &T) -> Result<String, StoreError> {
    serde_json::to_string(value).map_err(corrupt(what))
}

/// SQLite's integers are signed; no count comes near the limit, and a client's absurd one must only not match.
pub(super) fn int(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
