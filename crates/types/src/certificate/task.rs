//! The task of the process that computes log-probabilities for certificates (`rlood certifier`), and its report.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{Certificate, Measured};
use crate::spec::Plan;

/// The computation to do, sent to the process's standard input as one line of JSON.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CertifyTask {
    /// Write the certificate of a checkpoint that has none.
    Certify {
        /// The plan of the job.
        plan: Box<Plan>,
        /// Name of the base model, as in the adapter's config.
        model_name: String,
        /// Directory of the base model.
        model_dir: PathBuf,
        /// Directory of the checkpoint.
        checkpoint_dir: PathBuf,
        /// Number of optimizer steps of the checkpoint.
        step: u64,
    },
    /// Compute what a model says about the prompts of a certificate.
    Measure {
        /// Directory of the model, such as a merged one.
        model_dir: PathBuf,
        /// Directory of a PEFT adapter to apply; None = none.
        adapter_dir: Option<PathBuf>,
        /// The certificate to check.
        certificate: Box<Certificate>,
    },
}

/// The result of the process.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CertifyReport {
    /// The certificate that was computed.
    Certified(Box<Certificate>),
    /// The log-probabilities of the model.
    Measured {
        /// Log-probabilities, one list per prompt.
        logps: Vec<Measured>,
        /// Token ids that the model's tokenizer makes of the prompts' texts, then of the tokenizer's texts.
        ids: Vec<Vec<u32>>,
    },
    /// The reason why there is neither.
    Failed(String),
}
