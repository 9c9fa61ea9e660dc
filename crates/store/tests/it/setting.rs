//! Test fixture: a data directory with a store, a dataset, and jobs created from one small plan.

use std::collections::BTreeMap;

use rlood_store::files::DataDir;
use rlood_store::{Claimed, JobRow, NewDataset, NewJob, Publication, PublishCheckpoint, Store, StoreError};
use rlood_types::digest::Sha256Digest;
use rlood_types::event::Metrics;
use rlood_types::id::{DatasetId, JobId, WorkerId};
use rlood_types::job::{Failure, FailureClass, State};
use rlood_types::protocol::{FileEntry, Outcome, PROTOCOL, Register};
use rlood_types::spec::Plan;
use serde_json::json;

/// Time at which every test begins, Unix time in milliseconds.
pub const T0: i64 = 1_800_000_000_000;
/// Duration of a lease, in milliseconds.
pub const LEASE: i64 = 30_000;

pub struct Setting {
    pub store: Store,
    pub files: DataDir,
    pub dataset: DatasetId,
    pub dir: tempfile::TempDir,
}

impl Setting {
    pub async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let files = DataDir::open(dir.path()).unwrap();
        let store = Store::open(&files.database()).await.unwrap();
        let dataset = DatasetId::new();
        let new = NewDataset {
            id: dataset,
            name: None,
            sha256: "d1".to_owned(),
            num_rows: 8,
            size_bytes: 80,
            columns: vec!["prompt".to_owned()],
            owner: String::new(),
        };
        store.dataset_create(new, T0).await.unwrap();
        Self { store, files, dataset, dir }
    }

    /// Runs SQL directly, for changes that the store would reject or does not support.
    pub async fn sql(&self, sql: &str) -> Result<u64, sqlx::Error> {
        use sqlx::Connection;
        let options = sqlx::sqlite::SqliteConnectOptions::new().filename(self.files.database());
        let mut connection = sqlx::SqliteConnection::connect_with(&options).await?;
        sqlx::query(sqlx::AssertSqlSafe(sql)).execute(&mut connection).await.map(|done| done.rows_affected())
    }

    pub async fn job(&self) -> JobId {
        self.job_with(0, T0).await
    }

    pub async fn job_with(&self, priority: i64, now: i64) -> JobId {
        self.job_of(&plan(self.dataset), priority, now).await.unwrap().id
    }

    pub async fn job_of(&self, plan: &Plan, priority: i64, now: i64) -> Result<JobRow, StoreError> {
        let secrets =
            BTreeMap::from([("helpful".to_owned(), serde_json::from_value(json!({"secret": "whsec_x"})).unwrap())]);
        let spec = json!({"model": plan.model.id});
        let new = NewJob { id: JobId::new(), spec: &spec, plan, secrets: &secrets, parent: None, priority, owner: "" };
        self.store.job_create(new, now).await
    }

    pub async fn worker(&self) -> WorkerId {
        self.worker_with(false).await
    }

    pub async fn worker_with(&self, child: bool) -> WorkerId {
        let worker = WorkerId::new();
        let register = Register {
            worker,
            device: "cpu".to_owned(),
            pid: 7,
            threads: 2,
            version: "0.1.0".to_owned(),
            child,
            protocol: PROTOCOL,
            kernels: None,
            runtimes: Vec::new(),
        };
        self.store.worker_register(&register, T0).await.unwrap();
        worker
    }

    pub async fn claim(&self, worker: WorkerId, now: i64) -> Option<Claimed> {
        self.store.job_claim(worker, now, LEASE).await.unwrap()
    }

    /// Creates a job in this state; its attempt is 1 if it ran.
    pub async fn job_in(&self, state: State) -> JobId {
        let job = self.job().await;
        let run = async |outcome: Outcome| {
            let worker = self.worker().await;
            let claimed = self.claim(worker, T0).await.unwrap();
            assert_eq!(claimed.job, job);
            self.store.job_finish(job, claimed.attempt, outcome, T0).await.unwrap();
        };
        match state {
            State::Queued => {}
            State::Running => {
                let worker = self.worker().await;
                assert_eq!(self.claim(worker, T0).await.unwrap().job, job);
            }
            State::Paused => {
                self.store.job_pause(job, T0).await.unwrap();
            }
            State::Succeeded => run(Outcome::Succeeded).await,
            State::Failed => run(Outcome::Failed { failure: failure("nan_loss") }).await,
            State::Cancelled => {
                self.store.job_cancel(job, T0).await.unwrap();
            }
        }
        assert_eq!(self.state(job).await, state);
        job
    }

    pub async fn state(&self, job: JobId) -> State {
        self.store.job_get(job).await.unwrap().state
    }

    pub async fn publish(&self, claimed: &Claimed, step: u64, metrics: &Metrics) -> Result<Publication, StoreError> {
        let files = [FileEntry { name: "manifest.json".to_owned(), size_bytes: 2, sha256: Sha256Digest::of("{}") }];
        let Claimed { job, attempt, .. } = claimed;
        let checkpoint =
            PublishCheckpoint { job: *job, attempt: *attempt, step, files: &files, metrics, temporary: false };
        self.store.checkpoint_publish(checkpoint, T0).await
    }

    /// Returns the types of a job's events, in order.
    pub async fn history(&self, job: JobId) -> Vec<String> {
        self.store.event_page(job, 0, 1000).await.unwrap().into_iter().map(|event| event.kind).collect()
    }
}

pub fn failure(code: &str) -> Failure {
    Failure {
        class: FailureClass::User,
        code: code.to_owned(),
        message: "it does not work".to_owned(),
        phase: None,
        step: None,
        suggestion: None,
    }
}

/// Returns a plan of ten steps on a dataset that keeps the last two checkpoints and the best one.
pub fn plan(dataset: DatasetId) -> Plan {
    serde_json::from_value(json!({
        "name": "a-job",
        "model": {"id": "org/tiny", "sha256": "aa"},
        "dataset": {"id": dataset, "sha256": "d1", "num_rows": 8},
        "eval": null,
        "rewards": [{"name": "length", "weight": 1.0, "required": true, "type": "length",
                     "min_words": 1, "max_words": 5, "sentence_bonus": 0.5}],
        "rloo": {"num_generations": 2, "beta": 0.05, "epsilon": 0.2, "epsilon_high": 0.2, "num_iterations": 1,
                 "steps_per_generation": 1, "normalize_advantages": false, "reward_clip_range": null,
                 "mask_truncated_completions": false, "combine": "renormalize"},
        "sampling": {"max_completion_length": 8, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
                     "repetition_penalty": 1.0, "stop": [], "chat_template_kwargs": {}},
        "lora": {"r": 4, "alpha": 8.0, "dropout": 0.0, "target_modules": ["q_proj"], "use_rslora": false},
        "optimizer": {"learning_rate": 1e-3, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8,
                      "weight_decay": 0.0, "max_grad_norm": 1.0, "lr_scheduler_type": "constant", "warmup_steps": 0},
        "training": {"prompts_per_step": 2, "max_steps": 10, "seed": 1, "shuffle_dataset": true},
        "checkpoints": {"every_steps": 1, "keep_last": 2, "keep_best": 1},
        "metadata": {"team": "x"},
        "totals": {"optimizer_steps": 10, "completions_per_step": 4, "prompts_per_block": 2, "generation_blocks": 10,
                   "completions": 40, "epochs": 2.5, "dropped_rows_per_epoch": 0, "max_completion_tokens": 320}
    }))
    .unwrap()
}
