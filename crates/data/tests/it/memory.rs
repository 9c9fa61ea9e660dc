//! Measures the memory that reading takes, whatever a parquet file claims: a child process reads each file, and
//! its peak is measured.

mod written;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;

use parquet::basic::{Compression, Encoding, GzipLevel, ZstdLevel};
use rlood_data::{Options, Source, convert};
use serde_json::json;
use written::{Written, mixed, noise, packed_zeros, text, write};

/// Maximum memory of the reader, in MiB.
const MAX_MIB: u64 = 256;
const FILE: &str = "RLOOD_TEST_PARQUET";
const GIB: usize = 1 << 30;

/// Reads a file with a filter over all columns that keeps only the prompt: the large column must be
/// read but not stored.
fn read(path: &Path) -> String {
    let map = json!({"map": {"prompt": "prompt", "where": "prompt != big", "keep": ["prompt"]}});
    let cancelled = AtomicBool::new(false);
    let options = Options {
        format: None,
        chat_default: false,
        answers: false,
        max_bytes: 1 << 30,
        cancelled: &cancelled,
        images: None,
    };
    let recipe = serde_json::from_value(map).unwrap();
    match convert(&[Source::file("a.parquet", path)], &recipe, &options, &mut std::io::sink()) {
        Ok(done) => format!("{} rows", done.rows_read),
        Err(refused) => refused.errors[0].detail.clone(),
    }
}

/// A memory figure of this process from /proc/self/status, in MiB.
fn status(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim_matches(|c: char| !c.is_ascii_digit()).parse::<u64>().unwrap() >> 10
}

/// The child process that reads a file; without a file, this test does nothing.
#[test]
fn child() {
    let Some(path) = std::env::var_os(FILE).map(PathBuf::from) else { return };
    let before = status("VmRSS:");
    let message = read(&path);
    println!("\nmeasured {} {message}", status("VmHWM:") - before);
}

/// Returns the outcome of reading a file in a child process, and its peak memory in MiB.
fn measured(path: &Path) -> (String, u64) {
    let mut child = Command::new(std::env::current_exe().unwrap());
    let done = child.args(["memory::child", "--exact", "--nocapture"]).env(FILE, path).output().unwrap();
    let out = String::from_utf8(done.stdout).unwrap();
    let line = out.lines().find_map(|line| line.strip_prefix("measured ")).unwrap_or_else(|| panic!("{out}"));
    let (mib, message) = line.split_once(' ').unwrap();
    (message.to_owned(), mib.parse().unwrap())
}

struct Files(tempfile::TempDir);

impl Files {
    /// Writes a file of texts, reads it, checks the peak, and returns the outcome.
    fn read(&self, name: &str, schema: &str, rows: i64, columns: Vec<(Compression, Vec<Written>)>) -> String {
        let path = self.0.path().join("a.parquet");
        write(&path, schema, rows, columns);
        let (message, mib) = measured(&path);
        println!("{name}: {mib} MiB from {} KiB: {message}", std::fs::metadata(&path).unwrap().len() >> 10);
        assert!(mib <= MAX_MIB, "{name}: {mib} MiB, {message}");
        message
    }
}

const TEXTS: &str = "message rows { required binary prompt (UTF8); required binary big (UTF8); }";
const NONE: Compression = Compression::UNCOMPRESSED;

fn files() -> Files {
    Files(tempfile::tempdir().unwrap())
}

fn zstd() -> Compression {
    Compression::ZSTD(ZstdLevel::default())
}

fn prompts(values: u32) -> (Compression, Vec<Written>) {
    let page: Vec<u8> = (0..values).flat_map(|_| text(4)).collect();
    (NONE, vec![Written::data(values, page.len(), page)])
}

/// Creates a data page compressed with zstd.
fn packed(values: u32, page: &[u8]) -> Written {
    Written::data(values, page.len(), zstd::encode_all(page, 1).unwrap())
}

fn packed_as(page: Written) -> Written {
    Written { packed: zstd::encode_all(&page.packed[..], 1).unwrap(), ..page }
}

/// Creates a column of random bytes, so that the row group does not look like a decompression bomb.
fn with_noise() -> (Compression, Vec<Written>) {
    let mut page = noise(4 << 20);
    page.splice(..4, ((4_u32 << 20) - 4).to_le_bytes());
    (NONE, vec![Written::data(1, page.len(), page)])
}

#[test]
fn a_page_or_a_dictionary_of_a_gigabyte_is_refused_before_it_is_unpacked() {
    let files = files();
    let schema = "message rows { required binary prompt (UTF8); required binary big (UTF8); required binary noise; }";
    let huge = || packed_zeros(zstd(), GIB as u64);
    let page = vec![Written::data(100, GIB, huge())];
    let message = files.read("a page of 1 GiB", schema, 100, vec![prompts(100), (zstd(), page), with_noise()]);
    let advice = "write the file with smaller pages (data_page_size in pyarrow)";
    assert_eq!(
        message,
        format!(
            "a.parquet: row group 0: the column 'big' has a page of {GIB} bytes, at most 64 MiB are read: {advice}"
        )
    );
    let dictionary = Written { is_dictionary: true, ..Written::data(1, GIB, huge()) };
    let page = Written { encoding: Encoding::RLE_DICTIONARY, ..Written::data(100, 10, huge()) };
    let columns = vec![prompts(100), (zstd(), vec![dictionary, page]), with_noise()];
    let message = files.read("a dictionary of 1 GiB", schema, 100, columns);
    assert!(message.contains("the column 'big' has a dictionary of 1073741824 bytes"), "{message}");
    // An uncompressed page of 300 MiB, and a dictionary that claims two billion values.
    let packed = vec![Written::data(1, 300 << 20, vec![0; 300 << 20])];
    let message = files.read("300 MiB not packed", TEXTS, 5, vec![prompts(5), (NONE, packed)]);
    assert!(message.contains("has a page of 314572800 bytes"), "{message}");
    let dictionary = Written { is_dictionary: true, ..Written::data(i32::MAX as u32, 9, text(5)) };
    let message =
        files.read("2^31 values", TEXTS, 1, vec![prompts(1), (NONE, vec![dictionary, Written::data(1, 9, text(5))])]);
    assert!(message.contains("need 687194"), "{message}");
}

#[test]
fn a_page_that_unpacks_to_more_than_its_header_says_is_an_error() {
    let files = files();
    for codec in [zstd(), Compression::GZIP(GzipLevel::default()), Compression::LZ4] {
        let page = Written::data(100, 1000, packed_zeros(codec, GIB as u64));
        let message = files.read(&format!("{codec} that lies"), TEXTS, 100, vec![prompts(100), (codec, vec![page])]);
        assert!(message.contains("a page cannot be unpacked"), "{message}");
    }
}

#[test]
fn many_columns_share_the_memory() {
    let files = files();
    for (columns, expected_part) in [(70, "100 rows"), (300, "leave columns out with map.drop or map.keep")] {
        let more: String = (0..columns).map(|at| format!("required binary c{at} (UTF8);")).collect();
        let schema = format!("message rows {{ required binary prompt (UTF8); required binary big (UTF8); {more} }}");
        // The first row is by far the longest.
        let short: Vec<u8> = (1..100).flat_map(|_| text(9)).collect();
        let page = || (zstd(), vec![packed(1, &mixed(1 << 20)), packed(99, &short)]);
        let big = (zstd(), vec![packed(100, &[text(9), short.clone()].concat())]);
        let columns = [prompts(100), big].into_iter().chain((0..columns).map(|_| page()));
        let message = files.read("columns of 1 MiB", &schema, 100, columns.collect());
        assert!(message.contains(expected_part), "{message}");
    }
}

#[test]
fn long_rows_among_short_ones_are_read_with_fewer_read_ahead() {
    let files = files();
    let short: Vec<u8> = (0..100_000).flat_map(|_| text(8)).collect();
    let mut pages = vec![packed(100_000, &short)];
    pages.extend((0..1500).map(|_| packed(1, &mixed(300 << 10))));
    pages.push(packed(1, &mixed(40 << 20)));
    let message = files.read("long rows", TEXTS, 101_501, vec![prompts(101_501), (zstd(), pages)]);
    assert_eq!(message, "101501 rows");
    let page = packed(1, &mixed(63 << 20));
    let message = files.read("a row of 63 MiB", TEXTS, 1, vec![prompts(1), (zstd(), vec![page])]);
    assert_eq!(message, "1 rows");
}

#[test]
fn delta_encoded_texts_take_no_more_than_others() {
    let files = files();
    let of = |encoding, values, page: Vec<u8>| Written { encoding, ..Written::data(values, page.len(), page) };
    // A billion empty texts, encoded as lengths in blocks of 2^30; once with a correct header, once with a header
    // that claims a hundred.
    let empty = [&[0x80, 0x80, 0x80, 0x80, 4, 1][..], &[0x80, 0x94, 0xeb, 0xdc, 3, 0], &[0, 0]].concat();
    for (values, says) in [(1_000_000_000, "the last of them: 'big'"), (100, "a different number of values")] {
        let page = of(Encoding::DELTA_LENGTH_BYTE_ARRAY, values, empty.clone());
        let message = files.read("lengths", TEXTS, 100, vec![prompts(100), (NONE, vec![page])]);
        assert!(message.contains(says), "{message}");
    }
    // A text of 20 MB, and 59 texts that have all of it as their prefix: the reader must read them one by one.
    let stream = |first: u64, delta: u64| {
        let number = |mut value: u64| {
            let mut bytes = Vec::new();
            while value > 127 {
                bytes.push(value as u8 | 0x80);
                value >>= 7;
            }
            bytes.push(value as u8);
            bytes
        };
        // 60 values: the first value, then one block whose differences are all 0 except the first.
        let difference = (delta as u32).to_le_bytes();
        let packed = [&difference[..], &[0; 1023 * 4]].concat();
        [number(1024), vec![1], number(60), number(first << 1), vec![0, 32], packed].concat()
    };
    // The suffix lengths drop from 20 MB to 0: a difference of -20 MB, modulo 2^32.
    let size = 20_000_000_u64;
    let page = [stream(0, size), stream(size, (1 << 32) - size), vec![b'a'; size as usize]].concat();
    let page = packed_as(of(Encoding::DELTA_BYTE_ARRAY, 60, page));
    let message = files.read("prefixes", TEXTS, 60, vec![prompts(60), (zstd(), vec![page])]);
    assert_eq!(message, "60 rows");
}

#[test]
fn a_list_of_a_billion_values_in_a_few_bytes_is_refused() {
    let files = files();
    let schema = "message rows { required binary prompt (UTF8); repeated int32 big; }";
    // A run of repetition levels with its length in front: one row with a billion values, all
    // the same dictionary entry.
    let count = 1_000_000_000_u32;
    let run = |level: u8| vec![0x80, 0xa8, 0xd6, 0xb9, 0x07, level];
    let with_length = |levels: Vec<u8>| [&(levels.len() as u32).to_le_bytes()[..], &levels].concat();
    let page = [with_length([vec![2, 0], run(1)].concat()), with_length(run(1)), vec![1], run(0)].concat();
    let dictionary = || Written { is_dictionary: true, ..Written::data(1, 4, vec![7, 0, 0, 0]) };
    let of =
        |page: Vec<u8>, count| Written { encoding: Encoding::RLE_DICTIONARY, ..Written::data(count, page.len(), page) };
    let message = files.read("a list", schema, 1, vec![prompts(1), (NONE, vec![dictionary(), of(page, count)])]);
    assert!(message.contains("the last of them: 'big'"), "{message}");
    // A text of 1 MiB, repeated a thousand times.
    let schema = "message rows { required binary prompt (UTF8); repeated binary big (UTF8); }";
    let run = |level: u8| vec![0xd0, 0x0f, level];
    let page = [with_length([vec![2, 0], run(1)].concat()), with_length(run(1)), vec![1], run(0)].concat();
    let entry = text(1 << 20);
    let dictionary = Written { is_dictionary: true, ..Written::data(1, entry.len(), entry) };
    let message = files.read("texts", schema, 1, vec![prompts(1), (NONE, vec![dictionary, of(page, 1000)])]);
    assert!(message.contains("the last of them: 'big'"), "{message}");
}
