//! Databases of older and newer versions: which commands upgrade them, which refuse them, and the output of `rlood check`.

use std::path::Path;

use serde_json::{Value, json};
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection, SqliteJournalMode};
use sqlx::{Connection, Executor};

use crate::backup::{path, run, said};

/// The last migration of an rlood that already had keys.
const OLDER: i64 = 9;

async fn connect(database: &Path) -> SqliteConnection {
    let options = SqliteConnectOptions::new().filename(database).create_if_missing(true);
    SqliteConnection::connect_with(&options.journal_mode(SqliteJournalMode::Wal)).await.unwrap()
}

async fn migrations(database: &Path) -> Vec<i64> {
    let mut connection = connect(database).await;
    let versions = sqlx::query_scalar("SELECT version FROM _sqlx_migrations ORDER BY version");
    let versions = versions.fetch_all(&mut connection).await.unwrap();
    connection.close().await.unwrap();
    versions
}

async fn add_a_later_migration(database: &Path) {
    let mut connection = connect(database).await;
    let later = "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time) \
                 VALUES (9999, 'later', 1, x'00', 0)";
    connection.execute(later).await.unwrap();
    connection.close().await.unwrap();
}

fn check(data: &Path) -> (Option<i32>, String) {
    let output = run(&["check", "--devices", "none", "--listen", "127.0.0.1:0", "--data-dir", path(data)]);
    (output.status.code(), said(&output))
}

/// Returns the output line with this label.
fn line<'t>(text: &'t str, what: &str) -> &'t str {
    text.lines().find(|line| line.split_whitespace().nth(1) == Some(what)).unwrap_or_else(|| panic!("{what}: {text}"))
}

#[tokio::test]
async fn an_older_database_is_brought_up_to_date_by_a_server_or_a_first_key_and_nobody_else() {
    let dir = tempfile::tempdir().unwrap();
    let (data, copy, restored) = (dir.path().join("data"), dir.path().join("copy"), dir.path().join("restored"));
    std::fs::create_dir(&data).unwrap();
    let database = data.join("rlood.db");
    let mut connection = connect(&database).await;
    let files = sqlx::migrate::Migrator::new(Path::new("migrations")).await.unwrap();
    files.run_to(OLDER, &mut connection).await.unwrap();
    connection.close().await.unwrap();
    let before = migrations(&database).await;
    assert_eq!(before.last(), Some(&OLDER));

    for action in [&["list"][..], &["revoke", "key_01jd0000000000000000000000"]] {
        let refused = run(&[&["keys"][..], action, &["--data-dir", path(&data)]].concat());
        assert!(!refused.status.success() && said(&refused).contains("by an older rlood"), "{}", said(&refused));
    }
    let (_, text) = check(&data);
    assert!(line(&text, "database").contains("ok") && text.contains("the next start upgrades it"), "{text}");
    assert!(line(&text, "keys").contains("every local request is allowed"), "{text}");
    let made = run(&["backup", path(&copy), "--data-dir", path(&data)]);
    assert!(made.status.success(), "{}", said(&made));
    assert_eq!(migrations(&database).await, before, "the source is as it was");

    let back = run(&["restore", path(&copy), "--data-dir", path(&restored)]);
    assert!(back.status.success(), "{}", said(&back));
    let listed = run(&["keys", "list", "--data-dir", path(&restored)]);
    assert!(listed.status.success(), "the copy is of this version: {}", said(&listed));
    assert!(run(&["keys", "create", "--scopes", "read", "--data-dir", path(&data)]).status.success());
    assert!(migrations(&database).await.len() > before.len());
}

#[tokio::test]
async fn a_newer_database_is_refused_by_every_command_in_the_same_words() {
    const WORDS: &str = "was written by a newer rlood";
    let dir = tempfile::tempdir().unwrap();
    let (data, copy, other) = (dir.path().join("data"), dir.path().join("copy"), dir.path().join("other"));
    let data_dir = ["--data-dir", path(&data)];
    assert!(run(&[&["keys", "create", "--scopes", "read"][..], &data_dir].concat()).status.success());
    assert!(run(&[&["backup", path(&copy)][..], &data_dir].concat()).status.success());

    add_a_later_migration(&data.join("rlood.db")).await;
    for command in [
        &["serve", "--devices", "none", "--listen", "127.0.0.1:0"][..],
        &["backup", path(&other)],
        &["keys", "list"],
        &["keys", "create", "--scopes", "read"],
    ] {
        let refused = run(&[command, &data_dir].concat());
        assert!(!refused.status.success() && said(&refused).contains(WORDS), "{command:?}: {}", said(&refused));
    }
    assert!(!other.exists(), "nothing is left of a backup that there is not");
    let (code, text) = check(&data);
    let (database, keys) = (line(&text, "database"), line(&text, "keys"));
    assert!(code == Some(1) && database.starts_with("FAIL") && database.contains(WORDS), "{text}");
    assert!(keys.starts_with("FAIL") && keys.contains("not known"), "{text}");

    let database = copy.join("rlood.db");
    add_a_later_migration(&database).await;
    let (size_bytes, sha256) = rlood::files::hash_file(&database).unwrap();
    let manifest = copy.join("manifest.json");
    let mut document: Value = serde_json::from_slice(&std::fs::read(&manifest).unwrap()).unwrap();
    document["files"]["rlood.db"] = json!({"size_bytes": size_bytes, "sha256": sha256});
    std::fs::write(&manifest, document.to_string()).unwrap();
    let refused = run(&["restore", path(&copy), "--data-dir", path(&other)]);
    assert!(!refused.status.success() && said(&refused).contains(WORDS), "{}", said(&refused));
    assert!(!other.exists());
}

#[test]
fn check_says_when_no_key_can_be_used_and_when_that_cannot_be_known() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let data_dir = ["--data-dir", path(&data)];
    assert!(run(&[&["keys", "create", "--scopes", "admin"][..], &data_dir].concat()).status.success());
    assert!(line(&check(&data).1, "keys").contains("1 of `rlood keys`"));
    let listed = said(&run(&[&["keys", "list"][..], &data_dir].concat()));
    let id = listed.split_whitespace().find(|word| word.starts_with("key_")).unwrap();
    assert!(run(&[&["keys", "revoke", id][..], &data_dir].concat()).status.success());
    let (code, text) = check(&data);
    assert!(code == Some(0) && line(&text, "keys").contains("every request would be refused"), "{text}");

    let file = dir.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let (code, text) = check(&file.join("data"));
    assert_eq!(code, Some(1), "{text}");
    assert!(line(&text, "database").starts_with("FAIL") && line(&text, "keys").contains("not known"), "{text}");
    assert!(!text.contains("every local request is allowed") && !text.contains("none yet"), "{text}");
}
