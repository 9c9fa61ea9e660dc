//! Decides from measured log-probabilities whether a server computes what a certificate says, and if not, what it computes.
//!
//! The certificate has the log-probabilities of the same tokens at several scales of the adapter: 0 (the base model), 1 (the
//! checkpoint), and some wrong ones. They are points of a curve, one coordinate per token. The scale whose point is nearest to the
//! measured one is the server's, and what is left of the difference is the precision of the comparison.

use serde::Serialize;

use super::{Certificate, CertifiedPrompt};
use crate::spec::ComputeDtype;

/// Maximum number of prompts in a certificate.
pub const MAX_PROMPTS: usize = 8;
/// The effect of a checkpoint must be this many times the precision of the comparison, so that it can be seen at all.
pub const MIN_EFFECT: f64 = 5.0;
/// Smallest precision that a comparison can have, in nats: rounding of 32-bit floats.
const FLOOR: f64 = 1e-6;
/// Minimum number of measured tokens for a statement.
const MIN_TOKENS: usize = 8;
/// A difference of this size (root mean square, in nats) that no scale explains is no rounding: the weights are others.
const OTHER_WEIGHTS: f64 = 0.5;
/// Distance from a scale up to which it counts as that scale, unless the precision is worse: rounding of weights moves the estimated
/// scale by about its share of the effect.
const NEAR: f64 = 0.05;
/// A difference counts as equal only up to this share of the effect, whatever the tolerance.
const EQUAL_SHARE: f64 = 0.1;
/// The scales that are tried: from slightly subtracted to far too large.
const SCALES: (f64, f64) = (-0.5, 4.5);
/// Number of scales that are tried first; the best of them is refined.
const STEPS: u32 = 250;

/// The measurement of one prompt: the log-probability of each token as in [`CertifiedPrompt::trained`]; None where the server
/// does not tell.
pub type Measured = Vec<Option<f64>>;

/// How the log-probabilities were obtained from a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Asked {
    /// `prompt_logprobs` of vLLM.
    PromptLogprobs,
    /// `echo` with `logprobs`.
    Echo,
    /// One request per token, which a `logit_bias` forces.
    ForcedTokens,
    /// The greedy continuation of each prompt's text, as far as it is the certificate's.
    SampledTokens,
    /// The files of a model directory.
    Files,
}

/// The answer to whether a server computes what the certificate says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Finding {
    /// The server computes what the checkpoint computes.
    Equal,
    /// The base model: the adapter is not applied.
    BaseModel,
    /// The adapter is applied twice.
    AppliedTwice,
    /// The adapter is applied with a wrong scale.
    WrongScale,
    /// The server makes other tokens of a text.
    OtherTokenizer,
    /// The checkpoint is applied, but with less precision than the certificate has.
    LowPrecision,
    /// The difference is neither a scale nor rounding: other weights, or weights in the wrong order.
    OtherWeights,
    /// The effect of the checkpoint is too small for the precision of the comparison.
    CannotTell,
}

impl Finding {
    /// Exit code of `rlood verify`.
    pub fn exit_code(self) -> u8 {
        match self {
            Finding::Equal => 0,
            Finding::BaseModel => 20,
            Finding::AppliedTwice => 21,
            Finding::WrongScale => 22,
            Finding::OtherTokenizer => 23,
            Finding::LowPrecision => 24,
            Finding::OtherWeights => 25,
            Finding::CannotTell => 26,
        }
    }
}

/// The numbers behind a finding. All differences are in nats.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Comparison {
    /// The finding about the server.
    pub finding: Finding,
    /// Number of compared tokens.
    pub num_tokens: usize,
    /// Size of the checkpoint's effect on these tokens: root mean square of the difference to the base model.
    pub effect: f64,
    /// Root mean square of the difference between server and checkpoint.
    pub difference: f64,
    /// Largest difference between server and checkpoint.
    pub max_difference: f64,
    /// Factor on the adapter's scale that explains the measured values best: 0 = base model, 1 = checkpoint.
    pub scale: f64,
    /// The precision of the comparison: root mean square of what this scale does not explain.
    pub precision: f64,
    /// The largest `difference` that counts as equal.
    pub tolerance: f64,
}

/// The largest difference (root mean square, in nats) that counts as equal to log-probabilities of this precision, unless the user
/// says otherwise: f32 admits float16 weights and other orders of summation, and bf16 admits another kernel in bf16.
pub fn default_tolerance(dtype: ComputeDtype) -> f64 {
    match dtype {
        ComputeDtype::F32 => 0.005,
        ComputeDtype::Bf16 => 0.05,
    }
}

/// Compares measured log-probabilities, one entry per prompt of the certificate, with the certificate. `tolerance` is the largest
/// difference (root mean square) that counts as equal.
pub fn compare(certificate: &Certificate, measured: &[Measured], tolerance: f64) -> Comparison {
    let tokens: Vec<Token> =
        certificate.prompts.iter().zip(measured).flat_map(|(prompt, m)| tokens(prompt, m)).collect();
    let rms = |of: &dyn Fn(&Token) -> f64| {
        (tokens.iter().map(|token| of(token).powi(2)).sum::<f64>() / (tokens.len().max(1) as f64)).sqrt()
    };
    let left = |scale: f64| rms(&|token| token.measured - token.at(scale));
    let scale = best_scale(&left);
    let effect = rms(&|token| token.at(1.0) - token.at(0.0));
    let precision = left(scale).max(FLOOR);
    let mut comparison = Comparison {
        finding: Finding::CannotTell,
        num_tokens: tokens.len(),
        effect,
        difference: left(1.0),
        max_difference: tokens.iter().map(|token| (token.measured - token.at(1.0)).abs()).fold(0.0, f64::max),
        scale,
        precision,
        tolerance,
    };
    comparison.finding = finding_of(&comparison, certificate.lora.is_some());
    comparison
}

fn finding_of(comparison: &Comparison, has_adapter: bool) -> Finding {
    let Comparison { num_tokens, effect, difference, scale, precision, tolerance, .. } = *comparison;
    if num_tokens < MIN_TOKENS {
        return Finding::CannotTell;
    }
    if effect < MIN_EFFECT * precision {
        return if precision > OTHER_WEIGHTS { Finding::OtherWeights } else { Finding::CannotTell };
    }
    let is_near = |other: f64| (scale - other).abs() <= NEAR.max(precision / effect);
    match () {
        () if is_near(1.0) && difference <= tolerance.min(EQUAL_SHARE * effect) => Finding::Equal,
        () if is_near(1.0) => Finding::LowPrecision,
        () if is_near(0.0) => Finding::BaseModel,
        () if !has_adapter => Finding::OtherWeights,
        () if is_near(2.0) => Finding::AppliedTwice,
        () => Finding::WrongScale,
    }
}

/// A token whose log-probability was measured, and its log-probabilities by the adapter's scale, in order of the scale.
struct Token {
    measured: f64,
    curve: Vec<(f64, f64)>,
}

/// Returns the tokens of a prompt that were measured and whose log-probability under the base model is known.
fn tokens(prompt: &CertifiedPrompt, measured: &Measured) -> Vec<Token> {
    let token = |(index, measured): (usize, &Option<f64>)| {
        let of = |logps: &[f32]| logps.get(index).copied().map(f64::from);
        let base = prompt.base.get(index).copied().flatten()?;
        let mut curve = vec![(0.0, f64::from(base)), (1.0, of(&prompt.trained)?)];
        curve.extend(prompt.scaled.iter().filter_map(|scaled| Some((scaled.factor, of(&scaled.logps)?))));
        curve.sort_by(|one, other| one.0.total_cmp(&other.0));
        Some(Token { measured: measured.filter(|measured| measured.is_finite())?, curve })
    };
    measured.iter().enumerate().filter_map(token).collect()
}

impl Token {
    /// The log-probability at a scale, interpolated by the polynomial through the four nearest known ones.
    fn at(&self, scale: f64) -> f64 {
        let mut nearest: Vec<&(f64, f64)> = self.curve.iter().collect();
        nearest.sort_by(|one, other| (one.0 - scale).abs().total_cmp(&(other.0 - scale).abs()));
        nearest.truncate(4);
        let term = |(index, (at, value)): (usize, &&(f64, f64))| {
            let others = nearest.iter().enumerate().filter(|(other, _)| *other != index);
            value * others.map(|(_, (other, _))| (scale - other) / (at - other)).product::<f64>()
        };
        nearest.iter().enumerate().map(term).sum()
    }
}

/// Finds the scale that leaves least: on a grid, then by golden section around its best point.
fn best_scale(left: &dyn Fn(f64) -> f64) -> f64 {
    let (low, high) = SCALES;
    let width = (high - low) / f64::from(STEPS);
    let grid = (0..=STEPS).map(|step| low + width * f64::from(step));
    let best = grid.map(|scale| (left(scale), scale)).min_by(|one, other| one.0.total_cmp(&other.0));
    let (mut low, mut high) = best.map_or((0.0, 0.0), |(_, scale)| (scale - width, scale + width));
    let ratio = (5f64.sqrt() - 1.0) / 2.0;
    for _ in 0..40 {
        let (one, other) = (high - ratio * (high - low), low + ratio * (high - low));
        if left(one) < left(other) { high = other } else { low = one }
    }
    (low + high) / 2.0
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A certificate of one prompt with these log-probabilities under the base model; the effect of scale s on token i is s·(i+1)·size.
    fn certificate(size: f64) -> Certificate {
        let at = |scale: f64| (0..20).map(|token| -3.0 + scale * f64::from(token + 1) * size).collect::<Vec<_>>();
        let scaled: Vec<_> = [0.5, 2.0, 4.0].map(|factor| json!({"factor": factor, "logps": at(factor)})).into();
        let lora = json!({"r": 4, "alpha": 8.0, "dropout": 0.0, "target_modules": ["q_proj"], "use_rslora": false});
        let document = json!({
            "format": "rlood-certificate/1", "step": 1, "model": {"name": "m", "sha256": "0"}, "files": [], "lora": lora, "dtype": "f32",
            "tokenizer": {"sha256": "0", "texts": []},
            "effect": {"num_tokens": 20, "sum_nats": 1.0, "max_nats": 1.0, "rms_nats": 1.0},
            "prompts": [{
                "text": "a", "prompt_ids": (0..11).collect::<Vec<u32>>(), "continuation_ids": (0..10).collect::<Vec<u32>>(),
                "continuation": vec!["x"; 10], "base": at(0.0), "trained": at(1.0), "scaled": scaled,
            }],
        });
        Certificate::read(document.to_string().as_bytes()).unwrap()
    }

    /// The measurement of a server with this scale, with alternating noise.
    fn measured(certificate: &Certificate, scale: f64, noise: f64) -> Vec<Measured> {
        let prompt = &certificate.prompts[0];
        let logp = |(index, (base, trained)): (usize, (&Option<f32>, &f32))| {
            let base = f64::from(base.unwrap());
            let sign = if index % 2 == 0 { 1.0 } else { -1.0 };
            Some(base + scale * (f64::from(*trained) - base) + sign * noise)
        };
        vec![prompt.base.iter().zip(&prompt.trained).enumerate().map(logp).collect()]
    }

    #[test]
    fn a_finding_follows_from_scale_noise_and_effect() {
        // The effect of size 0.01 is 0.12 nats.
        for (size, scale, noise, expected) in [
            (0.01, 1.0, 0.0, Finding::Equal),
            (0.01, 1.0, 0.004, Finding::Equal),
            (0.01, 1.0, 0.02, Finding::LowPrecision),
            (0.01, 1.0, 0.03, Finding::CannotTell),
            (0.01, 0.0, 0.0, Finding::BaseModel),
            (0.01, 0.0, 0.02, Finding::BaseModel),
            (0.01, 2.0, 0.01, Finding::AppliedTwice),
            (0.01, 0.5, 0.01, Finding::WrongScale),
            (0.01, 1.2, 0.0, Finding::WrongScale),
            (0.01, 1.0, 0.7, Finding::OtherWeights),
            (1e-5, 1.0, 0.0, Finding::Equal),
            (1e-5, 0.0, 1e-3, Finding::CannotTell),
            (0.0, 1.0, 0.0, Finding::CannotTell),
        ] {
            let certificate = certificate(size);
            let found =
                compare(&certificate, &measured(&certificate, scale, noise), default_tolerance(certificate.dtype));
            assert_eq!(found.finding, expected, "{size} {scale} {noise}: {found:?}");
            if noise == 0.0 && size > 0.0 {
                assert!((found.scale - scale).abs() < 0.02, "{size} {scale}: {found:?}");
            }
        }
    }

    #[test]
    fn tokens_without_a_measurement_are_left_out() {
        let certificate = certificate(0.01);
        let mut some = measured(&certificate, 1.0, 0.0);
        some[0].iter_mut().step_by(2).for_each(|logp| *logp = None);
        some[0][1] = Some(f64::NAN);
        let found = compare(&certificate, &some, 0.005);
        assert_eq!((found.num_tokens, found.finding), (9, Finding::Equal));
        some[0].truncate(6);
        assert_eq!(compare(&certificate, &some, 0.005).finding, Finding::CannotTell, "too few");
        assert_eq!(compare(&certificate, &[], 0.005).num_tokens, 0);
    }

    #[test]
    fn without_an_adapter_there_are_no_scales() {
        let mut certificate = Certificate { lora: None, ..certificate(0.01) };
        certificate.prompts[0].scaled.clear();
        certificate.prompts[0].base[19] = None;
        let judge = |scale| compare(&certificate, &measured_known(&certificate, scale), 0.005);
        assert_eq!((judge(1.0).finding, judge(0.0).finding), (Finding::Equal, Finding::BaseModel));
        assert_eq!((judge(2.0).finding, judge(2.0).num_tokens), (Finding::OtherWeights, 19));
    }

    fn measured_known(certificate: &Certificate, scale: f64) -> Vec<Measured> {
        let mut known = certificate.clone();
        known.prompts[0].base[19] = Some(-3.0);
        measured(&known, scale, 0.0)
    }

    #[test]
    fn a_certificate_whose_lists_do_not_fit_is_refused() {
        let mut broken = certificate(0.01);
        broken.prompts[0].trained.pop();
        let refused = Certificate::read(&serde_json::to_vec(&broken).unwrap()).unwrap_err();
        assert!(refused.contains("prompts/0"), "{refused}");
        let later = Certificate { format: "rlood-certificate/2".to_owned(), ..certificate(0.01) };
        assert!(Certificate::read(&serde_json::to_vec(&later).unwrap()).unwrap_err().contains("rlood-certificate/2"));
    }
}
