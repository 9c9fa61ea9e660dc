//! Parses a re-score request: the reward, and the samples to score.

use std::time::Duration;

use serde_json::{Map, Value};

use crate::event::SamplePhase;
use crate::http::error::{Code, Problem};
use crate::spec::{FieldError, Plan, RewardPlan, RewardSecrets, read_single_reward};
use crate::store::SampleQuery;

/// Default and maximum number of samples to re-score.
const SAMPLES: u64 = 1_000;
const MAX_SAMPLES: u64 = 10_000;
/// Default and maximum of `max_wait_s`, in seconds.
const WAIT_S: u64 = 60;
const MAX_WAIT_S: u64 = 600;
/// A parsed re-score request.
pub(super) struct Wanted {
    pub plan: RewardPlan,
    pub secrets: RewardSecrets,
    pub weight_given: bool,
    pub replaces: Option<String>,
    pub query: SampleQuery,
    pub phase: SamplePhase,
    pub limit: usize,
    pub wait: Duration,
}

/// Parses the re-score request and reports all errors together.
pub(super) fn read(body: &Value, plan: &Plan) -> Result<Wanted, Problem> {
    const KNOWN: [&str; 8] = ["reward", "replaces", "phase", "step", "min_step", "max_step", "limit", "max_wait_s"];
    let mut errors = Vec::new();
    let reward = read_single_reward(body).map_err(|found| {
        errors.extend(found);
    });
    let mut wrong = |name: &str, code: &str, detail: String| {
        errors.push(FieldError { pointer: format!("/{name}"), code: code.to_owned(), detail });
    };
    for name in body.as_object().into_iter().flat_map(Map::keys).filter(|name| !KNOWN.contains(&name.as_str())) {
        wrong(name, "unknown_field", format!("unknown field; known fields: {}", KNOWN.join(", ")));
    }
    let given = |name: &str| body.get(name).filter(|value| !value.is_null());
    let phase = match given("phase").map(|phase| (phase, phase.as_str())) {
        None | Some((_, Some("train"))) => SamplePhase::Train,
        Some((_, Some("eval"))) => SamplePhase::Eval,
        Some((other, _)) => {
            wrong("phase", "invalid_value", format!("must be train or eval, not {other}"));
            SamplePhase::Train
        }
    };
    let mut whole = |name: &str, least: u64, most: u64| -> Option<u64> {
        let value = given(name)?;
        let found = value.as_u64().filter(|value| (least..=most).contains(value));
        if found.is_none() {
            wrong(name, "out_of_range", format!("must be a whole number from {least} to {most}, not {value}"));
        }
        found
    };
    let last = i64::MAX.unsigned_abs();
    let (step, min_step, max_step) = (whole("step", 0, last), whole("min_step", 0, last), whole("max_step", 0, last));
    let limit = whole("limit", 1, MAX_SAMPLES).unwrap_or(SAMPLES);
    let wait_s = whole("max_wait_s", 1, MAX_WAIT_S).unwrap_or(WAIT_S);
    if step.is_some() && min_step.or(max_step).is_some() {
        wrong("step", "conflict", "set either step, or min_step and max_step".to_owned());
    }
    let own = rewards_of(plan, phase);
    let names: Vec<&str> = own.iter().map(|reward| reward.name.as_str()).collect();
    let replaces = match given("replaces").map(|name| (name, name.as_str())) {
        None => match &reward {
            Ok((new, _)) if names.contains(&new.name.as_str()) => Some(new.name.clone()),
            _ if names.len() == 1 => Some(names[0].to_owned()),
            _ => None,
        },
        Some((_, Some(name))) if names.contains(&name) => Some(name.to_owned()),
        Some((other, _)) => {
            wrong(
                "replaces",
                "invalid_value",
                format!("the rewards of the job are {}; it has no reward {other}", names.join(", ")),
            );
            None
        }
    };
    let (Ok((plan, secrets)), true) = (reward, errors.is_empty()) else { return Err(invalid(errors)) };
    let query = SampleQuery {
        min_step: step.or(min_step),
        max_step: step.or(max_step),
        phase: Some(phase),
        ..SampleQuery::default()
    };
    Ok(Wanted {
        plan,
        secrets,
        weight_given: body["reward"].get("weight").is_some(),
        replaces,
        query,
        phase,
        limit: usize::try_from(limit).unwrap_or(usize::MAX),
        wait: Duration::from_secs(wait_s),
    })
}

pub(super) fn invalid(errors: Vec<FieldError>) -> Problem {
    Problem::new(Code::InvalidBody, "this request to re-score samples is not valid; see 'errors'").items(errors)
}

pub(super) fn rewards_of(plan: &Plan, phase: SamplePhase) -> &[RewardPlan] {
    let of_eval = plan.eval.as_ref().and_then(|eval| eval.rewards.as_deref());
    match phase {
        SamplePhase::Train => &plan.rewards,
        SamplePhase::Eval => of_eval.unwrap_or(&plan.rewards),
    }
}
