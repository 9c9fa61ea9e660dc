//! The migrations are compiled into the program, from a folder that Cargo does not watch by itself.

use std::collections::BTreeSet;
use std::path::Path;

use sqlx::{Connection, Row};

use crate::setting::Setting;

/// Relative to the crate, as the macro and the build script say it.
const FOLDER: &str = "../../migrations";

#[tokio::test]
async fn every_file_of_the_folder_is_in_the_program() {
    let setting = Setting::new().await;
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(setting.files.database());
    let mut connection = sqlx::SqliteConnection::connect_with(&options).await.unwrap();
    let rows = sqlx::query("SELECT version FROM _sqlx_migrations").fetch_all(&mut connection).await.unwrap();
    let applied: BTreeSet<i64> = rows.iter().map(|row| row.get(0)).collect();
    // Cargo runs tests in the crate's folder.
    let number = |name: String| -> i64 { name.split_once('_').unwrap().0.parse().unwrap() };
    let files = std::fs::read_dir(FOLDER).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let files: BTreeSet<i64> = files.map(number).collect();
    assert!(files.len() > 10, "{files:?}");
    assert_eq!(applied, files);
}

#[test]
fn a_new_file_in_the_folder_rebuilds_the_program() {
    let script = std::fs::read_to_string("build.rs").unwrap();
    assert!(script.contains(&format!("cargo::rerun-if-changed={FOLDER}\"")), "{script}");
    assert!(Path::new(FOLDER).is_dir());
    let source = std::fs::read_to_string("src/version.rs").unwrap();
    assert!(source.contains(&format!("sqlx::migrate!(\"{FOLDER}\")")), "the script watches another folder");
}
