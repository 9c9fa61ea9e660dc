//! Settings of how long things are kept.

use clap::Args;

use super::keys::{Life, parse_life};

/// Days that the record of changes is kept, unless set otherwise.
const AUDIT: &str = "400d";
/// Days that a retry finds the reward answers of the job before it, unless set otherwise.
const JOURNALS: &str = "30d";
/// Days that messages which were sent or given up stay listed, unless set otherwise.
const DELIVERIES: &str = "30d";

/// Flags of retention. Of jobs nothing but the journal is removed unless asked for, and nothing before they are over.
#[derive(Debug, Clone, Args)]
pub struct RetentionArgs {
    /// Remove the events of a job so long after its end: 90d, 12h. Its last state stays. Default: never.
    #[arg(long, env = "RLOOD_RETAIN_EVENTS", value_parser = parse_life, value_name = "TIME")]
    pub retain_events: Option<Life>,

    /// Remove the samples of a job so long after its end. Default: never (see --samples-max-bytes).
    #[arg(long, env = "RLOOD_RETAIN_SAMPLES", value_parser = parse_life, value_name = "TIME")]
    pub retain_samples: Option<Life>,

    /// Remove the metrics of a job so long after its end. Default: never.
    #[arg(long, env = "RLOOD_RETAIN_METRICS", value_parser = parse_life, value_name = "TIME")]
    pub retain_metrics: Option<Life>,

    /// Remove the log of a job's workers so long after its end. Default: never.
    #[arg(long, env = "RLOOD_RETAIN_LOGS", value_parser = parse_life, value_name = "TIME")]
    pub retain_logs: Option<Life>,

    /// Remove the journal of a job that failed or was cancelled so long after its end: completions and reward answers since its
    /// last checkpoint, which a retry from there does not ask for again. It goes with the checkpoints at the latest.
    #[arg(long, env = "RLOOD_RETAIN_JOURNALS", value_parser = parse_life, default_value = JOURNALS, value_name = "TIME")]
    pub retain_journals: Life,

    /// Remove the checkpoints of a job, adapters among them, so long after its end; pinned ones stay. Default: never.
    #[arg(long, env = "RLOOD_RETAIN_CHECKPOINTS", value_parser = parse_life, value_name = "TIME")]
    pub retain_checkpoints: Option<Life>,

    /// Remove a dataset that no job has used for so long. Default: never.
    #[arg(long, env = "RLOOD_RETAIN_DATASETS", value_parser = parse_life, value_name = "TIME")]
    pub retain_datasets: Option<Life>,

    /// Remove a model that the server downloaded and that no job has used for so long, unless adapters need it. Models of other
    /// folders stay. Default: never.
    #[arg(long, env = "RLOOD_RETAIN_MODELS", value_parser = parse_life, value_name = "TIME")]
    pub retain_models: Option<Life>,

    /// Keep the record of changes (GET /audit) for so long.
    #[arg(long, env = "RLOOD_RETAIN_AUDIT", value_parser = parse_life, default_value = AUDIT, value_name = "TIME")]
    pub retain_audit: Life,

    /// Keep lifecycle messages that were delivered or given up for so long.
    #[arg(long, env = "RLOOD_RETAIN_DELIVERIES", value_parser = parse_life, default_value = DELIVERIES, value_name = "TIME")]
    pub retain_deliveries: Life,
}

/// How long things are kept, ms; None = for good.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Retention {
    /// Of jobs that are over.
    pub events_ms: Option<i64>,
    /// Of jobs that are over.
    pub samples_ms: Option<i64>,
    /// Of jobs that are over.
    pub metrics_ms: Option<i64>,
    /// Of jobs that are over.
    pub logs_ms: Option<i64>,
    /// Of jobs that failed or were cancelled.
    pub journals_ms: Option<i64>,
    /// Of jobs that are over.
    pub checkpoints_ms: Option<i64>,
    /// Datasets since the last job that used them.
    pub datasets_ms: Option<i64>,
    /// Downloaded models since the last job that used them.
    pub models_ms: Option<i64>,
    /// Entries.
    pub audit_ms: Option<i64>,
    /// Messages that are not pending.
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
