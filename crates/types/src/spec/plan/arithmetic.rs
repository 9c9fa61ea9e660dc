//! The arithmetic rules of a plan: the choices that decide the exact bits of its run.
//!
//! A job keeps the rules it was accepted with, however much later it resumes. A plan that names none was stored by rlood
//! 0.1 and follows [`Arithmetic::FIRST`]. A version that does not know a rule refuses the plan instead of guessing.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The rules that decide the exact bits of a run; absent = those of rlood 0.1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Arithmetic {
    /// Which rows `eval.fraction` holds out.
    pub split: SplitRule,
    /// When the rewards of a group are tied.
    pub ties: TieRule,
    /// The order in which floating-point sums are computed.
    pub sums: SumOrder,
    /// Which rows the warm-up leaves out.
    pub warm_up: WarmUpRule,
}

impl Arithmetic {
    /// The arithmetic rules of rlood 0.1.
    pub const FIRST: Self =
        Self { split: SplitRule::RowNumber, ties: TieRule::Std, sums: SumOrder::V1, warm_up: WarmUpRule::Evaluated };
    /// The arithmetic rules of new jobs.
    pub const LATEST: Self = Self {
        split: SplitRule::PromptHash,
        ties: TieRule::Equal,
        sums: SumOrder::V2,
        warm_up: WarmUpRule::EvaluatedAndJudged,
    };

    /// Whether these are the arithmetic rules of rlood 0.1, which a plan without rules follows.
    pub fn is_first(&self) -> bool {
        *self == Self::FIRST
    }
}

/// Which rows `eval.fraction` holds out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SplitRule {
    /// Held-out rows are chosen by the hash of seed and row number: equal prompts may be in both evaluation and training.
    #[default]
    RowNumber,
    /// Held-out rows are chosen by the hash of seed and prompt: equal prompts are either all held out or all trained on.
    PromptHash,
}

/// When the rewards of a group are tied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum TieRule {
    /// A group is tied if the sample standard deviation of its rewards is at most 1e-8; the rounding residue of the
    /// advantages is trained on.
    #[default]
    Std,
    /// A group is tied if all its scorable rewards are equal; their advantages are exactly 0.
    Equal,
}

/// The order in which kernels and metrics compute floating-point sums.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SumOrder {
    /// The order of rlood 0.1: the gradient of the language-model head takes a second pass over the vocabulary.
    #[default]
    V1,
    /// The pass that computes the log-probs also sums up this gradient, on the CPU.
    V2,
}

/// Which rows of its dataset the warm-up leaves out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum WarmUpRule {
    /// Rows whose prompts are evaluated during training, or set aside by `eval.test_fraction`.
    #[default]
    Evaluated,
    /// These, and rows whose prompts are in `eval.test_dataset` or in the guard set, which only the verdict reads.
    EvaluatedAndJudged,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn absent_rules_are_those_of_the_first_version_and_unknown_ones_are_refused() {
        assert_eq!(serde_json::from_value::<Arithmetic>(json!({})).unwrap(), Arithmetic::FIRST);
        let latest = json!({"split": "prompt_hash", "ties": "equal", "sums": "v2", "warm_up": "evaluated_and_judged"});
        assert_eq!(serde_json::to_value(Arithmetic::LATEST).unwrap(), latest);
        assert_eq!(serde_json::from_value::<Arithmetic>(latest).unwrap(), Arithmetic::LATEST);
        // A plan that was stored before these rules existed keeps the rows of its warm-up and its sums.
        let stored = json!({"split": "prompt_hash", "ties": "equal", "sums": "v1"});
        assert_eq!(serde_json::from_value::<Arithmetic>(stored).unwrap().warm_up, WarmUpRule::Evaluated);
        for later in [json!({"ties": "nearly"}), json!({"rounding": "up"}), json!({"sums": "v3"})] {
            assert!(serde_json::from_value::<Arithmetic>(later.clone()).is_err(), "{later}");
        }
    }
}
