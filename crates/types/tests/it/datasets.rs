//! Tests of the streaming reader of datasets.

use std::io::Write;

use proptest::prelude::*;
use rlood_types::dataset::RowPlace::{self, File, Line, Row};
use rlood_types::dataset::{Format, MAX_ROW_BYTES, Reader, Rejected, Summary};
use serde_json::{Value, json};

/// Reads bytes in chunks of a given size.
fn read(format: Format, bytes: &[u8], piece: usize) -> (Vec<u8>, Result<Summary, Rejected>) {
    let (mut reader, mut out) = (Reader::new(format), Vec::new());
    for piece in bytes.chunks(piece.max(1)) {
        reader.push(piece, &mut out);
    }
    let result = reader.finish(&mut out);
    (out, result)
}

fn rows(format: Format, bytes: &[u8]) -> Vec<Value> {
    let (out, result) = read(format, bytes, usize::MAX);
    let rows: Vec<Value> =
        out.split(|b| *b == b'\n').filter(|l| !l.is_empty()).map(|l| serde_json::from_slice(l).unwrap()).collect();
    assert_eq!(result.unwrap().num_rows, rows.len() as u64);
    rows
}

fn errors(format: Format, bytes: &[u8]) -> Vec<(RowPlace, &'static str)> {
    let (_, result) = read(format, bytes, usize::MAX);
    result.unwrap_err().errors.into_iter().map(|error| (error.place, error.code)).collect()
}

#[test]
fn the_three_forms_give_the_same_rows() {
    let expected = vec![json!({"prompt": "a", "n": "1"}), json!({"prompt": "b, \"c\"\nd", "n": "2"})];
    assert_eq!(rows(Format::Csv, b"\xef\xbb\xbfprompt,n\r\na,1\r\n\"b, \"\"c\"\"\nd\",2\r\n"), expected);
    let ndjson = b"\xef\xbb\xbf{\"prompt\":\"a\",\"n\":\"1\"}\r\n\r\n{\"prompt\":\"b, \\\"c\\\"\\nd\",\"n\":\"2\"}";
    assert_eq!(rows(Format::Ndjson, ndjson), expected);
    let list = serde_json::to_vec_pretty(&expected).unwrap();
    assert_eq!(rows(Format::Json, &list), expected);
    let records = serde_json::to_vec_pretty(&json!({"records": expected})).unwrap();
    assert_eq!(rows(Format::Json, &records), expected);
}

#[test]
fn columns_come_in_the_order_of_first_appearance() {
    let (_, result) = read(Format::Ndjson, b"{\"prompt\":\"a\",\"z\":1}\n{\"b\":2,\"prompt\":\"c\",\"z\":1}", 7);
    assert_eq!(result.unwrap(), Summary { num_rows: 2, columns: vec!["prompt".into(), "z".into(), "b".into()] });
}

#[test]
fn every_bad_line_is_reported_with_its_number() {
    let bytes = b"{\"prompt\":\"a\"}\n{\"prompt\":}\n\n[1]\n{\"prompt\":\" \"}\n{\"text\":\"a\"}\n{\"prompt\":3}\n{\"prompt\":\"\xff\"}\n";
    let expected = [
        (Line(2), "json"),
        (Line(4), "not_an_object"),
        (Line(5), "empty_prompt"),
        (Line(6), "missing_prompt"),
        (Line(7), "invalid_prompt"),
        (Line(8), "encoding"),
    ];
    assert_eq!(errors(Format::Ndjson, bytes), expected);
    let many = "{}\n".repeat(250);
    let (out, result) = read(Format::Ndjson, many.as_bytes(), 100);
    let rejected = result.unwrap_err();
    assert_eq!((out.len(), rejected.errors.len(), rejected.num_errors), (0, 100, 250));
}

#[test]
fn chat_prompts_are_checked_message_by_message() {
    let row = |prompt: Value| serde_json::to_vec(&json!({"prompt": prompt})).unwrap();
    let good = json!([{"role": "system", "content": ""}, {"role": "user", "content": "hi"}]);
    assert_eq!(rows(Format::Ndjson, &row(good.clone())), [json!({"prompt": good})]);
    for (bad, code) in [
        (json!([]), "empty_prompt"),
        (json!(["hi"]), "invalid_message"),
        (json!([{"content": "hi"}]), "invalid_message"),
        (json!([{"role": "user"}]), "invalid_message"),
        (json!([{"role": "user", "content": [{"type": "image"}]}]), "invalid_message"),
        (json!(null), "invalid_prompt"),
    ] {
        assert_eq!(errors(Format::Ndjson, &row(bad.clone())), [(Line(1), code)], "{bad}");
    }
}

#[test]
fn images_are_refused_by_name() {
    for column in ["image", "images"] {
        let (_, result) = read(Format::Csv, format!("prompt,{column}\na,x.png\n").as_bytes(), 5);
        let error = result.unwrap_err().errors.remove(0);
        assert_eq!((error.place, error.code), (Row(1), "images_unsupported"));
        assert!(error.detail.contains(&format!("'{column}'")), "{}", error.detail);
    }
}

#[test]
fn nothing_at_all_is_an_empty_dataset() {
    for (format, bytes) in [
        (Format::Ndjson, &b""[..]),
        (Format::Ndjson, b"\n\r\n  \n"),
        (Format::Ndjson, b"\xef\xbb\xbf"),
        (Format::Csv, b""),
        (Format::Csv, b"prompt\n"),
        (Format::Json, b"[]"),
        (Format::Json, b" "),
        (Format::Json, b"{\"records\": []}"),
    ] {
        assert_eq!(errors(format, bytes), [(File, "empty")], "{format:?} {}", String::from_utf8_lossy(bytes));
    }
}

#[test]
fn broken_csv_says_where() {
    // The header is a line of the file, but no row.
    assert_eq!(errors(Format::Csv, b"prompt,a\nx,1\ny\nz,1,2\n"), [(Row(2), "field_count"), (Row(3), "field_count")]);
    assert_eq!(errors(Format::Tsv, b"prompt\ta\nx\t1\ny\n"), [(Row(2), "field_count")]);
    assert_eq!(errors(Format::Csv, b"question,a\nx,1\n"), [(Line(1), "missing_prompt")]);
    assert_eq!(errors(Format::Csv, b"prompt,prompt\nx,1\n"), [(Line(1), "header")]);
    assert_eq!(errors(Format::Csv, b"prompt,\nx,1\n"), [(Line(1), "header")]);
    assert_eq!(errors(Format::Csv, b"prompt\na\n\"b\nc\nd"), [(Row(2), "csv")]);
    assert_eq!(errors(Format::Csv, b"prompt\n\"a\"b\nc"), [(Row(1), "csv")]);
    assert_eq!(errors(Format::Csv, b"prompt\n\"line 2\nline 3\"\n \nlast"), [(Row(2), "empty_prompt")]);
}

#[test]
fn broken_json_says_where() {
    assert_eq!(errors(Format::Json, b"[\n{\"prompt\":\"a\"},\n{\"prompt\":}\n]"), [(Row(2), "json")]);
    assert_eq!(errors(Format::Json, b"[{\"prompt\":\"a\"}\n{\"prompt\":\"b\"}]"), [(Row(1), "json")]);
    // An error between two rows has a line.
    assert_eq!(errors(Format::Json, b"[{\"prompt\":\"a\"},\n]"), [(Line(2), "json")]);
    for bytes in [
        "{\"prompt\":\"a\"}",
        "{\"rows\":[]}",
        "[{\"prompt\":\"a\"},]",
        "[{\"prompt\":\"a\"}",
        "3",
        "[] x",
        "{\"records\":[],\"a\":1}",
    ] {
        assert_eq!(errors(Format::Json, bytes.as_bytes()).last().unwrap().1, "json", "{bytes}");
    }
}

#[test]
fn values_that_would_be_rounded_or_dropped_are_rejected_with_their_position() {
    let of = |format, text: &str| read(format, text.as_bytes(), usize::MAX).1.unwrap_err().errors.remove(0);
    let long = "{\"prompt\":\"a\"}\n{\"prompt\":\"b\",\"id\":123456789012345678901234567890}\n";
    let error = of(Format::Ndjson, long);
    assert_eq!((error.place, error.code), (Line(2), "not_exact"));
    assert!(error.detail.starts_with("at column 20: the integer 123456789012345678901234567890"), "{}", error.detail);
    assert!(error.detail.contains("write it as a string"), "{}", error.detail);
    for twice in ["{\"prompt\":\"a\",\"prompt\":\"b\"}", "{\"prompt\":\"a\",\"x\":[{\"y\":1,\"y\":1}]}"] {
        let error = of(Format::Ndjson, twice);
        assert_eq!((error.place, error.code), (Line(1), "not_exact"));
        assert!(error.detail.contains("duplicate key"), "{}", error.detail);
    }
    let error = of(Format::Json, "[\n{\"prompt\":\"a\",\n  \"n\": -9223372036854775809}]");
    assert_eq!((error.place, error.code), (Row(1), "not_exact"));
    assert!(error.detail.starts_with("at line 3, column 8: "), "{}", error.detail);
    // Fractions are rounded as in other parsers, and integers that fit into 64 bits are kept.
    let kept = "{\"prompt\":\"a\",\"n\":18446744073709551615,\"x\":1e30,\"y\":0.1000000000000000055511151231257827}\n";
    let expected = [json!({"prompt": "a", "n": u64::MAX, "x": 1e30, "y": 0.1})];
    assert_eq!(rows(Format::Ndjson, kept.as_bytes()), expected);
}

#[test]
fn a_csv_header_with_a_duplicate_or_missing_name_is_rejected() {
    let detail = |text: &str| read(Format::Csv, text.as_bytes(), 3).1.unwrap_err().errors.remove(0).detail;
    assert!(detail("prompt,a,prompt\nx,1,2\n").starts_with("columns 1 and 3 of the header are both named 'prompt'"));
    assert!(detail("prompt,,a\nx,1,2\n").starts_with("column 2 of the header has no name"));
}

#[test]
fn utf_16_is_named() {
    let bytes: Vec<u8> = "\u{feff}prompt\na\n".encode_utf16().flat_map(u16::to_le_bytes).collect();
    assert_eq!(errors(Format::Csv, &bytes), [(Line(1), "encoding")]);
}

#[test]
fn undeclared_gzip_is_recognized() {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(b"{\"prompt\": \"a\"}\n").unwrap();
    assert_eq!(errors(Format::Ndjson, &encoder.finish().unwrap()), [(Line(1), "gzip")]);
}

#[test]
fn an_endless_row_is_rejected_with_its_number_and_never_buffered() {
    for (format, start, place) in [
        (Format::Ndjson, "{\"prompt\":\"a\"}\n{\"prompt\":\"", Line(2)),
        (Format::Csv, "prompt\n\"", Row(1)),
        (Format::Json, "[\n{\"prompt\":\"", Row(1)),
    ] {
        let (mut reader, mut out) = (Reader::new(format), Vec::new());
        reader.push(start.as_bytes(), &mut out);
        let piece = vec![b'x'; 1 << 20];
        for _ in 0..100 {
            reader.push(&piece, &mut out);
        }
        assert!(out.capacity() < MAX_ROW_BYTES);
        let error = reader.finish(&mut out).unwrap_err().errors.remove(0);
        assert_eq!((error.place, error.code), (place, "row_too_long"), "{format:?}");
    }
}

fn text() -> impl Strategy<Value = String> {
    proptest::collection::vec(
        proptest::sample::select(vec!["a", "é", "\"", ",", "\n", "\r\n", "\\", "{", "]", " ", "🦀", "\t"]),
        0..8,
    )
    .prop_map(|parts| format!("x{}", parts.concat()))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn the_pieces_do_not_matter(prompts in proptest::collection::vec((text(), text()), 1..6), piece in 1_usize..20, form in 0..3) {
        let rows: Vec<Value> = prompts.iter().map(|(prompt, extra)| json!({"prompt": prompt, "extra": extra})).collect();
        let (format, bytes) = match form {
            0 => (Format::Ndjson, rows.iter().map(|row| format!("{row}\n")).collect::<String>().into_bytes()),
            1 => (Format::Json, serde_json::to_vec_pretty(&rows).unwrap()),
            _ => {
                let mut writer = csv::Writer::from_writer(Vec::new());
                writer.write_record(["prompt", "extra"]).unwrap();
                for (prompt, extra) in &prompts {
                    writer.write_record([prompt, extra]).unwrap();
                }
                (Format::Csv, writer.into_inner().unwrap())
            }
        };
        let (out, result) = read(format, &bytes, piece);
        prop_assert_eq!(result.unwrap().num_rows, rows.len() as u64);
        let found: Vec<Value> = String::from_utf8(out).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        prop_assert_eq!(found, rows);
    }

    #[test]
    fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), piece in 1_usize..50, form in 0_usize..3) {
        let format = [Format::Ndjson, Format::Csv, Format::Json][form];
        let whole = read(format, &bytes, usize::MAX);
        prop_assert_eq!(read(format, &bytes, piece), whole);
    }

    #[test]
    fn csv_rows_end_where_the_csv_crate_ends_them(text in "[a\",\n\r]{0,30}") {
        let mut reference = csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(text.as_bytes());
        let reference: Vec<Vec<String>> = reference.records().map(|row| row.unwrap().iter().map(str::to_owned).collect()).collect();
        // The header names a single column, so rows of other widths are errors in both.
        let bytes = format!("prompt\n{text}");
        let (_, result) = read(Format::Csv, bytes.as_bytes(), 3);
        if let Ok(summary) = result {
            prop_assert_eq!(summary.num_rows, reference.len() as u64);
            prop_assert!(reference.iter().all(|row| row.len() == 1 && !row[0].trim().is_empty()));
        }
    }
}
