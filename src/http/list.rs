//! Pages and times, shared by all lists and resources.

use jiff::Timestamp;
use serde::{Deserialize, Serialize, Serializer};
use utoipa::openapi::schema::{KnownFormat, ObjectBuilder, SchemaFormat, Type};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{IntoParams, PartialSchema, ToSchema};

use super::error::{Code, Problem};
use crate::store::Page;

/// Default number of items per page.
const DEFAULT_LIMIT: u32 = 20;
/// Maximum number of items per page.
pub const MAX_LIMIT: u32 = 100;

#[derive(Debug, Clone, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct PageQuery {
    /// The cursor `next` of the previous page.
    pub after: Option<String>,
    /// Items per page, 1 to 100.
    #[param(minimum = 1, maximum = 100, default = 20)]
    pub limit: Option<u32>,
}

impl PageQuery {
    /// Returns the page size (`limit` of the query), checked.
    ///
    /// # Errors
    /// Answers 400 when the page size is outside 1 to 100.
    pub fn limit(&self) -> Result<u32, Problem> {
        limit(self.limit)
    }
}

/// Checks a page size; `None` = the default.
///
/// # Errors
/// Answers 400 when the page size is outside 1 to 100.
pub fn limit(given: Option<u32>) -> Result<u32, Problem> {
    match given {
        None => Ok(DEFAULT_LIMIT),
        Some(limit) if (1..=MAX_LIMIT).contains(&limit) => Ok(limit),
        Some(limit) => {
            let detail = format!("the parameter 'limit' must be between 1 and {MAX_LIMIT}, not {limit}");
            Err(Problem::new(Code::InvalidQuery, detail.clone()).item("?limit", "out_of_range", detail))
        }
    }
}

/// One page of a list, newest item first.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct List<T> {
    /// The items of this page.
    pub data: Vec<T>,
    /// The cursor to send as `after` for the next page; null on the last page.
    pub next: Option<String>,
}

impl<T> List<T> {
    /// Converts a page of database rows to the API's types.
    pub fn of<R>(page: Page<R>, word: impl FnMut(R) -> T) -> Self {
        Self { data: page.data.into_iter().map(word).collect(), next: page.next }
    }
}

/// A time, stored as Unix milliseconds and written to JSON as RFC 3339 in UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Time(pub i64);

impl Serialize for Time {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let time = Timestamp::from_millisecond(self.0).map_err(serde::ser::Error::custom)?;
        serializer.collect_str(&format_args!("{time:.3}"))
    }
}

impl PartialSchema for Time {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new()
            .schema_type(Type::String)
            .format(Some(SchemaFormat::KnownFormat(KnownFormat::DateTime)))
            .description(Some("RFC 3339, UTC"))
            .examples([serde_json::json!("2026-01-01T00:00:00.000Z")])
            .build()
            .into()
    }
}

impl ToSchema for Time {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_rfc_3339_with_milliseconds() {
        assert_eq!(serde_json::to_string(&Time(1_767_225_600_007)).unwrap(), "\"2026-01-01T00:00:00.007Z\"");
    }
}
