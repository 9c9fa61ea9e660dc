//! Images of datasets at the API: how they are uploaded, who may train on them, and how they are read.

use axum::body::Body;
use axum::http::{Request, header};
use rlood_test_support::images::{ZipEntry, png, zip_of};
use serde_json::{Value, json};

use crate::http::{Answer, Server, server};

/// Sends a form with rows and a zip.
async fn upload(server: &Server, rows: &[Value], zip: Option<&[u8]>) -> Answer {
    server.send(form("/datasets", rows, zip)).await
}

fn form(path: &str, rows: &[Value], zip: Option<&[u8]>) -> Request<Body> {
    let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
    let mut body = b"--X\r\ncontent-disposition: form-data; name=\"file\"; filename=\"rows.jsonl\"\r\n\r\n".to_vec();
    body.extend(lines.as_bytes());
    if let Some(zip) = zip {
        body.extend(b"\r\n--X\r\ncontent-disposition: form-data; name=\"images\"; filename=\"images.zip\"\r\n\r\n");
        body.extend(zip);
    }
    body.extend(b"\r\n--X--\r\n");
    let request = Request::post(path).header(header::CONTENT_TYPE, "multipart/form-data; boundary=X");
    request.body(Body::from(body)).unwrap()
}

fn row(images: Value) -> Value {
    json!({"prompt": [{"role": "user", "content": "What is this?"}], "images": images, "answer": "a"})
}

fn base64(bytes: &[u8]) -> String {
    base64::Engine::encode(&base64::engine::general_purpose::STANDARD, bytes)
}

fn sha256(bytes: &[u8]) -> String {
    hex::encode(<sha2::Sha256 as sha2::Digest>::digest(bytes))
}

/// Returns the number of entries of a folder of the data directory.
fn entries(server: &Server, folder: &str) -> usize {
    std::fs::read_dir(server.dir.path().join("data").join(folder)).unwrap().count()
}

#[tokio::test]
async fn images_of_a_zip_are_stored_once_and_read_with_safe_headers() {
    let server = server().await;
    let (one, two) = (png(20, 30, 1), png(5, 6, 2));
    let zip = zip_of(&[
        ZipEntry::stored("a/one.png", &one),
        ZipEntry::stored("two.png", &two),
        ZipEntry::stored(".DS_Store", b"x"),
    ]);
    let rows = [
        row(json!([{"file": "a/one.png"}, {"file": "two.png"}])),
        row(json!([])),
        row(json!([{"file": "a/one.png"}, {"bytes_b64": base64(&two)}])),
        json!({"prompt": "text alone"}),
    ];
    let answer = upload(&server, &rows, Some(&zip)).await;
    assert_eq!(answer.status, 201, "{}", answer.text());
    let dataset = answer.json();
    let about = json!({"stored": 2, "bytes": one.len() + two.len(), "unused_files": 1});
    assert_eq!(dataset["origin"]["images"], about);
    let id = dataset["id"].as_str().unwrap();
    assert_eq!(entries(&server, &format!("datasets/{id}.images")), 2);
    assert_eq!(entries(&server, "staging"), 0);

    let page = server.get(&format!("/datasets/{id}/rows?from=2&limit=1")).await.json();
    assert_eq!(page["data"][0]["row"], 2);
    let images = &page["data"][0]["record"]["images"];
    assert_eq!(
        images[0],
        json!({"sha256": sha256(&one), "media_type": "image/png", "width": 20, "height": 30}),
        "{page}"
    );
    assert_eq!(images[1]["sha256"], sha256(&two));
    assert_eq!(server.get(&format!("/datasets/{id}/rows?from=9")).await.json()["data"], json!([]));

    let path = format!("/datasets/{id}/images/{}", sha256(&one));
    let image = server.get(&path).await;
    assert_eq!(image.body, one);
    for (name, value) in [
        ("content-type", "image/png"),
        ("x-content-type-options", "nosniff"),
        ("content-security-policy", "default-src 'none'; frame-ancestors 'none'; sandbox"),
        ("cache-control", "private, max-age=31536000, immutable"),
        ("content-disposition", "inline"),
    ] {
        assert_eq!(image.header(name), value, "{name}");
    }
    for wrong in [sha256(b"another"), "..%2F..%2Frlood.db".to_owned(), "x".to_owned()] {
        server.get(&format!("/datasets/{id}/images/{wrong}")).await.problem(404, "not_found");
    }

    // The same rows again are the same dataset, and leave no files.
    let again = upload(&server, &rows, Some(&zip)).await;
    assert_eq!((again.status.as_u16(), again.json()["id"].as_str()), (200, Some(id)));
    assert_eq!((entries(&server, "datasets"), entries(&server, "staging")), (2, 0));

    assert_eq!(server.delete(&format!("/datasets/{id}")).await.status, 204);
    assert_eq!(entries(&server, "datasets"), 0, "the images go with the dataset");
    server.get(&path).await.problem(404, "not_found");
}

#[tokio::test]
async fn small_images_are_sent_inside_of_rows() {
    let server = server().await;
    let bytes = png(7, 8, 0);
    let lines = format!("{}\n{}\n", row(json!([{"bytes_b64": base64(&bytes)}])), row(json!([])));
    let answer = server.post("/datasets", "application/x-ndjson", lines).await;
    assert_eq!(answer.status, 201, "{}", answer.text());
    let dataset = answer.json();
    let id = dataset["id"].as_str().unwrap();
    assert!(dataset["columns"].as_array().unwrap().contains(&json!("images")));
    let image = server.get(&format!("/datasets/{id}/images/{}", sha256(&bytes))).await;
    assert_eq!(image.body, bytes);
    // What the server stores is not what it accepts: a reference could name an image that it does not have.
    let content = server.get(&format!("/datasets/{id}/content")).await.text();
    let problem = server.post("/datasets", "application/x-ndjson", content).await.problem(422, "invalid_dataset");
    assert!(problem["detail"].as_str().unwrap().contains("the field 'sha256' is unknown"), "{problem}");
}

#[tokio::test]
async fn what_is_wrong_with_images_is_said_with_the_row_and_leaves_no_files() {
    let server = server().await;
    let good = ZipEntry::stored("a.png", &png(2, 2, 0));
    let with = |entry: ZipEntry| zip_of(&[good.clone(), entry]);
    let named = |name: &str| row(json!([{"file": name}]));
    let link = ZipEntry { mode: 0o120_777, ..ZipEntry::stored("link", b"/etc/passwd") };
    for (rows, zip, code, says) in [
        (vec![named("a.png")], with(ZipEntry::stored("../b.png", b"")), "invalid_zip", "'../b.png' leads outside"),
        (vec![named("a.png")], with(link), "invalid_zip", "'link' is a link"),
        (vec![named("a.png")], with(good.clone()), "invalid_zip", "the same name"),
        (vec![named("a.png")], b"no zip".to_vec(), "invalid_zip", "is not a zip"),
        (
            vec![row(json!([])), named("b.png")],
            with(ZipEntry::stored("c.png", b"")),
            "missing_file",
            "row 2 (rows.jsonl): image 0 of the row: the zip has no file 'b.png'",
        ),
        (
            vec![named("big.png")],
            with(ZipEntry::stored("big.png", &png(9000, 9000, 0))),
            "too_many_pixels",
            "big.png: the image has 9000 × 9000 pixels",
        ),
        (vec![named("a.bmp")], with(ZipEntry::stored("a.bmp", b"BM......")), "invalid_image", "BMP is not supported"),
        (vec![row(json!([]))], zip_of(std::slice::from_ref(&good)), "unused_files", "no row names a file of the zip"),
    ] {
        let problem = upload(&server, &rows, Some(&zip)).await.problem(422, "invalid_dataset");
        let item = &problem["errors"][0];
        assert_eq!(item["code"], code, "{problem}");
        assert!(item["detail"].as_str().unwrap().contains(says), "{says}: {problem}");
    }
    for (images, code) in [(json!([{"bytes_b64": "?"}]), "image_base64"), (json!([{"file": "a.png"}]), "missing_file")]
    {
        let answer = server.post("/datasets", "application/x-ndjson", format!("{}\n", row(images))).await;
        let problem = answer.problem(422, "invalid_dataset");
        assert_eq!((&problem["errors"][0]["pointer"], &problem["errors"][0]["code"]), (&json!("line 1"), &json!(code)));
    }
    assert_eq!((entries(&server, "datasets"), entries(&server, "staging")), (0, 0));

    let preview = server.send(form("/datasets/preview", &[named("a.png")], Some(&zip_of(&[good])))).await;
    assert_eq!(preview.json()["rows"][0]["record"]["images"][0]["width"], 2, "{}", preview.text());
    assert_eq!(entries(&server, "staging"), 0);
}
