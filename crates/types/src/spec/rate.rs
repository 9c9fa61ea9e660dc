//! Suggests learning rates for LoRA adapters.
//!
//! TRL's default of 1e-6 comes from full fine-tuning. Published recipes for RL with LoRA use rates between 4e-5 and 1e-4 at a scale
//! alpha/r of 2, with lower rates for wider models. Between these bounds, the suggestion falls with the square root of the hidden
//! size and equals the default at a hidden size of 2048.

use super::LoraPlan;

/// Default learning rate with an adapter.
pub const LORA_LEARNING_RATE: f64 = 5e-5;
/// Default learning rate of full fine-tuning, without an adapter.
pub const FULL_LEARNING_RATE: f64 = 1e-6;
/// Lowest and highest learning rate of published recipes.
const PUBLISHED_RATES: (f64, f64) = (4e-5, 1e-4);
/// The scale alpha/r that the published recipes use.
const USUAL_SCALE: f64 = 2.0;
/// The hidden size for which the default is suggested.
const USUAL_HIDDEN_SIZE: f64 = 2048.0;
/// Fraction of the suggestion at and below which a rate is too low.
const LOW_RATE_FRACTION: f64 = 0.25;

/// Returns the suggested learning rate for an adapter on a model of this hidden size, rounded to one digit. A larger scale of the
/// adapter makes each update larger, so the suggestion falls with it.
pub fn suggested_lora_rate(lora: &LoraPlan, hidden_size: u64) -> f64 {
    let rank = f64::from(lora.r.max(1));
    let scale = lora.alpha / if lora.use_rslora { rank.sqrt() } else { rank };
    let by_width = LORA_LEARNING_RATE * (USUAL_HIDDEN_SIZE / hidden_size.max(1) as f64).sqrt();
    let rate = by_width.clamp(PUBLISHED_RATES.0, PUBLISHED_RATES.1) * USUAL_SCALE
        / if scale > 0.0 { scale } else { USUAL_SCALE };
    let digit = 10f64.powf(rate.log10().floor());
    (rate / digit).round() * digit
}

/// Returns a description and a fix for a learning rate at which an adapter learns next to nothing; `None` if the
/// rate is not that low.
pub fn low_lora_rate(lora: &LoraPlan, hidden_size: u64, learning_rate: f64) -> Option<(String, String)> {
    let suggested = suggested_lora_rate(lora, hidden_size);
    // The factor allows for the rounding of decimal fractions.
    if learning_rate > suggested * LOW_RATE_FRACTION * (1.0 + 1e-9) {
        return None;
    }
    let detail = format!(
        "a LoRA adapter of rank {} and alpha {} learns next to nothing at a learning rate of {learning_rate:e}",
        lora.r, lora.alpha
    );
    let fix = format!("set optimizer.learning_rate to about {suggested:.0e} for a model of hidden size {hidden_size}");
    Some((detail, fix))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lora(r: u32, alpha: f64, use_rslora: bool) -> LoraPlan {
        LoraPlan { use_rslora, ..LoraPlan::all_linear(r, alpha) }
    }

    fn near(rate: f64, expected: f64) -> bool {
        (rate / expected - 1.0).abs() < 1e-9
    }

    #[test]
    fn the_suggestion_falls_with_the_width_of_the_model_and_the_scale_of_the_adapter() {
        let usual = lora(16, 32.0, false);
        for (hidden_size, expected) in [(64, 1e-4), (896, 8e-5), (1024, 7e-5), (2048, 5e-5), (4096, 4e-5), (8192, 4e-5)]
        {
            assert!(near(suggested_lora_rate(&usual, hidden_size), expected), "{hidden_size}");
        }
        assert!(near(suggested_lora_rate(&lora(16, 16.0, false), 2048), 1e-4));
        assert!(near(suggested_lora_rate(&lora(16, 32.0, true), 2048), 1e-5));
    }

    #[test]
    fn the_defaults_of_trl_and_of_rlood_0_1_are_low_and_the_default_is_not() {
        let usual = lora(16, 32.0, false);
        for hidden_size in [64, 896, 1024, 2048, 4096, 8192] {
            for low in [1e-6, 5e-6, 1e-5] {
                let (detail, fix) = low_lora_rate(&usual, hidden_size, low).unwrap();
                assert!(
                    detail.contains(&format!("{low:e}")) && fix.contains(&hidden_size.to_string()),
                    "{detail} {fix}"
                );
            }
            assert_eq!(low_lora_rate(&usual, hidden_size, LORA_LEARNING_RATE), None);
        }
        assert_eq!(
            low_lora_rate(&usual, 1024, 7e-5 / 4.0).unwrap().1,
            "set optimizer.learning_rate to about 7e-5 for a model of hidden size 1024"
        );
    }
}
