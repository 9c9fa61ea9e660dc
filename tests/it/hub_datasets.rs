//! Datasets from the hub and from files of any format, with a real server: stored, previewed, used by a job.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

use crate::hub::{COMMIT, Faults, OLD_DATASET, Running, git_sha1, start};
use crate::processes::{Server, command, model_copy, register, spec};

const README: &str = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n  - split: test\n    path: main/test-*\n- config_name: socratic\n  data_files: socratic/*.jsonl\n---\n";

fn fixture(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/data/tests/fixtures").join(name)).unwrap()
}

fn repository() -> BTreeMap<String, Vec<u8>> {
    [
        ("README.md", README.as_bytes().to_vec()),
        ("main/train-00000-of-00001.parquet", fixture("gsm8k-snappy.parquet")),
        ("main/test-00000-of-00001.parquet", fixture("gsm8k-zstd.parquet")),
        ("socratic/a.jsonl", b"{\"question\":\"q\",\"answer\":\"#### 1\"}\n".to_vec()),
    ]
    .map(|(path, bytes)| (path.to_owned(), bytes))
    .into()
}

fn serve(data: &Path, hub: &Running, devices: &str) -> Server {
    let mut command = command(data, devices);
    let server = hub.url.as_str();
    command.env_remove("HF_HUB_OFFLINE").env("HF_ENDPOINT", server).env("RLOOD_HUB_DATASETS_SERVER", server);
    Server::start_by(&mut command)
}

async fn post(server: &Server, path: &str, body: &Value) -> (u16, Value) {
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let answer = http.post(format!("{}{path}", server.url)).json(body).send().await.unwrap();
    (answer.status().as_u16(), answer.json().await.unwrap())
}

async fn upload(server: &Server, path: &str, kind: &str, bytes: Vec<u8>) -> (u16, Value) {
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let request = http.post(format!("{}{path}", server.url)).header("content-type", kind).body(bytes);
    let answer = request.send().await.unwrap();
    (answer.status().as_u16(), answer.json().await.unwrap())
}

/// A form field: its name, a file name, its bytes.
type Part<'p> = (&'p str, Option<&'p str>, Vec<u8>);

async fn form(server: &Server, path: &str, parts: &[Part<'_>]) -> (u16, Value) {
    let mut body = Vec::new();
    for (name, file, bytes) in parts {
        let file = file.map_or_else(String::new, |file| format!("; filename=\"{file}\""));
        body.extend(format!("--XX\r\ncontent-disposition: form-data; name=\"{name}\"{file}\r\n\r\n").into_bytes());
        body.extend(bytes);
        body.extend(b"\r\n");
    }
    body.extend(b"--XX--\r\n");
    upload(server, path, "multipart/form-data; boundary=XX", body).await
}

fn map() -> Value {
    json!({"prompt": "question", "system": "End with ####.",
           "columns": {"answer": "{{ answer.split('####')[-1] | trim | replace(',', '') }}"}})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_data_set_of_the_hub_is_pinned_mapped_and_the_same_for_the_same_request() {
    let hub = start(repository(), Faults::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let server = serve(&dir.path().join("data"), &hub, "none");
    let wanted =
        json!({"name": "gsm8k", "hub": "fake/rows", "config": "main", "split": "train", "map": map(), "limit": 30});
    let (status, made) = post(&server, "/datasets", &wanted).await;
    assert_eq!(
        (status, &made["num_rows"], &made["columns"]),
        (201, &json!(30), &json!(["prompt", "question", "answer"])),
        "{made}"
    );
    let origin = &made["origin"];
    assert_eq!(
        (&origin["commit"], &origin["config"], &origin["split"]),
        (&json!(COMMIT), &json!("main"), &json!("train")),
        "{origin}"
    );
    assert_eq!(origin["files"][0]["path"], "main/train-00000-of-00001.parquet");
    assert_eq!(origin["recipe"]["map"], map());
    let rows = server.get(&format!("/datasets/{}/rows?limit=1", made["id"].as_str().unwrap())).await;
    assert_eq!(rows["data"][0]["record"]["prompt"][0]["content"], "End with ####.");
    assert_eq!(rows["data"][0]["record"]["answer"], "0");
    assert_eq!(origin.get("renamed_to"), None, "{origin}");
    let (status, again) = post(&server, "/datasets", &wanted).await;
    assert_eq!((status, &again["id"]), (200, &made["id"]));
    let former = json!({"hub": OLD_DATASET, "config": "main", "map": map(), "limit": 3});
    let (status, made) = post(&server, "/datasets", &former).await;
    assert_eq!((status, &made["origin"]["renamed_to"]), (201, &json!("fake/rows")), "{made}");

    for (body, at, says) in [
        (json!({"hub": "fake/rows"}), "/config", "config 'main' or 'socratic' must be chosen"),
        (json!({"hub": "fake/rows", "config": "main", "split": "trian"}), "/split", "did you mean 'train'?"),
        (json!({"hub": "fake/other"}), "/hub", "or it is private"),
        (json!({"hub": "fake/tiny"}), "/hub", "fake/tiny is a model, not a dataset"),
        (json!({"hub": "a b"}), "/hub", "org/name"),
        (json!({"hub": "fake/rows", "config": "main", "map": {"promt": "question"}}), "", "unknown field `promt`"),
        (json!({"hub": "fake/rows", "config": "main", "seed": 1}), "/seed", "give limit as well"),
        (
            json!({"hub": "fake/rows", "config": "main", "map": {"prompt": "quesiton"}}),
            "",
            "row 1 (main/train-00000-of-00001.parquet, row group 0): map.prompt: there is no column 'quesiton'; columns are question, answer (did you mean 'question'?)",
        ),
        (json!({"hub": "fake/rows", "config": "main"}), "", "\"map\": {\"prompt\":\"question\""),
    ] {
        let (status, answer) = post(&server, "/datasets", &body).await;
        assert_eq!((status, &answer["errors"][0]["pointer"]), (422, &json!(at)), "{body}: {answer}");
        assert!(answer["detail"].as_str().unwrap().contains(says), "{body}: {answer}");
    }
}

/// Writes files to a cache folder in the layout of huggingface_hub.
fn fill_cache(cache: &Path, files: &BTreeMap<String, Vec<u8>>) {
    let dataset = cache.join("datasets--fake--rows");
    for folder in ["refs", "blobs"] {
        std::fs::create_dir_all(dataset.join(folder)).unwrap();
    }
    std::fs::write(dataset.join("refs/main"), COMMIT).unwrap();
    for (path, bytes) in files {
        let blob = dataset.join("blobs").join(git_sha1(bytes));
        std::fs::write(&blob, bytes).unwrap();
        let link = dataset.join("snapshots").join(COMMIT).join(path);
        std::fs::create_dir_all(link.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(blob, link).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_data_set_in_the_local_cache_is_read_in_place_and_offline() {
    let (dir, mut files) = (tempfile::tempdir().unwrap(), repository());
    let cache = dir.path().join("cache");
    files.insert("socratic/test-00001-of-00002.jsonl".to_owned(), b"{\"question\":\"q\"}\n".to_vec());
    fill_cache(&cache, &files);
    let hub = start(repository(), Faults::default()).await;
    let wanted = json!({"hub": "fake/rows", "config": "main", "map": map(), "limit": 30});
    let serve = |data: &str, is_offline: bool| {
        let mut command = command(&dir.path().join(data), "none");
        command.env_remove("HF_HUB_OFFLINE").env("HF_ENDPOINT", &hub.url).env("HF_HUB_CACHE", &cache);
        if is_offline {
            command.env("HF_HUB_OFFLINE", "1");
        }
        Server::start_by(&mut command)
    };
    let is_file = |path: &str| path.contains("parquet");

    let offline = serve("offline", true);
    let (status, made) = post(&offline, "/datasets", &wanted).await;
    assert_eq!((status, &made["num_rows"], &made["origin"]["commit"]), (201, &json!(30), &json!(COMMIT)), "{made}");
    let (status, shown) = post(&offline, "/datasets/preview", &wanted).await;
    assert_eq!((status, &shown["rows"][0]["record"]["answer"]), (200, &json!("0")), "{shown}");
    assert!(hub.seen().is_empty(), "{:?}", hub.seen());
    for (body, at, says) in [
        (json!({"hub": "fake/other"}), "/hub", "the local cache does not have all its files"),
        (json!({"hub": "fake/rows", "config": "socratic"}), "/split", "socratic/test-00000-of-00002.jsonl is missing"),
    ] {
        let (status, refused) = post(&offline, "/datasets", &body).await;
        assert_eq!((status, &refused["errors"][0]["pointer"]), (422, &json!(at)), "{body}: {refused}");
        assert!(refused["detail"].as_str().unwrap().contains(says), "{refused}");
    }

    let online = serve("online", false);
    let (status, same) = post(&online, "/datasets", &wanted).await;
    assert_eq!((status, &same["sha256"]), (201, &made["sha256"]), "{same}");
    assert!(!hub.seen().iter().any(|seen| is_file(&seen.path)), "{:?}", hub.seen());
    // A damaged file is downloaded instead, and cannot be used offline.
    let blob = git_sha1(&files["main/train-00000-of-00001.parquet"]);
    std::fs::write(cache.join("datasets--fake--rows/blobs").join(blob), b"damaged").unwrap();
    let other = json!({"hub": "fake/rows", "config": "main", "map": map(), "limit": 29});
    let (status, refused) = post(&offline, "/datasets", &other).await;
    assert!(status == 422 && refused["detail"].as_str().unwrap().contains("offline"), "{refused}");
    let (status, made) = post(&online, "/datasets", &other).await;
    assert_eq!((status, &made["num_rows"]), (201, &json!(29)), "{made}");
    assert!(hub.seen().iter().any(|seen| is_file(&seen.path)), "{:?}", hub.seen());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_nothing_can_be_read_the_hub_s_converted_copy_is_taken() {
    let files: BTreeMap<String, Vec<u8>> = [
        ("data-00000-of-00001.arrow", b"ARROW1".to_vec()),
        ("converted/default/train/0000.parquet", fixture("gsm8k-gzip.parquet")),
        ("converted/default/test/0000.parquet", fixture("gsm8k-none.parquet")),
    ]
    .map(|(path, bytes)| (path.to_owned(), bytes))
    .into();
    let hub = start(files, Faults::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let server = serve(&dir.path().join("data"), &hub, "none");
    let ask = |more: Value| {
        let mut wanted = json!({"hub": "fake/rows", "map": {"prompt": "question"}});
        wanted.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        wanted
    };
    let (status, made) = post(&server, "/datasets", &ask(json!({}))).await;
    assert_eq!((status, &made["num_rows"]), (201, &json!(40)), "{made}");
    assert_eq!(made["origin"]["files"][0]["path"], "converted/default/train/0000.parquet", "{made}");
    // Configurations and splits are those of the copy.
    for (more, path) in [
        (json!({"config": "default"}), "converted/default/train/0000.parquet"),
        (json!({"split": "test"}), "converted/default/test/0000.parquet"),
        (json!({"config": "default", "split": "test", "revision": "main"}), "converted/default/test/0000.parquet"),
    ] {
        let (status, look) = post(&server, "/datasets/preview", &ask(more.clone())).await;
        assert_eq!((status, &look["origin"]["files"][0]["path"]), (200, &json!(path)), "{more}: {look}");
    }
    for (more, at, says) in [
        (json!({"config": "main"}), "/config", "there is no config 'main'; there are 'default'"),
        (json!({"split": "tset"}), "/split", "did you mean 'test'?"),
        (json!({"revision": COMMIT}), "/revision", "exists only of the default revision"),
    ] {
        let (status, answer) = post(&server, "/datasets", &ask(more.clone())).await;
        assert_eq!((status, &answer["errors"][0]["pointer"]), (422, &json!(at)), "{more}: {answer}");
        assert!(answer["detail"].as_str().unwrap().contains(says), "{more}: {answer}");
    }
}

/// The same rows in a file of 20 MB: its footer, whose length precedes PAR1, moves to the end.
fn padded(parquet: &[u8]) -> Vec<u8> {
    let (rest, length) = parquet[..parquet.len() - 4].split_last_chunk::<4>().unwrap();
    let footer = rest.len() - u32::from_le_bytes(*length) as usize;
    [&parquet[..footer], &vec![7; 20_000_000], &parquet[footer..]].concat()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_look_at_large_parquet_fetches_its_first_rows_alone() {
    let file = padded(&fixture("gsm8k-snappy.parquet"));
    let size = file.len() as u64;
    let dir = tempfile::tempdir().unwrap();
    let mut looks = Vec::new();
    for (at, (faults, least, most)) in [
        (Faults::default(), 1, 1 << 20),
        // Without range requests the whole file is downloaded.
        (Faults { ignores_ranges: true, ..Faults::default() }, size, 3 * size),
        (Faults { forbids_ranges: true, ..Faults::default() }, size, 2 * size),
    ]
    .into_iter()
    .enumerate()
    {
        let files = [("train.parquet".to_owned(), file.clone())].into();
        let hub = start(files, faults).await;
        let server = serve(&dir.path().join(at.to_string()), &hub, "none");
        let wanted = json!({"hub": "fake/rows", "map": map()});
        let (status, look) = post(&server, "/datasets/preview?rows=3", &wanted).await;
        assert_eq!(status, 200, "{look}");
        assert_eq!((&look["errors"], look["source_rows"].as_array().unwrap().len()), (&json!([]), 3), "{look}");
        assert_eq!(look["rows"][2]["record"]["answer"], "2002", "{look}");
        let sent = hub.fake.sent_bytes.load(std::sync::atomic::Ordering::SeqCst);
        assert!((least..=most).contains(&sent), "{at}: {sent} bytes of {size}");
        looks.push(look);
    }
    assert!(looks.iter().all(|look| *look == looks[0]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uploads_of_every_format_are_mapped_by_a_part_or_by_the_query() {
    let hub = start(repository(), Faults::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let server = serve(&dir.path().join("data"), &hub, "none");
    let file = || ("file", Some("train.parquet"), fixture("gsm8k-snappy.parquet"));
    let mapping = |mapping: Value| ("mapping", None, mapping.to_string().into_bytes());
    let wanted = || mapping(json!({"map": map(), "limit": 7}));
    let (status, made) = form(&server, "/datasets", &[wanted(), file()]).await;
    assert_eq!((status, &made["num_rows"]), (201, &json!(7)), "{made}");
    // Parquet is detected by its content, so the mapping may come after it.
    assert_eq!(form(&server, "/datasets", &[file(), wanted()]).await.1["id"], made["id"]);
    let (status, answer) = form(&server, "/datasets", &[file(), mapping(json!({"limit": 0}))]).await;
    assert_eq!((status, &answer["errors"][0]["pointer"]), (422, &json!("mapping/limit")), "{answer}");

    let csv = b"question,answer\n\"What is 1+1?\",2\nWhat is 2+2?,4\n".to_vec();
    // The same for text: curl sends fields in the order of its flags.
    let text = || ("file", Some("train.csv"), csv.clone());
    let by_question = || mapping(json!({"map": {"prompt": "question"}, "limit": 1}));
    let (status, made) = form(&server, "/datasets", &[text(), by_question()]).await;
    assert_eq!((status, &made["num_rows"]), (201, &json!(1)), "{made}");
    assert_eq!(form(&server, "/datasets", &[by_question(), text()]).await.1["id"], made["id"]);
    let (status, answer) = form(&server, "/datasets", &[text()]).await;
    assert_eq!((status, &answer["errors"][0]["pointer"]), (422, &json!("line 1")), "{answer}");
    let offered = r#"give a mapping, here "map": {"prompt":"question","columns":{"ground_truth":"answer"}}"#;
    assert!(answer["detail"].as_str().unwrap().contains(offered), "{answer}");
    let (_, answer) =
        upload(&server, "/datasets", "application/x-ndjson", b"{\"problem\":\"a\",\"solution\":\"b\"}\n".to_vec())
            .await;
    assert!(answer["detail"].as_str().unwrap().contains(r#""map": {"prompt":"problem""#), "{answer}");
    let (status, made) = upload(&server, "/datasets?prompt=question&limit=1&chat=false", "text/csv", csv.clone()).await;
    assert_eq!((status, &made["num_rows"]), (201, &json!(1)), "{made}");
    let (status, answer) = upload(&server, "/datasets?prompt=question&limit=x", "text/csv", csv.clone()).await;
    assert_eq!((status, &answer["errors"][0]["pointer"]), (400, &json!("?limit")), "{answer}");
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    std::io::Write::write_all(&mut gz, &csv).unwrap();
    let (status, made) =
        upload(&server, "/datasets?prompt=question", "application/octet-stream", gz.finish().unwrap()).await;
    assert_eq!((status, &made["num_rows"]), (201, &json!(2)), "{made}");
    let tsv = b"prompt\tlabel\na\tb\n".to_vec();
    assert_eq!(upload(&server, "/datasets", "text/tab-separated-values", tsv).await.0, 201);
    let (status, answer) = upload(&server, "/datasets", "application/octet-stream", csv).await;
    assert_eq!(status, 415, "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_look_shows_rows_as_the_model_reads_them_and_stores_nothing() {
    let hub = start(repository(), Faults::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let server = serve(&dir.path().join("data"), &hub, "none");
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;
    let wanted = json!({"hub": "fake/rows", "config": "main", "split": "test", "map": map()});
    let (status, look) = post(&server, "/datasets/preview?model=tiny&rows=2", &wanted).await;
    assert_eq!((status, look["rows"].as_array().unwrap().len(), &look["errors"]), (200, 2, &json!([])), "{look}");
    let row = &look["rows"][1];
    assert_eq!(
        (&row["record"]["answer"], &look["columns"][0]),
        (&json!("1001"), &json!({"name": "question", "kind": "text"}))
    );
    assert!(row["text"].as_str().unwrap().contains("End with ####.") && row["num_tokens"].as_u64() > Some(5), "{row}");
    let (_, look) = post(&server, "/datasets/preview", &json!({"hub": "fake/rows", "config": "main"})).await;
    assert_eq!((&look["rows"], &look["suggested_map"]["prompt"]), (&json!([]), &json!("question")), "{look}");
    assert!(look["errors"][0]["detail"].as_str().unwrap().contains("there is no 'prompt' column"), "{look}");
    let csv = b"question,answer\nWhat is 1+1?,2\n".to_vec();
    let (status, look) = upload(&server, "/datasets/preview?prompt=question&chat=false", "text/csv", csv).await;
    assert_eq!((status, &look["rows"][0]["record"]["prompt"]), (200, &json!("What is 1+1?")), "{look}");
    let (status, answer) = post(&server, "/datasets/preview?rows=51", &wanted).await;
    assert_eq!((status, &answer["errors"][0]["pointer"]), (400, &json!("?rows")), "{answer}");
    let (status, answer) = post(&server, "/datasets/preview?model=none", &wanted).await;
    assert_eq!((status, &answer["errors"][0]["pointer"]), (400, &json!("?model")), "{answer}");
    // A large file is read in part, and the row at which it was cut is left out.
    let long: String =
        (0..10_000).map(|row| format!("{{\"question\":\"q{row}\",\"x\":\"{}\"}}\n", "x".repeat(1000))).collect();
    let (status, look) = upload(
        &server,
        "/datasets/preview?prompt=question&where=question+%3D%3D+'q7'",
        "application/x-ndjson",
        long.into_bytes(),
    )
    .await;
    assert_eq!((status, look["rows"].as_array().unwrap().len(), &look["errors"]), (200, 1, &json!([])), "{look}");
    assert_eq!(server.get("/datasets").await["data"], json!([]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_names_a_data_set_of_the_hub() {
    let hub = start(repository(), Faults::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let server = serve(&dir.path().join("data"), &hub, "cpu");
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;
    let mut wanted = spec("tiny", 1);
    wanted["dataset"] = json!({"hub": "fake/rows", "config": "main", "map": map(), "limit": 8});
    wanted["rewards"] = json!([{"type": "number_match", "column": "answer"}]);
    let checked = server.post("/jobs/validate", &wanted).await;
    assert_eq!((&checked["valid"], &checked["errors"]), (&json!(true), &json!([])), "{checked}");
    assert_eq!(server.get("/datasets").await["data"], json!([]));
    let job = server.submit(&wanted).await;
    let view = server.job_in_state(&job, "succeeded").await;
    let id = view["plan"]["dataset"]["id"].as_str().unwrap();
    let dataset = server.get(&format!("/datasets/{id}")).await;
    assert_eq!((&dataset["num_rows"], &dataset["origin"]["hub"]), (&json!(8), &json!("fake/rows")), "{dataset}");
    // A name as in POST /datasets, and a map over rows that are here already.
    let records = json!([{"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": "4"}]);
    for (source, name) in [
        (json!({"name": "named", "hub": "fake/rows", "config": "main", "map": map(), "limit": 9}), json!("named")),
        (json!({"name": "mine", "records": records, "map": {"prompt": "question"}}), json!("mine")),
        (json!({"id": id, "map": {"where": "answer != '0'"}, "limit": 7}), Value::Null),
    ] {
        let mut wanted = wanted.clone();
        wanted["dataset"] = source.clone();
        wanted["training"] = json!({"prompts_per_step": 1, "max_steps": 1});
        let job = server.submit(&wanted).await;
        let view = server.get(&format!("/jobs/{job}")).await;
        let stored = view["plan"]["dataset"]["id"].as_str().unwrap();
        let dataset = server.get(&format!("/datasets/{stored}")).await;
        assert_eq!(dataset["name"], name, "{source}: {dataset}");
        let rows = source["limit"].as_u64().unwrap_or(2);
        assert_eq!(dataset["num_rows"], rows, "{source}: {dataset}");
    }
    // A validation and the events of the job report a renamed repository.
    let mut renamed = wanted.clone();
    renamed["dataset"]["hub"] = json!(OLD_DATASET);
    let is_renamed = |list: &Value, at: &str| {
        list.as_array()
            .unwrap()
            .iter()
            .any(|item| item["code"] == "repository_renamed" && item.to_string().contains(at))
    };
    let checked = server.post("/jobs/validate", &renamed).await;
    assert!(is_renamed(&checked["warnings"], "fake/rows"), "{checked}");
    let job = server.submit(&renamed).await;
    let events = server.get(&format!("/jobs/{job}/events?limit=100")).await;
    let data: Value = events["data"].as_array().unwrap().iter().map(|event| event["data"].clone()).collect();
    assert!(is_renamed(&data, "/dataset: the hub has renamed"), "{events}");
    wanted["dataset"]["map"]["prompt"] = json!("quesiton");
    let checked = server.post("/jobs/validate", &wanted).await;
    assert_eq!(checked["errors"][0]["pointer"], "/dataset", "{checked}");
    assert!(checked["errors"][0]["detail"].as_str().unwrap().contains("did you mean 'question'?"), "{checked}");
    wanted["dataset"] = json!({"hub": "fake/rows", "split": 7});
    let checked = server.post("/jobs/validate", &wanted).await;
    assert_eq!(checked["errors"][0]["pointer"], "/dataset", "{checked}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_trains_on_several_sources_each_judged_by_its_own_rewards() {
    let hub = start(repository(), Faults::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let server = serve(&dir.path().join("data"), &hub, "cpu");
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;
    let stored = json!({"records": [{"prompt": "Zero?"}, {"prompt": "One?"}, {"prompt": "Two?"}]});
    let stored = server.post("/datasets", &stored).await;
    let mut wanted = spec("tiny", 16);
    wanted["dataset"] = json!([
        {"hub": "fake/rows", "config": "main", "map": map(), "limit": 8, "name": "maths", "weight": 3},
        {"records": [{"q": "Say one word."}, {"q": "Say two words."}], "map": {"prompt": "q", "chat": true}},
        {"id": stored["id"], "name": "stored", "weight": 1, "map": {"where": "prompt != 'Zero?'"}},
    ]);
    wanted["rewards"] = json!([
        {"type": "number_match", "column": "answer", "applies_to": "maths"},
        {"type": "length", "min_words": 1, "max_words": 3, "applies_to": ["source_2", "stored"]},
    ]);
    let checked = server.post("/jobs/validate", &wanted).await;
    assert_eq!((&checked["valid"], &checked["errors"]), (&json!(true), &json!([])), "{checked}");
    assert_eq!(checked["warnings"][0]["code"], "weights_and_rows", "{checked}");
    let job = server.submit(&wanted).await;
    let view = server.job_in_state(&job, "succeeded").await;
    let dataset = &view["plan"]["dataset"];
    assert_eq!(
        dataset["sources"],
        json!([{"name": "maths", "num_rows": 8, "weight": 3.0}, {"name": "source_2", "num_rows": 2, "weight": 2.0},
               {"name": "stored", "num_rows": 2, "weight": 1.0}])
    );
    let joined = server.get(&format!("/datasets/{}", dataset["id"].as_str().unwrap())).await;
    assert_eq!((&joined["num_rows"], &joined["origin"]["sources"][0]["hub"]), (&json!(12), &json!("fake/rows")));
    assert_eq!(joined["origin"]["sources"][2]["dataset"], stored["id"], "{joined}");
    assert_eq!(joined["origin"]["sources"][1]["recipe"]["map"]["prompt"], "q", "{joined}");

    // An epoch is 8 prompts of the largest source, and 16/3 and 8/3 of the others; 32 prompts are two epochs.
    let samples = server.get(&format!("/jobs/{job}/samples?limit=100")).await;
    let mut rows: BTreeMap<&str, u64> = BTreeMap::new();
    for sample in samples["data"].as_array().unwrap() {
        let row: u64 = sample["prompt_id"].as_str().unwrap()["row_".len()..].parse().unwrap();
        let (of_maths, of_words) = (&sample["rewards"]["number_match"], &sample["rewards"]["length"]);
        assert_eq!((row < 8, of_maths.is_null(), of_words.is_null()), (row < 8, row >= 8, row < 8), "{sample}");
        assert!(sample["reward"].is_number(), "the rewards that do not apply count nothing: {sample}");
        *rows.entry(["maths", "others"][usize::from(row >= 8)]).or_default() += 1;
    }
    assert_eq!(rows, BTreeMap::from([("maths", 32), ("others", 32)]));
    let metrics = server.get(&format!("/jobs/{job}/metrics?keys=sources/maths/share,sources/maths/reward,sources/stored/reward,rewards/length/missing_fraction")).await;
    let of = |name: &str| {
        metrics["data"].as_array().unwrap().iter().filter_map(|row| row[name].as_f64()).collect::<Vec<_>>()
    };
    assert_eq!(of("sources/maths/share").len(), 16, "{metrics}");
    assert_eq!(of("sources/maths/share").iter().sum::<f64>(), 8.0);
    assert!(
        !of("sources/stored/reward").is_empty()
            && of("rewards/length/missing_fraction").iter().all(|part| *part == 0.0)
    );

    // The configuration can be submitted again, with the same data in the same shares.
    let config = server.get(&format!("/jobs/{job}/config")).await;
    assert_eq!(config["dataset"]["sources"], dataset["sources"], "{config}");
    let again = server.submit(&config).await;
    assert_eq!(server.get(&format!("/jobs/{again}")).await["plan"]["dataset"], *dataset);

    for (source, at, says) in [
        (json!({"id": "ds_01m89kcx2srn7wefqdq3p2cmrn", "name": "x"}), "/dataset/3/id", "there is no dataset"),
        (json!({"hub": "fake/rows", "config": "main", "split": "trian"}), "/dataset/3", "did you mean 'train'?"),
        (json!({"hub": "fake/rows", "config": "main", "map": {"prompt": "quesiton"}}), "/dataset/3", "quesiton"),
    ] {
        let mut wrong = wanted.clone();
        wrong["dataset"].as_array_mut().unwrap().push(source.clone());
        let checked = server.post("/jobs/validate", &wrong).await;
        let found = checked["errors"].as_array().unwrap().iter().find(|error| error["pointer"] == at);
        assert!(found.is_some_and(|error| error["detail"].as_str().unwrap().contains(says)), "{source}: {checked}");
    }
    let mut wrong = wanted.clone();
    wrong["rewards"][0]["applies_to"] = Value::Null;
    let checked = server.post("/jobs/validate", &wrong).await;
    assert_eq!(checked["errors"][0]["pointer"], "/rewards/0/column", "{checked}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_look_at_a_large_file_of_the_hub_reads_its_beginning_alone() {
    let row = format!("{{\"question\":\"{}\"}}\n", "q".repeat(1000));
    let files = BTreeMap::from([
        ("train-0.jsonl".to_owned(), row.repeat(40_000).into_bytes()),
        ("train-1.jsonl".to_owned(), row.into_bytes()),
    ]);
    let hub = start(files, Faults::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let server = serve(&dir.path().join("data"), &hub, "none");
    let wanted = json!({"hub": "fake/rows", "map": {"prompt": "question"}});
    let (status, look) = post(&server, "/datasets/preview", &wanted).await;
    assert_eq!((status, look["rows"].as_array().unwrap().len(), &look["errors"]), (200, 5, &json!([])), "{look}");
    assert_eq!(look["origin"]["files"].as_array().unwrap().len(), 2, "{look}");
    let kept = |name: &str| std::fs::read_dir(dir.path().join("data/hub").join(name)).map_or(0, Iterator::count);
    assert_eq!((kept("parts"), kept("sources")), (0, 0), "nothing was downloaded");
}
