//! Settings of the built-in rewards.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::Schema;
use utoipa::{PartialSchema, ToSchema};

use super::RewardKind;

/// A built-in type of reward, for the JSON schema.
pub(in crate::spec) struct Builtin {
    /// The value of `type` in a job.
    pub(in crate::spec) name: &'static str,
    /// The JSON schema of its settings.
    pub(in crate::spec) schema: fn() -> RefOr<Schema>,
    /// The settings that a job must give.
    pub(in crate::spec) required: &'static [&'static str],
    /// The shortest valid settings, without `type`; the schema takes its defaults from them.
    pub(in crate::spec) minimal: fn() -> Value,
}

/// Every built-in type, in the order of the API's document. `spec/rewards/builtins.rs` has their readers.
pub(in crate::spec) const BUILTINS: &[Builtin] = &[
    Builtin { name: "length", schema: LengthPlan::schema, required: &[], minimal: || json!({}) },
    Builtin {
        name: "exact_match",
        schema: MatchPlan::schema,
        required: &["column"],
        minimal: || json!({"column": "answer"}),
    },
    Builtin { name: "contains", schema: ContainsPlan::schema, required: &[], minimal: || json!({"text": "…"}) },
    Builtin {
        name: "number_match",
        schema: NumberMatchPlan::schema,
        required: &["column"],
        minimal: || json!({"column": "answer"}),
    },
    Builtin { name: "regex", schema: RegexPlan::schema, required: &["pattern"], minimal: || json!({"pattern": "."}) },
    Builtin {
        name: "string_check",
        schema: StringCheckPlan::schema,
        required: &["reference", "operation"],
        minimal: || json!({"reference": "x", "operation": "eq"}),
    },
    Builtin {
        name: "text_similarity",
        schema: TextSimilarityPlan::schema,
        required: &["reference", "evaluation_metric"],
        minimal: || json!({"reference": "x", "evaluation_metric": "bleu"}),
    },
    Builtin {
        name: "math_equal",
        schema: MathEqualPlan::schema,
        required: &["column"],
        minimal: || json!({"column": "answer"}),
    },
    Builtin { name: "json_schema", schema: JsonSchemaPlan::schema, required: &[], minimal: || json!({}) },
    Builtin { name: "repetition", schema: RepetitionPlan::schema, required: &[], minimal: || json!({}) },
    Builtin {
        name: "soft_overlong",
        schema: SoftOverlongPlan::schema,
        required: &["max_tokens", "cache_tokens"],
        minimal: || json!({"max_tokens": 2, "cache_tokens": 1}),
    },
    Builtin { name: "format", schema: FormatPlan::schema, required: &[], minimal: || json!({}) },
    Builtin {
        name: "multi",
        schema: MultiPlan::schema,
        required: &["graders", "calculate_output"],
        minimal: || json!({"graders": {"a": {"type": "length"}}, "calculate_output": "a"}),
    },
];

/// Length reward: 1 within the limits, `below` and `above` outside, with a linear transition over `soft_margin`, plus a
/// bonus for ending a sentence.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LengthPlan {
    /// Minimum length, inclusive, in whitespace-separated words or in the given `unit`.
    pub min_words: u32,
    /// Maximum length, inclusive, in whitespace-separated words or in the given `unit`.
    pub max_words: u32,
    /// Bonus that is added when the completion ends with `.`, `!` or `?`.
    pub sentence_bonus: f64,
    /// Unit of length. With `tokens`, the limits can also be written `min_tokens` and `max_tokens`.
    #[serde(default)]
    pub unit: LengthUnit,
    /// Number of words or tokens over which the value falls linearly from 1 to its value outside the limits; 0 = no transition.
    #[serde(default)]
    pub soft_margin: u32,
    /// Value of completions that are too short.
    #[serde(default = "LengthPlan::default_below")]
    pub below: f64,
    /// Value of completions that are too long.
    #[serde(default)]
    pub above: f64,
}

impl LengthPlan {
    fn default_below() -> f64 {
        -0.5
    }

    /// Returns the lowest and highest possible value.
    pub fn bounds(&self) -> (f64, f64) {
        let (low, high) = (self.below.min(self.above).min(1.0), self.below.max(self.above).max(1.0));
        (low + self.sentence_bonus.min(0.0), high + self.sentence_bonus.max(0.0))
    }
}

/// Unit in which the length is counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum LengthUnit {
    /// Words, separated by whitespace.
    #[default]
    Words,
    /// Tokens of the policy's tokenizer.
    Tokens,
}

/// Comparison of the completion with a column.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MatchPlan {
    /// Dataset column that holds the reference answer.
    pub column: String,
    /// Whether to ignore case.
    pub ignore_case: bool,
}

/// Search for a text in the completion.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ContainsPlan {
    /// Dataset column that holds the text. Mutually exclusive with `text`.
    pub column: Option<String>,
    /// The text to search for. Mutually exclusive with `column`.
    pub text: Option<String>,
    /// Whether to ignore case.
    pub ignore_case: bool,
}

/// Comparison of the completion's last number with a column.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NumberMatchPlan {
    /// Dataset column that holds the reference number.
    pub column: String,
    /// Maximum absolute difference at which numbers count as equal.
    pub tolerance: f64,
}

/// Search for a pattern in the completion (Rust regex syntax, linear time).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RegexPlan {
    /// The regular expression to search for.
    pub pattern: String,
}

/// Comparison of two texts, as in OpenAI's `string_check` grader.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct StringCheckPlan {
    /// Template of the text to check: `{{ sample.output_text }}`, `{{ item.COLUMN }}`.
    pub input: String,
    /// Template of the text to compare with.
    pub reference: String,
    /// The comparison: eq, ne, like or ilike.
    pub operation: StringOperation,
}

/// How two texts are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum StringOperation {
    /// The texts are equal.
    Eq,
    /// The texts are not equal.
    Ne,
    /// The input contains the reference.
    Like,
    /// The input contains the reference, ignoring case.
    Ilike,
}

/// Similarity of two texts, as in OpenAI's `text_similarity` grader.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TextSimilarityPlan {
    /// Template of the text to grade: `{{ sample.output_text }}`, `{{ item.COLUMN }}`.
    pub input: String,
    /// Template of the text to compare with.
    pub reference: String,
    /// The metric of text similarity.
    pub evaluation_metric: SimilarityMetric,
}

/// Similarity metrics, each from 0 (nothing in common) to 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SimilarityMetric {
    /// Characters in common, in order: 1 − indel distance / sum of both lengths (rapidfuzz's ratio).
    FuzzyMatch,
    /// Sentence BLEU with n-grams of up to four words, add-one smoothed above one word.
    Bleu,
    /// The lower of n-gram precision and recall, for n up to four.
    Gleu,
    /// F1 score of single words.
    #[serde(rename = "rouge_1")]
    Rouge1,
    /// F1 score of word pairs.
    #[serde(rename = "rouge_2")]
    Rouge2,
    /// F1 score of word 3-grams.
    #[serde(rename = "rouge_3")]
    Rouge3,
    /// F1 score of word 4-grams.
    #[serde(rename = "rouge_4")]
    Rouge4,
    /// F1 score of word 5-grams.
    #[serde(rename = "rouge_5")]
    Rouge5,
    /// F1 score of the longest common subsequence of words.
    RougeL,
}

/// Comparison of final answers as mathematical expressions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MathEqualPlan {
    /// Dataset column that holds the correct answer.
    pub column: String,
    /// Maximum relative difference at which numbers count as equal.
    pub tolerance: f64,
    /// Where in the completion to find the answer.
    pub answer: AnswerPlace,
}

/// Where in a completion to find the final answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum AnswerPlace {
    /// The last `\boxed{}`, otherwise `<answer>`, otherwise the text after `####` or "the answer is", otherwise the last number.
    Auto,
    /// The last `\boxed{}` only.
    Boxed,
    /// The last `<answer>…</answer>` only.
    Tag,
    /// The whole text of the completion.
    Whole,
}

/// JSON that conforms to a schema.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JsonSchemaPlan {
    /// The schema, draft 2020-12 unless its `$schema` says otherwise. Absent with `column`. If both are
    /// absent, any JSON is accepted.
    #[schema(value_type = Option<Object>)]
    pub schema: Option<Value>,
    /// Dataset column that holds each row's own schema.
    pub column: Option<String>,
    /// Whether to check the last ```` ```json ```` block if the completion has one.
    pub fenced: bool,
}

/// Penalty for repeated n-grams (Yeo et al. 2025, arXiv 2502.03373, as in TRL).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RepetitionPlan {
    /// Number of words per n-gram.
    pub ngram_size: u32,
    /// Value if every n-gram is repeated; 0 or negative.
    pub max_penalty: f64,
}

/// DAPO's soft overlong punishment (arXiv 2503.14476, equation 13).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SoftOverlongPlan {
    /// Length in tokens from which the value is −1.
    pub max_tokens: u32,
    /// Number of tokens before `max_tokens` over which the value falls from 0 to −1.
    pub cache_tokens: u32,
}

/// Tags that structure a completion.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FormatPlan {
    /// Names of the tags, in order.
    pub tags: Vec<String>,
    /// Whether only whitespace is allowed outside the tags.
    pub strict: bool,
    /// Whether to return the share of tags that appear exactly once and in order, instead of 0 or 1.
    pub partial: bool,
    /// Whether the first opening tag may be missing, because many chat templates include it in the prompt.
    pub first_tag_open: bool,
}

/// A formula over built-in rewards, as in OpenAI's `multi` grader.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MultiPlan {
    /// The built-in rewards, by name. Each is written as in a job, without a weight.
    #[schema(value_type = Object)]
    pub graders: BTreeMap<String, RewardKind>,
    /// Formula over the names of the graders: + − * / ( ), min, max, abs, floor, ceil, exp, sqrt, log.
    pub calculate_output: String,
}
