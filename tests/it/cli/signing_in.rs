//! Profiles and keys.

use serde_json::{Value, json};

use super::{Done, User, mode_of, named, start};
use crate::processes::{Server, command};

const KEY: &str = "operator-key-0123456789";

fn guarded(user: &User) -> Server {
    Server::start_by(command(&user.path("data"), "none").env("RLOOD_API_KEY", KEY))
}

#[tokio::test]
async fn a_profile_holds_a_server_and_a_key_for_its_owner_alone() {
    let user = User::new();
    let server = guarded(&user);
    user.run(&["login", &server.url]).failed(2, "--key-file");
    user.run_with(&["login", &server.url], "rld_wrong_wrong_wrong\n").failed(4, "");
    assert!(!user.path(".config").exists(), "nothing is kept of a key that the server refused");
    let done = user.run_with(&["login", &server.url, "--name", "prod", "--key-file", "-"], &format!("{KEY}\n"));
    assert!(done.err.contains("operator's key") && done.err.contains("'prod'") && !done.err.contains(KEY), "{done:?}");
    let file = user.path(".config/rlood/config.toml");
    assert_eq!((mode_of(&file), mode_of(file.parent().unwrap())), (0o600, 0o700));
    user.run(&["list"]).ok();
    // The key of a profile is sent only to the profile's server.
    let mut other = user.command(&["list", "--server", &server.url.replace("127.0.0.1", "localhost")]);
    assert_eq!(other.output().unwrap().status.code(), Some(4));
    user.run(&["list", "--server", &server.url]).ok();

    user.write("key", KEY);
    user.run(&["login", &server.url, "--name", "command", "--key-command", "cat key"]).ok();
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(text.contains("default = \"command\"") && text.contains("key_command = \"cat key\""), "{text}");
    user.run(&["list"]).ok();
    std::fs::remove_file(user.path("key")).unwrap();
    user.run(&["list"]).failed(2, "key_command");
    user.run(&["list", "--key", KEY]).ok();

    let list = user.run(&["profile", "list", "--json"]).json();
    let names: Vec<_> = list["data"].as_array().unwrap().iter().map(|one| (&one["name"], &one["key"])).collect();
    assert_eq!(names, [(&json!("command"), &json!("command")), (&json!("prod"), &json!("stored"))]);
    assert!(!user.run(&["profile", "list"]).ok().contains(KEY));
    user.run(&["profile", "use", "prod"]).ok();
    user.run(&["list"]).ok();
    user.run(&["list", "--profile", "absent"]).failed(2, "known profiles: command, prod");
    user.run(&["profile", "remove", "prod"]).ok();
    user.run(&["profile", "remove", "prod"]).failed(2, "prod");
    assert!(!std::fs::read_to_string(&file).unwrap().contains(KEY));
    assert_eq!(mode_of(&file), 0o600);
}

#[tokio::test]
async fn a_user_without_a_home_has_no_profiles_and_loses_only_what_is_remembered() {
    let (server, user) = start("none");
    let homeless = |arguments: &[&str]| {
        let output = user.command(arguments).env_remove("HOME").output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Done { code: output.status.code().unwrap(), out: text(output.stdout), err: text(output.stderr) }
    };
    homeless(&["list"]).ok();
    homeless(&["list", "--server", &server.url]).ok();
    user.write("rows.jsonl", "{\"prompt\":\"Say one.\"}\n{\"prompt\":\"Say two.\"}\n");
    let mut job = named("homeless", 2);
    job["dataset"] = json!("rows.jsonl");
    user.write("job.json", job.to_string());
    let submitted = homeless(&["submit", "job.json"]);
    assert!(submitted.err.contains("cannot record") && submitted.err.contains("cannot save this job"), "{submitted:?}");
    let id = submitted.ok();
    assert_eq!(server.get(&format!("/jobs/{}", id.trim())).await["name"], json!("homeless"));
    homeless(&["show", "@last"]).failed(3, "@last");
    homeless(&["list", "--profile", "prod"]).failed(2, "profile 'prod' not found; there are no profiles yet");
    homeless(&["login", &server.url, "--name", "here"]).failed(2, "HOME");
}

#[tokio::test]
async fn keys_are_made_over_the_api_and_in_a_data_directory() {
    let mut user = User::new();
    let server = guarded(&user);
    user.variables.push(("RLOOD_KEY".to_owned(), KEY.to_owned()));
    let api = ["--server", server.url.as_str()];
    let with = |arguments: &[&str]| user.run(&[arguments, &api].concat());
    let made = with(&["keys", "create", "--scopes", "read", "--name", "ci", "--expires", "1h"]);
    assert!(made.err.contains("'ci'") && made.err.contains("not shown again"), "{made:?}");
    let key = made.ok().trim().to_owned();
    assert!(key.starts_with("rld_"), "{key}");
    let document = with(&["keys", "list", "--json"]).json();
    let id = document["data"][0]["id"].as_str().unwrap().to_owned();
    assert!(document["data"][0]["expires_at"].is_string() && document.get("next").is_some(), "{document}");
    assert!(with(&["keys", "list"]).ok().contains(&id));
    // The same directly in the data directory, next to the running server.
    assert!(user.run(&["keys", "list", "--data-dir", "data"]).ok().contains(&id));
    let offline = user.run(&["keys", "list", "--data-dir", "data", "--json"]).json();
    assert_eq!((&offline["data"][0]["id"], &offline["next"]), (&json!(id), &Value::Null), "the API's shape: {offline}");
    user.run(&["keys", "list", "--data-dir", "data", "--server", &server.url]).failed(2, "--data-dir");
    let mut reader = user.command(&["keys", "list", "--key", &key]);
    assert_eq!(reader.args(api).output().unwrap().status.code(), Some(4), "a reader lists no keys");
    assert!(with(&["keys", "revoke", &id]).ok().contains("is revoked"));
    with(&["keys", "revoke", "key_01jd0000000000000000000000"]).failed(3, "");
    with(&["list", "--key", &key]).failed(4, "");
    // Without a flag, a profile decides; without one, the data directory.
    user.run(&["keys", "list"]).failed(1, "rlood-data");
    user.write("key", KEY);
    user.run(&["login", &server.url, "--key-file", "key"]).ok();
    assert!(user.run(&["keys", "list"]).ok().contains(&id));
    let mut offline = user.command(&["keys", "list"]);
    assert_eq!(offline.env("RLOOD_DATA_DIR", "elsewhere").output().unwrap().status.code(), Some(1));
}
