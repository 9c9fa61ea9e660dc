//! The memory of a row group's columns: pages, dictionaries, and the rows that are read ahead.

use std::sync::{Mutex, MutexGuard, PoisonError};

use parquet::errors::ParquetError;

/// A page, unpacked or not; a dictionary too.
pub const MAX_PAGE_BYTES: u64 = 64 << 20;
/// What all columns hold at once. A row may be all of it, copied as JSON and once more for the templates, so that the three together
/// stay below 256 MiB.
pub const MAX_HELD_BYTES: u64 = 80 << 20;
/// Readers and decoders of a column, whatever it holds.
const COLUMN_BYTES: u64 = 4 << 10;

/// Why a page is not read; it travels inside the crate's error.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TooLarge {
    /// A single page.
    #[error("the column '{column}' has a {what} of {bytes} bytes, at most 64 MiB are read: {advice}")]
    Page { column: String, what: &'static str, bytes: u64, advice: &'static str },
    /// All columns together.
    #[error(
        "its columns need {bytes} bytes of memory at once, at most 80 MiB are used (the last of them: '{column}'): write the file with smaller pages, or leave columns out with map.drop or map.keep"
    )]
    Together { column: String, bytes: u64 },
}

impl TooLarge {
    /// That reason, if it is one.
    pub fn of(error: &ParquetError) -> Option<&TooLarge> {
        match error {
            ParquetError::External(error) => error.downcast_ref(),
            _ => None,
        }
    }
}

impl From<TooLarge> for ParquetError {
    fn from(error: TooLarge) -> ParquetError {
        ParquetError::External(Box::new(error))
    }
}

/// What a column holds.
#[derive(Debug, Default, Clone, Copy)]
struct Column {
    dictionary: u64,
    /// Pages that the rows read ahead lie in.
    pages: u64,
    /// The last of them, which the next batch begins in.
    last: u64,
    /// The batch in which its last page was read.
    batch: u64,
}

impl Column {
    fn held(&self) -> u64 {
        let bytes = self.dictionary.saturating_add(self.pages);
        if bytes == 0 { 0 } else { bytes.saturating_add(COLUMN_BYTES) }
    }
}

#[derive(Debug)]
struct State {
    columns: Vec<Column>,
    batch: u64,
    /// The sum over all columns.
    held: u64,
}

/// What the columns of a row group hold.
#[derive(Debug)]
pub struct Budget {
    state: Mutex<State>,
}

impl Budget {
    pub fn new(columns: usize) -> Budget {
        Budget { state: Mutex::new(State { columns: vec![Column::default(); columns], batch: 0, held: 0 }) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Before the row whose reading makes every column read a batch of rows.
    pub fn begin_batch(&self) {
        self.state().batch += 1;
    }

    /// After that row: columns that needed no other page for the batch hold their last one alone.
    pub fn end_batch(&self) {
        let State { columns, batch, held } = &mut *self.state();
        for column in columns.iter_mut().filter(|column| column.batch != *batch) {
            *held = held.saturating_sub(column.held());
            column.pages = column.last;
            *held = held.saturating_add(column.held());
        }
    }

    /// Counts a page before it is read.
    pub fn page(&self, at: usize, name: &str, bytes: u64) -> Result<(), TooLarge> {
        self.change(at, name, |column, batch| {
            if column.batch != batch {
                (column.batch, column.pages) = (batch, column.last);
            }
            column.pages = column.pages.saturating_add(bytes);
            column.last = bytes;
        })
    }

    /// Counts what the page just read needs beyond its bytes.
    pub fn grow(&self, at: usize, name: &str, bytes: u64) -> Result<(), TooLarge> {
        self.change(at, name, |column, _| {
            column.pages = column.pages.saturating_add(bytes);
            column.last = column.last.saturating_add(bytes);
        })
    }

    /// Counts a dictionary, which stays as long as the column is read.
    pub fn dictionary(&self, at: usize, name: &str, bytes: u64) -> Result<(), TooLarge> {
        self.change(at, name, |column, _| column.dictionary = column.dictionary.saturating_add(bytes))
    }

    fn change(&self, at: usize, name: &str, change: impl FnOnce(&mut Column, u64)) -> Result<(), TooLarge> {
        let State { columns, batch, held } = &mut *self.state();
        let Some(column) = columns.get_mut(at) else { return Ok(()) };
        *held = held.saturating_sub(column.held());
        change(column, *batch);
        *held = held.saturating_add(column.held());
        match *held <= MAX_HELD_BYTES {
            true => Ok(()),
            false => Err(TooLarge::Together { column: name.to_owned(), bytes: *held }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_count_until_the_batch_after_them_was_read() {
        let budget = Budget::new(2);
        let page = |at, bytes: u64| budget.page(at, "a", bytes << 20).is_ok();
        budget.begin_batch();
        assert!(page(0, 40) && page(1, 30));
        assert!(!page(0, 60));
        let budget = Budget::new(2);
        let page = |at, bytes: u64| budget.page(at, "a", bytes << 20).is_ok();
        for _ in 0..5 {
            budget.begin_batch();
            // The batch begins in the page before.
            assert!(page(0, 30));
            budget.end_batch();
        }
        assert!(budget.dictionary(1, "b", 15 << 20).is_ok() && budget.dictionary(1, "b", 15 << 20).is_err());
    }

    #[test]
    fn ten_thousand_columns_are_read_and_thirty_thousand_are_not() {
        let fits = |columns| {
            let budget = Budget::new(columns);
            (0..columns).all(|at| budget.page(at, "a", 1).is_ok())
        };
        assert!(fits(10_000) && !fits(30_000));
    }
}
