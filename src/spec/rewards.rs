//! Reads the list of rewards; secrets and header values are split off.

use std::collections::{BTreeMap, BTreeSet};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

mod reward_model;

use super::foreign::advice;
use super::reader::{Errors, Field, FieldError, Reader, shown};
use super::{
    ContainsPlan, LengthPlan, MatchPlan, NumberMatchPlan, OnInvalid, RegexPlan, RewardKind, RewardPlan, RewardSecrets,
    WebhookPlan,
};

/// The most rewards a job may have.
const MAX_REWARDS: usize = 32;

#[derive(Clone, Copy)]
enum Kind {
    Webhook,
    Length,
    ExactMatch,
    Contains,
    NumberMatch,
    Regex,
    RewardModel,
}

const KINDS: [(&str, Kind); 7] = [
    ("webhook", Kind::Webhook),
    ("length", Kind::Length),
    ("exact_match", Kind::ExactMatch),
    ("contains", Kind::Contains),
    ("number_match", Kind::NumberMatch),
    ("regex", Kind::Regex),
    ("reward_model", Kind::RewardModel),
];

/// Types of the reward contract that are not built yet.
const LATER: [&str; 19] = [
    "openrlhf",
    "slime",
    "llamafactory",
    "tei_predict",
    "tei_rerank",
    "vllm_classify",
    "vllm_score",
    "vllm_pooling",
    "sglang_classify",
    "hf_text_classification",
    "openai_judge",
    "http_template",
    "string_check",
    "json_schema",
    "repetition",
    "soft_overlong",
    "format",
    "multi",
    "judge",
];

/// Headers that belong to the transport or to the contract itself.
const RESERVED_HEADERS: [&str; 13] = [
    "host",
    "content-length",
    "content-type",
    "transfer-encoding",
    "connection",
    "upgrade",
    "te",
    "trailer",
    "expect",
    "idempotency-key",
    "webhook-id",
    "webhook-timestamp",
    "webhook-signature",
];

/// All rewards, and the secrets of those that have some.
pub(super) fn read_rewards(field: &Field<'_>) -> (Vec<RewardPlan>, BTreeMap<String, RewardSecrets>) {
    let (mut rewards, mut secrets) = (Vec::new(), BTreeMap::new());
    let Some(items) = field.items() else { return (rewards, secrets) };
    if items.is_empty() {
        field.fail("required", "give at least one reward, {\"type\": \"length\"} say");
    }
    if items.len() > MAX_REWARDS {
        field.fail("out_of_range", format!("at most {MAX_REWARDS} rewards, not {}", items.len()));
    }
    let mut names = BTreeSet::new();
    let mut all_read = true;
    for item in items.iter().take(MAX_REWARDS) {
        let Some((reward, secret)) = item.object().and_then(|reader| read_reward(&reader)) else {
            all_read = false;
            continue;
        };
        if !names.insert(reward.name.clone()) {
            let detail = format!(
                "two rewards are named '{0}': give each a name of its own (metrics are rewards/{0}/…)",
                reward.name
            );
            item.fail_at("name", "duplicate", detail);
        }
        if secret != RewardSecrets::default() {
            secrets.insert(reward.name.clone(), secret);
        }
        rewards.push(reward);
    }
    if all_read && !rewards.is_empty() && rewards.iter().all(|reward| reward.weight == 0.0) {
        field.fail(
            "invalid_value",
            "every weight is 0 (metric only), so there is nothing to learn: give one reward a weight",
        );
    }
    (rewards, secrets)
}

/// Reads the one reward in the field `reward` of a document; any weight will do.
///
/// # Errors
/// All of its errors, with pointers into the document.
pub fn read_single_reward(document: &Value) -> Result<(RewardPlan, RewardSecrets), Vec<FieldError>> {
    let errors = Errors::default();
    let field = Reader::document(document, &errors)
        .required("reward", "give the reward as in a job, {\"type\": \"webhook\", \"url\": \"…\"} say");
    let reward = field.object().and_then(|reader| read_reward(&reader));
    let errors = errors.into_vec();
    match reward {
        Some(reward) if errors.is_empty() => Ok(reward),
        _ => Err(errors),
    }
}

fn read_reward(reader: &Reader<'_>) -> Option<(RewardPlan, RewardSecrets)> {
    let kind_field = reader.required(
        "type",
        "name the reward's type: webhook, length, exact_match, contains, number_match, regex or reward_model",
    );
    let type_name = kind_field.value().and_then(|value| value.as_str()).unwrap_or_default();
    if LATER.contains(&type_name) {
        kind_field.fail("unsupported", format!("'{type_name}' is not built yet; a webhook can compute any reward"));
        return None;
    }
    let kind = kind_field.choice(&KINDS)?;
    let name = read_name(&reader.field("name"), type_name);
    let weight = reader.field("weight").number("a finite number", |_| true).unwrap_or(1.0);
    let required = reader.field("required");
    if required.bool() == Some(true) && weight == 0.0 {
        required.fail("conflict", "a reward of weight 0 is a metric only and cannot be required");
    }
    let required = required.value().and_then(|value| value.as_bool()).unwrap_or(weight != 0.0);
    let mut secrets = RewardSecrets::default();
    let kind = match kind {
        Kind::Webhook => {
            secrets = read_secrets(reader);
            RewardKind::Webhook(read_webhook(reader))
        }
        Kind::Length => RewardKind::Length(read_length(reader)),
        Kind::ExactMatch => RewardKind::ExactMatch(MatchPlan {
            column: read_column(&reader.required("column", "name the dataset column that holds the reference answer")),
            ignore_case: reader.field("ignore_case").bool().unwrap_or(false),
        }),
        Kind::Contains => RewardKind::Contains(read_contains(reader)),
        Kind::NumberMatch => RewardKind::NumberMatch(NumberMatchPlan {
            column: read_column(&reader.required("column", "name the dataset column that holds the right number")),
            tolerance: reader.field("tolerance").number("at least 0", |value| value >= 0.0).unwrap_or(1e-9),
        }),
        Kind::Regex => RewardKind::Regex(read_regex(reader)),
        Kind::RewardModel => RewardKind::RewardModel(reward_model::read_reward_model(reader)),
    };
    reader.finish(advice);
    Some((RewardPlan { name, weight, required, kind }, secrets))
}

fn read_name(field: &Field<'_>, type_name: &str) -> String {
    let Some(name) = field.nonempty(64) else { return type_name.to_owned() };
    if !name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.')) {
        field.fail(
            "invalid_value",
            "a name has letters, digits, '_', '-' and '.' only: it becomes part of metric names",
        );
    }
    name.to_owned()
}

fn read_column(field: &Field<'_>) -> String {
    field.nonempty(200).unwrap_or_default().to_owned()
}

fn read_length(reader: &Reader<'_>) -> LengthPlan {
    let max = reader.field("max_words");
    let length = LengthPlan {
        min_words: reader.field("min_words").whole(0..=1_000_000).unwrap_or(10),
        max_words: max.whole(1..=1_000_000).unwrap_or(50),
        sentence_bonus: reader.field("sentence_bonus").number("a finite number", |_| true).unwrap_or(0.5),
    };
    if length.min_words > length.max_words {
        let detail =
            format!("max_words ({}) is less than min_words ({}): no length fits", length.max_words, length.min_words);
        max.fail("invalid_value", detail);
    }
    length
}

fn read_contains(reader: &Reader<'_>) -> ContainsPlan {
    let (column, text) = (reader.field("column"), reader.field("text"));
    match (column.value(), text.value()) {
        (Some(_), Some(_)) => text.fail("conflict", "give either column or text, not both"),
        (None, None) => text.fail("required", "give the text to look for, or the column that holds it"),
        (Some(_), None) | (None, Some(_)) => {}
    }
    ContainsPlan {
        column: column.nonempty(200).map(str::to_owned),
        text: text.nonempty(10_000).map(str::to_owned),
        ignore_case: reader.field("ignore_case").bool().unwrap_or(false),
    }
}

fn read_regex(reader: &Reader<'_>) -> RegexPlan {
    let field = reader.required("pattern", "give the pattern to look for");
    let pattern = field.nonempty(10_000).unwrap_or_default();
    if let Err(error) = regex::RegexBuilder::new(pattern).size_limit(1 << 20).build() {
        let text = error.to_string();
        let reason = text.lines().last().unwrap_or("it cannot be parsed").trim_start_matches("error: ");
        field.fail(
            "invalid_value",
            format!("not a regular expression in Rust's syntax (no look-around, no back-references): {reason}"),
        );
    }
    RegexPlan { pattern: pattern.to_owned() }
}

fn read_webhook(reader: &Reader<'_>) -> WebhookPlan {
    let timeout = reader.field("timeout_ms");
    let webhook = WebhookPlan {
        url: read_url(&reader.required("url", "give the http or https address of the reward service")),
        params: reader.field("params").map().cloned().unwrap_or_default(),
        max_concurrency: reader.field("max_concurrency").whole(1..=256).unwrap_or(8),
        max_batch_samples: reader.field("max_batch_samples").whole(1..=10_000).unwrap_or(32),
        max_batch_bytes: reader.field("max_batch_bytes").whole(1_024..=64_000_000).unwrap_or(1_000_000),
        timeout_ms: timeout.whole(1..=86_400_000).unwrap_or(30_000),
        deadline_ms: reader.field("deadline_ms").whole(1..=604_800_000).unwrap_or(300_000),
        max_tries: reader.field("max_tries").whole(1..=100).unwrap_or(5),
        max_invalid_tries: reader.field("max_invalid_tries").whole(1..=100).unwrap_or(2),
        on_invalid: reader
            .field("on_invalid")
            .choice(&[("mask", OnInvalid::Mask), ("zero", OnInvalid::Zero), ("fail", OnInvalid::Fail)])
            .unwrap_or(OnInvalid::Mask),
        max_outage_s: reader.field("max_outage_s").whole(1..=604_800).unwrap_or(600),
    };
    if webhook.timeout_ms > webhook.deadline_ms {
        let detail = format!(
            "one try ({} ms) may not take longer than all tries together (deadline_ms {})",
            webhook.timeout_ms, webhook.deadline_ms
        );
        timeout.fail("invalid_value", detail);
    }
    webhook
}

fn read_url(field: &Field<'_>) -> String {
    let Some(text) = field.nonempty(2_000) else { return String::new() };
    let complaint = match reqwest::Url::parse(text) {
        Err(error) => Some(format!("not an absolute URL ({error}); it looks like https://rm.example/score")),
        Ok(url) if !matches!(url.scheme(), "http" | "https") => {
            Some(format!("the scheme must be http or https, not '{}'", shown(url.scheme())))
        }
        Ok(url) if !url.username().is_empty() || url.password().is_some() => {
            Some("credentials do not belong in a URL: give them in headers, which are never shown".to_owned())
        }
        Ok(url) if url.fragment().is_some() => Some("a fragment (#…) is never sent to a server: remove it".to_owned()),
        Ok(_) => None,
    };
    if let Some(detail) = complaint {
        field.fail("invalid_value", detail);
        return String::new();
    }
    text.to_owned()
}

fn read_secrets(reader: &Reader<'_>) -> RewardSecrets {
    let secret = reader.field("secret");
    let valid = secret.string(200).filter(|text| {
        let key = text.strip_prefix("whsec_").and_then(|key| STANDARD.decode(key).ok());
        let fits = key.is_some_and(|key| (24..=64).contains(&key.len()));
        if !fits {
            secret.fail(
                "invalid_value",
                "must be 'whsec_' followed by 24 to 64 random bytes in base64 (the Standard Webhooks form)",
            );
        }
        fits
    });
    RewardSecrets {
        secret: valid.map(str::to_owned),
        headers: read_headers(&reader.field("headers")).unwrap_or_default(),
    }
}

fn read_headers(field: &Field<'_>) -> Option<BTreeMap<String, String>> {
    let headers = field.texts(32, 8_000)?;
    for (name, value) in &headers {
        let is_token = |c: char| c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(c);
        if name.is_empty() || !name.chars().all(is_token) {
            field.fail_at(name, "invalid_value", "not a header name: letters, digits and '-' only");
        } else if RESERVED_HEADERS.contains(&name.to_ascii_lowercase().as_str()) {
            field.fail_at(name, "invalid_value", "this header is set by the reward contract itself");
        }
        if !value.chars().all(|c| c == '\t' || (' '..='~').contains(&c)) {
            field.fail_at(name, "invalid_value", "a header value has printable ASCII characters only");
        }
    }
    Some(headers)
}
