//! How commands refer to jobs: ids, id prefixes, names.

use serde_json::json;

use super::{named, start};

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
