//! Settings of the retention times.

use clap::Args;

use super::keys::{Life, parse_life};

/// Default retention time of the audit log.
const AUDIT: &str = "400d";
/// Default retention time of the reward answers that a retry can reuse.
const JOURNALS: &str = "30d";
/// Default retention time of webhook messages that were delivered or given up.
const DELIVERIES: &str = "30d";

/// Flags of the retention times. By default only journals of jobs are removed. Nothing is removed before a job has ended.
#[derive(Debug, Clone, Args)]
pub struct RetentionArgs {
    /// Remove a job's events this long after its end: 90d, 12h. Its final state is kept. Default: never.
    #[arg(long, env = "RLOOD_RETAIN_EVENTS", value_parser = parse_life, value_name = "TIME")]
    pub retain_events: Option<Life>,

    /// Remove a job's samples this long after its end. Default: never (see --samples-max-bytes).
    #[arg(long, env = "RLOOD_RETAIN_SAMPLES", value_parser = parse_life, value_name = "TIME")]
    pub retain_samples: Option<Life>,

    /// Remove a job's metrics this long after its end. Default: never.
    #[arg(long, env = "RLOOD_RETAIN_METRICS", value_parser = parse_life, value_name = "TIME")]
    pub retain_metrics: Option<Life>,

    /// Remove the worker logs of a job this long after its end. Default: never.
    #[arg(long, env = "RLOOD_RETAIN_LOGS", value_parser = parse_life, value_name = "TIME")]
    pub retain_logs: Option<Life>,

    /// Remove the journal of a failed or cancelled job this long after its end. The journal contains completions and reward answers
    /// since the last checkpoint, so that a retry need not request them again. It is removed together with the
    /// checkpoints at the latest.
    #[arg(long, env = "RLOOD_RETAIN_JOURNALS", value_parser = parse_life, default_value = JOURNALS, value_name = "TIME")]
    pub retain_journals: Life,

    /// Remove a job's checkpoints, including adapters, this long after its end; pinned ones are kept. Default: never.
    #[arg(long, env = "RLOOD_RETAIN_CHECKPOINTS", value_parser = parse_life, value_name = "TIME")]
    pub retain_checkpoints: Option<Life>,

    /// Remove a dataset that no job has used for this long. Default: never.
    #[arg(long, env = "RLOOD_RETAIN_DATASETS", value_parser = parse_life, value_name = "TIME")]
    pub retain_datasets: Option<Life>,

    /// Remove a downloaded model that no job has used for this long, unless adapters need it. Models in other folders
    /// are kept. Default: never.
    #[arg(long, env = "RLOOD_RETAIN_MODELS", value_parser = parse_life, value_name = "TIME")]
    pub retain_models: Option<Life>,

    /// How long to keep the audit log (GET /audit).
    #[arg(long, env = "RLOOD_RETAIN_AUDIT", value_parser = parse_life, default_value = AUDIT, value_name = "TIME")]
    pub retain_audit: Life,

    /// How long to keep lifecycle messages that were delivered or given up.
    #[arg(long, env = "RLOOD_RETAIN_DELIVERIES", value_parser = parse_life, default_value = DELIVERIES, value_name = "TIME")]
    pub retain_deliveries: Life,
}

/// Validated retention times in ms; None = unlimited.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Retention {
    /// Events of finished jobs.
    pub events_ms: Option<i64>,
    /// Samples of finished jobs.
    pub samples_ms: Option<i64>,
    /// Metrics of finished jobs.
    pub metrics_ms: Option<i64>,
    /// Logs of finished jobs.
    pub logs_ms: Option<i64>,
    /// Journals of jobs that failed or were cancelled.
    pub journals_ms: Option<i64>,
    /// Checkpoints of finished jobs.
    pub checkpoints_ms: Option<i64>,
    /// Datasets, counted from the last job that used them.
    pub datasets_ms: Option<i64>,
    /// Downloaded models, counted from the last job that used them.
    pub models_ms: Option<i64>,
    /// Entries of the audit log.
    pub audit_ms: Option<i64>,
    /// Webhook messages that were delivered or given up.
    pub deliveries_ms: Option<i64>,
}

impl RetentionArgs {
    pub(super) fn resolve(&self) -> Retention {
        let ms = |life: Option<Life>| life.map(|life| life.seconds * 1000);
        Retention {
            events_ms: ms(self.retain_events),
            samples_ms: ms(self.retain_samples),
            metrics_ms: ms(self.retain_metrics),
            logs_ms: ms(self.retain_logs),
            journals_ms: ms(Some(self.retain_journals)),
            checkpoints_ms: ms(self.retain_checkpoints),
            datasets_ms: ms(self.retain_datasets),
            models_ms: ms(self.retain_models),
            audit_ms: ms(Some(self.retain_audit)),
            deliveries_ms: ms(Some(self.retain_deliveries)),
        }
    }
}
