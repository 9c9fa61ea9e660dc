//! The dataset routes. The streaming reader is tested in `crates/types`.

use axum::body::Body;
use axum::http::{Request, header};
use serde_json::{Value, json};

use crate::http::{Answer, Server, post, server, server_with};

const NDJSON: &str = "application/x-ndjson";

async fn upload(server: &Server, body: &'static str) -> Answer {
    server.post("/datasets", NDJSON, body).await
}

#[tokio::test]
async fn a_preview_shows_a_row_that_is_not_an_object_and_the_document_allows_that() {
    let server = server().await;
    let preview = server.post("/datasets/preview", "application/json", "[{\"prompt\": \"a\"}, [], \"b\"]").await;
    assert_eq!(preview.status, 200, "{}", preview.text());
    let preview = preview.json();
    assert_eq!(preview["source_rows"], json!([{"prompt": "a"}, [], "b"]));
    assert!(preview["errors"][0]["detail"].as_str().unwrap().contains("row 2"), "{preview}");
    let document = server.get("/openapi.json").await.json();
    let shown = &document["components"]["schemas"]["DatasetPreview"]["properties"]["source_rows"];
    assert_eq!((&shown["type"], &shown["items"]), (&json!("array"), &json!({})), "{shown}");
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
    let sha256 = hex::encode(<sha2::Sha256 as sha2::Digest>::digest(canonical));
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
    // A refused upload leaves no files.
    assert_eq!(std::fs::read_dir(server.dir.path().join("data/staging")).unwrap().count(), 0);
}

#[tokio::test]
async fn a_bad_row_of_a_table_is_named_by_its_number_and_file() {
    let server = server().await;
    let csv = "prompt,answer\na,1\n\"b\nc\"\n";
    let problem = server.post("/datasets", "text/csv", csv).await.problem(422, "invalid_dataset");
    assert_eq!(problem["errors"][0]["pointer"], "row 2", "{problem}");
    assert!(problem["detail"].as_str().unwrap().starts_with("row 2: the row has 1 fields"), "{problem}");
    let form = |name: &str, rows: &str| {
        let head = format!("--X\r\ncontent-disposition: form-data; name=\"file\"; filename=\"{name}\"\r\n\r\n");
        post("/datasets", "multipart/form-data; boundary=X", format!("{head}{rows}\r\n--X--\r\n"))
    };
    for (name, rows, says) in [
        ("train.csv", csv, "row 2 (train.csv): the row has 1 fields"),
        ("train.tsv", "prompt\tn\n\t1\n", "row 1 (train.tsv): the prompt is empty"),
        ("train.json", "[{\"prompt\":\"a\"},\n{\"prompt\":3}]", "row 2 (train.json): the prompt is a number"),
        ("train.jsonl", "{\"prompt\":\"a\"}\n\n{}\n", "line 3 (train.jsonl): there is no 'prompt' column"),
        ("train.csv", "prompt,prompt\n", "line 1 (train.csv): columns 1 and 2 of the header"),
        ("train.csv", "prompt\n", "train.csv: the dataset has no rows"),
    ] {
        let problem = server.send(form(name, rows)).await.problem(422, "invalid_dataset");
        assert!(problem["detail"].as_str().unwrap().starts_with(says), "{problem}");
    }
    // A mapped file counts its rows in the same way.
    let mapped = server.post("/datasets?prompt=question", "text/csv", "question\na\n\"b\"x\n").await;
    let problem = mapped.problem(422, "invalid_dataset");
    assert!(problem["detail"].as_str().unwrap().starts_with("row 2 (the upload): "), "{problem}");
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
    // Canonical rows can be longer than the upload: each CSV row repeats the header.
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
async fn a_dataset_is_found_by_its_name_and_by_its_hash() {
    let server = server().await;
    for name in ["sums", "sums", "other"] {
        let body = format!("{{\"prompt\":\"{name} {}\"}}\n", rlood::id::DatasetId::new());
        server.post(&format!("/datasets?name={name}"), NDJSON, body).await.json();
    }
    let all = server.get("/datasets").await.json()["data"].clone();
    let found = async |query: &str| server.get(&format!("/datasets?{query}")).await.json()["data"].clone();
    assert_eq!(found("name=sums").await.as_array().unwrap().len(), 2);
    assert_eq!(found("name=sum").await, json!([]));
    let other = all.as_array().unwrap().iter().find(|one| one["name"] == "other").unwrap();
    let sha256 = other["sha256"].as_str().unwrap();
    assert_eq!(found(&format!("sha256={sha256}")).await, json!([other]));
    assert_eq!(found(&format!("sha256={}&name=other", sha256.to_uppercase())).await, json!([other]));
    assert_eq!(found(&format!("sha256={sha256}&name=sums")).await, json!([]));
    let problem = server.get("/datasets?sha256=abc").await.problem(400, "invalid_query");
    assert_eq!(problem["errors"][0]["pointer"], "?sha256");
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
    // A refused request does not use up its Idempotency-Key.
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
