//! The initial weights of a run, and the reference weights of its KL penalty.

use std::path::Path;

use super::backend::BackendKind;
use super::error::{EngineError, Result};
use super::host::TrainInput;
use super::model::{Adapter, Policy};
use super::tensors;
use crate::event::Event;
use crate::kernels::isa::Isa;
use crate::modelcard::{Skipped, TensorDtype};
use crate::spec::{ComputeDtype, Reference};
use serde_json::json;

/// The reference model of the KL penalty (rloo.md, "Log-probabilities").
#[derive(Debug)]
pub(super) enum ReferenceModel {
    /// No reference: beta = 0, or the warm-up that creates the reference is not over.
    None,
    /// The policy's own weights without the adapter.
    AdapterOff,
    /// A frozen copy: of the base model in full fine-tuning, or of the weights of a warm start.
    Frozen(Box<Policy>),
}

impl ReferenceModel {
    /// Returns the model that computes the reference's log-probs, and whether to apply its adapter.
    pub fn of<'p>(&'p self, policy: &'p Policy) -> (&'p Policy, Adapter) {
        match self {
            ReferenceModel::None | ReferenceModel::AdapterOff => (policy, Adapter::Off),
            ReferenceModel::Frozen(frozen) => (frozen, Adapter::On),
        }
    }
}

/// Gives the policy its initial weights, or those of the checkpoint to resume from, and returns the reference. `step`
/// is the number of steps done.
pub(super) fn begin(policy: &mut Policy, input: &TrainInput<'_>, step: u64) -> Result<ReferenceModel> {
    policy.check_trainable()?;
    let plan = input.plan;
    let wants_initial = plan.warm_start.as_ref().is_some_and(|warm| warm.reference == Reference::Initial);
    let initial = input.initial_adapter.as_deref();
    if plan.warm_start.is_some() && initial.is_none() && (input.resume.is_none() || wants_initial) {
        return Err(EngineError::Input("the checkpoint that the job starts from was not found".to_owned()));
    }
    // After a warm-up, its last weights become the reference.
    let with_reference = plan.rloo.needs_reference() && !plan.has_warmed_reference();
    let mut reference = ReferenceModel::None;
    match &plan.lora {
        Some(lora) => {
            let load = |policy: &mut Policy, dir: &Path| -> Result<()> {
                policy.load_lora(dir)?;
                match policy.lora_config() {
                    Some(found) if found.is_compatible_with(lora) => Ok(()),
                    found => Err(EngineError::Adapter(format!(
                        "the checkpoint's adapter was created with {found:?}, but the plan says {lora:?}"
                    ))),
                }
            };
            match (initial, &input.resume) {
                (Some(dir), resume) if resume.is_none() || wants_initial => load(policy, dir)?,
                (None, None) => policy.add_lora(lora, plan.training.seed)?,
                (_, _) => {}
            }
            if with_reference {
                reference = match wants_initial {
                    true => ReferenceModel::Frozen(Box::new(policy.frozen_copy())),
                    false => ReferenceModel::AdapterOff,
                };
            }
            if let Some(dir) = &input.resume {
                load(policy, dir)?;
            }
            policy.set_lora_dropout(lora.dropout);
        }
        None => {
            if with_reference && !wants_initial {
                reference = ReferenceModel::Frozen(Box::new(policy.frozen_copy()));
            }
            match (initial, &input.resume) {
                (Some(dir), resume) if resume.is_none() || wants_initial => policy.load_full(dir)?,
                (None, None) => policy.train_all(input.model_dir)?,
                (_, _) => {}
            }
            if with_reference && wants_initial {
                reference = ReferenceModel::Frozen(Box::new(policy.frozen_copy()));
            }
            if let Some(dir) = &input.resume {
                policy.load_full(dir)?;
            }
        }
    }
    if plan.has_warmed_reference() && step >= plan.warm_up_steps() {
        reference = match &input.resume {
            Some(dir) if step > plan.warm_up_steps() => read_reference(policy, dir, plan.lora.is_some())?,
            // This run resumes at the very end of the warm-up: the policy's current weights become the reference.
            Some(_) | None => warmed_reference(policy),
        };
    }
    Ok(reference)
}

/// The reference of a run whose warm-up has just ended.
pub(super) fn warmed_reference(policy: &Policy) -> ReferenceModel {
    ReferenceModel::Frozen(Box::new(policy.frozen_copy()))
}

/// File name of the reference's weights in a checkpoint, present if the reference was created by a warm-up.
pub(super) const REFERENCE: &str = "reference.safetensors";
const TENSOR: &str = "reference";

/// Writes the policy's weights at the end of its warm-up to a file that all later checkpoints include.
pub(super) fn save_reference(policy: &Policy, scratch_dir: &Path) -> Result<tempfile::TempPath> {
    let failed = |source| EngineError::Io { path: scratch_dir.to_owned(), source };
    std::fs::create_dir_all(scratch_dir).map_err(failed)?;
    let file = tempfile::Builder::new().prefix(".reference-").tempfile_in(scratch_dir).map_err(failed)?;
    let values = policy.flat().values()?;
    let tensor = tensors::Tensor { name: TENSOR, shape: &[values.len()], data: tensors::Data::F32(&values) };
    tensors::write_finite(file.path(), &[tensor])?;
    Ok(file.into_temp_path())
}

/// Reads the reference from a checkpoint. The policy has the checkpoint's weights before and after the call.
fn read_reference(policy: &mut Policy, dir: &Path, is_adapter: bool) -> Result<ReferenceModel> {
    let path = dir.join(REFERENCE);
    let values = tensors::Reader::open(&path)?.f32s(TENSOR)?;
    let values = values.ok_or_else(|| {
        EngineError::Checkpoint(format!("the file {REFERENCE} holds no weights of the reference model"))
    })?;
    policy.set_parameter_values(&values)?;
    drop(values);
    let reference = warmed_reference(policy);
    match is_adapter {
        true => {
            let dropout = policy.lora_config().map_or(0.0, |lora| lora.dropout);
            policy.load_lora(dir)?;
            policy.set_lora_dropout(dropout);
        }
        false => policy.load_full(dir)?,
    }
    Ok(reference)
}

/// Chooses the instruction set of the CPU kernels for a run, and returns a warning if it differs from the one that the
/// run used before, since the results then have other bits. Returns no instruction set for other backends.
///
/// The requested instruction set comes first. Otherwise a resumed run keeps its previous one, whatever this worker
/// measured when it started, if the machine supports it. A new run uses the fastest.
pub(super) fn choose_isa(
    (backend, dtype): (BackendKind, ComputeDtype),
    previous: Option<&str>,
    requested: Option<Isa>,
) -> Result<(Option<Isa>, Option<Event>)> {
    if backend != BackendKind::Cpu {
        return Ok((None, None));
    }
    let recorded = previous.and_then(|name| name.parse::<Isa>().ok()).filter(|isa| isa.is_available());
    let isa = match requested.or(recorded) {
        Some(isa) => isa,
        None => Isa::chosen().map_err(EngineError::Input)?,
    };
    // AMX and AVX512-BF16 use the kernels of AVX-512 for f32.
    let isa = if dtype == ComputeDtype::F32 { isa.vectors() } else { isa };
    let changed = previous.filter(|name| *name != isa.name()).map(|name| {
        let message = format!(
            "the run started with the instruction set {name} and continues with {isa}, so the last digits of its results differ from those of an uninterrupted run. To avoid this, resume the job on a machine that supports {name}, without --isa or with --isa {name}"
        );
        let data = json!({ "previous_isa": name, "isa": isa.name() });
        Event::Warning { code: "isa_changed".into(), message, data }
    });
    Ok((Some(isa), changed))
}

/// The warning that a multimodal checkpoint has tensors that are not used.
pub(super) fn skipped_warning(policy: &Policy) -> Option<Event> {
    let Skipped { count, parts } = policy.card().skipped.as_ref()?;
    let message =
        format!("only the text part of the model is trained: {count} tensors of {} are skipped", parts.join(", "));
    let data = json!({ "tensors": count, "parts": parts });
    Some(Event::Warning { code: "tensors_skipped".into(), message, data })
}

/// The warning that the base model's weights lose precision in bf16.
pub(super) fn rounding_warning(policy: &Policy, dtype: ComputeDtype) -> Option<Event> {
    // The values of 4-bit codes are nearly always rounded to bf16 already.
    let is_rounded = |dtype: TensorDtype| dtype != TensorDtype::Bf16 && !dtype.is_four_bit();
    let stored = policy.card().tensors.iter().find(|tensor| is_rounded(tensor.dtype))?.dtype;
    if dtype != ComputeDtype::Bf16 {
        return None;
    }
    let message = format!(
        "the model's weights are stored as {stored:?} and training.dtype is bf16: its matrices are rounded to bf16, in rollouts, training and reference alike"
    );
    Some(Event::Warning { code: "weights_rounded".into(), message, data: json!({ "stored": format!("{stored:?}") }) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resumed_run_keeps_its_instruction_set() {
        let choose = |dtype, previous, requested| {
            choose_isa((BackendKind::Cpu, dtype), previous, requested).map(|(isa, warning)| (isa, warning.is_some()))
        };
        let (bf16, f32) = (ComputeDtype::Bf16, ComputeDtype::F32);
        let fastest = Isa::chosen().unwrap();
        assert_eq!(choose(bf16, None, None).unwrap(), (Some(fastest), false));
        for isa in Isa::available() {
            // A resumed run keeps any available instruction set, also if it is not the fastest.
            assert_eq!(choose(bf16, Some(isa.name()), None).unwrap(), (Some(isa), false));
            // A requested instruction set has priority, and a change causes a warning.
            assert_eq!(
                choose(bf16, Some(isa.name()), Some(Isa::Portable)).unwrap(),
                (Some(Isa::Portable), isa != Isa::Portable)
            );
            assert_eq!(choose(f32, Some(isa.vectors().name()), Some(isa)).unwrap(), (Some(isa.vectors()), false));
        }
        assert_eq!(choose(bf16, Some("of another machine"), None).unwrap(), (Some(fastest), true));
        assert_eq!(choose_isa((BackendKind::Reference, bf16), Some("amx"), None).unwrap(), (None, None));
    }
}
