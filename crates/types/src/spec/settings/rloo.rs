//! The algorithm's settings (`rloo.md`), and the checks between them.

use serde_json::{Value, json};
use utoipa::PartialSchema;

use super::DefaultValue::{Flag, Follows, Number, Variant, Whole};
use super::{DefaultValue, Form, Kind, Range, Resume, Section, Setting, Trl, Values, variant_name, variant_names};
use crate::spec::plan::RlooPlan;
use crate::spec::reader::Field;
use crate::spec::schema::any;
use crate::spec::{Combine, Estimator, KlEstimator, KlIn, Loss, MAX_REFILLS, RewardNormalization};

pub(in crate::spec) static RLOO: Section = Section::new(
    "rloo",
    "RLOO",
    "The algorithm.",
    &[
        Setting::whole("num_generations", 1, 1024)
            .lowest(fewest_generations)
            .hint("the baseline of a completion is the mean reward of the other completions of its prompt, so one alone has none (estimators reinforce and remax take 1)")
            .default(Whole(4))
            .trl(Trl::Own(&["num_generations"]))
            .resume(Resume::Fixed)
            .prominent(3),
        Setting::number("beta", Range::at_least(0.0).noting("0 = no reference model"))
            .aliases(&["kl_coef", "kl_coeff"])
            .default(Number(0.05))
            .trl(Trl::Key(&["beta", "kl_coef", "kl_coeff"], Form::Number, Number(0.05)))
            .prominent(4),
        Setting::number("epsilon", Range::above(0.0).below(1.0))
            .first()
            .default(Number(0.2))
            .trl(Trl::Key(&["epsilon"], Form::Number, Number(0.2))),
        Setting::number("epsilon_high", Range::above(0.0))
            .default(Follows(|read| json!(read.get::<f64>("epsilon")), "the value of `epsilon`"))
            .trl(Trl::Key(&["epsilon_high"], Form::Number, DefaultValue::Nothing)),
        Setting::whole("num_iterations", 1, 1000)
            .default(Whole(1))
            .trl(Trl::Key(&["num_iterations"], Form::Count, Whole(1)))
            .resume(Resume::Fixed),
        Setting::whole("steps_per_generation", 1, 1000)
            .default(Whole(1))
            .trl(Trl::Own(&["steps_per_generation", "generation_batch_size"]))
            .resume(Resume::Fixed),
        Setting::flag("normalize_advantages")
            .default(Flag(false))
            .trl(Trl::Key(&["normalize_advantages"], Form::Flag, Flag(false))),
        Setting::new("reward_clip_range", Kind::Own { read: read_interval, schema: any, says: "a list of two numbers, [min, max]" })
            .trl(Trl::Key(&["reward_clip_range"], Form::AsSent, DefaultValue::Nothing)),
        Setting::flag("mask_truncated_completions")
            .default(Flag(false))
            .trl(Trl::Key(&["mask_truncated_completions"], Form::Flag, Flag(false))),
        // TRL counts a missing reward as 0 and does not scale weights.
        Setting::variant("combine", variant_names::<Combine>).default(Variant("renormalize")).trl(Trl::Always(Variant("nansum"))),
        Setting::variant("estimator", variant_names::<Estimator>).first().default(Variant("rloo")),
        Setting::variant("loss", variant_names::<Loss>)
            .default(Follows(default_loss, "`sequence`; `token_mean` with estimators that have token advantages"))
            .conflict(loss_conflict),
        Setting::variant("kl_in", variant_names::<KlIn>).first().default(Variant("reward")),
        Setting::variant("kl_estimator", variant_names::<KlEstimator>)
            .default(Follows(default_kl_estimator, "`k1` in the reward, `k3` in the loss"))
            .conflict(kl_estimator_conflict),
        Setting::flag("drop_tied_groups").default(Flag(false)),
        Setting::whole("soft_overlong", 1, 1_000_000)
            .hint("tokens before max_completion_length over which the penalty grows; null = off"),
        Setting::number("length_penalty", Range::at_least(0.0).noting("0 = off")).default(Number(0.0)),
        Setting::whole("min_informative_groups", 0, 1_000_000_000)
            .hint("groups whose rewards differ, of the prompts of a generation block; 0 = off")
            .default(Whole(0)),
        Setting::whole("max_refills", 1, 64).default(Whole(MAX_REFILLS as u64)),
        Setting::variant("reward_normalization", variant_names::<RewardNormalization>).default(Variant("none")),
        Setting::flag("overlap").default(Flag(false)).resume(Resume::FixedInOwnForm),
    ],
)
.of_plan(RlooPlan::schema);

fn fewest_generations(read: &Values) -> u64 {
    if read.get::<Estimator>("estimator").allows_one_generation() { 1 } else { 2 }
}

fn read_interval(field: &Field<'_>) -> Option<Value> {
    let items = field.items()?;
    let [low, high] = items.as_slice() else {
        field.fail("invalid_value", format!("must be a list of two numbers, [min, max], not of {}", items.len()));
        return None;
    };
    let (low, high) = (low.number_in(Range::ANY)?, high.number_in(Range::ANY)?);
    if low >= high {
        field.fail(
            "invalid_value",
            format!("the range's first number must be less than the second, not {low} and {high}"),
        );
        return None;
    }
    Some(json!([low, high]))
}

fn default_loss(read: &Values) -> Value {
    let of_tokens = read.get::<Estimator>("estimator").has_token_advantages();
    json!(if of_tokens { Loss::TokenMean } else { Loss::Sequence })
}

/// Rejects a loss that has one ratio per completion together with an estimator that gives each token its own advantage.
fn loss_conflict(read: &Values, given: &Value) -> Option<String> {
    let estimator: Estimator = read.get("estimator");
    let loss: Loss = serde_json::from_value(given.clone()).ok()?;
    (estimator.has_token_advantages() && loss.has_sequence_ratio()).then(|| format!(
        "estimator '{}' gives every token an advantage of its own, and loss '{}' has one ratio for the whole completion: use loss 'token_mean' (its default), 'seq_mean_token_mean' or 'dr_grpo', or estimator 'rloo'",
        variant_name(estimator),
        variant_name(loss)
    ))
}

fn default_kl_estimator(read: &Values) -> Value {
    json!(match read.get("kl_in") {
        KlIn::Reward => KlEstimator::K1,
        KlIn::Loss => KlEstimator::K3,
    })
}

fn kl_estimator_conflict(read: &Values, given: &Value) -> Option<String> {
    let refused = match (read.get("kl_in"), serde_json::from_value(given.clone()).ok()?) {
        (KlIn::Reward, KlEstimator::K1) | (KlIn::Loss, KlEstimator::K2 | KlEstimator::K3) => return None,
        (KlIn::Reward, KlEstimator::K2 | KlEstimator::K3) => {
            "in the reward the penalty must be k1, whose expectation has the gradient of the KL: leave it out, or use kl_in 'loss' for k2 and k3"
        }
        (KlIn::Loss, KlEstimator::K1) => {
            "as a loss term k1 has no effect, because its expected gradient is zero on-policy: use k3 (the default) or k2"
        }
    };
    Some(refused.to_owned())
}
