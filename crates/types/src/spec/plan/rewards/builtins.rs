//! What the built-in rewards need to know.

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

/// Band of lengths: 1 inside, `below` and `above` outside, in between over `soft_margin`; a bonus for a sentence's end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LengthPlan {
    /// Words (whitespace-separated), or what `unit` says; inclusive.
    pub min_words: u32,
    /// The same, inclusive.
    pub max_words: u32,
    /// Added when the completion ends with `.`, `!` or `?`.
    pub sentence_bonus: f64,
    /// What is counted. With `tokens` the limits may be spelled `min_tokens` and `max_tokens`.
    #[serde(default)]
    pub unit: LengthUnit,
    /// Over so many words or tokens the value falls linearly from 1 to what it is outside; 0 = at once.
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

    /// Lowest and highest value.
    pub fn bounds(&self) -> (f64, f64) {
        let (low, high) = (self.below.min(self.above).min(1.0), self.below.max(self.above).max(1.0));
        (low + self.sentence_bonus.min(0.0), high + self.sentence_bonus.max(0.0))
    }
}

/// What a length is counted in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum LengthUnit {
    /// Separated by whitespace.
    #[default]
    Words,
    /// The policy's own.
    Tokens,
}

/// Compare with a column.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MatchPlan {
    /// The dataset column that holds the reference.
    pub column: String,
    /// Compare without regard to case.
    pub ignore_case: bool,
}

/// Search for text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ContainsPlan {
    /// The dataset column that holds the text; exclusive with `text`.
    pub column: Option<String>,
    /// The text itself.
    pub text: Option<String>,
    /// Compare without regard to case.
    pub ignore_case: bool,
}

/// Compare the last number.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NumberMatchPlan {
    /// The dataset column that holds the reference.
    pub column: String,
    /// Largest absolute difference that still counts.
    pub tolerance: f64,
}

/// Search for a pattern (Rust's regex syntax: linear time).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RegexPlan {
    /// The pattern.
    pub pattern: String,
}

/// Compare two texts, as OpenAI's `string_check` grader does.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct StringCheckPlan {
    /// Template of the text that is checked: `{{ sample.output_text }}`, `{{ item.COLUMN }}`.
    pub input: String,
    /// Template of what it is held against.
    pub reference: String,
    /// How.
    pub operation: StringOperation,
}

/// How texts are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum StringOperation {
    /// Equal.
    Eq,
    /// Not equal.
    Ne,
    /// The input contains the reference.
    Like,
    /// The same without regard to case.
    Ilike,
}

/// How alike two texts are, as OpenAI's `text_similarity` grader says it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TextSimilarityPlan {
    /// Template of the text that is graded: `{{ sample.output_text }}`, `{{ item.COLUMN }}`.
    pub input: String,
    /// Template of what it is graded against.
    pub reference: String,
    /// By which measure.
    pub evaluation_metric: SimilarityMetric,
}

/// Measures of likeness, each from 0 (nothing alike) to 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SimilarityMetric {
    /// Characters that stay, in order: 1 − indel distance / both lengths (rapidfuzz's ratio).
    FuzzyMatch,
    /// Sentence BLEU of up to four words, add-one smoothed above one word.
    Bleu,
    /// The lower of n-gram precision and recall, n up to four.
    Gleu,
    /// F1 of words.
    #[serde(rename = "rouge_1")]
    Rouge1,
    /// F1 of pairs of words.
    #[serde(rename = "rouge_2")]
    Rouge2,
    /// F1 of three words in a row.
    #[serde(rename = "rouge_3")]
    Rouge3,
    /// F1 of four words in a row.
    #[serde(rename = "rouge_4")]
    Rouge4,
    /// F1 of five words in a row.
    #[serde(rename = "rouge_5")]
    Rouge5,
    /// F1 of the longest common subsequence of words.
    RougeL,
}

/// Compare a final answer as mathematics.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MathEqualPlan {
    /// The dataset column that holds the right answer.
    pub column: String,
    /// Largest relative difference of numbers that still counts.
    pub tolerance: f64,
    /// Where the answer stands.
    pub answer: AnswerPlace,
}

/// Where a completion's final answer is looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum AnswerPlace {
    /// In the last `\boxed{}`, else `<answer>`, else behind `####` or "the answer is", else the last number.
    Auto,
    /// In the last `\boxed{}` only.
    Boxed,
    /// In the last `<answer>…</answer>` only.
    Tag,
    /// The whole completion.
    Whole,
}

/// JSON that a schema accepts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JsonSchemaPlan {
    /// The schema, draft 2020-12 unless its `$schema` says otherwise; absent with `column`: any JSON.
    #[schema(value_type = Option<Object>)]
    pub schema: Option<Value>,
    /// The dataset column that holds a row's own schema.
    pub column: Option<String>,
    /// Look into the last ```` ```json ```` block when the completion has one.
    pub fenced: bool,
}

/// Penalise repeated n-grams (Yeo et al. 2025, arXiv 2502.03373, as in TRL).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RepetitionPlan {
    /// Words of an n-gram.
    pub ngram_size: u32,
    /// Value if every n-gram repeats; ≤ 0.
    pub max_penalty: f64,
}

/// Length punishment of DAPO (arXiv 2503.14476, equation 13).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SoftOverlongPlan {
    /// Tokens from which the value is −1.
    pub max_tokens: u32,
    /// Tokens before that over which it falls from 0.
    pub cache_tokens: u32,
}

/// Tags that a completion is laid out in.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FormatPlan {
    /// Names of tags, in order.
    pub tags: Vec<String>,
    /// Nothing but whitespace may stand outside the tags.
    pub strict: bool,
    /// Give the share of tags that stand once and in order, instead of all or nothing.
    pub partial: bool,
    /// Chat templates often put the first opening tag into the prompt: it may be missing then.
    pub first_tag_open: bool,
}

/// A formula over built-in rewards, as OpenAI's `multi` grader has it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MultiPlan {
    /// By name: built-in rewards as in a job, without weight.
    #[schema(value_type = Object)]
    pub graders: BTreeMap<String, RewardKind>,
    /// Over their names: + − * / ( ), min, max, abs, floor, ceil, exp, sqrt, log.
    pub calculate_output: String,
}
