//! Writes the certificate of a checkpoint ([`Certificate`]): log-probabilities of a few prompts under the base model and under the
//! trained weights. Nothing here reads or changes a random state, so a run with certificates has the same bits as one without.

use std::path::Path;

use super::error::{EngineError, Result};
use super::generate::{GeneratePrompt, GenerateRequest, generate};
use super::model::{Adapter, Policy, Trajectory};
use super::random::{Key, Stream};
use super::sampling::Sampler;
use super::text::Text;
use crate::digest::Sha256Digest;
use crate::event::Event;
use crate::modelcard;
use crate::spec::Plan;
use rlood_types::certificate::{
    Certificate, CertifiedModel, CertifiedPrompt, CertifiedTokenizer, Effect, FORMAT, MAX_PROMPTS, Scaled,
    TokenizedText,
};
use serde_json::json;

/// Neutral prompts: a JSON list of texts.
const PROMPTS: &str = include_str!("certificate/prompts.json");
/// Maximum number of tokens of a prompt; longer ones are not used.
const MAX_PROMPT_TOKENS: usize = 64;
/// Maximum number of tokens of a continuation.
const CONTINUATION_TOKENS: usize = 16;
/// Maximum number of tokens in one forward pass, so that a certificate needs less memory than a training step.
const BATCH_TOKENS: usize = 512;
/// Factors on the adapter's scale for which log-probabilities are recorded. With rsLoRA, so is the factor that makes its
/// scale that of plain LoRA.
const FACTORS: [f64; 3] = [0.5, 2.0, 4.0];
/// Texts that tokenizers treat differently: digits, spaces, letters outside of ASCII, emoji, code.
const TEXTS: [&str; 6] = [
    "12345 1,234.50 2026-11-26 3e-4",
    "  two spaces,\ttab\n\nand  lines ",
    "Größe, naïve, Ελλάδα, Привет",
    "東京は日本の首都です。你好",
    "👩‍🚀 🇫🇷 ✓",
    "if (a[i] != b->c) { return f(x, \"y\"); } // it's",
];

/// Writes certificates of one run: the prompts with their tokens, and what the base model says about them.
#[derive(Debug)]
pub struct Certifier {
    prompts: Vec<TokenizedText>,
    tokenizer: CertifiedTokenizer,
    /// Log-probabilities of each prompt under the base model, from the second token on; None until they are computed.
    base: Option<Vec<Vec<f32>>>,
}

impl Certifier {
    /// Tokenizes the prompts: the plan's own ones, or those that are part of rlood. Prompts with fewer than 2 or more than 64 tokens,
    /// or without room for a continuation, are left out.
    ///
    /// # Errors
    /// Fails if the tokenizer fails, or if no prompt is left.
    pub fn new(text: &Text, model_dir: &Path, max_positions: usize, plan: &Plan) -> Result<Certifier> {
        let prompts = match &plan.certificate {
            Some(own) => own.prompts.clone(),
            None => serde_json::from_str(PROMPTS)
                .map_err(|error| EngineError::Input(format!("the built-in prompts cannot be read: {error}")))?,
        };
        let tokenized = |text_of: &str| -> Result<TokenizedText> {
            Ok(TokenizedText { text: text_of.to_owned(), ids: text.encode(text_of, true)? })
        };
        let most = MAX_PROMPT_TOKENS.min(max_positions.saturating_sub(CONTINUATION_TOKENS));
        let mut prompts = prompts.iter().map(|prompt| tokenized(prompt)).collect::<Result<Vec<_>>>()?;
        prompts.retain(|prompt| (2..=most).contains(&prompt.ids.len()));
        if prompts.is_empty() {
            return Err(EngineError::Prompts(format!(
                "no prompt for the checkpoint's certificate has between 2 and {most} tokens: set certificate.prompts"
            )));
        }
        let path = model_dir.join(modelcard::text::TOKENIZER);
        let mut file = std::fs::File::open(&path).map_err(|source| EngineError::Io { path: path.clone(), source })?;
        let (_, sha256) = Sha256Digest::of_reader(&mut file).map_err(|source| EngineError::Io { path, source })?;
        let texts = TEXTS.into_iter().map(tokenized).collect::<Result<_>>()?;
        Ok(Certifier { prompts, tokenizer: CertifiedTokenizer { sha256: sha256.to_string(), texts }, base: None })
    }

    /// Computes what the base model says about the prompts, if that is not known yet. `policy` is the base model, or has an adapter.
    ///
    /// # Errors
    /// Fails if the model cannot be computed, or `stop` asks for the end.
    pub fn read_base(&mut self, policy: &Policy, stop: &dyn Fn() -> bool) -> Result<()> {
        if self.base.is_none() {
            let prompts: Vec<&[u32]> = self.prompts.iter().map(|prompt| prompt.ids.as_slice()).collect();
            self.base = Some(logps(policy, &prompts, Adapter::Off, stop)?);
        }
        Ok(())
    }

    /// Writes the certificate of the policy's weights, without `files`. If all weights are trained, [`Certifier::read_base`] must have
    /// been called with the base model before.
    ///
    /// # Errors
    /// Fails if the model cannot be computed, a log-probability is not finite, or `stop` asks for the end. The policy has its adapter in any case, unless it
    /// lost it when the device had no memory left.
    pub fn certify(
        &mut self,
        policy: &mut Policy,
        text: &Text,
        (plan, model_name, step): (&Plan, &str, u64),
        stop: &dyn Fn() -> bool,
    ) -> Result<Certificate> {
        if !policy.trains_all() {
            self.read_base(policy, stop)?;
        }
        let Some(base) = &self.base else {
            return Err(EngineError::Input("the base model's part of the certificate was not computed".to_owned()));
        };
        let all: Vec<&[u32]> = self.prompts.iter().map(|prompt| prompt.ids.as_slice()).collect();
        let trained = logps(policy, &all, Adapter::On, stop)?;
        let mut order: Vec<(usize, f64)> =
            base.iter().zip(&trained).map(|(base, trained)| distance(base, trained)).enumerate().collect();
        // Of equal differences the first prompt comes first, because the sort is stable.
        order.sort_by(|one, other| other.1.total_cmp(&one.1));
        order.truncate(MAX_PROMPTS);
        let chosen: Vec<&TokenizedText> = order.iter().map(|(index, _)| &self.prompts[*index]).collect();
        let base: Vec<&Vec<f32>> = order.iter().map(|(index, _)| &base[*index]).collect();
        let prompts = prompts(policy, text, (&chosen, &base), stop)?;
        Ok(Certificate {
            format: FORMAT.to_owned(),
            step,
            model: CertifiedModel { name: model_name.to_owned(), sha256: plan.model.sha256.clone() },
            files: Vec::new(),
            lora: policy.lora_config().cloned(),
            dtype: policy.dtype(),
            load_in_4bit: plan.training.four_bit(),
            tokenizer: self.tokenizer.clone(),
            effect: Effect::of(&prompts),
            prompts,
        })
    }
}

/// Sum of the absolute differences.
fn distance(base: &[f32], trained: &[f32]) -> f64 {
    base.iter().zip(trained).map(|(base, trained)| f64::from((trained - base).abs())).sum()
}

/// Continues the chosen prompts greedily, and computes all log-probabilities of prompts and continuations. `base` has those of the
/// prompts under the base model.
fn prompts(
    policy: &mut Policy,
    text: &Text,
    (chosen, base): (&[&TokenizedText], &[&Vec<f32>]),
    stop: &dyn Fn() -> bool,
) -> Result<Vec<CertifiedPrompt>> {
    let continuations = continuations(policy, text, chosen, stop)?;
    let whole: Vec<Vec<u32>> =
        chosen.iter().zip(&continuations).map(|(prompt, more)| [&prompt.ids[..], more].concat()).collect();
    let whole: Vec<&[u32]> = whole.iter().map(Vec::as_slice).collect();
    let trained = logps(policy, &whole, Adapter::On, stop)?;
    // Without an adapter, there is no base model here to score the continuations with.
    let of_base: Vec<Vec<Option<f32>>> = match policy.trains_all() {
        false => logps(policy, &whole, Adapter::Off, stop)?
            .into_iter()
            .map(|row| row.into_iter().map(Some).collect())
            .collect(),
        true => {
            let padded = |(base, trained): (&&Vec<f32>, &Vec<f32>)| {
                let mut row: Vec<Option<f32>> = base.iter().copied().map(Some).collect();
                row.resize(trained.len(), None);
                row
            };
            base.iter().zip(&trained).map(padded).collect()
        }
    };
    let mut factors = Vec::new();
    if let Some(lora) = policy.lora_config() {
        factors.extend(FACTORS);
        if lora.use_rslora && lora.r > 1 {
            factors.push(1.0 / f64::from(lora.r).sqrt());
        }
    }
    factors.sort_by(f64::total_cmp);
    factors.dedup();
    let mut scaled: Vec<Vec<Scaled>> = vec![Vec::new(); chosen.len()];
    for factor in factors {
        let rows = policy.with_adapter_scaled(factor, |policy| logps(policy, &whole, Adapter::On, stop))?;
        for (scaled, logps) in scaled.iter_mut().zip(rows) {
            scaled.push(Scaled { factor, logps });
        }
    }
    let mut prompts = Vec::with_capacity(chosen.len());
    let rows = continuations.into_iter().zip(of_base).zip(trained).zip(scaled);
    for (prompt, (((continuation_ids, base), trained), scaled)) in chosen.iter().zip(rows) {
        prompts.push(CertifiedPrompt {
            text: prompt.text.clone(),
            prompt_ids: prompt.ids.clone(),
            continuation: pieces(text, &continuation_ids)?,
            continuation_ids,
            base,
            trained,
            scaled,
        });
    }
    Ok(prompts)
}

/// The policy's greedy continuations, EOS included.
fn continuations(
    policy: &Policy,
    text: &Text,
    prompts: &[&TokenizedText],
    stop: &dyn Fn() -> bool,
) -> Result<Vec<Vec<u32>>> {
    let asked: Vec<GeneratePrompt<'_>> =
        (0..).zip(prompts).map(|(row, prompt)| GeneratePrompt { row, ids: &prompt.ids, given: &[] }).collect();
    let request = GenerateRequest {
        prompts: &asked,
        num_generations: std::num::NonZeroUsize::MIN,
        sampler: Sampler { temperature: 0.0, ..Sampler::PLAIN },
        max_completion_length: CONTINUATION_TOKENS,
        stop: &[],
        // Greedy sampling reads no random numbers.
        key: Key::new(0, Stream::Generate),
        eos_token_ids: text.eos_token_ids(),
        adapter: Adapter::On,
        max_rows: MAX_PROMPTS,
    };
    let groups = generate(policy, text, &request, stop)?.ok_or_else(stopped)?;
    let generated = groups.into_iter().flatten();
    generated.map(|one| Ok(one.segments.completion()?.to_vec())).collect()
}

fn stopped() -> EngineError {
    EngineError::Input("the certificate was not finished, because the run is to stop".to_owned())
}

/// The text that each token adds to that of the tokens before it. A token that is a part of a character may add nothing.
fn pieces(text: &Text, ids: &[u32]) -> Result<Vec<String>> {
    let mut before = String::new();
    let mut pieces = Vec::with_capacity(ids.len());
    for end in 1..=ids.len() {
        let whole = text.decode(ids.get(..end).unwrap_or_default(), false)?;
        pieces.push(whole.strip_prefix(&before).unwrap_or_default().to_owned());
        before = whole;
    }
    Ok(pieces)
}

/// Computes the log-probability of each token but the first, in nats, for sequences of at least 2 tokens: `[sequences][tokens - 1]`.
///
/// # Errors
/// Fails if a log-probability is not finite, or `stop` asks for the end between two batches.
pub fn logps(
    policy: &Policy,
    sequences: &[&[u32]],
    adapter: Adapter,
    stop: &dyn Fn() -> bool,
) -> Result<Vec<Vec<f32>>> {
    let mut rows = Vec::with_capacity(sequences.len());
    let mut left = sequences;
    while !left.is_empty() {
        if stop() {
            return Err(stopped());
        }
        let mut tokens = 0;
        let fits = |sequence: &&&[u32]| {
            tokens += sequence.len();
            tokens <= BATCH_TOKENS
        };
        let (batch, rest) = left.split_at(left.iter().take_while(fits).count().max(1));
        left = rest;
        let batch: Vec<Trajectory<'_>> = batch
            .iter()
            .filter_map(|sequence| sequence.split_at_checked(1))
            .map(|(first, more)| Trajectory::of_completion(first, more))
            .collect();
        rows.extend(policy.score(&batch, 1.0, adapter)?.into_iter().map(|score| score.logps));
    }
    match rows.iter().flatten().all(|logp| logp.is_finite()) {
        true => Ok(rows),
        false => {
            Err(EngineError::ModelNotFinite { what: "a log-probability of the certificate is not finite".to_owned() })
        }
    }
}

/// The warning that the checkpoints of a run have no certificate.
pub(super) fn warning(error: &EngineError) -> Event {
    let message =
        format!("the checkpoints have no certificate, so `rlood verify` cannot check a server of them: {error}");
    Event::Warning { code: "no_certificate".into(), message, data: json!({}) }
}
