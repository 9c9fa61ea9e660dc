//! Reads and checks the environment of a job.

use serde_json::{Value, json};

use super::facts::Context;
use super::foreign::advice;
use super::reader::{Errors, FieldError, Reader};
use super::rewards::{read_secrets, read_url};
use super::runtime_spec::RuntimeChoice;
use super::settings::{ENVIRONMENT, Values};
use super::{
    EnvironmentKind, EnvironmentPlan, EpisodeReturn, Estimator, JobSpec, Loss, MAX_ABS_REWARD, OnInvalid, Plan,
    RewardKind, RewardNormalization, RewardPlan, RewardSecrets, ServicePlan, ToolPlan,
};

/// Default of the setting `environment.name`.
const NAME: &str = "environment";
/// Default of `max_tries` for tools, as in OpenAI's and Azure's agent fine-tuning.
const TOOL_TRIES: u32 = 3;
/// The name under which the environment's secrets are stored.
pub const ENVIRONMENT_SECRET: &str = "environment:";

/// Reads the environment of a job and its secrets. `tools` are the job's tools, if it has the section `tools`.
pub(super) fn read_environment(reader: Reader<'_>, tools: Option<Vec<ToolPlan>>) -> (EnvironmentPlan, RewardSecrets) {
    let mut values = ENVIRONMENT.read(&reader);
    let kind = read_kind(&reader, &values, tools.is_some());
    let url = match kind {
        EnvironmentKind::Tools => String::new(),
        EnvironmentKind::Http | EnvironmentKind::Openenv => {
            read_url(&reader.required("url", "give the http or https address of the environment's server"))
        }
    };
    if kind == EnvironmentKind::Openenv {
        check_openenv(&reader, &url);
    }
    let secrets = read_secrets(&reader);
    let params = reader.field("params").map().cloned().unwrap_or_default();
    let timeout = reader.field("timeout_ms");
    if kind == EnvironmentKind::Tools {
        if values.is_default("max_tries") {
            values.set("max_tries", TOOL_TRIES);
        }
        if values.is_default("timeout_ms") {
            let deadline: u64 = values.get("deadline_ms");
            values.set("timeout_ms", deadline);
        }
    }
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
        kind,
        params,
        max_turns: values.get("max_turns"),
        max_episode_tokens: values.get("max_episode_tokens"),
        max_observation_tokens: values.get("max_observation_tokens"),
        total: values.get("return"),
        tool_parser: values.get("tool_parser"),
        on_parse_error: values.get("on_parse_error"),
        max_parse_errors: values.get("max_parse_errors"),
        max_restarts: values.get("max_restarts"),
        max_open_episodes: values.get("max_open_episodes"),
        tools: tools.unwrap_or_default(),
        service,
    };
    reader.finish(advice);
    (plan, secrets)
}

/// Reads the type of the environment, and checks that the rest of the section has a meaning for it.
fn read_kind(reader: &Reader<'_>, values: &Values, has_tools: bool) -> EnvironmentKind {
    let (field, given) = (reader.field("type"), values.get::<EnvironmentKind>("type"));
    if !has_tools {
        if given == EnvironmentKind::Tools {
            field.fail("required", "give the job's section tools, or choose another type");
        }
        // Nothing else is missing in an environment of type `tools` without tools.
        return given;
    }
    if !values.is_default("type") && given != EnvironmentKind::Tools {
        field.fail(
            "conflict",
            "the section tools cannot be combined with an environment's server: remove tools, or this type",
        );
    }
    let url = reader.field("url");
    if url.value().is_some() {
        url.fail(
            "conflict",
            "environment.url and tools cannot be combined: the server of an environment gives its own tools; remove one of the two",
        );
    }
    for name in ["secret", "previous_secret", "headers"] {
        let field = reader.field(name);
        if field.value().is_some() {
            field.fail(
                "conflict",
                "a job with tools has no server of an environment: give headers in each entry of tools",
            );
        }
    }
    EnvironmentKind::Tools
}

/// Checks what only OpenEnv servers have.
fn check_openenv(reader: &Reader<'_>, url: &str) {
    let path = url::Url::parse(url).map(|url| url.path().trim_end_matches('/').to_owned()).unwrap_or_default();
    if ["/reset", "/step", "/state", "/mcp"].iter().any(|route| path.ends_with(route)) {
        reader.field("url").fail(
            "unsupported",
            "OpenEnv's HTTP form forgets the state of an episode; give the server's base address, and rlood uses its WebSocket /ws",
        );
    }
    let params = reader.field("params");
    for name in ["action_field", "observation_field"] {
        if params.value().and_then(|params| params.get(name)).is_some_and(|field| !field.is_string()) {
            params.fail_at(name, "invalid_type", "must be a text: the name of a field");
        }
    }
    if params.value().and_then(|params| params.get("reset")).is_some_and(|fields| !fields.is_object()) {
        params.fail_at("reset", "invalid_type", "must be an object: the fields of every reset");
    }
    for name in ["secret", "previous_secret"] {
        let field = reader.field(name);
        if field.value().is_some() {
            field.fail("unsupported", "OpenEnv servers do not verify signatures: use headers, such as authorization");
        }
    }
}

/// Reads the environment in the field `environment` of a document, without the settings of a job around it.
///
/// # Errors
/// Returns all errors, with pointers into the document.
pub fn read_single_environment(document: &Value) -> Result<(EnvironmentPlan, RewardSecrets), Vec<FieldError>> {
    let errors = Errors::default();
    let field = Reader::document(document, &errors)
        .required("environment", "give the environment as in a job, such as {\"url\": \"…\"}");
    let environment = field.object().map(|reader| read_environment(reader, None));
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
        if environment.kind == EnvironmentKind::Tools {
            // The tools are a section of their own, and there is no server.
            section.retain(|name, _| !matches!(name.as_str(), "tools" | "url"));
        }
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
    if let (Some(index), Some(EnvironmentKind::Tools)) = (judged, spec.environment.as_ref().map(|plan| plan.kind)) {
        let detail = "tools pay no reward, so there is nothing to add: remove this reward, and score with others";
        errors.push(FieldError::new(format!("/rewards/{index}/type"), "needs_environment", detail));
    }
    let Some(environment) = &spec.environment else {
        if spec.rloo.estimator == Estimator::RlooTurns {
            let detail = "rloo_turns gives each turn of an episode its own advantage, and this job has no episodes: add the section environment, or use rloo";
            errors.push(FieldError::new("/rloo/estimator", "needs_environment", detail));
        }
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
    check_turn_advantages(spec, environment, errors);
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

/// Number of the model's tokens in an episode above which the ratio of a whole episode is soon clipped: the sum of the tokens'
/// log-ratios passes ±0.2 after a single step.
const LONG_EPISODE: u64 = 2000;

/// Warns about settings that are legal but probably not intended: calls `warn` with a pointer, a code and the detail.
pub(super) fn warn(spec: &JobSpec, plan: &Plan, context: &Context, warn: &mut impl FnMut(String, &str, String)) {
    let Some(environment) = &plan.environment else { return };
    let is_own_contract = environment.kind == EnvironmentKind::Http;
    if is_own_contract && spec.secrets.get(ENVIRONMENT_SECRET).is_none_or(|secrets| secrets.secret.is_none()) {
        let detail =
            "requests are not signed, so the environment cannot tell them from forged ones: give a whsec_… secret";
        warn("/environment/secret".to_owned(), "unsigned_webhook", detail.to_owned());
    }
    let thinks = plan.sampling.chat_template_kwargs.get("enable_thinking") != Some(&Value::Bool(false));
    if thinks
        && environment.kind != EnvironmentKind::Tools
        && context.model.as_ref().is_some_and(|model| model.removes_reasoning)
    {
        let detail = "the model's chat template removes the reasoning of earlier turns when a message of a user follows, but an episode keeps what was sampled: the model is trained on histories that it will not see when served. Answer tool calls with messages of role tool, which keep the reasoning, or set enable_thinking to false";
        warn("/sampling/chat_template_kwargs".to_owned(), "reasoning_kept_in_training", detail.to_owned());
    }
    let turns = u64::from(environment.max_turns) * u64::from(plan.sampling.max_completion_length);
    let longest = turns.min(u64::from(environment.max_episode_tokens));
    let is_reused = plan.rloo.num_iterations > 1 || plan.rloo.steps_per_generation > 1;
    if longest > LONG_EPISODE && is_reused && plan.rloo.loss == Loss::Sequence {
        let detail = format!(
            "an episode may have {longest} tokens of the model, and a block is used for several steps: the ratio of so many tokens leaves the clip range at once, and then teaches nothing. Use loss 'token_mean' or 'gspo', or one step per block"
        );
        warn("/rloo/loss".to_owned(), "long_episodes", detail);
    }
}

/// Checks that the reward of an episode is a sum over its turns, as `rloo_turns` needs it.
fn check_turn_advantages(spec: &JobSpec, environment: &EnvironmentPlan, errors: &mut Vec<FieldError>) {
    if spec.rloo.estimator != Estimator::RlooTurns {
        return;
    }
    let rloo = &spec.rloo;
    let cases = [
        (
            environment.kind == EnvironmentKind::Tools,
            "/rloo/estimator",
            "tools, whose turns have no rewards,",
            "use an environment",
        ),
        (environment.total == EpisodeReturn::Last, "/environment/return", "return 'last'", "use 'sum'"),
        (
            rloo.reward_normalization != RewardNormalization::None,
            "/rloo/reward_normalization",
            "normalized rewards",
            "set it to 'none'",
        ),
        (rloo.reward_clip_range.is_some(), "/rloo/reward_clip_range", "clipped rewards", "leave it out"),
        (rloo.normalize_advantages, "/rloo/normalize_advantages", "normalized advantages", "set it to false"),
    ];
    let refused = cases.into_iter().filter(|(is_refused, ..)| *is_refused);
    errors.extend(refused.map(|(_, at, what, remedy)| {
        let detail = format!(
            "estimator 'rloo_turns' divides the reward of an episode among its turns, which {what} do not allow: {remedy}, or use estimator 'rloo'"
        );
        FieldError::new(at, "conflict", detail)
    }));
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
    fn settings_that_are_probably_not_intended_have_warnings() {
        let warned = |changes: Value| -> Vec<String> {
            let warnings = resolved(changes, true).unwrap().warnings;
            warnings.into_iter().map(|warning| warning.code).filter(|code| code != "few_steps").collect()
        };
        let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
        let quiet = json!({"environment": {"secret": secret}, "sampling": {"chat_template_kwargs": {"enable_thinking": false}}});
        assert_eq!(warned(quiet), [""; 0]);
        assert_eq!(warned(json!({})), ["unsigned_webhook", "reasoning_kept_in_training"]);
        let reused = |loss: &str| {
            json!({
                "environment": {"secret": secret},
                "sampling": {"max_completion_length": 300, "chat_template_kwargs": {"enable_thinking": false}},
                "rloo": {"steps_per_generation": 2, "loss": loss}
            })
        };
        assert_eq!(warned(reused("sequence")), ["long_episodes"]);
        assert_eq!(warned(reused("token_mean")), [""; 0]);
    }

    #[test]
    fn settings_that_do_not_fit_are_refused_by_name() {
        for (changes, at, code) in [
            (json!({"environment": {"type": "ors"}}), "/environment/type", "unsupported"),
            (json!({"environment": {"type": "nemo_gym"}}), "/environment/type", "unsupported"),
            (json!({"environment": {"type": "tools"}}), "/environment/type", "required"),
            (
                json!({"environment": {"type": "openenv", "url": "http://10.0.0.7/reset"}}),
                "/environment/url",
                "unsupported",
            ),
            (
                json!({"environment": {"type": "openenv", "params": {"action_field": 3}}}),
                "/environment/params/action_field",
                "invalid_type",
            ),
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
                json!({"rloo": {"estimator": "rloo_turns"}, "environment": {"return": "last"}}),
                "/environment/return",
                "conflict",
            ),
            (
                json!({"rloo": {"estimator": "rloo_turns", "reward_clip_range": [0, 1]}}),
                "/rloo/reward_clip_range",
                "conflict",
            ),
            (
                json!({"rloo": {"estimator": "rloo_turns", "normalize_advantages": true}}),
                "/rloo/normalize_advantages",
                "conflict",
            ),
            (json!({"rloo": {"estimator": "rloo_turns", "loss": "sequence"}}), "/rloo/loss", "conflict"),
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
        let without =
            json!({"environment": null, "rewards": [{"type": "length"}], "rloo": {"estimator": "rloo_turns"}});
        assert_eq!(resolved(without, true).unwrap_err(), error("/rloo/estimator", "needs_environment"));
        let too_long = json!({"environment": {"max_episode_tokens": 100_000}});
        assert_eq!(resolved(too_long, true).unwrap_err(), error("/environment/max_episode_tokens", "out_of_range"));
    }
}
