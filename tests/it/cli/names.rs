//! How commands refer to jobs: ids, id prefixes, names.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};

use serde_json::json;
use sha2::{Digest, Sha256};

use super::{User, named, start};

/// A server that answers every request with the same list, and records the requests.
struct Recorder {
    url: String,
    seen: Arc<Mutex<Vec<String>>>,
}

impl Recorder {
    fn start(list: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let seen = Arc::new(Mutex::new(Vec::new()));
        let recorded = seen.clone();
        // A thread of its own, because the tests wait for their commands.
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
                let Some(first) = lines.next() else { continue };
                let _ = lines.find(String::is_empty);
                recorded.lock().unwrap().push(first.trim_end_matches(" HTTP/1.1").to_owned());
                let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close";
                let _ = write!(stream, "{head}\r\ncontent-length: {}\r\n\r\n{list}", list.len());
            }
        });
        Self { url, seen }
    }

    /// The requests since the last call.
    fn seen(&self) -> Vec<String> {
        std::mem::take(&mut *self.seen.lock().unwrap())
    }
}

#[test]
fn the_server_is_asked_for_a_name_and_not_for_all_its_jobs() {
    let recorder = Recorder::start("{\"data\": [], \"next\": null}");
    let user = User::of(&recorder.url);
    user.run(&["show", "nightly & co"]).failed(3, "not found");
    assert_eq!(recorder.seen(), ["GET /jobs?name=nightly+%26+co&limit=100"]);
    user.run(&["show", "job_01ABCDEF"]).failed(3, "not found");
    let expected = ["GET /jobs?name=job_01ABCDEF&limit=100", "GET /jobs?id_prefix=job_01abcdef&limit=100"];
    assert_eq!(recorder.seen(), expected);
    user.run(&["list", "--state", "queued,running", "--name", "night"]).ok();
    assert_eq!(recorder.seen(), ["GET /jobs?state=queued%2Crunning&name_contains=night&limit=20"]);
    user.run(&["datasets", "show", "asked"]).failed(3, "not found");
    assert_eq!(recorder.seen(), ["GET /datasets?name=asked&limit=100"]);

    let recorder = Recorder::start("{\"data\": [{\"id\": \"ds_01jd0000000000000000000000\"}], \"next\": null}");
    let user = User::of(&recorder.url);
    user.write("rows.json", "[{\"prompt\": \"one\"}]");
    let found = user.run(&["datasets", "upload", "rows.json"]);
    assert_eq!(found.ok(), "ds_01jd0000000000000000000000\n");
    let sha256 = hex::encode(Sha256::digest("{\"prompt\":\"one\"}\n"));
    assert_eq!(recorder.seen(), [format!("GET /datasets?sha256={sha256}&limit=1")]);
}

#[tokio::test]
async fn a_job_is_named_by_its_id_its_beginning_its_name_or_last() {
    let (server, user) = start("none");
    user.run(&["show", "@last"]).failed(3, "@last");
    let first = user.submit(&named("twin", 2));
    let second = user.submit(&named("twin", 3));
    let third = user.submit(&named("only one", 4));
    let id = |word: &str| user.run(&["show", word, "--json"]).json()["id"].as_str().unwrap().to_owned();
    assert_eq!(id("only one"), third);
    assert_eq!(id("@last"), third);
    assert_eq!(id(&third[..third.len() - 1]), third, "a beginning that no other id has");
    assert_eq!(id(&third.to_uppercase().replace("JOB_", "job_")), third);

    let ambiguous = user.run(&["show", "twin"]);
    ambiguous.failed(2, "2 jobs");
    assert!(ambiguous.err.contains(&first) && ambiguous.err.contains(&second) && !ambiguous.err.contains(&third));
    // The first characters encode the time, which all three ids share.
    let ambiguous = user.run(&["cancel", &first[..10]]);
    ambiguous.failed(2, "3 jobs");
    assert_eq!(server.get(&format!("/jobs/{first}")).await["state"], json!("queued"), "nothing was cancelled");
    user.run(&["show", &first[..9]]).failed(2, "at least 6 characters");
    user.run(&["show", "nobody"]).failed(3, "job 'nobody' not found");
    user.run(&["show", "job_zzzzzzzz"]).failed(3, "");
    user.run(&["pull", "twin@first"]).failed(2, "@best");
    user.run(&["pull", &format!("{first}@last")]).failed(3, "no checkpoint yet");
    user.run(&["wait", &first, "nobody"]).failed(3, "nobody");
}
