//! Reads the algorithm's section and knows which of its settings go together (rloo.md).

use super::foreign::advice;
use super::reader::{Field, Reader};
use super::resolve::Warning;
use super::{
    Combine, Estimator, FieldError, JobSpec, KlEstimator, KlIn, Loss, MAX_REFILLS, Plan, RewardNormalization, RlooPlan,
    SamplingPlan,
};

const ESTIMATORS: [(&str, Estimator); 7] = [
    ("rloo", Estimator::Rloo),
    ("grpo", Estimator::Grpo),
    ("dr_grpo", Estimator::DrGrpo),
    ("reinforce_pp", Estimator::ReinforcePp),
    ("reinforce_pp_baseline", Estimator::ReinforcePpBaseline),
    ("remax", Estimator::Remax),
    ("reinforce", Estimator::Reinforce),
];
const LOSSES: [(&str, Loss); 5] = [
    ("sequence", Loss::Sequence),
    ("token_mean", Loss::TokenMean),
    ("seq_mean_token_mean", Loss::SeqMeanTokenMean),
    ("dr_grpo", Loss::DrGrpo),
    ("gspo", Loss::Gspo),
];
const KL_ESTIMATORS: [(&str, KlEstimator); 3] =
    [("k1", KlEstimator::K1), ("k2", KlEstimator::K2), ("k3", KlEstimator::K3)];
const NORMALIZATIONS: [(&str, RewardNormalization); 3] = [
    ("none", RewardNormalization::None),
    ("batch", RewardNormalization::Batch),
    ("running", RewardNormalization::Running),
];

pub(super) fn read_rloo(reader: Reader<'_>) -> RlooPlan {
    let positive = |value: f64| value > 0.0;
    let epsilon = reader
        .field("epsilon")
        .number("greater than 0 and less than 1", |value| value > 0.0 && value < 1.0)
        .unwrap_or(0.2);
    let estimator = reader.field("estimator").choice(&ESTIMATORS).unwrap_or_default();
    let kl_in = reader.field("kl_in").choice(&[("reward", KlIn::Reward), ("loss", KlIn::Loss)]).unwrap_or_default();
    let fewest = if estimator.allows_one_generation() { 1 } else { 2 };
    let rloo = RlooPlan {
        num_generations: reader
            .field("num_generations")
            .hint("the baseline of a completion is the mean reward of the other completions of its prompt, so one alone has none (estimators reinforce and remax take 1)")
            .whole(fewest..=1024)
            .unwrap_or(4),
        beta: reader
            .field_of(&["beta", "kl_coef", "kl_coeff"])
            .number("at least 0 (0 = no reference model)", |value| value >= 0.0)
            .unwrap_or(0.05),
        epsilon,
        epsilon_high: reader.field("epsilon_high").number("greater than 0", positive).unwrap_or(epsilon),
        num_iterations: reader.field("num_iterations").whole(1..=1000).unwrap_or(1),
        steps_per_generation: reader.field("steps_per_generation").whole(1..=1000).unwrap_or(1),
        normalize_advantages: reader.field("normalize_advantages").bool().unwrap_or(false),
        reward_clip_range: read_range(&reader.field("reward_clip_range")),
        mask_truncated_completions: reader.field("mask_truncated_completions").bool().unwrap_or(false),
        combine: reader
            .field("combine")
            .choice(&[("renormalize", Combine::Renormalize), ("nansum", Combine::Nansum)])
            .unwrap_or(Combine::Renormalize),
        estimator,
        loss: read_loss(&reader.field("loss"), estimator),
        kl_in,
        kl_estimator: read_kl_estimator(&reader.field("kl_estimator"), kl_in),
        drop_tied_groups: reader.field("drop_tied_groups").bool().unwrap_or(false),
        soft_overlong: reader
            .field("soft_overlong")
            .hint("tokens before max_completion_length over which the penalty grows; null = off")
            .whole(1..=1_000_000),
        length_penalty: reader
            .field("length_penalty")
            .number("at least 0 (0 = off)", |value| value >= 0.0)
            .unwrap_or(0.0),
        min_informative_groups: reader
            .field("min_informative_groups")
            .hint("groups whose rewards differ, of the prompts of a generation block; 0 = off")
            .whole(0..=1_000_000_000)
            .unwrap_or(0),
        max_refills: reader.field("max_refills").whole(1..=64).unwrap_or(MAX_REFILLS),
        reward_normalization: reader.field("reward_normalization").choice(&NORMALIZATIONS).unwrap_or_default(),
        overlap: reader.field("overlap").bool().unwrap_or(false),
    };
    check_overlap(&rloo, &reader.field("overlap"));
    if rloo.num_generations == 1 {
        for (name, given) in
            [("drop_tied_groups", rloo.drop_tied_groups), ("min_informative_groups", rloo.min_informative_groups > 0)]
        {
            if given {
                reader.field(name).fail(
                    "conflict",
                    "with num_generations 1 no group has rewards to compare: use 2 or more, or leave it out",
                );
            }
        }
    }
    reader.finish(advice);
    rloo
}

/// A block that is sampled before the one ahead of it is trained must be known without its rewards, and be worth the wait.
fn check_overlap(rloo: &RlooPlan, field: &Field<'_>) {
    if !rloo.overlap {
        return;
    }
    if rloo.steps_per_generation < 2 {
        let detail = "overlap samples the next block while this one is scored and trained, so every block is one block late: with steps_per_generation 1 every step would train on the policy before last; set steps_per_generation to 2 or more, or leave overlap out";
        field.fail("conflict", detail);
    }
    if rloo.min_informative_groups > 0 {
        let detail = "which prompts refill tied groups, and so which ones come next, is known only when the rewards are: leave out either overlap or min_informative_groups";
        field.fail("conflict", detail);
    }
}

/// Estimators of tokens need a loss over tokens; `token_mean` is their default.
fn read_loss(field: &Field<'_>, estimator: Estimator) -> Loss {
    let default = if estimator.has_token_advantages() { Loss::TokenMean } else { Loss::Sequence };
    let loss = field.choice(&LOSSES).unwrap_or(default);
    if estimator.has_token_advantages() && loss.has_sequence_ratio() {
        let detail = format!(
            "estimator '{}' gives every token an advantage of its own, and loss '{}' has one ratio for the whole completion: use loss 'token_mean' (its default), 'seq_mean_token_mean' or 'dr_grpo', or estimator 'rloo'",
            word(&ESTIMATORS, estimator),
            word(&LOSSES, loss)
        );
        field.fail("conflict", detail);
        return default;
    }
    loss
}

fn read_kl_estimator(field: &Field<'_>, kl_in: KlIn) -> KlEstimator {
    let default = match kl_in {
        KlIn::Reward => KlEstimator::K1,
        KlIn::Loss => KlEstimator::K3,
    };
    let given = field.choice(&KL_ESTIMATORS).unwrap_or(default);
    let refused = match (kl_in, given) {
        (KlIn::Reward, KlEstimator::K1) | (KlIn::Loss, KlEstimator::K2 | KlEstimator::K3) => return given,
        (KlIn::Reward, KlEstimator::K2 | KlEstimator::K3) => {
            "the penalty in the reward is k1, whose expectation has the gradient of the KL: leave it out, or use kl_in 'loss' for k2 and k3"
        }
        (KlIn::Loss, KlEstimator::K1) => {
            "in the loss the expected gradient of k1 is zero on-policy, so it would hold nothing back: use k3 (the default) or k2"
        }
    };
    field.fail("conflict", refused);
    default
}

fn word<T: PartialEq>(words: &[(&'static str, T)], value: T) -> &'static str {
    words.iter().find(|(_, known)| *known == value).map_or("", |(name, _)| name)
}

fn read_range(field: &Field<'_>) -> Option<(f64, f64)> {
    let items = field.items()?;
    let [low, high] = items.as_slice() else {
        field.fail("invalid_value", format!("must be a list of two numbers, [min, max], not of {}", items.len()));
        return None;
    };
    let (low, high) = (low.number("a number", |_| true)?, high.number("a number", |_| true)?);
    if low >= high {
        field.fail("invalid_value", format!("the first must be less than the second, not {low} and {high}"));
        return None;
    }
    Some((low, high))
}

/// What stands against settings of this section together with those of others.
pub(super) fn check(spec: &JobSpec, sampling: &SamplingPlan, errors: &mut Vec<FieldError>) {
    let rloo = &spec.rloo;
    let block = u64::from(spec.training.prompts_per_step) * u64::from(rloo.steps_per_generation);
    if u64::from(rloo.min_informative_groups) > block {
        let detail = format!(
            "a generation block has {block} prompts (prompts_per_step · steps_per_generation), so at most {block} groups can be informative, not {}",
            rloo.min_informative_groups
        );
        errors.push(FieldError::new("/rloo/min_informative_groups", "out_of_range", detail));
    }
    if let Some(cache) = rloo.soft_overlong.filter(|cache| *cache > sampling.max_completion_length) {
        let detail = format!(
            "the penalty grows over the last {cache} tokens before max_completion_length, which is {}: give at most that",
            sampling.max_completion_length
        );
        errors.push(FieldError::new("/rloo/soft_overlong", "out_of_range", detail));
    }
}

/// What is legal and probably not meant.
pub(super) fn warnings(plan: &Plan) -> Vec<Warning> {
    let rloo = &plan.rloo;
    let mut warnings = Vec::new();
    let mut warn = |field: &str, code: &str, detail: String| {
        warnings.push(Warning { pointer: format!("/rloo/{field}"), code: code.to_owned(), detail });
    };
    let estimator = word(&ESTIMATORS, rloo.estimator);
    if rloo.epsilon_high < rloo.epsilon {
        let detail = format!(
            "{} is below epsilon {}: likely completions are held back sooner than unlikely ones, which lowers entropy; DAPO uses 0.28 with 0.2",
            rloo.epsilon_high, rloo.epsilon
        );
        warn("epsilon_high", "narrow_upper_clip", detail);
    }
    if rloo.kl_in == KlIn::Loss && rloo.beta == 0.0 {
        warn("kl_in", "no_kl", "beta is 0, so there is no KL penalty to put anywhere".to_owned());
    }
    if rloo.estimator == Estimator::Reinforce {
        let detail = "without a baseline rewards of one sign push all completions the same way, and the gradient's variance is high: rloo costs nothing more";
        warn("estimator", "no_baseline", detail.to_owned());
    }
    if rloo.estimator == Estimator::DrGrpo && rloo.loss != Loss::DrGrpo {
        let detail = format!(
            "Dr. GRPO takes out two biases together: with estimator 'dr_grpo' use loss 'dr_grpo' instead of '{}'",
            word(&LOSSES, rloo.loss)
        );
        warn("loss", "half_of_dr_grpo", detail);
    }
    if rloo.estimator == Estimator::Grpo && rloo.loss == Loss::Sequence {
        let detail =
            "GRPO's own loss is 'seq_mean_token_mean' (DAPO's 'token_mean', GSPO's 'gspo'); 'sequence' is RLOO's";
        warn("loss", "loss_of_another_method", detail.to_owned());
    }
    if rloo.normalize_advantages && rloo.estimator.has_token_advantages() {
        let detail = format!("estimator '{estimator}' whitens its advantages itself; this changes nothing");
        warn("normalize_advantages", "already_normalized", detail);
    }
    if rloo.normalize_advantages && rloo.estimator == Estimator::Grpo {
        let detail = "grpo divides by the std of each group already; the block's is divided out on top of it";
        warn("normalize_advantages", "normalized_twice", detail.to_owned());
    }
    let unpaired = matches!(rloo.estimator, Estimator::Reinforce | Estimator::Remax | Estimator::ReinforcePp);
    if rloo.drop_tied_groups && unpaired {
        let detail =
            format!("groups of equal rewards still teach with estimator '{estimator}', and are left out all the same");
        warn("drop_tied_groups", "drops_information", detail);
    }
    if rloo.min_informative_groups > 0 {
        let detail = format!(
            "a block can take up to {} rounds of sampling and scoring, {} more completions in all; refills pass over the dataset faster than totals.epochs says",
            rloo.max_refills.saturating_add(1),
            plan.totals.max_refill_completions
        );
        warn("min_informative_groups", "refills_cost_samples", detail);
    }
    warnings
}
