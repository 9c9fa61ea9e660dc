//! `rlood certifier`: computes log-probabilities for certificates in its own process. It reads a task from standard input (one line
//! of JSON) and writes a report to standard output.

use std::path::Path;
use std::process::ExitCode;

use rlood_types::certificate::{Certificate, CertifyReport, CertifyTask};

use crate::args::OneShotArgs;
use crate::engine::backend::BackendKind;
use crate::engine::certificate::{Certifier, logps};
use crate::engine::checkpoint::weights_of;
use crate::engine::error::EngineError;
use crate::engine::model::{Adapter, Policy, Precision};
use crate::engine::text::Text;
use crate::one_shot::{self, OneShotError, error_text};
use crate::spec::Plan;

/// Runs `rlood certifier`: reads the task, computes, and writes the report. The exit code is 0 even if the report contains an error.
///
/// # Errors
/// Fails when standard input has no valid task, or the report cannot be written to standard output.
pub fn run(args: &OneShotArgs) -> Result<ExitCode, OneShotError> {
    let task: CertifyTask = one_shot::read_task()?;
    let device = args.device.to_string();
    let report = match &task {
        CertifyTask::Certify { plan, model_name, model_dir, checkpoint_dir, step } => {
            certify(&device, (plan, model_name, *step), model_dir, checkpoint_dir)
                .map(|one| CertifyReport::Certified(Box::new(one)))
        }
        CertifyTask::Measure { model_dir, adapter_dir, certificate } => {
            measure(&device, model_dir, adapter_dir.as_deref(), certificate)
        }
    };
    one_shot::write_report(&report.unwrap_or_else(|error| CertifyReport::Failed(error_text(&error))))?;
    Ok(ExitCode::SUCCESS)
}

/// Writes the certificate of a checkpoint, as its run would have.
fn certify(
    device: &str,
    (plan, model_name, step): (&Plan, &str, u64),
    model_dir: &Path,
    checkpoint_dir: &Path,
) -> Result<Certificate, EngineError> {
    let backend = BackendKind::of_device(device)?;
    let text = Text::load(model_dir).map_err(EngineError::from)?;
    let mut policy = Policy::load_dtype(model_dir, backend, &plan.training)?;
    let mut certifier = Certifier::new(&text, model_dir, policy.card().max_position_embeddings, plan)?;
    certifier.read_base(&policy, &|| false)?;
    match plan.lora {
        Some(_) => policy.load_lora(checkpoint_dir)?,
        None => policy.load_full(checkpoint_dir)?,
    }
    let certificate = certifier.certify(&mut policy, &text, (plan, model_name, step), &|| false)?;
    Ok(Certificate { files: weights_of(checkpoint_dir)?, ..certificate })
}

/// Computes what a model says about the prompts of a certificate, in the certificate's precision.
fn measure(
    device: &str,
    model_dir: &Path,
    adapter_dir: Option<&Path>,
    certificate: &Certificate,
) -> Result<CertifyReport, EngineError> {
    let backend = BackendKind::of_device(device)?;
    let text = Text::load(model_dir).map_err(EngineError::from)?;
    // A merged model is used as it is: only the base of an adapter is quantized as in training.
    let load_in_4bit = certificate.load_in_4bit.filter(|_| adapter_dir.is_some());
    let mut policy = Policy::load_dtype(model_dir, backend, Precision { dtype: certificate.dtype, load_in_4bit })?;
    if let Some(dir) = adapter_dir {
        policy.load_lora(dir)?;
    }
    let ids = certificate.texts().map(|(of, _)| text.encode(of, true)).collect::<Result<_, _>>();
    let ids: Vec<Vec<u32>> = ids.map_err(EngineError::from)?;
    let sequences: Vec<Vec<u32>> = certificate.prompts.iter().map(|prompt| prompt.ids()).collect();
    let sequences: Vec<&[u32]> = sequences.iter().map(Vec::as_slice).collect();
    let vocab_size = policy.card().config.vocab_size;
    if let Some(id) = sequences.iter().copied().flatten().find(|id| **id as usize >= vocab_size) {
        let detail = format!("the certificate has the token id {id}, but the model has only {vocab_size} tokens");
        return Err(EngineError::Input(detail));
    }
    let rows = logps(&policy, &sequences, Adapter::On, &|| false)?;
    let logps = rows.into_iter().map(|row| row.into_iter().map(|logp| Some(f64::from(logp))).collect()).collect();
    Ok(CertifyReport::Measured { logps, ids })
}
