//! The events and failures by which a worker reports on the environment of a job: forgotten episodes, and an environment that cannot be used.

use serde_json::json;

use crate::environment::{EpisodeCall, Reply};
use crate::event::{Event, Phase};
use crate::job::Failure;
use crate::reward::RewardFailure;
use crate::rollout::RolloutId;

/// Returns the warning about episodes that the environment has forgotten, if there are any.
pub(super) fn forgotten_episodes(id: RolloutId, calls: &[EpisodeCall], replies: &[Reply]) -> Option<Event> {
    let lost = calls.iter().zip(replies).filter(|(_, reply)| matches!(reply, Reply::Lost));
    let rows: Vec<u64> = lost.map(|(call, _)| call.episode.row).collect();
    let first = rows.first()?;
    let message = format!(
        "the environment has forgotten {} episodes of step {} (the first: row {first}): each begins again up to environment.max_restarts times, \
         then it has no reward. The bytes of this run are not guaranteed to be those of a run without the loss: let the environment keep its episodes on disk \
         (rlood env serve --state DIR)",
        rows.len(),
        id.step
    );
    let data = json!({"step": id.step, "episodes": rows.len(), "rows": rows.iter().take(8).collect::<Vec<_>>()});
    Some(Event::Warning { code: "environment_restarted".to_owned(), message, data })
}

/// Returns the failure of a job whose environment cannot be used.
pub(super) fn environment_failure(failure: &RewardFailure, step: u64) -> Failure {
    let of_reward = failure.to_failure(step);
    let (code, suggestion) = match failure {
        RewardFailure::Outage { .. } => {
            ("environment_outage", "bring the environment's server back; the job then resumes by itself")
        }
        RewardFailure::Refused { .. } => (
            "environment_address_refused",
            "use another environment.url, or ask the operator to add the address to --allow-outgoing",
        ),
        _ => ("environment_failed", "look at the environment's server, then retry the job"),
    };
    let message = of_reward.message.replacen("reward '", "environment '", 1);
    Failure {
        code: code.to_owned(),
        message,
        phase: Some(Phase::Rollout),
        suggestion: Some(suggestion.to_owned()),
        ..of_reward
    }
}
