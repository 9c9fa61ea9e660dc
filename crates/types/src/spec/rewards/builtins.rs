//! Reads the settings of built-in rewards.

use std::collections::BTreeMap;

use serde_json::Value;

use super::super::foreign::advice;
use super::super::reader::{Field, Reader};
use super::super::{
    AnswerPlace, ContainsPlan, FormatPlan, Formula, JsonSchemaPlan, LengthPlan, LengthUnit, MatchPlan, MathEqualPlan,
    MultiPlan, NumberMatchPlan, RegexPlan, RepetitionPlan, RewardKind, SimilarityMetric, SoftOverlongPlan,
    StringCheckPlan, StringOperation, TextSimilarityPlan,
};
use super::adapters::read_template;
use super::json_schema::JsonSchema;
use super::{KINDS, ReadKind};

/// The built-in reward types, each with the function that reads its settings from a job.
pub(super) const READERS: &[(&str, ReadKind)] = &[
    ("length", read_length),
    ("exact_match", read_exact_match),
    ("contains", read_contains),
    ("number_match", read_number_match),
    ("regex", read_regex),
    ("string_check", read_string_check),
    ("text_similarity", read_text_similarity),
    ("math_equal", read_math_equal),
    ("json_schema", read_json_schema),
    ("repetition", read_repetition),
    ("soft_overlong", read_soft_overlong),
    ("format", read_format),
    ("multi", read_multi),
];

/// Maximum number of graders in one `multi` reward.
const MAX_GRADERS: usize = 32;

fn read_length(reader: &Reader<'_>) -> RewardKind {
    let unit = reader.field("unit").variant::<LengthUnit>();
    let unit = unit.unwrap_or_default();
    let (min, max) = match unit {
        LengthUnit::Words => (reader.field("min_words"), reader.field("max_words")),
        LengthUnit::Tokens => {
            (reader.field_of("min_tokens", &["min_words"]), reader.field_of("max_tokens", &["max_words"]))
        }
    };
    let finite = |name, default| reader.field(name).number("a finite number", |_| true).unwrap_or(default);
    let length = LengthPlan {
        min_words: min.whole(0..=1_000_000).unwrap_or(10),
        max_words: max.whole(1..=1_000_000).unwrap_or(50),
        sentence_bonus: finite("sentence_bonus", 0.5),
        unit,
        soft_margin: reader.field("soft_margin").whole(0..=1_000_000).unwrap_or(0),
        below: finite("below", -0.5),
        above: finite("above", 0.0),
    };
    if length.min_words > length.max_words {
        let detail = format!(
            "the maximum ({}) is less than the minimum ({}): no length matches",
            length.max_words, length.min_words
        );
        max.fail("invalid_value", detail);
    }
    RewardKind::Length(length)
}

fn read_exact_match(reader: &Reader<'_>) -> RewardKind {
    RewardKind::ExactMatch(MatchPlan {
        column: read_column(&reader.required("column", "name the dataset column that holds the reference answer")),
        ignore_case: reader.field("ignore_case").bool().unwrap_or(false),
    })
}

fn read_number_match(reader: &Reader<'_>) -> RewardKind {
    RewardKind::NumberMatch(NumberMatchPlan {
        column: read_column(&reader.required("column", "name the dataset column that holds the right number")),
        tolerance: reader.field("tolerance").number("at least 0", |value| value >= 0.0).unwrap_or(1e-9),
    })
}

fn read_contains(reader: &Reader<'_>) -> RewardKind {
    let (column, text) = (reader.field("column"), reader.field("text"));
    match (column.value(), text.value()) {
        (Some(_), Some(_)) => text.fail("conflict", "give either column or text, not both"),
        (None, None) => text.fail("required", "give the text to look for, or the column that holds it"),
        (Some(_), None) | (None, Some(_)) => {}
    }
    RewardKind::Contains(ContainsPlan {
        column: column.nonempty(200).map(str::to_owned),
        text: text.nonempty(10_000).map(str::to_owned),
        ignore_case: reader.field("ignore_case").bool().unwrap_or(false),
    })
}

fn read_regex(reader: &Reader<'_>) -> RewardKind {
    let field = reader.required("pattern", "give the pattern to look for");
    let pattern = field.nonempty(10_000).unwrap_or_default();
    if let Err(error) = regex::RegexBuilder::new(pattern).size_limit(1 << 20).build() {
        let text = error.to_string();
        let reason = text.lines().last().unwrap_or("the pattern cannot be parsed").trim_start_matches("error: ");
        field.fail(
            "invalid_value",
            format!("the pattern is not a regular expression in Rust's syntax (no look-around, no back-references): {reason}"),
        );
    }
    RewardKind::Regex(RegexPlan { pattern: pattern.to_owned() })
}

fn read_string_check(reader: &Reader<'_>) -> RewardKind {
    RewardKind::StringCheck(StringCheckPlan {
        input: read_input(reader),
        reference: read_reference(reader),
        operation: reader
            .required("operation", "choose how the texts are compared: eq, ne, like or ilike")
            .variant()
            .unwrap_or(StringOperation::Eq),
    })
}

fn read_text_similarity(reader: &Reader<'_>) -> RewardKind {
    let metric =
        reader.required("evaluation_metric", "name the measure: fuzzy_match, bleu, gleu, rouge_1 … rouge_5 or rouge_l");
    let chosen = match metric.value().and_then(Value::as_str) {
        Some(other @ ("meteor" | "cosine")) => {
            metric.fail(
                "unsupported",
                format!("the measure '{other}' needs word lists or an embedding model: a webhook can compute it"),
            );
            None
        }
        _ => metric.variant(),
    };
    RewardKind::TextSimilarity(TextSimilarityPlan {
        input: read_input(reader),
        reference: read_reference(reader),
        evaluation_metric: chosen.unwrap_or(SimilarityMetric::FuzzyMatch),
    })
}

fn read_input(reader: &Reader<'_>) -> String {
    read_template(&reader.field("input")).unwrap_or_else(|| "{{ sample.output_text }}".to_owned())
}

fn read_reference(reader: &Reader<'_>) -> String {
    let field = reader.required("reference", "give the text to compare with, such as \"{{ item.answer }}\"");
    read_template(&field).unwrap_or_default()
}

fn read_math_equal(reader: &Reader<'_>) -> RewardKind {
    RewardKind::MathEqual(MathEqualPlan {
        column: read_column(&reader.required("column", "name the dataset column that holds the right answer")),
        tolerance: reader.field("tolerance").number("between 0 and 1", |v| (0.0..=1.0).contains(&v)).unwrap_or(1e-6),
        answer: reader.field("answer").variant().unwrap_or(AnswerPlace::Auto),
    })
}

fn read_json_schema(reader: &Reader<'_>) -> RewardKind {
    let (schema, column) = (reader.field("schema"), reader.field("column"));
    if let (Some(_), Some(_)) = (schema.value(), column.value()) {
        column.fail("conflict", "give either schema or column, not both");
    }
    if let Some(value) = schema.value() {
        if !(value.is_object() || value.is_boolean()) {
            schema.fail("invalid_type", "the schema must be a JSON Schema: an object, or true or false");
        } else if let Err(error) = JsonSchema::new(value) {
            schema.fail("invalid_value", error);
        }
    }
    RewardKind::JsonSchema(JsonSchemaPlan {
        schema: schema.value().cloned(),
        column: column.nonempty(200).map(str::to_owned),
        fenced: reader.field("fenced").bool().unwrap_or(true),
    })
}

fn read_repetition(reader: &Reader<'_>) -> RewardKind {
    RewardKind::Repetition(RepetitionPlan {
        ngram_size: reader.field("ngram_size").whole(1..=100).unwrap_or(3),
        max_penalty: reader.field("max_penalty").number("0 or negative", |value| value <= 0.0).unwrap_or(-1.0),
    })
}

fn read_soft_overlong(reader: &Reader<'_>) -> RewardKind {
    let max = reader.required("max_tokens", "give the number of tokens from which a completion is punished in full");
    let cache =
        reader.required("cache_tokens", "give the number of tokens before max_tokens over which the punishment grows");
    let plan = SoftOverlongPlan {
        max_tokens: max.whole(1..=10_000_000).unwrap_or(1),
        cache_tokens: cache.whole(1..=10_000_000).unwrap_or(1),
    };
    if plan.cache_tokens > plan.max_tokens {
        cache.fail("out_of_range", format!("cache_tokens must be at most max_tokens ({})", plan.max_tokens));
    }
    RewardKind::SoftOverlong(plan)
}

fn read_format(reader: &Reader<'_>) -> RewardKind {
    let field = reader.field("tags");
    let mut tags = Vec::new();
    for item in field.items().unwrap_or_default() {
        let Some(tag) = item.nonempty(64) else { continue };
        if !tag.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | ':')) {
            item.fail(
                "invalid_value",
                "a tag's name has letters, digits, '_', '-', '.' and ':' only; give it without < and >",
            );
        } else if tags.iter().any(|known| known == tag) {
            item.fail("duplicate", format!("the tag '{tag}' is listed twice"));
        }
        tags.push(tag.to_owned());
    }
    if field.value().is_none() {
        tags = vec!["think".to_owned(), "answer".to_owned()];
    } else if tags.is_empty() {
        field.fail("required", "give at least one tag");
    }
    if tags.len() > 16 {
        field.fail("out_of_range", "a reward may have at most 16 tags");
    }
    RewardKind::Format(FormatPlan {
        tags,
        strict: reader.field("strict").bool().unwrap_or(true),
        partial: reader.field("partial").bool().unwrap_or(false),
        first_tag_open: reader.field("first_tag_open").bool().unwrap_or(false),
    })
}

fn read_multi(reader: &Reader<'_>) -> RewardKind {
    let field =
        reader.required("graders", "give the graders by name, such as {\"right\": {\"type\": \"string_check\", …}}");
    let mut graders = BTreeMap::new();
    let given = field.object();
    let names: Vec<&String> = field.map().map(|map| map.keys().collect()).unwrap_or_default();
    if names.len() > MAX_GRADERS {
        field.fail("out_of_range", format!("a multi grader may have at most {MAX_GRADERS} graders"));
    }
    for name in names.into_iter().take(MAX_GRADERS) {
        if !Formula::is_name(name) {
            field.fail_at(name, "invalid_value", "a grader's name must begin with a letter, have only letters, digits and '_', and not be the name of a function");
            continue;
        }
        let Some(item) = given.as_ref().and_then(|given| given.entry(name).object()) else { continue };
        if let Some(kind) = read_grader(&item) {
            graders.insert(name.clone(), kind);
        }
    }
    let formula = reader.required(
        "calculate_output",
        "give the formula over the graders' names, such as \"0.8 * right + 0.2 * short\"",
    );
    let text = formula.nonempty(2_000).unwrap_or_default();
    match Formula::parse(text) {
        Err(error) if !text.is_empty() => formula.fail("invalid_value", error),
        Err(_) => {}
        Ok(parsed) => {
            let known = field.map();
            for name in parsed.names() {
                if !known.is_some_and(|known| known.contains_key(&name)) {
                    formula.fail("invalid_value", format!("the multi grader has no grader '{name}'"));
                }
            }
        }
    }
    RewardKind::Multi(MultiPlan { graders, calculate_output: text.to_owned() })
}

fn read_grader(reader: &Reader<'_>) -> Option<RewardKind> {
    let field = reader.required("type", "name the grader's type");
    let kind = field.choice(&KINDS)?(reader);
    // OpenAI's graders have a `name` field of their own, which is ignored.
    let _ = reader.field("name").string(64);
    if kind.service().is_some() || matches!(kind, RewardKind::Multi(_)) {
        field.fail(
            "unsupported",
            "a multi grader has built-in graders only: give services as rewards of their own, with weights",
        );
        return None;
    }
    reader.finish(advice);
    Some(kind)
}

fn read_column(field: &Field<'_>) -> String {
    field.nonempty(200).unwrap_or_default().to_owned()
}
