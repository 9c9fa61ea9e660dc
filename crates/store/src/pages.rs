//! Lists in pages: rows, and an opaque cursor for the next page.

use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use futures::future::BoxFuture;
use sqlx::sqlite::SqliteRow;

use super::{Doing, Store, StoreError, column};

/// One page of a list.
#[derive(Debug, Clone)]
pub struct Page<T> {
    /// Rows of the page.
    pub data: Vec<T>,
    /// Cursor of the next page; `None` = this is the last one.
    pub next: Option<String>,
}

/// Creates an opaque cursor from the sort keys of a page's last row.
pub(super) fn cursor<const N: usize>(list: &str, keys: [&str; N]) -> String {
    URL_SAFE_NO_PAD.encode(format!("{list}\u{1f}{}", keys.join("\u{1f}")))
}

/// Returns the keys in a cursor of this list.
pub(super) fn parse_cursor<const N: usize>(list: &str, text: &str) -> Result<[String; N], StoreError> {
    let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|_| StoreError::BadCursor)?;
    let plain = String::from_utf8(bytes).map_err(|_| StoreError::BadCursor)?;
    let mut parts = plain.split('\u{1f}').map(str::to_owned);
    if parts.next().as_deref() != Some(list) {
        return Err(StoreError::BadCursor);
    }
    parts.collect::<Vec<_>>().try_into().map_err(|_| StoreError::BadCursor)
}

/// A list that shows the newest items first.
pub(super) struct Newest<'a> {
    /// Name of the list, in cursors and in messages.
    pub list: &'static str,
    /// Statement that selects rows with `created_at` and `id`, ordered by both, from before (?1, ?2), of an owner (?3; NULL
    /// = all), at most ?4.
    pub sql: &'static str,
    /// Owner of the rows; `None` = all owners.
    pub owner: Option<&'a str>,
    /// Cursor of the previous page.
    pub after: Option<&'a str>,
    /// Number of rows per page, 1 to 1000.
    pub limit: u32,
    /// Further parameters of the statement, from ?5 on.
    pub more: &'a [Option<&'a str>],
}

impl Store {
    /// Returns a page of a list.
    pub(super) async fn newest<T>(
        &self,
        newest: Newest<'_>,
        read: impl Fn(&SqliteRow) -> Result<T, StoreError>,
    ) -> Result<Page<T>, StoreError> {
        let (list, limit) = (newest.list, newest.limit.clamp(1, 1000));
        let rows = self.newest_rows(newest, limit).await?;
        let place = |row: &SqliteRow| Ok((column::<i64>(row, "created_at")?.to_string(), column::<String>(row, "id")?));
        let data = rows.iter().map(|row| Ok((read(row)?, place(row)?))).collect::<Result<Vec<_>, StoreError>>()?;
        let page = page(data, limit, |(_, (created_at, id))| cursor(list, [created_at, id]));
        Ok(Page { data: page.data.into_iter().map(|(row, _)| row).collect(), next: page.next })
    }

    /// Returns the rows of a page, and the first one of the next page.
    fn newest_rows<'a>(&'a self, newest: Newest<'a>, limit: u32) -> BoxFuture<'a, Result<Vec<SqliteRow>, StoreError>> {
        Box::pin(async move {
            let (before, id) = newest_after(newest.list, newest.after)?;
            let mut query = sqlx::query(newest.sql).bind(before).bind(id).bind(newest.owner).bind(i64::from(limit) + 1);
            for value in newest.more {
                query = query.bind(*value);
            }
            query.fetch_all(&self.readers).await.doing("read a page of a list of objects")
        })
    }
}

/// Returns where a newest-first list continues: the time and the id of the last row of the previous page.
pub(super) fn newest_after(list: &str, after: Option<&str>) -> Result<(i64, String), StoreError> {
    let Some(after) = after else { return Ok((i64::MAX, String::new())) };
    let [created_at, id] = parse_cursor(list, after)?;
    Ok((cursor_key(&created_at)?, id))
}

/// Parses a key of a cursor.
pub(super) fn cursor_key<T: FromStr>(text: &str) -> Result<T, StoreError> {
    text.parse().map_err(|_| StoreError::BadCursor)
}

/// Turns `limit + 1` fetched rows into a page of `limit`.
pub(super) fn page<T>(mut data: Vec<T>, limit: u32, key: impl FnOnce(&T) -> String) -> Page<T> {
    let limit = limit as usize;
    let more = data.len() > limit;
    data.truncate(limit);
    let next = if more { data.last().map(key) } else { None };
    Page { data, next }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_survives_and_another_lists_is_refused() {
        let text = cursor("jobs", ["17", "job_x"]);
        assert_eq!(parse_cursor::<2>("jobs", &text).unwrap(), ["17", "job_x"]);
        assert!(matches!(parse_cursor::<2>("models", &text), Err(StoreError::BadCursor)));
        assert!(matches!(parse_cursor::<1>("jobs", &text), Err(StoreError::BadCursor)));
        assert!(matches!(parse_cursor::<1>("jobs", "ß"), Err(StoreError::BadCursor)));
    }
}
