//! Counts the memory of a parquet row group's columns (pages, dictionaries, and rows read ahead) and rejects files
//! that need too much.

use std::sync::{Mutex, MutexGuard, PoisonError};

use parquet::errors::ParquetError;

/// Maximum size in bytes of a parquet page or dictionary, packed or unpacked.
pub const MAX_PAGE_BYTES: u64 = 64 << 20;
/// Maximum memory in bytes of all columns together, including the copies of a row. The fetched bytes of a remote
/// file are not included.
pub const MAX_HELD_BYTES: u64 = 224 << 20;
/// Number of copies of a row in memory besides its pages: one as JSON, one for the templates.
const ROW_COPIES: u64 = 2;
/// Memory in bytes for the readers and decoders of a column.
const COLUMN_BYTES: u64 = 4 << 10;

/// The reason why a page would need too much memory; passed through the error type of the crate `parquet`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TooLarge {
    /// A single page or dictionary of a parquet file is too large.
    #[error("the column '{column}' has a {what} of {bytes} bytes, at most 64 MiB are read: {advice}")]
    Page { column: String, what: &'static str, bytes: u64, advice: &'static str },
    /// The columns of a row group together need too much memory.
    #[error(
        "the row group's columns need {bytes} bytes of memory at once, at most 224 MiB are used (the last of them: '{column}'): write the file with smaller pages, or leave columns out with map.drop or map.keep"
    )]
    Together { column: String, bytes: u64 },
}

impl TooLarge {
    /// Returns the reason that an error of the crate `parquet` contains, if there is one.
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

/// The memory that one column uses.
#[derive(Debug, Default, Clone, Copy)]
struct Column {
    dictionary: u64,
    /// Bytes of the pages that contain the rows read ahead.
    pages: u64,
    /// Bytes of the last page, in which the next batch of rows begins.
    last: u64,
    /// Bytes of the longest value in the pages with the rows read ahead, and in the last of these pages.
    longest: u64,
    last_longest: u64,
    /// Number of the batch of rows in which the column's last page was read.
    batch: u64,
}

impl Column {
    fn held(&self) -> u64 {
        let bytes = self.dictionary.saturating_add(self.pages);
        let copies = self.longest.saturating_mul(ROW_COPIES);
        if bytes == 0 { 0 } else { bytes.saturating_add(copies).saturating_add(COLUMN_BYTES) }
    }

    /// Counts only the last page from now on: it alone contains the rows read ahead.
    fn forget(&mut self) {
        (self.pages, self.longest) = (self.last, self.last_longest);
    }
}

#[derive(Debug)]
struct State {
    columns: Vec<Column>,
    batch: u64,
    /// Returns the bytes that the file's metadata and all columns use.
    held: u64,
}

/// The memory budget shared by the columns of a row group.
#[derive(Debug)]
pub struct Budget {
    state: Mutex<State>,
}

impl Budget {
    /// Creates a memory budget of which the file's metadata already uses `held` bytes.
    pub fn new(columns: usize, held: u64) -> Budget {
        Budget { state: Mutex::new(State { columns: vec![Column::default(); columns], batch: 0, held }) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that reading the next row makes every column read a batch of rows.
    pub fn begin_batch(&self) {
        self.state().batch += 1;
    }

    /// Notes that the batch was read: columns that needed no further page for the batch keep only their last page.
    pub fn end_batch(&self) {
        let State { columns, batch, held } = &mut *self.state();
        for column in columns.iter_mut().filter(|column| column.batch != *batch) {
            *held = held.saturating_sub(column.held());
            column.forget();
            *held = held.saturating_add(column.held());
        }
    }

    /// Counts a page before it is read. Its packed bytes count too until it is unpacked.
    pub fn page(&self, at: usize, name: &str, bytes: u64, packed_bytes: u64) -> Result<(), TooLarge> {
        self.change(at, name, packed_bytes, |column, batch| {
            if column.batch != batch {
                column.batch = batch;
                column.forget();
            }
            column.pages = column.pages.saturating_add(bytes);
            column.last = bytes;
        })
    }

    /// Counts the memory that the last page read needs in addition to its bytes, and its longest value.
    pub fn grow(&self, at: usize, name: &str, bytes: u64, longest: u64) -> Result<(), TooLarge> {
        self.change(at, name, 0, |column, _| {
            column.pages = column.pages.saturating_add(bytes);
            column.last = column.last.saturating_add(bytes);
            column.last_longest = longest;
            column.longest = column.longest.max(longest);
        })
    }

    /// Counts a dictionary, which stays in memory as long as the column is read.
    pub fn dictionary(&self, at: usize, name: &str, bytes: u64, packed_bytes: u64) -> Result<(), TooLarge> {
        self.change(at, name, packed_bytes, |column, _| column.dictionary = column.dictionary.saturating_add(bytes))
    }

    fn change(
        &self,
        at: usize,
        name: &str,
        passing: u64,
        change: impl FnOnce(&mut Column, u64),
    ) -> Result<(), TooLarge> {
        let State { columns, batch, held } = &mut *self.state();
        let Some(column) = columns.get_mut(at) else { return Ok(()) };
        *held = held.saturating_sub(column.held());
        change(column, *batch);
        *held = held.saturating_add(column.held());
        let bytes = held.saturating_add(passing);
        match bytes <= MAX_HELD_BYTES {
            true => Ok(()),
            false => Err(TooLarge::Together { column: name.to_owned(), bytes }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(budget: &Budget, at: usize, mib: u64) -> bool {
        budget.page(at, "a", mib << 20, 0).is_ok()
    }

    #[test]
    fn pages_count_until_the_batch_after_them_was_read() {
        let budget = Budget::new(2, 0);
        budget.begin_batch();
        assert!(page(&budget, 0, 120) && page(&budget, 1, 90));
        assert!(!page(&budget, 0, 60));
        let budget = Budget::new(2, 0);
        for _ in 0..5 {
            budget.begin_batch();
            // Every batch begins in the column's previous page, so two pages are kept.
            assert!(page(&budget, 0, 90));
            budget.end_batch();
        }
        let dictionary = || budget.dictionary(1, "b", 40 << 20, 0);
        assert!(dictionary().is_ok() && dictionary().is_err());
    }

    #[test]
    fn a_long_row_counts_with_its_copies_and_a_packed_page_until_it_is_unpacked() {
        let budget = Budget::new(2, 0);
        budget.begin_batch();
        assert!(page(&budget, 0, 50) && budget.grow(0, "a", 0, 50 << 20).is_ok());
        assert!(budget.page(1, "b", 20 << 20, 40 << 20).is_ok());
        assert!(budget.page(1, "b", 20 << 20, 40 << 20).is_err());
        assert!(page(&Budget::new(1, 200 << 20), 0, 10) && !page(&Budget::new(1, 200 << 20), 0, 30));
        let message = Budget::new(1, 0).page(0, "a", 0, u64::MAX).unwrap_err().to_string();
        assert!(message.contains("at most 224 MiB"), "{message}");
    }

    #[test]
    fn fifty_thousand_columns_are_read_and_sixty_thousand_are_not() {
        let fits = |columns| {
            let budget = Budget::new(columns, 0);
            (0..columns).all(|at| budget.page(at, "a", 1, 0).is_ok())
        };
        assert!(fits(50_000) && !fits(60_000));
    }
}
