//! Databases with many jobs: the real schema, the first job created by the store itself, the others copied with SQL.

use std::path::{Path, PathBuf};
use std::time::Instant;

use rlood::doctor::{Alert, OnAlert, PhaseChange, Rule, Severity, TrainingPhase};
use rlood::store::NewModel;
use serde_json::{Value, json};

use super::Size;
use crate::setting::{Setting, T0};

/// Number of metrics per step.
const KEYS: usize = 25;
/// File that marks a completely created database.
const COMPLETE: &str = "complete";

/// A data directory; removed when dropped, unless `RLOOD_SCALE_DIR` keeps it.
pub enum Stock {
    Passing(tempfile::TempDir),
    Kept(PathBuf),
}

impl Stock {
    pub fn path(&self) -> &Path {
        match self {
            Stock::Passing(dir) => dir.path(),
            Stock::Kept(path) => path,
        }
    }

    /// Many jobs in every state, with metrics, events, alerts, checkpoints.
    pub async fn history(size: &Size) -> Self {
        Self::named("history", async |setting| fill_history(setting, size).await).await
    }

    /// Many jobs in the queue.
    pub async fn queue(size: &Size) -> Self {
        Self::named("queue", async |setting| {
            setting.job().await;
            copies(setting, 'b', size.queued).await;
        })
        .await
    }

    async fn named(name: &str, fill: impl AsyncFnOnce(&Setting)) -> Self {
        let kept = std::env::var_os("RLOOD_SCALE_DIR").map(|dir| PathBuf::from(dir).join(name));
        if let Some(path) = kept.as_ref().filter(|path| path.join(COMPLETE).exists()) {
            return Stock::Kept(path.clone());
        }
        let begun = Instant::now();
        let setting = Setting::new().await;
        fill(&setting).await;
        let dir = handed_over(setting).await;
        println!("{name}: filled in {:.0} s", begun.elapsed().as_secs_f64());
        let Some(path) = kept else { return Stock::Passing(dir) };
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::rename(dir.keep(), &path).unwrap();
        std::fs::write(path.join(COMPLETE), "").unwrap();
        Stock::Kept(path)
    }
}

/// Returns the id of a copy.
pub fn job_id(prefix: char, number: usize) -> String {
    format!("job_0{prefix}{number:024}")
}

pub fn metric_names() -> Vec<String> {
    let mut names: Vec<String> = ["reward", "kl", "loss", "grad_norm", "entropy"].map(str::to_owned).to_vec();
    names.extend((names.len()..KEYS).map(|number| format!("metric/number_{number}")));
    names
}

/// Labels as `KEY=VALUE`: of all jobs, of one in ten, of a single one, and of none.
pub fn label(number: usize) -> String {
    match number % 4 {
        0 => "sweep=all".to_owned(),
        1 => format!("team=t{}", number % 10),
        2 => format!("seed={}", 1 + number),
        _ => "seed=none".to_owned(),
    }
}

/// Creates one real job, and copies of it with SQL; `prefix` distinguishes their ids.
async fn copies(setting: &Setting, prefix: char, count: usize) {
    let done = setting
        .sql(&format!(
            "WITH RECURSIVE n (v) AS (SELECT 1 UNION ALL SELECT v + 1 FROM n WHERE v < {count}) \
             INSERT INTO jobs (id, name, state, priority, queue_order, total_steps, model, spec, plan, secrets, metadata, owner, \
             created_at) \
             SELECT 'job_0{prefix}' || printf('%024d', v), 'copy', 'queued', v % 7 - 3, (SELECT MAX(queue_order) FROM jobs) + v, \
             10, model, spec, plan, secrets, json_object('sweep', 'all', 'team', 't' || (v % 10), 'seed', CAST(v AS TEXT)), \
             CASE v % 5 WHEN 0 THEN '' ELSE 'owner-' || (v % 5) END, created_at + v \
             FROM n, (SELECT * FROM jobs ORDER BY queue_order LIMIT 1)"
        ))
        .await
        .unwrap();
    assert_eq!(done, count as u64);
}

async fn fill_history(setting: &Setting, size: &Size) {
    setting.job().await;
    copies(setting, 'a', size.jobs).await;
    let metrics = metric_names().iter().map(|name| format!("\"{name}\":0.123456789012")).collect::<Vec<_>>().join(",");
    let headlines = "{\"step\":1,\"kind\":\"train\",\"metrics\":{\"reward\":0.123456789012,\"kl\":0.1,\"loss\":0.1}}";
    let first = job_id('a', 1);
    for (jobs, steps) in
        [(format!("id LIKE 'job_0a%' AND id <> '{first}'"), size.steps), (format!("id = '{first}'"), size.long_run)]
    {
        let count = format!("WITH RECURSIVE n (v) AS (SELECT 1 UNION ALL SELECT v + 1 FROM n WHERE v < {steps})");
        for insert in [
            // The reward varies from step to step, as in real runs.
            format!(
                "{count} INSERT INTO steps SELECT id, v, 'train', 1, {T0} + v, \
                 replace('{{{metrics}}}', '\"reward\":0.123456789012', '\"reward\":' || ((v * 7919 % 1000) / 1000.0)), \
                 (v * 7919 % 1000) / 1000.0 FROM jobs, n WHERE {jobs}"
            ),
            format!(
                "{count} INSERT INTO events SELECT id, v, 'step', 1, {T0} + v, '{headlines}' FROM jobs, n WHERE {jobs}"
            ),
        ] {
            setting.sql(&insert).await.unwrap();
        }
    }
    beside(setting).await;
    let worker = setting.worker().await;
    let failure = json!({"class": "infra", "code": "worker_lost", "message": "lost", "phase": null, "step": null, "suggestion": null});
    for statement in [
        "UPDATE jobs SET next_seq = 1 + COALESCE((SELECT MAX(seq) FROM events WHERE job_id = jobs.id), 0)".to_owned(),
        // One in ten is still queued; most have ended.
        format!(
            "UPDATE jobs SET state = 'running', lease_until = {T0}, worker = '{worker}', started_at = {T0}, attempt = 1 \
             WHERE queue_order % 10 IN (1, 2, 3, 4, 5, 6)"
        ),
        format!(
            "UPDATE jobs SET state = 'succeeded', lease_until = NULL, worker = NULL, step = 10, finished_at = {T0} \
             WHERE state = 'running'"
        ),
        format!(
            "UPDATE jobs SET state = 'failed', failure = '{failure}', finished_at = {T0} WHERE queue_order % 10 = 7"
        ),
        format!("UPDATE jobs SET state = 'cancelled', finished_at = {T0} WHERE queue_order % 10 = 8"),
        "UPDATE jobs SET state = 'paused' WHERE queue_order % 10 = 9".to_owned(),
    ] {
        setting.sql(&statement).await.unwrap();
    }
    checkpoints(setting).await;
}

/// Adds alerts to one job in three, each in two training phases.
async fn beside(setting: &Setting) {
    let alert = |rule| {
        let alert = Alert {
            rule,
            severity: Severity::Critical,
            step: 5,
            since_step: 2,
            message: "it drifts, as this text of a usual length says to whoever reads it".to_owned(),
            evidence: Vec::new(),
            fix: "raise rloo.beta".to_owned(),
            on_alert: OnAlert::Note,
            ends: Vec::new(),
        };
        serde_json::to_string(&alert).unwrap()
    };
    let phase =
        |phase| serde_json::to_string(&PhaseChange { phase, from: None, step: 3, evidence: Vec::new() }).unwrap();
    for (step, rule) in [(3, Rule::KlExplosion), (5, Rule::ColdStart)] {
        let (text, rule) = (alert(rule), rule.as_str());
        setting
            .sql(&format!(
                "INSERT INTO alerts (job_id, step, rule, time, alert) SELECT id, {step}, '{rule}', {T0}, '{text}' FROM jobs \
                 WHERE queue_order % 3 = 0"
            ))
            .await
            .unwrap();
    }
    for (step, change) in [(2, phase(TrainingPhase::Exploration)), (4, phase(TrainingPhase::Convergence))] {
        let insert = format!("INSERT INTO training_phases SELECT id, {step}, {T0}, '{change}' FROM jobs");
        setting.sql(&insert).await.unwrap();
    }
}

/// Adds two checkpoints to each successful job, rows and directories.
async fn checkpoints(setting: &Setting) {
    let mut after = None;
    let filter = rlood::store::JobFilter { states: vec![rlood::job::State::Succeeded], ..Default::default() };
    loop {
        let page = setting.store.job_list(&filter, after.as_deref(), 1000).await.unwrap();
        for job in &page.data {
            for step in [8, 10] {
                let dir = setting.files.checkpoint_dir(job.id, step, 1);
                std::fs::create_dir_all(&dir).unwrap();
                std::fs::write(dir.join("manifest.json"), "{}").unwrap();
            }
        }
        match page.next {
            Some(next) => after = Some(next),
            None => break,
        }
    }
    let files: Value = json!([{"name": "manifest.json", "size_bytes": 2, "sha256": "00"}]);
    for step in [8, 10] {
        // An id is 26 characters after its prefix.
        let insert = format!(
            "INSERT INTO checkpoints (id, job_id, step, attempt, files, metrics, created_at) \
             SELECT 'ckpt_' || printf('%02d', {step}) || substr(id, 7), id, {step}, 1, '{files}', '{{}}', {T0} \
             FROM jobs WHERE state = 'succeeded'"
        );
        setting.sql(&insert).await.unwrap();
    }
}

/// Hands the data directory over to a server.
async fn handed_over(setting: Setting) -> tempfile::TempDir {
    let model = NewModel {
        id: "org/tiny".to_owned(),
        source: "/models/tiny".to_owned(),
        sha256: "aa".to_owned(),
        card: json!({}),
        owner: String::new(),
    };
    setting.store.model_create(model, T0).await.unwrap();
    std::fs::write(setting.files.dataset(setting.dataset), b"{\"prompt\":\"a\"}\n").unwrap();
    setting.store.close().await;
    setting.dir
}
