//! Reads and checks the environment of a job.

use serde_json::{Value, json};

use super::facts::Context;
use super::foreign::advice;
use super::reader::{Errors, FieldError, Reader};
use super::rewards::{read_secrets, read_url};
use super::runtime_spec::RuntimeChoice;
use super::settings::ENVIRONMENT;
use super::{
    EnvironmentKind, EnvironmentPlan, Estimator, JobSpec, MAX_ABS_REWARD, OnInvalid, RewardKind, RewardPlan,
    RewardSecrets, ServicePlan,
};

/// Default of the setting `environment.name`.
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

/// Reads the environment in the field `environment` of a document, without the settings of a job around it.
///
/// # Errors
/// Returns all errors, with pointers into the document.
pub fn read_single_environment(document: &Value) -> Result<(EnvironmentPlan, RewardSecrets), Vec<FieldError>> {
    let errors = Errors::default();
    let field = Reader::document(document, &errors)
        .required("environment", "give the environment as in a job, such as {\"url\": \"…\"}");
    let environment = field.object().and_then(read_environment);
    let errors = errors.into_vec();
    match environment {
        Some(environment) if errors.is_empty() => Ok(environment),
        _ => Err(errors),
    }
}

/// Returns the environment of a plan as a job gives it: without the limits of [`ServicePlan`] that only rewards have.
pub(super) fn submittable_environment(environment: &EnvironmentPlan) -> Value {
    let mut section = json!(environment);
    if let Some(section) = section.as_object_mut() {
        let only_rewards = [
            "max_batch_samples",
            "max_batch_bytes",
            "on_invalid",
            "cache",
            "min_valid_per_group",
            "max_invalid_fraction",
        ];
        section.retain(|name, _| !only_rewards.contains(&name.as_str()));
    }
    section
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{DatasetFacts, Resolution, resolve, submittable};

    fn resolved(changes: Value, has_chat_template: bool) -> Result<Resolution, Vec<(String, String)>> {
        let records = [json!({"prompt": "a"}), json!({"prompt": "b"})];
        let mut document = json!({
            "model": "m", "dataset": {"records": records}, "environment": {"url": "http://10.0.0.7/play"},
            "training": {"prompts_per_step": 1, "max_steps": 4}
        });
        for (key, value) in changes.as_object().unwrap() {
            match document.get_mut(key).and_then(Value::as_object_mut).zip(value.as_object()) {
                Some((section, value)) => section.extend(value.clone()),
                None => document[key] = value.clone(),
            }
        }
        let (spec, errors) = JobSpec::read(document);
        let codes =
            |errors: Vec<FieldError>| errors.into_iter().map(|error| (error.pointer, error.code.to_string())).collect();
        if !errors.is_empty() {
            return Err(codes(errors));
        }
        let model = crate::spec::example::model(has_chat_template);
        let context =
            Context { model: Some(model), dataset: Some(DatasetFacts::of_records(&records)), ..Context::default() };
        resolve(&spec, &context).map_err(codes)
    }

    fn error(at: &str, code: &str) -> Vec<(String, String)> {
        vec![(at.to_owned(), code.to_owned())]
    }

    #[test]
    fn an_environment_adds_its_reward_and_its_plan_can_be_submitted_again() {
        let plan = resolved(json!({}), true).unwrap().plan;
        assert_eq!(plan.rewards.iter().map(|reward| reward.name.as_str()).collect::<Vec<_>>(), ["environment"]);
        let environment = plan.environment.as_ref().unwrap();
        assert_eq!(
            (environment.max_turns, environment.max_episode_tokens, plan.max_tokens_after_prompt()),
            (8, 4096, 4096)
        );
        let (again, errors) = JobSpec::read(submittable(&plan));
        assert!(errors.is_empty(), "{errors:?}");
        assert_eq!(again.environment.as_ref(), Some(environment));
        assert_eq!(again.rewards, plan.rewards);

        let beside = resolved(json!({"rewards": [{"type": "length", "weight": 0.5}]}), true).unwrap().plan;
        assert_eq!(beside.rewards.len(), 2);
        let own =
            json!({"rewards": [{"type": "environment", "weight": 2.0, "name": "game"}], "eval": {"fraction": 0.5}});
        let own = resolved(own, true).unwrap().plan;
        assert_eq!((own.rewards.len(), own.rewards[0].weight), (1, 2.0));
        assert!(!own.eval.unwrap().auto_verdict, "a verdict samples single turns");
    }

    #[test]
    fn settings_that_do_not_fit_are_refused_by_name() {
        for (changes, at, code) in [
            (json!({"environment": {"type": "openenv"}}), "/environment/type", "unsupported"),
            (json!({"environment": {"type": "grpc"}}), "/environment/type", "invalid_value"),
            (json!({"environment": {"url": "nowhere"}}), "/environment/url", "invalid_value"),
            (json!({"environment": {"turns": 3}}), "/environment/turns", "unknown_field"),
            (json!({"environment": {"tool_parser": "xml"}}), "/environment/tool_parser", "invalid_value"),
            (json!({"environment": {"secret": "short"}}), "/environment/secret", "invalid_value"),
            (json!({"environment": {"max_episode_tokens": 10}}), "/environment/max_episode_tokens", "out_of_range"),
            (json!({"rloo": {"estimator": "remax"}}), "/rloo/estimator", "unsupported_with_environment"),
            (
                json!({"rloo": {"overlap": true, "steps_per_generation": 2}}),
                "/rloo/overlap",
                "unsupported_with_environment",
            ),
            (json!({"sampling": {"stop": ["\n"]}}), "/sampling/stop", "unsupported_with_environment"),
            (
                json!({"rollout": {"engine": "vllm", "servers": [{"url": "http://10.0.0.8:8000"}]}}),
                "/rollout",
                "unsupported_with_environment",
            ),
        ] {
            let errors = resolved(changes.clone(), true).unwrap_err();
            assert!(errors.contains(&(at.to_owned(), code.to_owned())), "{changes}: {errors:?}");
        }
        assert_eq!(resolved(json!({}), false).unwrap_err(), error("/environment", "no_chat_template"));
        let without = json!({"environment": null, "rewards": [{"type": "environment"}]});
        assert_eq!(resolved(without, true).unwrap_err(), error("/rewards/0/type", "needs_environment"));
        let too_long = json!({"environment": {"max_episode_tokens": 100_000}});
        assert_eq!(resolved(too_long, true).unwrap_err(), error("/environment/max_episode_tokens", "out_of_range"));
    }
}
