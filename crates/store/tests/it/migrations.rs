//! Tests that the migrations are compiled into the program, from a folder that Cargo does not watch by itself.

use std::collections::BTreeMap;
use std::path::Path;

use sqlx::migrate::Migrator;
use sqlx::{Connection, Row};

use crate::setting::Setting;

/// Folder of the migrations relative to the crate, as in the build script.
const FOLDER: &str = "../../migrations";

/// Description and checksum by version, both from sqlx's own reader of the files and from a new database.
type Versions = BTreeMap<i64, (String, Vec<u8>)>;

#[tokio::test]
async fn every_file_of_the_folder_is_in_the_program() {
    let setting = Setting::new().await;
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(setting.files.database());
    let mut connection = sqlx::SqliteConnection::connect_with(&options).await.unwrap();
    let rows = sqlx::query("SELECT version, description, checksum FROM _sqlx_migrations")
        .fetch_all(&mut connection)
        .await
        .unwrap();
    let applied: Versions = rows.iter().map(|row| (row.get(0), (row.get(1), row.get(2)))).collect();
    // Cargo runs tests in the crate's folder.
    let read = Migrator::new(Path::new(FOLDER)).await.unwrap();
    let files: Versions =
        read.iter().map(|it| (it.version, (it.description.to_string(), it.checksum.to_vec()))).collect();
    assert!(files.len() > 10, "{files:?}");
    assert_eq!(applied, files);
}

#[test]
fn a_new_file_in_the_folder_rebuilds_the_program() {
    let script = std::fs::read_to_string("build.rs").unwrap();
    assert!(script.contains(&format!("const FOLDER: &str = {FOLDER:?};")), "{script}");
    assert!(script.contains("cargo::rerun-if-changed={FOLDER}"), "{script}");
    assert!(Path::new(FOLDER).is_dir());
}

#[tokio::test]
async fn the_rows_of_verdicts_stay_when_tasks_are_written_again() {
    let dir = tempfile::tempdir().unwrap();
    let database = dir.path().join("old.db");
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(&database).create_if_missing(true);
    let mut connection = sqlx::SqliteConnection::connect_with(&options).await.unwrap();
    let all = Migrator::new(Path::new(FOLDER)).await.unwrap();
    let before = |version: i64| all.iter().filter(move |it| it.version < version).cloned().collect::<Vec<_>>();
    Migrator::with_migrations(before(26)).run(&mut connection).await.unwrap();
    sqlx::raw_sql(
        "INSERT INTO jobs (id, state, queue_order, total_steps, model, spec, plan, secrets, metadata, created_at)
         VALUES ('j', 'queued', 1, 1, 'm', '{}', '{}', '{}', '{}', 1);
         INSERT INTO tasks (id, kind, job_id, checkpoint_id, step, state, attempt, request, done, total, created_at, expires_at)
         VALUES ('vrd_1', 'verdict', 'j', 'c', 7, 'succeeded', 2, '{\"a\": 1}', 3, 4, 5, NULL),
                ('exp_1', 'export', 'j', 'c', 7, 'succeeded', 1, '{}', 3, 4, 5, 6);
         INSERT INTO verdict_rows VALUES ('vrd_1', 1, 'test', 'won', '{}'), ('vrd_1', 2, 'test', 'lost', '{}');",
    )
    .execute(&mut connection)
    .await
    .unwrap();
    connection.close().await.unwrap();

    let mut connection = sqlx::SqliteConnection::connect_with(&options.foreign_keys(true)).await.unwrap();
    Migrator::with_migrations(before(27)).run(&mut connection).await.unwrap();
    let tasks = "SELECT id || kind || step || attempt || request || done || total || COALESCE(expires_at, '-') FROM tasks ORDER BY id";
    let tasks: Vec<String> = sqlx::query_scalar(tasks).fetch_all(&mut connection).await.unwrap();
    assert_eq!(tasks, ["exp_1export71{}346", "vrd_1verdict72{\"a\": 1}34-"]);
    let rows: Vec<String> = sqlx::query_scalar("SELECT verdict_id || seq || outcome FROM verdict_rows ORDER BY seq")
        .fetch_all(&mut connection)
        .await
        .unwrap();
    assert_eq!(rows, ["vrd_11won", "vrd_12lost"]);
    // The rows still go with their verdict.
    sqlx::query("DELETE FROM tasks").execute(&mut connection).await.unwrap();
    let left: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM verdict_rows").fetch_one(&mut connection).await.unwrap();
    assert_eq!(left, 0);
}
