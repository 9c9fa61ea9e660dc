//! Metrics of `/metrics` beyond requests and job states: the queue, connections, webhook messages, database files, this
//! process.

use std::sync::atomic::Ordering;

use super::AppState;
use super::error::Problem;
use super::prometheus::{family, line};
use crate::store::clock_ms;

/// Appends the metrics in Prometheus's text format.
pub(super) async fn write(state: &AppState, text: &mut String) -> Result<(), Problem> {
    let store = state.store.measures().await?;
    let mut one = |name: &str, kind: &str, help: &str, value: f64| {
        family(text, name, kind, help);
        line(text, name, value);
    };
    let waited = store.oldest_queued_at.map_or(0, |at| (clock_ms() - at).max(0));
    one("rlood_queue_oldest_seconds", "gauge", "How long the first job of the queue has waited.", waited as f64 / 1e3);
    one(
        "rlood_jobs_waiting_for_reward",
        "gauge",
        "Running jobs whose reward service does not answer.",
        store.waiting as f64,
    );
    one("rlood_alerts_active", "gauge", "Active alerts of unfinished jobs.", store.alerts as f64);
    one("rlood_checkpoints", "gauge", "Published checkpoints.", store.checkpoints as f64);
    one("rlood_datasets", "gauge", "Datasets.", store.datasets as f64);
    one("rlood_sessions", "gauge", "Open browser sessions.", store.sessions as f64);
    one(
        "rlood_audit_entries_total",
        "counter",
        "Entries of the audit log since the first start.",
        store.changes as f64,
    );

    let counts = &state.connections;
    for (name, kind, help, value) in [
        ("rlood_connections_open", "gauge", "Connections of clients and workers.", &counts.open),
        ("rlood_connections_accepted_total", "counter", "Connections since the server started.", &counts.accepted),
        (
            "rlood_connections_evicted_total",
            "counter",
            "Connections that were closed to make room: idle ones, then event streams.",
            &counts.evicted,
        ),
        (
            "rlood_connections_refused_total",
            "counter",
            "New connections that were refused because the limit was reached.",
            &counts.refused,
        ),
    ] {
        one(name, kind, help, value.load(Ordering::Relaxed) as f64);
    }
    one(
        "rlood_disk_reserve_bytes",
        "gauge",
        "Free disk space below which jobs pause.",
        state.config.edge.disk_reserve_bytes as f64,
    );
    let database = state.files.database();
    for (name, help, path) in [
        ("rlood_database_bytes", "Size of the database.", database.clone()),
        ("rlood_database_wal_bytes", "Size of the database's write-ahead log.", database.with_extension("db-wal")),
    ] {
        one(name, "gauge", help, std::fs::metadata(path).map_or(0.0, |found| found.len() as f64));
    }
    process(&mut one);

    family(text, "rlood_jobs_paused", "gauge", "Paused jobs by reason; user = paused by request.");
    for (reason, number) in &store.paused {
        line(text, &format!("rlood_jobs_paused{{reason=\"{}\"}}", label(reason.as_deref().unwrap_or("user"))), number);
    }
    family(text, "rlood_lifecycle_messages", "gauge", "Messages to webhooks by state.");
    for (state, number) in state.store.delivery_counts().await? {
        line(text, &format!("rlood_lifecycle_messages{{state=\"{}\"}}", state.as_str()), number);
    }
    Ok(())
}

/// Escapes a pause reason that a worker sent, so that it cannot end the Prometheus label.
fn label(text: &str) -> String {
    text.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '_').take(60).collect()
}

/// Appends the metrics of this process under the names that Prometheus client libraries use. Values that the system does not
/// report are left out.
fn process(one: &mut impl FnMut(&str, &str, &str, f64)) {
    let Ok(stat) = std::fs::read_to_string("/proc/self/stat") else { return };
    // Splits /proc/self/stat after the process name, which may contain any character; the next field, the state, is field 3.
    let fields: Vec<&str> = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
    let field = |number: usize| fields.get(number - 3).and_then(|text| text.parse::<f64>().ok());
    let ticks = rustix::param::clock_ticks_per_second() as f64;
    if let (Some(user), Some(system)) = (field(14), field(15)) {
        one(
            "process_cpu_seconds_total",
            "counter",
            "CPU time of the server (not of its workers).",
            (user + system) / ticks,
        );
    }
    if let Some(pages) = field(24) {
        let bytes = pages * rustix::param::page_size() as f64;
        one("process_resident_memory_bytes", "gauge", "Memory of the server (not of its workers).", bytes);
    }
    if let Ok(open) = std::fs::read_dir("/proc/self/fd") {
        one("process_open_fds", "gauge", "Open files.", open.count() as f64);
    }
    if let Some(most) = rustix::process::getrlimit(rustix::process::Resource::Nofile).current {
        one("process_max_fds", "gauge", "Limit of open files.", most as f64);
    }
}
