//! Remote parquet files: a preview fetches only what it needs and shows the same as for a local file.

use std::io::{Error, Result};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use rlood_data::{NOT_FETCHED, Preview, Ranges, Source, preview};
use rlood_types::dataset::{Recipe, Rejected};
use serde_json::{Value, json};

use super::{fixture, fixture_path, options, recipe};

/// A fake remote file that records requests and fails after a number of bytes.
#[derive(Clone)]
struct Elsewhere {
    bytes: Arc<Vec<u8>>,
    sent: Arc<AtomicU64>,
    asked: Arc<Mutex<Vec<usize>>>,
    most: u64,
}

impl Elsewhere {
    fn new(bytes: Vec<u8>, most: u64) -> Elsewhere {
        Elsewhere { bytes: Arc::new(bytes), sent: Arc::default(), asked: Arc::default(), most }
    }

    fn look(&self, wanted: Value) -> std::result::Result<Preview, Rejected> {
        preview(&[Source::elsewhere("a.parquet", self.clone())], &recipe(wanted), &options(), 5)
    }
}

impl Ranges for Elsewhere {
    fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read(&self, ranges: &[Range<u64>]) -> Result<Vec<Vec<u8>>> {
        self.asked.lock().unwrap().push(ranges.len());
        let bytes: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        if self.sent.fetch_add(bytes, Ordering::SeqCst) + bytes > self.most {
            return Err(Error::other("the line is dead"));
        }
        Ok(ranges.iter().map(|range| self.bytes[range.start as usize..range.end as usize].to_vec()).collect())
    }
}

/// A file with two row groups of 20,000 rows, 14 MiB each.
fn large() -> Vec<u8> {
    let schema = "message rows { required binary question (UTF8); required binary answer (UTF8); }";
    let properties = WriterProperties::builder().set_dictionary_enabled(false).build();
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut file = SerializedFileWriter::new(Vec::new(), schema, Arc::new(properties)).unwrap();
    for group in 0..2 {
        let mut columns = file.next_row_group().unwrap();
        for name in ["question", "answer"] {
            let text = |row: usize| ByteArray::from(format!("{name} {group} {row} {}", "x".repeat(350)).into_bytes());
            let values: Vec<ByteArray> = (0..20_000).map(text).collect();
            let mut column = columns.next_column().unwrap().unwrap();
            column.typed::<ByteArrayType>().write_batch(&values, None, None).unwrap();
            column.close().unwrap();
        }
        columns.close().unwrap();
    }
    file.into_inner().unwrap()
}

#[test]
fn a_preview_fetches_only_the_footer_and_the_first_pages() {
    let file = Elsewhere::new(large(), u64::MAX);
    assert!(file.bytes.len() > 28_000_000, "{}", file.bytes.len());
    let look = file.look(json!({"map": {"prompt": "question"}})).unwrap();
    assert_eq!((look.source_rows.len(), look.rows.len(), look.rejected), (5, 5, None));
    assert!(look.rows[4]["prompt"][0]["content"].as_str().unwrap().starts_with("question 0 4 xxx"), "{}", look.rows[4]);
    let sent = file.sent.load(Ordering::SeqCst);
    assert!(sent < 5 << 20, "{sent}");
    // One call for the end of the file, and one for both columns.
    assert_eq!(*file.asked.lock().unwrap(), [1, 2]);
}

#[test]
fn a_preview_of_a_remote_file_equals_that_of_the_local_file() {
    for name in ["verl.parquet", "gsm8k-zstd.parquet", "gsm8k-brotli.parquet", "image.parquet"] {
        let here = preview(&[fixture(name)], &Recipe::default(), &options(), 5);
        let file = Elsewhere::new(std::fs::read(fixture_path(name)).unwrap(), u64::MAX);
        let there = preview(&[Source::elsewhere(name, file)], &Recipe::default(), &options(), 5);
        assert_eq!(format!("{here:?}"), format!("{there:?}"));
    }
}

#[test]
fn a_failed_fetch_is_reported_and_no_row_is_invented() {
    for most in [0, 100, 300_000, 1 << 20] {
        let refused = Elsewhere::new(large(), most).look(json!({})).unwrap_err();
        assert_eq!(refused.errors[0].code, NOT_FETCHED);
        assert_eq!(refused.errors[0].detail, "a.parquet: the line is dead");
    }
    // No row passes the filter: the preview stops at its limit of fetched bytes or of time.
    let file = Elsewhere::new(large(), u64::MAX);
    let look = file.look(json!({"map": {"prompt": "question", "where": "answer == 'never'"}})).unwrap();
    assert_eq!((look.source_rows.len(), look.rows.len(), look.rejected), (5, 0, None));
    assert!(file.sent.load(Ordering::SeqCst) <= 24 << 20);
}
