//! Tests of lists of jobs: contents, order, additional data and filters; and that no list reads all rows.

use std::collections::BTreeMap;

use rlood_store::listing::{BESIDE_JOBS, BETWEEN_IN_QUEUE, list_query};
use rlood_store::rewards::OUTAGE_JOBS;
use rlood_store::sparklines::REWARD_SPARKLINES;
use rlood_store::steps::{SOME_STEP_LINES, STEP_LINES};
use rlood_store::{JobFilter, JobPatch, JobRow, NewJob};
use rlood_types::id::JobId;
use rlood_types::job::State;
use serde_json::json;
use sqlx::{Connection, Row};

use crate::setting::{Setting, T0, plan};

fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

/// Creates sixty jobs with several models, owners, labels, priorities and states; some in the same millisecond.
async fn some_jobs(setting: &Setting) -> Vec<JobRow> {
    let mut jobs = Vec::new();
    for number in 0..60 {
        let mut plan = plan(setting.dataset);
        plan.model.id = ["org/tiny", "org/small"][number % 2].to_owned();
        plan.name = [None, Some("nightly"), Some("nightly %_ run")][number % 3].map(str::to_owned);
        plan.metadata = match number % 4 {
            0 => labels(&[]),
            1 => labels(&[("team", "x"), ("a key \"quoted\"", "välue")]),
            2 => labels(&[("team", "x"), ("sweep", "1")]),
            _ => labels(&[("team", "y"), ("sweep", "1")]),
        };
        let id = JobId::new();
        let spec = json!({});
        let secrets = BTreeMap::new();
        let new = NewJob {
            id,
            spec: &spec,
            plan: &plan,
            secrets: &secrets,
            parent: None,
            priority: [0, 5, -3][number % 3],
            owner: ["", "ann", "bob"][number % 5 % 3],
        };
        let row = setting.store.job_create(new, T0 + i64::try_from(number / 3).unwrap()).await.unwrap();
        match number % 6 {
            1 => drop(setting.store.job_cancel(id, T0).await.unwrap()),
            2 => drop(setting.store.job_pause(id, T0).await.unwrap()),
            _ => {}
        }
        jobs.push(row);
    }
    let moved = labels(&[("team", "z")]);
    let patch = JobPatch { metadata: Some(moved), ..JobPatch::default() };
    setting.store.job_patch(jobs[2].id, patch, T0).await.unwrap();
    setting.store.job_delete(jobs[7].id).await.unwrap();
    jobs.remove(7);
    let mut rows = Vec::new();
    for job in jobs {
        rows.push(setting.store.job_get(job.id).await.unwrap());
    }
    rows.sort_by_key(|row| std::cmp::Reverse((row.created_at, row.id.to_string())));
    rows
}

fn filters() -> Vec<JobFilter> {
    let mut filters = Vec::new();
    for states in
        [vec![], vec![State::Queued], vec![State::Cancelled], vec![State::Failed], vec![State::Queued, State::Paused]]
    {
        for model in [None, Some("org/tiny"), Some("org/none")] {
            for owner in [None, Some(""), Some("ann")] {
                for metadata in [
                    labels(&[]),
                    labels(&[("team", "x")]),
                    labels(&[("team", "x"), ("sweep", "1")]),
                    labels(&[("a key \"quoted\"", "välue")]),
                    labels(&[("team", "z")]),
                    labels(&[("team", "")]),
                ] {
                    let is_named = model != Some("org/none") && owner != Some("");
                    let (model, owner) = (model.map(str::to_owned), owner.map(str::to_owned));
                    let filter = JobFilter { states: states.clone(), model, metadata, owner, ..JobFilter::default() };
                    if is_named {
                        filters.extend(with_names(&filter));
                    }
                    filters.push(filter);
                }
            }
        }
    }
    filters
}

/// The filter together with names and beginnings of ids.
fn with_names(filter: &JobFilter) -> Vec<JobFilter> {
    let text = |text: &str| Some(text.to_owned());
    vec![
        JobFilter { name: text("nightly"), ..filter.clone() },
        JobFilter { name: text("none"), ..filter.clone() },
        JobFilter { name_contains: text("%_"), ..filter.clone() },
        JobFilter { id_prefix: text("job_0"), ..filter.clone() },
        JobFilter { id_prefix: text("job_z"), name: text("nightly"), ..filter.clone() },
    ]
}

fn matches(filter: &JobFilter, row: &JobRow) -> bool {
    let JobFilter { states, model, metadata, owner, name, name_contains, id_prefix } = filter;
    (states.is_empty() || states.contains(&row.state))
        && (name.is_none() || *name == row.name)
        && name_contains.as_ref().is_none_or(|part| row.name.as_ref().is_some_and(|name| name.contains(part)))
        && id_prefix.as_ref().is_none_or(|prefix| row.id.to_string().starts_with(prefix))
        && model.as_ref().is_none_or(|model| *model == row.model)
        && owner.as_ref().is_none_or(|owner| *owner == row.owner)
        && metadata.iter().all(|(key, value)| row.metadata.get(key) == Some(value))
}

#[tokio::test]
async fn every_filter_finds_its_jobs_page_by_page() {
    let setting = Setting::new().await;
    let rows = some_jobs(&setting).await;
    for filter in filters() {
        let expected: Vec<JobId> = rows.iter().filter(|row| matches(&filter, row)).map(|row| row.id).collect();
        let (mut found, mut after) = (Vec::new(), None);
        loop {
            let page = setting.store.job_list(&filter, after.as_deref(), 7).await.unwrap();
            found.extend(page.data.iter().map(|row| row.id));
            match page.next {
                Some(next) => after = Some(next),
                None => break,
            }
        }
        assert_eq!(found, expected, "{filter:?}");
    }
    // The beginning of an id finds the one job that has it.
    let id = rows[3].id.to_string();
    let one = JobFilter { id_prefix: Some(id[..id.len() - 1].to_owned()), ..JobFilter::default() };
    let found = setting.store.job_list(&one, None, 7).await.unwrap().data;
    assert_eq!(found.iter().map(|row| row.id).collect::<Vec<_>>(), [rows[3].id]);
}

#[tokio::test]
async fn places_in_the_queue_are_those_in_which_jobs_are_claimed() {
    let setting = Setting::new().await;
    let rows = some_jobs(&setting).await;
    let ids: Vec<JobId> = rows.iter().map(|row| row.id).collect();
    let beside = setting.store.jobs_beside(&ids).await.unwrap();
    let mut places: Vec<(u64, JobId)> = ids.iter().filter_map(|id| Some((beside[id].queue_position?, *id))).collect();
    places.sort_unstable();
    assert_eq!(
        places.iter().map(|(place, _)| *place).collect::<Vec<_>>(),
        (1..=places.len() as u64).collect::<Vec<_>>()
    );
    // Queries for a few of them, and for each one alone, give the same positions.
    let some: Vec<JobId> = places.iter().step_by(5).map(|(_, id)| *id).collect();
    let beside_some = setting.store.jobs_beside(&some).await.unwrap();
    for (place, id) in &places {
        assert_eq!(setting.store.job_queue_position(*id).await.unwrap(), Some(*place));
        if let Some(beside) = beside_some.get(id) {
            assert_eq!(beside.queue_position, Some(*place));
        }
    }
    let worker = setting.worker().await;
    for (_, id) in &places {
        let claimed = setting.claim(worker, T0).await.unwrap();
        assert_eq!(claimed.job, *id);
        setting.store.job_finish(*id, claimed.attempt, rlood_types::protocol::Outcome::Succeeded, T0).await.unwrap();
    }
    assert!(setting.claim(worker, T0).await.is_none());
}

/// Returns SQLite's query plan for a statement.
async fn steps_of(setting: &Setting, sql: &str) -> Vec<String> {
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(setting.files.database());
    let mut connection = sqlx::SqliteConnection::connect_with(&options).await.unwrap();
    let explain = sqlx::AssertSqlSafe(format!("EXPLAIN QUERY PLAN {sql}"));
    let rows = sqlx::query(explain).fetch_all(&mut connection).await.unwrap();
    rows.iter().map(|row| row.get("detail")).collect()
}

#[tokio::test]
async fn no_page_reads_all_rows_or_sorts_them() {
    let setting = Setting::new().await;
    for filter in filters() {
        for after in [None, Some((T0, "job_x".to_owned()))] {
            let sql = list_query(&filter, after.as_ref(), 20);
            let steps = steps_of(&setting, sql.sql().as_str()).await;
            let paged = steps.iter().any(|step| step.contains("SCAN page"));
            for step in &steps {
                // Only the jobs of the page, at most a hundred, are sorted once more.
                let sorts = step.contains("TEMP B-TREE") && !paged;
                let reads_all = step.starts_with("SCAN jobs") && !step.contains("INDEX jobs_");
                assert!(!sorts && !reads_all, "{filter:?}: {steps:?}");
            }
            let of_one = ["jobs_created", "jobs_state", "jobs_model", "jobs_owner", "jobs_name"];
            let by_index = steps
                .iter()
                .any(|step| of_one.iter().any(|index| step.contains(index)) || step.contains("INDEX jobs_list"));
            assert!(by_index, "{filter:?}: {steps:?}");
        }
    }
    for (sql, indexes) in [
        (BESIDE_JOBS, &["alerts USING PRIMARY KEY", "training_phases USING PRIMARY KEY", "workers USING INDEX"][..]),
        (BETWEEN_IN_QUEUE, &["COVERING INDEX jobs_queue"]),
        (REWARD_SPARKLINES, &["COVERING INDEX steps_reward"]),
        (STEP_LINES, &["steps USING PRIMARY KEY (job_id=? AND step>? AND step<?)"]),
        (SOME_STEP_LINES, &["steps USING PRIMARY KEY (job_id=? AND step=?)"]),
        (OUTAGE_JOBS, &["INDEX jobs_outage"]),
    ] {
        let steps = steps_of(&setting, sql).await;
        for index in indexes {
            assert!(steps.iter().any(|step| step.contains(index)), "{index}: {steps:?}");
        }
        // Tables are searched by index. Scans are only of lists that are part of the statement or of its intermediate results.
        for step in steps.iter().filter(|step| step.starts_with("SCAN")) {
            let small =
                ["wanted", "section", "stretch", "(subquery", "CONSTANT ROW"].iter().any(|name| step.contains(name));
            assert!(small || step.contains("INDEX jobs_outage"), "{steps:?}");
        }
    }
}
