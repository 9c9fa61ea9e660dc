//! Checks a reward service with valid requests: one sample, groups, unusual completions, large batches.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::wire::Signing;
use super::{Check, Outcome, new_id, numbers, read};
use crate::event::FinishReason;
use crate::reward::webhook::answer::{Answer, Found};
use crate::rollout::RewardSample;

/// Maximum batch size that is tested, even if the service announces a larger one.
const MAX_TESTED_BATCH: u32 = 1_024;
/// Length of a very long completion, in characters.
const LONG_COMPLETION_CHARS: usize = 100_000;
pub(super) const NO_ANSWER: &str = "answer every request for rewards with 200 and {\"version\": \"1\", \"id\": …, \"results\": \
    [{\"sample_id\": …, \"reward\": NUMBER}, …]}; a sample that cannot be scored gets \"reward\": null and an \"error\"";

impl Check {
    /// Checks a request with one sample. Returns whether the service answers at all.
    pub(super) async fn single(&mut self) -> bool {
        let one = vec![self.samples[0].clone()];
        match self.ask(&one).await {
            Err(why) => {
                self.find("single_sample", Outcome::Failed, format!("one sample: {why}"), NO_ANSWER);
                false
            }
            Ok(answer) => {
                let problems = self.problems(&answer, &one);
                match problems.is_empty() {
                    true => self.find("single_sample", Outcome::Ok, describe_result(&answer.found[0]), ""),
                    false => self.find("single_sample", Outcome::Failed, problems.join("; "), NO_ANSWER),
                }
                problems.is_empty()
            }
        }
    }

    /// Checks the fields of an answer other than the rewards: `id`, content type.
    pub(super) async fn envelope(&mut self) {
        let id = new_id();
        let body = self.request(&id, &self.samples[..1]).to_string();
        let Ok(got) = self.wire.post(&id, &body, Signing::Right).await else { return };
        let media_type = got.content_type.clone().unwrap_or_default();
        if media_type.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json") {
            self.find("content_type", Outcome::Ok, media_type, "");
        } else {
            let shown = if media_type.is_empty() { "none".to_owned() } else { format!("'{media_type}'") };
            let fix = "send the header content-type: application/json; proxies and tools depend on it";
            self.find("content_type", Outcome::Warning, format!("the answer's content-type is {shown}"), fix);
        }
        let value: Value = serde_json::from_slice(&got.body).unwrap_or_default();
        let Some(object) = value.as_object() else {
            let fix = "answer {\"version\": \"1\", \"id\": …, \"results\": [{\"sample_id\", \"reward\"}]}: a bare list is \
                       taken by position, and carries no reasons and no errors";
            return self.find("envelope", Outcome::Warning, "the answer is a bare list", fix);
        };
        let (version, answered) = (object.get("version"), object.get("id"));
        let detail = if !object.contains_key("results") {
            Some("the answer has no 'results': rewards are assigned by position, without reasons and errors".to_owned())
        } else if version.is_some_and(|version| version != "1") {
            Some(format!("the answer's 'version' is {}, not \"1\"", version.unwrap_or(&Value::Null)))
        } else if answered.is_none() {
            Some("the service's answer does not repeat the request's 'id'".to_owned())
        } else if answered != Some(&json!(id)) {
            Some(format!("the answer's 'id' is {}, not the request's", answered.unwrap_or(&Value::Null)))
        } else {
            None
        };
        match detail {
            Some(detail) => {
                let fix = "answer {\"version\": \"1\", \"id\": the request's, \"results\": […]}: mixed-up answers can \
                           then be detected";
                self.find("envelope", Outcome::Warning, detail, fix);
            }
            None => self.find("envelope", Outcome::Ok, "version, id and results are present", ""),
        }
    }

    /// Sends several groups, then the same in another order: a reward must depend on the sample, not on its position.
    pub(super) async fn groups(&mut self) {
        let samples = self.samples.clone();
        let answer = match self.ask(&samples).await {
            Err(why) => {
                let count = samples.len();
                return self.find(
                    "groups",
                    Outcome::Failed,
                    format!("{count} samples in several groups: {why}"),
                    NO_ANSWER,
                );
            }
            Ok(answer) => answer,
        };
        let problems = self.problems(&answer, &samples);
        if problems.is_empty() {
            self.find("groups", Outcome::Ok, format!("{} samples, one result each", samples.len()), "");
        } else {
            self.find("groups", Outcome::Failed, problems.join("; "), NO_ANSWER);
        }
        self.ids(&answer);
        self.values(&answer, &samples);
        let reversed: Vec<RewardSample> = samples.iter().rev().cloned().collect();
        let Ok(backwards) = self.ask(&reversed).await else {
            let fix = "samples may come in any order";
            return self.find("order", Outcome::Failed, "no answer to the same samples in another order", fix);
        };
        let (first, mut second) = (numbers(&answer), numbers(&backwards));
        let by_position = first == second;
        second.reverse();
        let distinct = first.iter().flatten().map(|number| number.to_bits()).collect::<BTreeSet<_>>().len();
        if first == second {
            let detail = "rewards stay with their samples when the order changes";
            self.find("order", Outcome::Ok, detail, "");
        } else if by_position && distinct > 1 {
            let fix =
                "score each sample by its contents, and answer under its own sample_id: the order of batches varies";
            let detail =
                "the rewards kept their positions when the samples were reordered: they do not depend on the sample";
            self.find("order", Outcome::Failed, detail, fix);
        } else {
            let fix = "if this is intended (for example a sampled judge), average over several votes: noise in rewards is noise in training";
            let detail = "the same samples got different rewards when sent again in another order";
            self.find("order", Outcome::Warning, detail, fix);
        }
    }

    fn ids(&mut self, answer: &Answer) {
        let Answer { unknown, duplicates, .. } = *answer;
        if unknown + duplicates == 0 {
            return self.find("sample_ids", Outcome::Ok, "every sample_id once, no others", "");
        }
        let detail = format!("{unknown} results for unknown ids, {duplicates} for ids that already had one");
        let fix =
            "answer each sample_id of the request once: unknown ids are ignored, and the first of duplicates counts";
        self.find("sample_ids", Outcome::Warning, detail, fix);
    }

    fn values(&mut self, answer: &Answer, samples: &[RewardSample]) {
        let rewards: Vec<f64> = numbers(answer).into_iter().flatten().collect();
        let (least, most) = rewards.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), &r| (a.min(r), b.max(r)));
        if rewards.is_empty() {
            let example = answer.found.first().map(describe_result).unwrap_or_default();
            let fix = "if the service needs columns of the dataset, give them: --column NAME=VALUE, or --samples FILE";
            let detail = format!("none of {} samples got a number; the first: {example}", samples.len());
            return self.find("values", Outcome::Failed, detail, fix);
        }
        if let Some([low, high]) = self.ping.as_ref().and_then(|ping| ping.range.as_deref())
            && (least < *low || most > *high)
        {
            let detail = format!("rewards from {least} to {most}, but reward.ping announces {low} to {high}");
            return self.find("values", Outcome::Failed, detail, "correct 'range' in the answer to reward.ping");
        }
        if least == most {
            let detail = format!("all {} rewards are {least}", rewards.len());
            let fix = "equal rewards within a group give no training signal; check that the samples (--samples FILE) are of the kind that the service scores";
            return self.find("values", Outcome::Warning, detail, fix);
        }
        self.find("values", Outcome::Ok, format!("{} numbers from {least} to {most}", rewards.len()), "");
    }

    /// Sends unusual completions that occur in real jobs.
    pub(super) async fn edges(&mut self) {
        let like = |completion: String| {
            let mut sample = self.samples[0].clone();
            sample.num_tokens = u32::try_from(completion.chars().count()).unwrap_or(u32::MAX);
            sample.completion = completion;
            sample
        };
        let text = "naïve 😀 漢字 العربية \u{202e}abc\u{202c} \u{0}\u{1}\u{7f} \u{2028} e\u{301} \\u0041 \"quoted\" </script> {{x}} \r\n\t";
        let mut plain = like("4".to_owned());
        (plain.messages, plain.columns) = (None, Map::new());
        let mut columns = like("4".to_owned());
        columns.columns.extend(Map::from_iter([
            ("a list".to_owned(), json!([1, 2.5, null, "x"])),
            ("an object".to_owned(), json!({"k": {"deep": [true]}})),
            ("null".to_owned(), Value::Null),
            ("number".to_owned(), json!(-1.5e-7)),
        ]));
        let mut cut = like("The answer is".to_owned());
        cut.finish_reason = FinishReason::Length;
        let mut lone = like("4".to_owned());
        (lone.sample_id, lone.group_id) = ("s_1234567".to_owned(), "g_99".to_owned());
        let cases: [(&'static str, &str, RewardSample); 7] = [
            ("empty_completion", "an empty completion", like(String::new())),
            ("unicode", "a completion with other scripts, control characters and quotes", like(text.repeat(3))),
            (
                "long_completion",
                "a completion of 100,000 characters",
                like("word and number 4. ".repeat(LONG_COMPLETION_CHARS / 19)),
            ),
            ("cut_completion", "a truncated completion (finish_reason \"length\")", cut),
            ("no_columns", "a row without chat messages and without columns besides the prompt", plain),
            ("odd_columns", "a row whose columns have every JSON type", columns),
            ("other_ids", "a sample with another id than s_0 and another group than g_0", lone),
        ];
        for (check, what, sample) in cases {
            let one = vec![sample];
            let outcome = self.ask(&one).await;
            let problems = match &outcome {
                Ok(answer) => self.problems(answer, &one),
                Err(why) => vec![why.clone()],
            };
            match (outcome, problems.is_empty()) {
                (Ok(answer), true) => {
                    self.find(check, Outcome::Ok, format!("{what}: {}", describe_result(&answer.found[0])), "")
                }
                _ => {
                    let fix = "such samples occur in jobs: return a number, or \"reward\": null with an \"error\" for this \
                               sample alone, with status 200";
                    self.find(check, Outcome::Failed, format!("{what}: {}", problems.join("; ")), fix);
                }
            }
        }
    }

    /// Sends as many samples as announced (or as a job sends by default), and one more.
    pub(super) async fn batch(&mut self) {
        let announced = self.ping.as_ref().and_then(|ping| ping.max_batch_samples);
        let usual = self.max_batch_samples;
        let most = announced.unwrap_or(usual);
        if most > MAX_TESTED_BATCH {
            let detail = format!("{most} samples are announced; {MAX_TESTED_BATCH} were tried");
            self.find("announced_batch", Outcome::Skipped, detail, "");
        }
        let most = most.min(MAX_TESTED_BATCH);
        let source = if announced.is_some() { "the announced maximum" } else { "the default of a job" };
        let samples = self.many(most as usize);
        let first = self.ask(&samples).await;
        match (&first, announced) {
            (Ok(answer), _) => {
                let problems = self.problems(answer, &samples);
                match problems.is_empty() {
                    true => self.find("batch", Outcome::Ok, format!("{most} samples in one request, {source}"), ""),
                    false => self.find(
                        "batch",
                        Outcome::Failed,
                        format!("{most} samples: {}", problems.join("; ")),
                        NO_ANSWER,
                    ),
                }
            }
            (Err(why), None) if why.contains("413") => {
                let fix = "announce max_batch_samples in the answer to reward.ping: each larger request costs a 413 and is split";
                self.find("batch", Outcome::Warning, format!("{most} samples ({source}): {why}"), fix);
            }
            (Err(why), _) => {
                let fix = "accept as many as reward.ping announces; answer 413 to larger requests, and they are split";
                self.find("batch", Outcome::Failed, format!("{most} samples ({source}): {why}"), fix);
            }
        }
        let Some(announced) = announced.filter(|announced| *announced <= MAX_TESTED_BATCH) else { return };
        let samples = self.many(announced as usize + 1);
        let id = new_id();
        let body = self.request(&id, &samples).to_string();
        let one_more = format!("{} samples, one more than announced", samples.len());
        match self.wire.post(&id, &body, Signing::Right).await {
            Ok(got) if got.status == 413 => {
                self.find("over_the_limit", Outcome::Ok, format!("{one_more}: 413"), "");
            }
            Ok(got) => match read(&got, &id, &samples) {
                Ok(answer) if self.problems(&answer, &samples).is_empty() => {
                    self.find("over_the_limit", Outcome::Ok, format!("{one_more}: answered nevertheless"), "");
                }
                Ok(answer) => {
                    let problems = self.problems(&answer, &samples).join("; ");
                    let fix = "answer all samples, or return 413";
                    self.find("over_the_limit", Outcome::Failed, format!("{one_more}: {problems}"), fix);
                }
                Err(why) => {
                    let fix = "answer 413 to a request that is too large: it is split and sent again; other errors lose the samples";
                    self.find("over_the_limit", Outcome::Failed, format!("{one_more}: {why}"), fix);
                }
            },
            Err(why) => {
                let fix = "answer 413 to a request that is too large: it is split and sent again";
                self.find("over_the_limit", Outcome::Failed, format!("{one_more}: {why}"), fix);
            }
        }
        if announced < usual {
            let detail = format!("it accepts {announced} samples in one request; a job sends up to {usual} by default");
            let fix = format!(
                "set \"max_batch_samples\": {announced} in the job's reward: otherwise each larger request costs a 413"
            );
            self.find("announced_batch", Outcome::Warning, detail, &fix);
        }
    }

    /// Repeats the given samples under new ids and groups.
    fn many(&self, count: usize) -> Vec<RewardSample> {
        let rounds = self.samples.len().max(1);
        let sample = |(index, sample): (usize, &RewardSample)| RewardSample {
            sample_id: format!("s_{index}"),
            group_id: format!("{}_{}", sample.group_id, index / rounds),
            ..sample.clone()
        };
        self.samples.iter().cycle().take(count).enumerate().map(sample).collect()
    }

    /// Returns the problems of the results in an answer, sample by sample.
    pub(super) fn problems(&self, answer: &Answer, samples: &[RewardSample]) -> Vec<String> {
        let mut problems = Vec::new();
        let absent: Vec<&str> = samples
            .iter()
            .zip(&answer.found)
            .filter(|(_, found)| **found == Found::Absent)
            .map(|(sample, _)| sample.sample_id.as_str())
            .collect();
        if !absent.is_empty() {
            let shown = absent.iter().take(5).copied().collect::<Vec<_>>().join(", ");
            problems.push(format!(
                "the answer has no result for {} of {} samples ({shown})",
                absent.len(),
                samples.len()
            ));
        }
        let invalid = samples.iter().zip(&answer.found).enumerate().filter_map(|(at, (sample, found))| match found {
            Found::Invalid(what) => Some(format!("{what} at index {at} ({})", sample.sample_id)),
            Found::Judged(_) | Found::Retryable(_) | Found::Absent => None,
        });
        problems.extend(invalid.take(3));
        problems
    }
}

/// Describes the result that the service returned for one sample.
fn describe_result(found: &Found) -> String {
    match found {
        Found::Judged(judgement) => match (&judgement.error, judgement.value.number()) {
            (Some(error), _) => format!("no reward ({}: {})", error.code, error.message),
            (None, Some(number)) => format!("reward {number}"),
            (None, None) => "the reward does not apply to this sample (null)".to_owned(),
        },
        Found::Retryable(error) => {
            format!(
                "the service has no reward for the sample yet, which may be sent again ({}: {})",
                error.code, error.message
            )
        }
        Found::Invalid(what) => what.clone(),
        Found::Absent => "no result".to_owned(),
    }
}
