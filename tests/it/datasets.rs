//! Datasets: the streaming reader, and the routes.

use axum::body::Body;
use axum::http::{Request, header};
use proptest::prelude::*;
use rlood::dataset::{Format, MAX_ROW_BYTES, Reader, Rejected, Summary};
use serde_json::{Value, json};

use crate::http::{Answer, Server, post, server, server_with};

const NDJSON: &str = "application/x-ndjson";

/// Reads bytes in pieces of a size.
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

fn errors(format: Format, bytes: &[u8]) -> Vec<(u64, &'static str)> {
    let (_, result) = read(format, bytes, usize::MAX);
    result.unwrap_err().errors.into_iter().map(|error| (error.line, error.code)).collect()
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
        (2, "json"),
        (4, "not_an_object"),
        (5, "empty_prompt"),
        (6, "missing_prompt"),
        (7, "invalid_prompt"),
        (8, "encoding"),
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
        assert_eq!(errors(Format::Ndjson, &row(bad.clone())), [(1, code)], "{bad}");
    }
}

#[test]
fn images_are_refused_by_name() {
    for column in ["image", "images"] {
        let (_, result) = read(Format::Csv, format!("prompt,{column}\na,x.png\n").as_bytes(), 5);
        let error = result.unwrap_err().errors.remove(0);
        assert_eq!((error.line, error.code), (2, "images_unsupported"));
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
        assert_eq!(errors(format, bytes), [(0, "empty")], "{format:?} {}", String::from_utf8_lossy(bytes));
    }
}

#[test]
fn broken_csv_says_where() {
    assert_eq!(errors(Format::Csv, b"prompt,a\nx,1\ny\nz,1,2\n"), [(3, "field_count"), (4, "field_count")]);
    assert_eq!(errors(Format::Csv, b"question,a\nx,1\n"), [(1, "missing_prompt")]);
    assert_eq!(errors(Format::Csv, b"prompt,prompt\nx,1\n"), [(1, "header")]);
    assert_eq!(errors(Format::Csv, b"prompt,\nx,1\n"), [(1, "header")]);
    assert_eq!(errors(Format::Csv, b"prompt\na\n\"b\nc\nd"), [(3, "csv")]);
    assert_eq!(errors(Format::Csv, b"prompt\n\"a\"b\nc"), [(2, "csv")]);
    assert_eq!(errors(Format::Csv, b"prompt\n\"line 2\nline 3\"\n \nlast"), [(4, "empty_prompt")]);
}

#[test]
fn broken_json_says_where() {
    assert_eq!(errors(Format::Json, b"[\n{\"prompt\":\"a\"},\n{\"prompt\":}\n]"), [(3, "json")]);
    assert_eq!(errors(Format::Json, b"[{\"prompt\":\"a\"}\n{\"prompt\":\"b\"}]"), [(1, "json")]);
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
fn what_would_be_rounded_or_dropped_is_refused_where_it_stands() {
    let of = |format, text: &str| read(format, text.as_bytes(), usize::MAX).1.unwrap_err().errors.remove(0);
    let long = "{\"prompt\":\"a\"}\n{\"prompt\":\"b\",\"id\":123456789012345678901234567890}\n";
    let error = of(Format::Ndjson, long);
    assert_eq!((error.line, error.code), (2, "not_exact"));
    assert!(error.detail.starts_with("at column 20: the integer 123456789012345678901234567890"), "{}", error.detail);
    assert!(error.detail.contains("write it as a string"), "{}", error.detail);
    for twice in ["{\"prompt\":\"a\",\"prompt\":\"b\"}", "{\"prompt\":\"a\",\"x\":[{\"y\":1,\"y\":1}]}"] {
        let error = of(Format::Ndjson, twice);
        assert_eq!((error.line, error.code), (1, "not_exact"));
        assert!(error.detail.contains("duplicate key"), "{}", error.detail);
    }
    let error = of(Format::Json, "[\n{\"prompt\":\"a\",\n  \"n\": -9223372036854775809}]");
    assert_eq!((error.line, error.code), (2, "not_exact"));
    assert!(error.detail.starts_with("at line 3, column 8: "), "{}", error.detail);
    // Fractions are rounded as everywhere, and what 64 bits hold is kept.
    let kept = "{\"prompt\":\"a\",\"n\":18446744073709551615,\"x\":1e30,\"y\":0.1000000000000000055511151231257827}\n";
    let expected = [json!({"prompt": "a", "n": u64::MAX, "x": 1e30, "y": 0.1})];
    assert_eq!(rows(Format::Ndjson, kept.as_bytes()), expected);
}

#[test]
fn a_header_of_csv_that_names_a_column_twice_or_not_at_all_says_which() {
    let detail = |text: &str| read(Format::Csv, text.as_bytes(), 3).1.unwrap_err().errors.remove(0).detail;
    assert!(detail("prompt,a,prompt\nx,1,2\n").starts_with("columns 1 and 3 of the header are both named 'prompt'"));
    assert!(detail("prompt,,a\nx,1,2\n").starts_with("column 2 of the header has no name"));
}

#[test]
fn utf_16_is_named() {
    let bytes: Vec<u8> = "\u{feff}prompt\na\n".encode_utf16().flat_map(u16::to_le_bytes).collect();
    assert_eq!(errors(Format::Csv, &bytes), [(1, "encoding")]);
}

#[test]
fn gzip_that_nobody_announced_is_named() {
    assert_eq!(errors(Format::Ndjson, &crate::http::gzip(b"{\"prompt\": \"a\"}\n")), [(1, "gzip")]);
}

#[test]
fn one_endless_row_is_refused_with_its_number_and_never_held() {
    for (format, start) in [
        (Format::Ndjson, "{\"prompt\":\"a\"}\n{\"prompt\":\""),
        (Format::Csv, "prompt\n\""),
        (Format::Json, "[\n{\"prompt\":\""),
    ] {
        let (mut reader, mut out) = (Reader::new(format), Vec::new());
        reader.push(start.as_bytes(), &mut out);
        let piece = vec![b'x'; 1 << 20];
        for _ in 0..100 {
            reader.push(&piece, &mut out);
        }
        assert!(out.capacity() < MAX_ROW_BYTES);
        let error = reader.finish(&mut out).unwrap_err().errors.remove(0);
        assert_eq!((error.line, error.code), (2, "row_too_long"), "{format:?}");
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
        // As one column named by its own header: rows of other widths are errors in both.
        let bytes = format!("prompt\n{text}");
        let (_, result) = read(Format::Csv, bytes.as_bytes(), 3);
        if let Ok(summary) = result {
            prop_assert_eq!(summary.num_rows, reference.len() as u64);
            prop_assert!(reference.iter().all(|row| row.len() == 1 && !row[0].trim().is_empty()));
        }
    }
}

async fn upload(server: &Server, body: &'static str) -> Answer {
    server.post("/datasets", NDJSON, body).await
}

#[tokio::test]
async fn an_upload_answers_201_and_the_same_rows_again_200() {
    let server = server().await;
    let first = server.post("/datasets?name=sums", NDJSON, "{\"prompt\": \"a\", \"n\": 1}\r\n{\"prompt\":\"b\"}").await;
    assert_eq!(first.status, 201, "{}", first.text());
    let dataset = first.json();
    assert_eq!(first.header("location"), format!("/datasets/{}", dataset["id"].as_str().unwrap()));
    assert_eq!(dataset["name"], "sums");
    assert_eq!(dataset["num_rows"], 2);
    assert_eq!(dataset["columns"], json!(["prompt", "n"]));
    let canonical = "{\"prompt\":\"a\",\"n\":1}\n{\"prompt\":\"b\"}\n";
    let sha256: String = sha2::Digest::finalize(<sha2::Sha256 as sha2::Digest>::new_with_prefix(canonical))
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    assert_eq!(dataset["sha256"], sha256);
    assert_eq!(dataset["size_bytes"], canonical.len());

    let again = server.post("/datasets", "application/json", "[{\"prompt\":\"a\",\"n\":1},{\"prompt\":\"b\"}]").await;
    assert_eq!(again.status, 200);
    assert_eq!(again.json(), dataset);

    let id = dataset["id"].as_str().unwrap();
    assert_eq!(server.get(&format!("/datasets/{id}")).await.json(), dataset);
    let content = server.get(&format!("/datasets/{id}/content")).await;
    assert_eq!((content.text().as_str(), content.header("content-type")), (canonical, NDJSON));
    assert_eq!(content.header("etag"), format!("\"{sha256}\""));
    assert_eq!(server.delete(&format!("/datasets/{id}")).await.status, 204);
    server.get(&format!("/datasets/{id}")).await.problem(404, "not_found");
    server.delete(&format!("/datasets/{id}")).await.problem(404, "not_found");
    assert_eq!(std::fs::read_dir(server.dir.path().join("data/datasets")).unwrap().count(), 0);
}

#[tokio::test]
async fn bad_rows_come_back_as_items() {
    let server = server().await;
    let problem =
        upload(&server, "{\"prompt\":\"a\"}\n{\"promt\":\"b\"}\nnope\n").await.problem(422, "invalid_dataset");
    let items = problem["errors"].as_array().unwrap();
    let at: Vec<_> =
        items.iter().map(|item| (item["pointer"].as_str().unwrap(), item["code"].as_str().unwrap())).collect();
    assert_eq!(at, [("line 2", "missing_prompt"), ("line 3", "json")]);
    assert!(items[0]["detail"].as_str().unwrap().contains("'promt'"), "{problem}");
    upload(&server, "").await.problem(422, "invalid_dataset");
    assert_eq!(server.get("/datasets").await.json()["data"], json!([]));
    // Nothing is left of what was refused.
    assert_eq!(std::fs::read_dir(server.dir.path().join("data/staging")).unwrap().count(), 0);
}

#[tokio::test]
async fn a_form_is_read_by_content_type_or_file_name() {
    let server = server().await;
    let form = |head: &str, rows: &str| {
        let name = "--X\r\ncontent-disposition: form-data; name=\"name\"\r\n\r\nby form\r\n";
        let body =
            format!("{name}--X\r\ncontent-disposition: form-data; name=\"file\"{head}\r\n\r\n{rows}\r\n--X--\r\n");
        post("/datasets", "multipart/form-data; boundary=X", body)
    };
    for head in [
        "; filename=\"rows.csv\"",
        "; filename=\"rows\"\r\ncontent-type: text/csv",
        "; filename=\"a.csv\"\r\ncontent-type: application/octet-stream",
    ] {
        let answer = server.send(form(head, "prompt\na")).await;
        assert!(answer.status.is_success(), "{head}: {}", answer.text());
        assert_eq!(answer.json()["name"], "by form");
    }
    server.send(form("; filename=\"rows.parquet\"", "x")).await.problem(415, "unsupported_media_type");
    let missing = post("/datasets", "multipart/form-data; boundary=X", "--X--\r\n");
    server.send(missing).await.problem(400, "invalid_request");
    let cut = post(
        "/datasets",
        "multipart/form-data; boundary=X",
        "--X\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a.csv\"\r\n\r\nprompt\na",
    );
    server.send(cut).await.problem(400, "invalid_request");
    server.send(post("/datasets", "multipart/form-data", "x")).await.problem(400, "invalid_request");
    server
        .send(post("/datasets", "application/x-www-form-urlencoded", "a=b"))
        .await
        .problem(415, "unsupported_media_type");
}

#[tokio::test]
async fn a_dataset_over_the_limit_is_refused() {
    let server = server_with(|_| {}, |state| state.dataset_limit_bytes = 1000).await;
    let big = "{\"prompt\":\"a\"}\n".repeat(100);
    let mut request = post("/datasets", NDJSON, big.clone());
    request.headers_mut().insert(header::CONTENT_LENGTH, big.len().to_string().parse().unwrap());
    server.send(request).await.problem(413, "body_too_large");
    let pieces = futures::stream::iter([Ok::<_, std::convert::Infallible>(big)]);
    server.post("/datasets", NDJSON, Body::from_stream(pieces)).await.problem(413, "body_too_large");
    // Canonical rows may be longer than what came: each CSV row repeats the header.
    let csv = format!("prompt,{}\n{}", "c".repeat(100), "a,b\n".repeat(20));
    server.post("/datasets", "text/csv", csv).await.problem(413, "body_too_large");
}

#[tokio::test]
async fn rows_are_paged_in_order() {
    let server = server().await;
    let body: String = (0..25).map(|n| format!("{{\"prompt\":\"p{n}\"}}\n")).collect();
    let id = server.post("/datasets", NDJSON, body).await.json()["id"].as_str().unwrap().to_owned();
    let (mut seen, mut after) = (Vec::new(), String::new());
    loop {
        let page = server.get(&format!("/datasets/{id}/rows?limit=10{after}")).await.json();
        seen.extend(
            page["data"]
                .as_array()
                .unwrap()
                .iter()
                .map(|row| (row["row"].as_u64().unwrap(), row["record"]["prompt"].clone())),
        );
        match page["next"].as_str() {
            Some(next) => after = format!("&after={next}"),
            None => break,
        }
    }
    let expected: Vec<_> = (0..25).map(|n| (n, json!(format!("p{n}")))).collect();
    assert_eq!(seen, expected);
    for made_up in ["r1b5", "r30b16", "r0b999999", "x", "r-1b0"] {
        server.get(&format!("/datasets/{id}/rows?after={made_up}")).await.problem(400, "invalid_cursor");
    }
}

#[tokio::test]
async fn lists_are_newest_first_and_paged() {
    let server = server().await;
    let mut ids = Vec::new();
    for n in 0..5 {
        let body = format!("{{\"prompt\":\"p{n}\"}}\n");
        ids.push(server.post("/datasets", NDJSON, body).await.json()["id"].as_str().unwrap().to_owned());
        tokio::time::sleep(std::time::Duration::from_millis(2)).await; // Ids of one millisecond have no order.
    }
    ids.reverse();
    let first = server.get("/datasets?limit=3").await.json();
    let rest = server.get(&format!("/datasets?limit=3&after={}", first["next"].as_str().unwrap())).await.json();
    let names = |page: &Value| -> Vec<String> {
        page["data"].as_array().unwrap().iter().map(|row| row["id"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!([names(&first), names(&rest)].concat(), ids);
    assert_eq!(rest["next"], Value::Null);
}

#[tokio::test]
async fn the_content_is_sent_whole_in_part_or_not_at_all() {
    let server = server().await;
    let made = server.post("/datasets", NDJSON, "{\"prompt\":\"a\"}\n{\"prompt\":\"b\"}\n").await.json();
    let path = format!("/datasets/{}/content", made["id"].as_str().unwrap());
    let ask = async |name: &'static str, value: &str| {
        server.send(Request::get(&path).header(name, value).body(Body::empty()).unwrap()).await
    };
    let whole = server.get(&path).await;
    assert_eq!((whole.status.as_u16(), whole.header("content-type")), (200, NDJSON));
    assert_eq!((whole.header("accept-ranges"), whole.headers.contains_key("repr-digest")), ("bytes", true));
    let known = ask("if-none-match", whole.header("etag")).await;
    assert_eq!((known.status.as_u16(), known.body.len()), (304, 0));
    let part = ask("range", "bytes=15-").await;
    assert_eq!((part.status.as_u16(), part.body.as_slice()), (206, &whole.body[15..]));
    ask("range", "bytes=99-").await.problem(416, "range_not_satisfiable");
}

#[tokio::test]
async fn json_without_rows_says_what_is_expected() {
    let server = server().await;
    for body in ["{}", "{\"records\"", "{\"rows\": [{\"prompt\": \"a\"}]}"] {
        let problem = server.post("/datasets", "application/json", body).await.problem(422, "invalid_dataset");
        assert!(problem["detail"].as_str().unwrap().contains("{\"records\": [rows]}"), "{body}: {problem}");
    }
}

#[tokio::test]
async fn an_idempotency_key_gives_the_first_answer_again() {
    let server = server().await;
    let send = |body: &'static str, key: &str| {
        let mut request = post("/datasets", NDJSON, body);
        request.headers_mut().insert("idempotency-key", key.parse().unwrap());
        request
    };
    let first = server.send(send("{\"prompt\":\"a\"}", "k1")).await;
    assert_eq!(first.status, 201);
    let again = server.send(send("{\"prompt\":\"a\"}", "k1")).await;
    assert_eq!((again.status, again.text()), (first.status, first.text()));
    assert_eq!(again.header("location"), first.header("location"));
    assert_eq!(again.header("idempotency-replayed"), "true");
    server.send(send("{\"prompt\":\"b\"}", "k1")).await.problem(422, "idempotency_mismatch");
    assert_eq!(server.send(send("{\"prompt\":\"b\"}", "k2")).await.status, 201);
    // A refused request does not use its key up.
    server.send(send("nope", "k3")).await.problem(422, "invalid_dataset");
    assert_eq!(server.send(send("{\"prompt\":\"c\"}", "k3")).await.status, 201);
    server.send(send("{\"prompt\":\"c\"}", &"k".repeat(256))).await.problem(400, "invalid_request");
}

#[tokio::test]
async fn uploads_of_the_same_rows_at_once_make_one_dataset() {
    let server = server().await;
    let uploads = (0..8).map(|_| upload(&server, "{\"prompt\":\"same\"}"));
    let answers = futures::future::join_all(uploads).await;
    let mut ids: Vec<String> = answers.iter().map(|answer| answer.json()["id"].as_str().unwrap().to_owned()).collect();
    ids.dedup();
    assert_eq!(ids.len(), 1, "{ids:?}");
    assert_eq!(answers.iter().filter(|answer| answer.status == 201).count(), 1);
    assert_eq!(std::fs::read_dir(server.dir.path().join("data/datasets")).unwrap().count(), 1);
}

#[tokio::test]
async fn an_upload_that_breaks_off_leaves_nothing() {
    let server = server().await;
    let pieces = [Ok("{\"prompt\":\"a\"}\n"), Err(std::io::Error::other("connection reset"))];
    let body = Body::from_stream(futures::stream::iter(pieces));
    let request = Request::post("/datasets").header("content-type", NDJSON).body(body).unwrap();
    server.send(request).await.problem(400, "body_interrupted");
    assert_eq!(std::fs::read_dir(server.dir.path().join("data/staging")).unwrap().count(), 0);
}
