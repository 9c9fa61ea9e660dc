//! `GET /checkpoints/{id}/certificate`: the checkpoint's file, or computed for a checkpoint that has none.

use serde_json::{Value, json};
use sqlx::Connection;
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection};

use crate::processes::trained;

#[tokio::test]
async fn a_checkpoint_of_an_earlier_version_gets_the_certificate_that_its_run_would_have_written() {
    for is_adapter in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let (server, job) = trained(dir.path(), is_adapter).await;
        let checkpoints = server.client.list_checkpoints(job.parse().unwrap()).collect().await.unwrap();
        let checkpoint = &checkpoints[0];
        let written = server.client.get_certificate(checkpoint.id).await.unwrap();
        assert_eq!(written["lora"].is_null(), !is_adapter);
        let step = checkpoint.step;
        let folder = dir.path().join("data/checkpoints").join(&job).join(format!("{step}-1"));
        let file = folder.join("certificate.json");
        let of_file: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        assert_eq!(written, of_file);

        // As an earlier version left it.
        std::fs::remove_file(&file).unwrap();
        let files: Vec<_> = checkpoint.files.iter().filter(|file| file.name != "certificate.json").collect();
        let options = SqliteConnectOptions::new().filename(dir.path().join("data/rlood.db"));
        let mut database = SqliteConnection::connect_with(&options).await.unwrap();
        let changed = sqlx::query("UPDATE checkpoints SET files = ? WHERE job_id = ? AND step = ?")
            .bind(json!(files).to_string())
            .bind(&job)
            .bind(step as i64)
            .execute(&mut database)
            .await
            .unwrap();
        assert_eq!(changed.rows_affected(), 1);
        let computed = server.client.get_certificate(checkpoint.id).await.unwrap();
        assert_eq!(computed["prompts"], written["prompts"]);
        assert_eq!(computed, written);
        // It is kept.
        assert!(file.is_file());
        std::fs::write(folder.join("trainer_state.json"), "changed").unwrap();
        assert_eq!(server.client.get_certificate(checkpoint.id).await.unwrap(), computed);
    }
}
