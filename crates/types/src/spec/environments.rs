//! Reads and checks the environment of a job.

use super::facts::Context;
use super::foreign::advice;
use super::reader::{FieldError, Reader};
use super::rewards::{read_secrets, read_url};
use super::runtime_spec::RuntimeChoice;
use super::settings::ENVIRONMENT;
use super::{
    EnvironmentKind, EnvironmentPlan, Estimator, JobSpec, MAX_ABS_REWARD, OnInvalid, RewardKind, RewardPlan,
    RewardSecrets, ServicePlan,
};

/// Default of `environment.name`.
const NAME: &str = "environment";
/// The name under which the environment's secrets are stored.
pub const ENVIRONMENT_SECRET: &str = "environment:";

/// Reads the environment of a job and its secrets; `None` if the section has errors that leave no plan.
pub(super) fn read_environment(reader: Reader<'_>) -> Option<(EnvironmentPlan, RewardSecrets)> {
    let values = ENVIRONMENT.read(&reader);
    let url = read_url(&reader.required("url", "give the http or https address of the environment's server"));
    let secrets = read_secrets(&reader);
    let params = reader.field("params").map().cloned().unwrap_or_default();
    let timeout = reader.field("timeout_ms");
    let service = ServicePlan {
        url,
        max_concurrency: values.get("max_concurrency"),
        max_batch_samples: 1,
        max_batch_bytes: 64_000_000,
        timeout_ms: values.get("timeout_ms"),
        deadline_ms: values.get("deadline_ms"),
        max_tries: values.get("max_tries"),
        max_invalid_tries: values.get("max_invalid_tries"),
        on_invalid: OnInvalid::Mask,
        max_outage_s: values.get("max_outage_s"),
        cache: false,
        min_valid_per_group: 1,
        max_invalid_fraction: 1.0,
    };
    if service.timeout_ms > service.deadline_ms {
        timeout.fail("invalid_value", "one try may not take longer than all tries together (deadline_ms)");
    }
    let plan = EnvironmentPlan {
        name: values.get::<Option<String>>("name").unwrap_or_else(|| NAME.to_owned()),
        kind: EnvironmentKind::Http,
        params,
        max_turns: values.get("max_turns"),
        max_episode_tokens: values.get("max_episode_tokens"),
        max_observation_tokens: values.get("max_observation_tokens"),
        total: values.get("return"),
        tool_parser: values.get("tool_parser"),
        on_parse_error: values.get("on_parse_error"),
        max_parse_errors: values.get("max_parse_errors"),
        max_restarts: values.get("max_restarts"),
        service,
    };
    reader.finish(advice);
    Some((plan, secrets))
}

/// The reward of a job with an environment that does not list it.
pub(super) fn environment_reward() -> RewardPlan {
    RewardPlan {
        name: NAME.to_owned(),
        weight: 1.0,
        required: true,
        max_abs_reward: Some(MAX_ABS_REWARD),
        blank_reference: None,
        applies_to: None,
        kind: RewardKind::Environment,
    }
}

/// Checks that the job's other settings fit its environment.
pub(super) fn check(spec: &JobSpec, context: &Context, errors: &mut Vec<FieldError>) {
    let judged = spec.rewards.iter().position(|reward| matches!(reward.kind, RewardKind::Environment));
    let Some(environment) = &spec.environment else {
        if let Some(index) = judged {
            let detail = "the job has no environment: add the section environment, or remove this reward";
            errors.push(FieldError::new(format!("/rewards/{index}/type"), "needs_environment", detail));
        }
        return;
    };
    let cases = [
        (spec.rollout.is_some(), "/rollout", "rollout servers", "remove rollout"),
        (spec.runtime.name == RuntimeChoice::Trl, "/runtime", "the runtime trl", "remove runtime"),
        (
            spec.rloo.estimator == Estimator::Remax,
            "/rloo/estimator",
            "remax, whose greedy episode would meet other noise",
            "use rloo",
        ),
        (spec.rloo.overlap, "/rloo/overlap", "overlapping blocks", "set it to false"),
        (
            !spec.sampling.stop.is_empty(),
            "/sampling/stop",
            "stop strings, which end turns without their last token",
            "remove sampling.stop",
        ),
        (spec.warm_up.is_some(), "/warm_up", "a warm-up", "train the warm-up as a job of its own"),
    ];
    let refused = cases.into_iter().filter(|(is_refused, ..)| *is_refused);
    errors.extend(refused.map(|(_, at, what, remedy)| {
        let detail = format!("a job with an environment does not support {what}: {remedy}");
        FieldError::new(at, "unsupported_with_environment", detail)
    }));
    let turn = spec.sampling.max_completion_length;
    if environment.max_episode_tokens < turn {
        let detail = format!(
            "an episode of {} tokens has no room for a turn of {turn} (sampling.max_completion_length): raise one, or lower the other",
            environment.max_episode_tokens
        );
        errors.push(FieldError::new("/environment/max_episode_tokens", "out_of_range", detail));
    }
    let Some(model) = &context.model else { return };
    if !model.has_chat_template {
        let detail = format!(
            "episodes are chats, but model '{}' has no chat template: add chat_template.jinja to the model, or use another model",
            model.id
        );
        errors.push(FieldError::new("/environment", "no_chat_template", detail));
    }
    let longest = context.datasets().filter_map(|(facts, _)| facts.prompt_lengths).map(|lengths| lengths.longest).max();
    let needed = u64::from(environment.max_episode_tokens) + longest.unwrap_or(1);
    if needed > model.max_position_embeddings {
        let detail = format!(
            "the longest prompt with an episode has up to {needed} tokens, and the model reads {}: lower max_episode_tokens",
            model.max_position_embeddings
        );
        errors.push(FieldError::new("/environment/max_episode_tokens", "out_of_range", detail));
    }
}
