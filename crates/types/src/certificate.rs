//! The certificate of a checkpoint: log-probabilities of a few texts under the base model and under the checkpoint. A program that
//! serves the checkpoint can be asked for the same numbers, which tells whether it computes the same function.

mod check;
mod task;

use serde::{Deserialize, Serialize};

pub use self::check::{Asked, Comparison, Finding, MAX_PROMPTS, MIN_EFFECT, Measured, compare, default_tolerance};
pub use self::task::{CertifyReport, CertifyTask};
use crate::protocol::FileEntry;
use crate::spec::{ComputeDtype, FourBitPlan, LoraPlan};

/// Name of the certificate in a checkpoint.
pub const FILE: &str = "certificate.json";
/// Value of [`Certificate::format`].
pub const FORMAT: &str = "rlood-certificate/1";

/// Evidence of what a checkpoint computes, written when the checkpoint is saved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Certificate {
    /// [`FORMAT`].
    pub format: String,
    /// Number of optimizer steps of the checkpoint.
    pub step: u64,
    /// The base model of the checkpoint.
    pub model: CertifiedModel,
    /// The files with the checkpoint's weights, with their sizes and hashes.
    pub files: Vec<FileEntry>,
    /// The adapter's settings; null = all weights are trained.
    pub lora: Option<LoraPlan>,
    /// Precision of the matrix products of all log-probabilities in this document.
    pub dtype: ComputeDtype,
    /// How the base model's linear layers were quantized when they were loaded; null = as they are stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_in_4bit: Option<FourBitPlan>,
    /// The tokenizer of the base model.
    pub tokenizer: CertifiedTokenizer,
    /// How far the checkpoint is from the base model on these prompts.
    pub effect: Effect,
    /// The prompts on which base model and checkpoint differ most, the largest difference first.
    pub prompts: Vec<CertifiedPrompt>,
}

/// The base model of a certificate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CertifiedModel {
    /// The name that the adapter's config has for the model.
    pub name: String,
    /// SHA-256 over config, weights and tokenizer, as in the job's plan.
    pub sha256: String,
}

/// A tokenizer, identified by its file and by what it makes of some texts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CertifiedTokenizer {
    /// SHA-256 of the file tokenizer.json.
    pub sha256: String,
    /// Texts that tokenizers are likely to treat differently, with their token ids.
    pub texts: Vec<TokenizedText>,
}

/// A text with its token ids, special tokens such as BOS included.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenizedText {
    /// The text that was tokenized.
    pub text: String,
    /// The token ids of the text.
    pub ids: Vec<u32>,
}

/// Differences of log-probabilities between checkpoint and base model, in nats, over all tokens of the certificate whose
/// log-probability under both is known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Effect {
    /// Number of these tokens.
    pub num_tokens: u64,
    /// Sum of the absolute differences.
    pub sum_nats: f64,
    /// The largest absolute difference, in nats.
    pub max_nats: f64,
    /// Root of the mean of the squared differences.
    pub rms_nats: f64,
}

/// One prompt of a certificate. All lists of log-probabilities (in nats, temperature 1) have one entry per token of prompt and
/// continuation, from the prompt's second token on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CertifiedPrompt {
    /// The prompt, as plain text: no chat template is applied.
    pub text: String,
    /// Token ids of the prompt, special tokens such as BOS included.
    pub prompt_ids: Vec<u32>,
    /// Token ids of the checkpoint's greedy continuation.
    pub continuation_ids: Vec<u32>,
    /// The text of each token of the continuation: what it adds to the text before it.
    pub continuation: Vec<String>,
    /// Log-probabilities under the base model; null where it was not computed: in the continuation, if all weights are trained.
    pub base: Vec<Option<f32>>,
    /// Log-probabilities under the checkpoint.
    pub trained: Vec<f32>,
    /// Log-probabilities with an adapter that is scaled wrongly; empty if all weights are trained.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scaled: Vec<Scaled>,
}

/// Log-probabilities with an adapter whose scale is wrong by a factor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Scaled {
    /// The factor on the adapter's scale.
    pub factor: f64,
    /// The log-probabilities, as in [`CertifiedPrompt::trained`].
    pub logps: Vec<f32>,
}

impl CertifiedPrompt {
    /// Returns the token ids of prompt and continuation.
    pub fn ids(&self) -> Vec<u32> {
        [self.prompt_ids.as_slice(), &self.continuation_ids].concat()
    }
}

impl Certificate {
    /// Returns all texts with known token ids: of the prompts, then of the tokenizer.
    pub fn texts(&self) -> impl Iterator<Item = (&str, &[u32])> {
        let prompts = self.prompts.iter().map(|prompt| (prompt.text.as_str(), prompt.prompt_ids.as_slice()));
        prompts.chain(self.tokenizer.texts.iter().map(|text| (text.text.as_str(), text.ids.as_slice())))
    }

    /// Reads a certificate and checks that its parts fit together.
    ///
    /// # Errors
    /// Says what is wrong with the document.
    pub fn read(bytes: &[u8]) -> Result<Certificate, String> {
        let certificate: Certificate =
            serde_json::from_slice(bytes).map_err(|error| format!("it is not a certificate: {error}"))?;
        if certificate.format != FORMAT {
            return Err(format!("its format is '{}', but this version reads {FORMAT}", certificate.format));
        }
        for (index, prompt) in certificate.prompts.iter().enumerate() {
            let tokens = prompt.prompt_ids.len() + prompt.continuation_ids.len();
            let lengths = [prompt.base.len(), prompt.trained.len()];
            let continued = prompt.continuation.len() == prompt.continuation_ids.len();
            let scaled = prompt.scaled.iter().map(|scaled| scaled.logps.len());
            if prompt.prompt_ids.is_empty()
                || !continued
                || lengths.into_iter().chain(scaled).any(|length| length + 1 != tokens)
            {
                return Err(format!("its prompts/{index} has {tokens} tokens, but lists of other lengths"));
            }
        }
        match certificate.prompts.is_empty() {
            true => Err("it has no prompts".to_owned()),
            false => Ok(certificate),
        }
    }
}

impl Effect {
    /// Sums up the differences of these prompts.
    pub fn of(prompts: &[CertifiedPrompt]) -> Effect {
        let mut effect = Effect::default();
        let mut squares = 0.0;
        let pairs = prompts.iter().flat_map(|prompt| prompt.base.iter().zip(&prompt.trained));
        for (base, trained) in pairs {
            let Some(base) = base else { continue };
            let difference = f64::from(trained - base).abs();
            effect.num_tokens += 1;
            effect.sum_nats += difference;
            effect.max_nats = effect.max_nats.max(difference);
            squares += difference * difference;
        }
        effect.rms_nats = (squares / (effect.num_tokens.max(1) as f64)).sqrt();
        effect
    }
}
