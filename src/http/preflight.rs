//! Preflights, which try out a job before it is submitted: prepares the task and evaluates the report. The preflight itself
//! runs in a process of its own.

use std::time::Duration;

use super::AppState;
use super::error::{Code, Problem};
use super::prompts::Prompts;
use super::{reach, warm_start};
use crate::one_shot::OneShotError;
use crate::preflight::verdict::verdict;
use crate::preflight::{PreflightError, PreflightReport, PreflightTask};
use crate::spec::{JobSpec, Resolution};
use crate::store::StoreError;
use crate::store::background::spawn_blocking;

/// Default number of prompts of a preflight.
pub(super) const DEFAULT_PROMPTS: u32 = 8;
/// Maximum number of prompts of a preflight.
pub(super) const MAX_PROMPTS: u32 = 64;
/// Default time limit of a preflight, in seconds.
pub(super) const DEFAULT_TIMEOUT_S: u32 = 60;
/// Maximum time limit of a preflight, in seconds.
pub(super) const MAX_TIMEOUT_S: u32 = 600;

/// Number of prompts and time limit of a preflight.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub prompts: u32,
    pub timeout_s: u32,
}

impl Limits {
    pub(super) fn read(prompts: Option<u32>, timeout_s: Option<u32>) -> Result<Self, Problem> {
        let within = |name: &str, given: Option<u32>, default: u32, most: u32| match given {
            None => Ok(default),
            Some(given) if (1..=most).contains(&given) => Ok(given),
            Some(given) => {
                let detail = format!("must be between 1 and {most}, not {given}");
                Err(Problem::new(Code::InvalidQuery, format!("{name} {detail}")).item(
                    format!("?{name}"),
                    "out_of_range",
                    detail,
                ))
            }
        };
        Ok(Self {
            prompts: within("probe_prompts", prompts, DEFAULT_PROMPTS, MAX_PROMPTS)?,
            timeout_s: within("probe_timeout_s", timeout_s, DEFAULT_TIMEOUT_S, MAX_TIMEOUT_S)?,
        })
    }
}

/// Runs a preflight of a valid job.
pub(super) async fn run(
    state: &AppState,
    spec: JobSpec,
    resolution: &Resolution,
    train: Prompts,
    limits: Limits,
) -> Result<PreflightReport, Problem> {
    let Some(preflights) = &state.preflights else {
        let detail = "this server starts no processes of its own, so it cannot run a preflight: validate the job without 'probe'";
        return Err(Problem::new(Code::NotImplemented, detail));
    };
    let plan = &resolution.plan;
    let model = match state.store.model_get(&plan.model.id).await {
        Ok(row) if row.state == "ready" => row,
        Ok(_) | Err(StoreError::NotFound { .. }) => {
            let detail = format!(
                "a preflight (probe=true) samples the model, and the files of '{}' are not downloaded yet: send POST /models {{\"hub\": …}}, wait until \
                 it is ready, or validate without probe",
                plan.model.id
            );
            return Err(Problem::new(Code::NotReady, detail));
        }
        Err(error) => return Err(error.into()),
    };
    let mut reward_models = std::collections::BTreeMap::new();
    for id in plan.reward_models.keys() {
        reward_models.insert(id.clone(), state.store.model_get(id).await?.source);
    }
    let initial = warm_start::source(state, plan).await?.map(|(dir, _)| dir);
    let numbers = spread_rows(u64::from(limits.prompts), plan.dataset.num_rows);
    let rows = spawn_blocking(move || train.rows(&numbers))
        .await
        .map_err(Problem::internal)?
        .map_err(|error| Problem::internal(format!("the rows of a dataset cannot be read: {error}")))?;
    let limit = Duration::from_secs(limits.timeout_s.into());
    let task = PreflightTask {
        plan: plan.clone(),
        secrets: spec.secrets,
        allow_outgoing: reach::allow_outgoing(state).await?,
        model_dir: model.source.into(),
        reward_models,
        initial,
        rows,
        limit_ms: limit.as_secs() * 1000,
    };
    let mut report = match preflights.run(&task, limit).await {
        Ok(report) => report,
        Err(OneShotError::Busy) => {
            let detail = "another preflight is running; try again when it has finished, or validate without probe";
            return Err(Problem::new(Code::TooManyRequests, detail).retry_after(limit.as_secs()));
        }
        Err(error) => {
            let error = Some(without_report(&error));
            let mut report = PreflightReport { error, ..PreflightReport::default() };
            report.verdict = verdict(&report, plan);
            report
        }
    };
    let kept = u64::from(plan.checkpoints.keep_last) + u64::from(plan.checkpoints.keep_best);
    report.checkpoints_bytes = resolution.estimate.checkpoint_bytes.map(|bytes| bytes.saturating_mul(kept.max(1)));
    report.free_disk_bytes = state.files.free_bytes().ok();
    Ok(report)
}

/// Explains why the process of a preflight ended without a report.
fn without_report(error: &OneShotError) -> PreflightError {
    let message = match error {
        OneShotError::TimedOut(limit) => {
            format!("the preflight did not end within {} s and was killed", limit.as_secs())
        }
        OneShotError::Killed(status) => format!(
            "the preflight was killed ({status}), most likely because it ran out of memory; a smaller model, shorter completions or fewer generations need less"
        ),
        OneShotError::Ended(status) => {
            format!("the preflight ended without a report ({status}); see the server's log")
        }
        OneShotError::Busy | OneShotError::Stopping | OneShotError::Failed(_) => {
            format!("the preflight could not be started: {error}")
        }
    };
    let code = if matches!(error, OneShotError::TimedOut(_)) { "probe_timeout" } else { "probe_failed" };
    PreflightError { code: code.to_owned(), message }
}

/// Returns `count` row numbers at even distances, or all if there are no more rows.
fn spread_rows(count: u64, num_rows: u64) -> Vec<u64> {
    let count = count.min(num_rows);
    (0..count).map(|index| index * num_rows / count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_spread_over_the_dataset_without_repeats() {
        assert_eq!(spread_rows(4, 100), [0, 25, 50, 75]);
        assert_eq!(spread_rows(8, 3), [0, 1, 2]);
        assert_eq!(spread_rows(3, 4), [0, 1, 2]);
        assert!(spread_rows(8, 0).is_empty());
    }

    #[test]
    fn sizes_have_defaults_and_bounds() {
        let limits = Limits::read(None, Some(5)).unwrap();
        assert_eq!((limits.prompts, limits.timeout_s), (8, 5));
        for (prompts, timeout_s) in [(Some(0), None), (Some(65), None), (None, Some(0)), (None, Some(601))] {
            assert_eq!(Limits::read(prompts, timeout_s).unwrap_err().code(), Code::InvalidQuery);
        }
    }
}
