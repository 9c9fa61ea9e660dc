//! Tests of which settings of the algorithm are compatible, at submission.

use rlood_types::spec::{Estimator, KlEstimator, KlIn, Loss, RewardNormalization};
use serde_json::{Value, json};

use crate::spec::{accepted, refused, refused_at, with};

fn warned(rloo: Value, field: &str, code: &str) {
    let warnings = accepted(with("/rloo", rloo)).warnings;
    let pointer = format!("/rloo/{field}");
    assert!(warnings.iter().any(|warning| warning.pointer == pointer && warning.code == code), "{code}: {warnings:#?}");
}

#[test]
fn the_defaults_are_those_of_rloo_and_all_settings_can_be_set() {
    let rloo = accepted(with("/rloo", json!({}))).plan.rloo;
    assert_eq!((rloo.estimator, rloo.loss), (Estimator::Rloo, Loss::Sequence));
    assert_eq!((rloo.kl_in, rloo.kl_estimator), (KlIn::Reward, KlEstimator::K1));
    assert_eq!((rloo.drop_tied_groups, rloo.soft_overlong, rloo.length_penalty), (false, None, 0.0));
    assert_eq!((rloo.min_informative_groups, rloo.max_refills), (0, 4));
    assert_eq!(rloo.reward_normalization, RewardNormalization::None);
    let all = json!({
        "estimator": "grpo", "loss": "gspo", "kl_in": "loss", "kl_estimator": "k2", "epsilon": 0.2, "epsilon_high": 0.28,
        "drop_tied_groups": true, "soft_overlong": 32, "length_penalty": 0.1, "min_informative_groups": 3,
        "max_refills": 2, "reward_normalization": "running", "num_iterations": 2, "steps_per_generation": 2,
    });
    let plan = accepted(with("/rloo", all.clone())).plan;
    let written = serde_json::to_value(&plan.rloo).unwrap();
    for (name, value) in all.as_object().unwrap() {
        assert_eq!(&written[name], value, "{name}");
    }
    let again = accepted(rlood_types::spec::submittable(&plan)).plan;
    assert_eq!(again.rloo, plan.rloo);
}

#[test]
fn a_plan_of_before_these_settings_reads_with_their_defaults() {
    let plan = accepted(with("/rloo", json!({}))).plan;
    let mut stored = serde_json::to_value(&plan).unwrap();
    let known = [
        "num_generations",
        "beta",
        "epsilon",
        "epsilon_high",
        "num_iterations",
        "steps_per_generation",
        "normalize_advantages",
        "reward_clip_range",
        "mask_truncated_completions",
        "combine",
    ];
    stored["rloo"].as_object_mut().unwrap().retain(|name, _| known.contains(&name.as_str()));
    stored["totals"]
        .as_object_mut()
        .unwrap()
        .retain(|name, _| !["greedy_completions", "max_refill_completions"].contains(&name.as_str()));
    assert_eq!(serde_json::from_value::<rlood_types::spec::Plan>(stored).unwrap(), plan);
}

#[test]
fn estimators_of_tokens_take_losses_over_tokens_only() {
    for (word, estimator) in
        [("reinforce_pp", Estimator::ReinforcePp), ("reinforce_pp_baseline", Estimator::ReinforcePpBaseline)]
    {
        let rloo = accepted(with("/rloo", json!({"estimator": word}))).plan.rloo;
        assert_eq!((rloo.estimator, rloo.loss), (estimator, Loss::TokenMean));
        for loss in ["token_mean", "seq_mean_token_mean", "dr_grpo"] {
            accepted(with("/rloo", json!({"estimator": word, "loss": loss})));
        }
        for loss in ["sequence", "gspo"] {
            refused_at(
                "/rloo",
                json!({"estimator": word, "loss": loss}),
                "/rloo/loss",
                "conflict",
                &[&format!("estimator '{word}'"), &format!("loss '{loss}'"), "use loss 'token_mean'"],
            );
        }
    }
    for estimator in ["rloo", "grpo", "dr_grpo", "remax", "reinforce"] {
        for loss in ["sequence", "token_mean", "seq_mean_token_mean", "dr_grpo", "gspo"] {
            accepted(with("/rloo", json!({"estimator": estimator, "loss": loss})));
        }
    }
    refused("/rloo/estimator", json!("grpoo"), "invalid_value", &["did you mean 'grpo'"]);
    refused("/rloo/loss", json!("token_sum"), "invalid_value", &["seq_mean_token_mean"]);
}

#[test]
fn one_completion_a_prompt_is_for_estimators_that_compare_no_siblings() {
    for estimator in ["reinforce", "remax"] {
        assert_eq!(
            accepted(with("/rloo", json!({"estimator": estimator, "num_generations": 1})))
                .plan
                .rloo
                .num_generations
                .get(),
            1
        );
        for (field, value) in [("drop_tied_groups", json!(true)), ("min_informative_groups", json!(1))] {
            let mut rloo = json!({"estimator": estimator, "num_generations": 1});
            rloo[field] = value;
            refused_at("/rloo", rloo, &format!("/rloo/{field}"), "conflict", &["num_generations 1"]);
        }
    }
    for estimator in ["rloo", "grpo", "dr_grpo", "reinforce_pp", "reinforce_pp_baseline"] {
        refused_at(
            "/rloo",
            json!({"estimator": estimator, "num_generations": 1}),
            "/rloo/num_generations",
            "out_of_range",
            &["reinforce and remax"],
        );
    }
}

#[test]
fn the_kl_penalty_is_k1_in_the_reward_and_k3_or_k2_in_the_loss() {
    let of = |rloo: Value| accepted(with("/rloo", rloo)).plan.rloo.kl_estimator;
    assert_eq!(of(json!({"kl_in": "loss"})), KlEstimator::K3);
    assert_eq!(of(json!({"kl_in": "loss", "kl_estimator": "k2"})), KlEstimator::K2);
    assert_eq!(of(json!({"kl_in": "reward", "kl_estimator": "k1"})), KlEstimator::K1);
    let at = "/rloo/kl_estimator";
    refused_at("/rloo", json!({"kl_in": "loss", "kl_estimator": "k1"}), at, "conflict", &["zero on-policy", "k3"]);
    for estimator in ["k2", "k3"] {
        refused_at("/rloo", json!({"kl_estimator": estimator}), at, "conflict", &["kl_in 'loss'"]);
    }
}

#[test]
fn limits_of_the_other_settings_name_their_reason() {
    refused("/rloo/length_penalty", json!(-0.1), "out_of_range", &["at least 0"]);
    refused("/rloo/soft_overlong", json!(0), "out_of_range", &["null = off"]);
    refused("/rloo/soft_overlong", json!(257), "out_of_range", &["max_completion_length, which is 256"]);
    refused("/rloo/min_informative_groups", json!(9), "out_of_range", &["8 prompts", "not 9"]);
    refused("/rloo/max_refills", json!(0), "out_of_range", &["between 1"]);
    refused("/rloo/reward_normalization", json!("group"), "invalid_value", &["none, batch, running"]);
    refused("/rloo/token_level_kl", json!(true), "foreign_key", &["reinforce_pp"]);
}

#[test]
fn totals_count_greedy_completions_and_refills() {
    let rloo = json!({"estimator": "remax", "num_generations": 2, "min_informative_groups": 1, "max_refills": 3});
    let mut document = with("/rloo", rloo);
    document["training"] = json!({"max_steps": 5, "prompts_per_step": 4});
    document["sampling"] = json!({"max_completion_length": 10});
    let totals = accepted(document).plan.totals;
    assert_eq!((totals.completions, totals.greedy_completions, totals.max_refill_completions), (40, 20, 180));
    assert_eq!(totals.max_completion_tokens, 2400);
    let totals = accepted(with("/rloo", json!({}))).plan.totals;
    assert_eq!((totals.greedy_completions, totals.max_refill_completions), (0, 0));
}

#[test]
fn odd_but_legal_choices_are_warned_of() {
    warned(json!({"epsilon": 0.2, "epsilon_high": 0.1}), "epsilon_high", "narrow_upper_clip");
    warned(json!({"kl_in": "loss", "beta": 0}), "kl_in", "no_kl");
    warned(json!({"estimator": "reinforce"}), "estimator", "no_baseline");
    warned(json!({"estimator": "dr_grpo"}), "loss", "half_of_dr_grpo");
    warned(json!({"estimator": "grpo"}), "loss", "loss_of_another_method");
    warned(json!({"estimator": "grpo", "normalize_advantages": true}), "normalize_advantages", "normalized_twice");
    warned(
        json!({"estimator": "reinforce_pp", "normalize_advantages": true}),
        "normalize_advantages",
        "already_normalized",
    );
    warned(json!({"estimator": "remax", "drop_tied_groups": true}), "drop_tied_groups", "drops_information");
    warned(json!({"min_informative_groups": 2}), "min_informative_groups", "refills_cost_samples");
    let quiet = json!({"estimator": "dr_grpo", "loss": "dr_grpo", "drop_tied_groups": true, "epsilon_high": 0.28});
    let warnings = accepted(with("/rloo", quiet)).warnings;
    assert!(warnings.iter().all(|warning| !warning.pointer.starts_with("/rloo")), "{warnings:#?}");
}

#[test]
fn dropout_is_accepted_with_a_warning_about_the_ratio() {
    let warnings = |dropout: f64| accepted(with("/lora", json!({"dropout": dropout}))).warnings;
    let code = "dropout_moves_the_ratio";
    let dropped = warnings(0.1);
    let warning = dropped.iter().find(|warning| warning.code == code).unwrap();
    assert_eq!(warning.pointer, "/lora/dropout");
    // This is true whether the log-probabilities of sampling were recorded or come from a separate pass.
    assert!(warning.detail.contains("log-probs of sampling") && warning.detail.contains("sampling/log_ratio_max"));
    assert!(!warning.detail.contains("separate pass"), "{}", warning.detail);
    assert!(warnings(0.0).iter().all(|warning| warning.code != code));
}
