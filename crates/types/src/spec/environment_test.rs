//! Reads a request to play episodes with an environment before a job depends on it.

use serde_json::{Map, Value};

use super::environments::read_environment;
use super::foreign::advice;
use super::reader::{Errors, FieldError, Reader};
use super::sections::read_section;
use super::settings::{MAX_SEED, SAMPLING};
use super::{EnvironmentKind, EnvironmentPlan, RewardSecrets, SamplingPlan};
use crate::dataset::check_prompt;

/// Maximum number of rows, and so of episodes, in a test.
pub const MAX_TEST_ROWS: usize = 8;

/// A request for test episodes, one for each row.
#[derive(Debug, Clone)]
pub struct EnvironmentTestSpec {
    /// The environment, as in a job.
    pub environment: EnvironmentPlan,
    /// The environment's secret and headers.
    pub secrets: RewardSecrets,
    /// Name of the model that plays: one of `GET /v1/models`. None = the only registered model.
    pub model: Option<String>,
    /// Rows as in a dataset: the prompt, and the other columns.
    pub rows: Vec<(Value, Map<String, Value>)>,
    /// Random seed of the environment and of the model.
    pub seed: u64,
    /// Sampling settings of the model, as in a job.
    pub sampling: SamplingPlan,
}

impl EnvironmentTestSpec {
    /// Reads a request.
    ///
    /// # Errors
    /// Returns all errors, with pointers into the document.
    pub fn read(document: &Value) -> Result<EnvironmentTestSpec, Vec<FieldError>> {
        let errors = Errors::default();
        let reader = Reader::document(document, &errors);
        let field = reader.required("environment", "give the environment as in a job, such as {\"url\": \"…\"}");
        let environment = field.object().map(|reader| read_environment(reader, None));
        let model = reader.field("model").nonempty(256).map(str::to_owned);
        let seed = reader.field("seed").whole(0..=MAX_SEED).unwrap_or(0);
        let sampling: SamplingPlan = read_section(&SAMPLING, reader.section("sampling"));
        let rows = read_rows(&reader);
        reader.finish(advice);
        let mut errors = errors.into_vec();
        if environment.as_ref().is_some_and(|(environment, _)| environment.kind == EnvironmentKind::Openenv) {
            let detail = "only servers of rlood's own contract (type http) are tested here: validate a job with probe=true instead, which plays episodes with an OpenEnv server too";
            errors.push(FieldError::new("/environment/type", "unsupported", detail));
        }
        if !sampling.stop.is_empty() {
            let detail = "an environment does not support stop strings, which end turns without their last token: remove sampling.stop";
            errors.push(FieldError::new("/sampling/stop", "unsupported_with_environment", detail));
        }
        match environment {
            Some((environment, secrets)) if errors.is_empty() => {
                Ok(EnvironmentTestSpec { environment, secrets, model, rows, seed, sampling })
            }
            _ => Err(errors),
        }
    }
}

fn read_rows(reader: &Reader<'_>) -> Vec<(Value, Map<String, Value>)> {
    let field = reader.required("rows", "give a list of rows as in a dataset, such as [{\"prompt\": \"Begin.\"}]");
    let Some(value) = field.value() else { return Vec::new() };
    let rows = value.as_array().map(Vec::as_slice).unwrap_or_default();
    if rows.is_empty() || rows.len() > MAX_TEST_ROWS {
        field.fail("out_of_range", format!("rows must be a list of 1 to {MAX_TEST_ROWS} rows, one for each episode"));
        return Vec::new();
    }
    let mut read = Vec::with_capacity(rows.len());
    for (index, row) in rows.iter().enumerate() {
        let mut columns = row.as_object().cloned().unwrap_or_default();
        let Some(prompt) = columns.shift_remove("prompt") else {
            let detail = format!("rows/{index} must be an object with a prompt: a text, or a list of chat messages");
            field.fail("invalid_value", detail);
            continue;
        };
        match check_prompt(&prompt) {
            Err((_, detail)) => field.fail("invalid_value", format!("rows/{index}/prompt: {detail}")),
            Ok(()) => read.push((prompt, columns)),
        }
    }
    read
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_test_has_an_environment_and_rows() {
        let whole = json!({"environment": {"url": "http://10.0.0.7/play", "max_turns": 2}, "model": "m", "seed": 4,
            "rows": [{"prompt": "Go.", "level": 3}], "sampling": {"max_completion_length": 9}});
        let spec = EnvironmentTestSpec::read(&whole).unwrap();
        assert_eq!((spec.environment.max_turns, spec.model.as_deref(), spec.seed), (2, Some("m"), 4));
        assert_eq!((spec.rows[0].0.clone(), spec.rows[0].1["level"].clone()), (json!("Go."), json!(3)));
        assert_eq!(spec.sampling.max_completion_length, 9);
        for (change, pointer) in [
            (json!({"environment": {"url": "nowhere"}}), "/environment/url"),
            (json!({"environment": null}), "/environment"),
            (json!({"rows": []}), "/rows"),
            (json!({"rows": [{"level": 3}]}), "/rows"),
            (json!({"rows": [{"prompt": 3}]}), "/rows"),
            (json!({"model": 3}), "/model"),
            (json!({"turns": 3}), "/turns"),
            (json!({"sampling": {"stop": ["x"]}}), "/sampling/stop"),
        ] {
            let mut document = whole.clone();
            for (name, value) in change.as_object().unwrap() {
                document[name] = value.clone();
            }
            let errors = EnvironmentTestSpec::read(&document).unwrap_err();
            assert_eq!(errors[0].pointer, pointer, "{errors:?}");
        }
    }
}
