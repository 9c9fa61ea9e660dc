//! Reads the algorithm's section and checks which settings are compatible (rloo.md).

use super::foreign::advice;
use super::reader::{Field, Reader};
use super::resolve::Warning;
use super::settings::{RLOO, variant_name};
use super::{Estimator, FieldError, JobSpec, KlIn, Loss, Plan, RlooPlan, SamplingPlan};

pub(super) fn read_rloo(reader: Reader<'_>) -> RlooPlan {
    let rloo: RlooPlan = RLOO.read(&reader).into_plan();
    check_overlap(&rloo, &reader.entry("overlap"));
    if rloo.num_generations.get() == 1 {
        for (name, given) in
            [("drop_tied_groups", rloo.drop_tied_groups), ("min_informative_groups", rloo.min_informative_groups > 0)]
        {
            if given {
                reader.entry(name).fail(
                    "conflict",
                    "with num_generations 1 no group has several rewards to compare: use 2 or more, or leave it out",
                );
            }
        }
    }
    reader.finish(advice);
    rloo
}

/// A block that is sampled before the previous one is trained must not depend on that block's rewards, and must
/// train for several steps.
fn check_overlap(rloo: &RlooPlan, field: &Field<'_>) {
    if !rloo.overlap {
        return;
    }
    if rloo.steps_per_generation < 2 {
        let detail = "overlap samples the next block while this one is scored and trained, so every block is one block late: with steps_per_generation 1 every step would train on the policy before last; set steps_per_generation to 2 or more, or leave overlap out";
        field.fail("conflict", detail);
    }
    if rloo.min_informative_groups > 0 {
        let detail = "which prompts replace tied groups, and so which prompts come next, is known only after the rewards: leave out either overlap or min_informative_groups";
        field.fail("conflict", detail);
    }
}

/// Checks settings of this section that depend on other sections.
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

/// Returns warnings about settings that are legal but probably not intended.
pub(super) fn warnings(plan: &Plan) -> Vec<Warning> {
    let rloo = &plan.rloo;
    let mut warnings = Vec::new();
    let mut warn = |field: &str, code: &str, detail: String| {
        warnings.push(Warning { pointer: format!("/rloo/{field}"), code: code.to_owned(), detail });
    };
    let estimator = variant_name(rloo.estimator);
    if rloo.epsilon_high < rloo.epsilon {
        let detail = format!(
            "epsilon_high {} is below epsilon {}: increases of the probability are clipped earlier than decreases, which lowers entropy; DAPO uses 0.28 with 0.2",
            rloo.epsilon_high, rloo.epsilon
        );
        warn("epsilon_high", "narrow_upper_clip", detail);
    }
    if rloo.kl_in == KlIn::Loss && !rloo.needs_reference() {
        warn("kl_in", "no_kl", "beta is 0, so there is no KL penalty and this setting has no effect".to_owned());
    }
    if rloo.estimator == Estimator::Reinforce {
        let detail = "without a baseline rewards of one sign push all completions the same way, and the gradient's variance is high: rloo costs nothing more";
        warn("estimator", "no_baseline", detail.to_owned());
    }
    if rloo.estimator == Estimator::DrGrpo && rloo.loss != Loss::DrGrpo {
        let detail = format!(
            "Dr. GRPO takes out two biases together: with estimator 'dr_grpo' use loss 'dr_grpo' instead of '{}'",
            variant_name(rloo.loss)
        );
        warn("loss", "half_of_dr_grpo", detail);
    }
    if rloo.estimator == Estimator::Grpo && rloo.loss == Loss::Sequence {
        let detail =
            "GRPO's own loss is 'seq_mean_token_mean' (DAPO's 'token_mean', GSPO's 'gspo'); 'sequence' is RLOO's";
        warn("loss", "loss_of_another_method", detail.to_owned());
    }
    if rloo.normalize_advantages && rloo.estimator.whitens() {
        let detail =
            format!("estimator '{estimator}' whitens its advantages itself; normalize_advantages changes nothing");
        warn("normalize_advantages", "already_normalized", detail);
    }
    if rloo.normalize_advantages && rloo.estimator == Estimator::Grpo {
        let detail = "estimator 'grpo' already divides by the standard deviation of each group; normalize_advantages divides again, by the block's";
        warn("normalize_advantages", "normalized_twice", detail.to_owned());
    }
    let unpaired = matches!(rloo.estimator, Estimator::Reinforce | Estimator::Remax | Estimator::ReinforcePp);
    if rloo.drop_tied_groups && unpaired {
        let detail = format!(
            "drop_tied_groups leaves out groups of equal rewards, although they still teach with estimator '{estimator}'"
        );
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
