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
