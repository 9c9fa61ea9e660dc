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
/// Distance from a scale up to which it counts as that scale.
const NEAR: f64 = 0.05;
/// Number of standard errors of the estimated scale up to which it counts as that scale.
const STANDARD_ERRORS: f64 = 4.0;
/// The scales that are tried: from slightly subtracted to far too large.
const SCALES: (f64, f64) = (-0.5, 4.5);
/// Number of scales that are tried first; the best of them is refined.
const STEPS: u32 = 250;

/// What was measured for one prompt: the log-probability of each token as in [`CertifiedPrompt::trained`]; None where the server
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
    /// The finding.
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
    if !(effect >= MIN_EFFECT * precision) {
        return if precision > OTHER_WEIGHTS { Finding::OtherWeights } else { Finding::CannotTell };
    }
    let error = STANDARD_ERRORS * precision / (effect * (num_tokens as f64).sqrt());
    let is_near = |other: f64| (scale - other).abs() <= NEAR.max(error);
    match () {
        () if is_near(1.0) && difference <= tolerance => Finding::Equal,
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
