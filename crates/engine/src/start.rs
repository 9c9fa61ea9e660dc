//! The weights a run begins with, and those its KL penalty holds on to.

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

/// What the KL penalty is measured against (rloo.md, "Log-probabilities").
#[derive(Debug)]
pub(super) enum ReferenceModel {
    /// Nothing: beta = 0, or the warm-up that makes the reference is not over.
    None,
    /// The policy's own weights without the adapter.
    AdapterOff,
    /// A frozen copy: of the base model in full fine-tuning, or of the weights a warm start begins with.
    Frozen(Box<Policy>),
}

impl ReferenceModel {
    /// Which model to score, and how.
    pub fn of<'p>(&'p self, policy: &'p Policy) -> (&'p Policy, Adapter) {
        match self {
            ReferenceModel::None | ReferenceModel::AdapterOff => (policy, Adapter::Off),
            ReferenceModel::Frozen(frozen) => (frozen, Adapter::On),
        }
    }
}

/// Give the policy its first weights, or those of the checkpoint to go on from, and keep the reference. `step`: steps done.
pub(super) fn begin(policy: &mut Policy, input: &TrainInput<'_>, step: u64) -> Result<ReferenceModel> {
    policy.check_trainable()?;
    let plan = input.plan;
    let wants_initial = plan.warm_start.as_ref().is_some_and(|warm| warm.reference == Reference::Initial);
    let initial = input.initial_adapter.as_deref();
    if plan.warm_start.is_some() && initial.is_none() && (input.resume.is_none() || wants_initial) {
        return Err(EngineError::Input("the checkpoint that the job begins with is not there".to_owned()));
    }
    // What follows a warm-up is kept when it is over.
    let with_reference = plan.rloo.needs_reference() && !plan.has_warmed_reference();
    let mut reference = ReferenceModel::None;
    match &plan.lora {
        Some(lora) => {
            let load = |policy: &mut Policy, dir: &Path| -> Result<()> {
                policy.load_lora(dir)?;
                match policy.lora_config() {
                    Some(found) if found.fits(lora) => Ok(()),
                    found => {
                        Err(EngineError::Adapter(format!("it was made with {found:?}, but the plan says {lora:?}")))
                    }
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
            Some(dir) if step > plan.warm_up_steps() => restored_reference(policy, dir, plan.lora.is_some())?,
            // These are the warmed weights.
            Some(_) | None => warmed_reference(policy),
        };
    }
    Ok(reference)
}

/// The reference of a run whose warm-up is over now.
pub(super) fn warmed_reference(policy: &Policy) -> ReferenceModel {
    ReferenceModel::Frozen(Box::new(policy.frozen_copy()))
}

/// The file of a checkpoint with the reference's weights, where they are those at the end of a warm-up.
pub(super) const REFERENCE: &str = "reference.safetensors";
const TENSOR: &str = "reference";

/// Writes the weights down that the policy has at the end of its warm-up: every later checkpoint holds them too.
pub(super) fn keep_reference(policy: &Policy, scratch_dir: &Path) -> Result<tempfile::TempPath> {
    let failed = |source| EngineError::Io { path: scratch_dir.to_owned(), source };
    std::fs::create_dir_all(scratch_dir).map_err(failed)?;
    let file = tempfile::Builder::new().prefix(".reference-").tempfile_in(scratch_dir).map_err(failed)?;
    let values = policy.flat().values()?;
    let tensor = tensors::Tensor { name: TENSOR, shape: &[values.len()], data: tensors::Data::F32(&values) };
    tensors::write_finite(file.path(), &[tensor])?;
    Ok(file.into_temp_path())
}

/// The reference that a checkpoint holds. The policy has the checkpoint's weights, before and after.
fn restored_reference(policy: &mut Policy, dir: &Path, is_adapter: bool) -> Result<ReferenceModel> {
    let path = dir.join(REFERENCE);
    let values = tensors::Reader::open(&path)?.f32s(TENSOR)?;
    let values = values.ok_or_else(|| EngineError::Checkpoint(format!("{REFERENCE} holds no weights")))?;
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

/// Chooses the instruction set of the processor's kernels for a run: the one that was `asked_for`; else the one that the run began
/// with, so that a resumed run does not depend on what the worker measured when it started; else the fastest. Returns `None` for
/// other backends. The event warns that the run began with another instruction set, whose results have other bits.
pub(super) fn choose_isa(
    (backend, dtype): (BackendKind, ComputeDtype),
    begun_with: Option<&str>,
    asked_for: Option<Isa>,
) -> Result<(Option<Isa>, Option<Event>)> {
    if backend != BackendKind::Cpu {
        return Ok((None, None));
    }
    let recorded = begun_with.and_then(|name| name.parse::<Isa>().ok()).filter(|isa| isa.is_available());
    let isa = match asked_for.or(recorded) {
        Some(isa) => isa,
        None => Isa::chosen().map_err(EngineError::Input)?,
    };
    // In f32 these rungs compute with the kernels of AVX-512.
    let isa = if dtype == ComputeDtype::F32 { isa.vectors() } else { isa };
    let changed = begun_with.filter(|name| *name != isa.name()).map(|name| {
        let message = format!(
            "the run began with the instruction set {name} and goes on with {isa}: its results will differ in their last digits from those of a run that was not interrupted; to keep them equal, run the job on a machine with {name}, or set --isa {name}"
        );
        let data = json!({ "previous_isa": name, "isa": isa.name() });
        Event::Warning { code: "isa_changed".into(), message, data }
    });
    Ok((Some(isa), changed))
}

/// The event that says so when a multimodal checkpoint has tensors that its text does not need.
pub(super) fn skipped_warning(policy: &Policy) -> Option<Event> {
    let Skipped { count, parts } = policy.card().skipped.as_ref()?;
    let message = format!("only the text of the model is trained: {count} tensors of {} are skipped", parts.join(", "));
    let data = json!({ "tensors": count, "parts": parts });
    Some(Event::Warning { code: "tensors_skipped".into(), message, data })
}

/// The event that says so when the base model's weights lose digits in bf16.
pub(super) fn rounding_warning(policy: &Policy, dtype: ComputeDtype) -> Option<Event> {
    let stored = policy.card().tensors.iter().find(|tensor| tensor.dtype != TensorDtype::Bf16)?.dtype;
    if dtype != ComputeDtype::Bf16 {
        return None;
    }
    let message = format!(
        "the model is stored as {stored:?} and training.dtype is bf16: its matrices are rounded to bf16, in rollouts, training and reference alike"
    );
    Some(Event::Warning { code: "weights_rounded".into(), message, data: json!({ "stored": format!("{stored:?}") }) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_keeps_the_instructions_that_it_began_with() {
        let choose = |dtype, begun_with, asked_for| {
            choose_isa((BackendKind::Cpu, dtype), begun_with, asked_for).map(|(isa, warning)| (isa, warning.is_some()))
        };
        let (bf16, f32) = (ComputeDtype::Bf16, ComputeDtype::F32);
        let fastest = Isa::chosen().unwrap();
        assert_eq!(choose(bf16, None, None).unwrap(), (Some(fastest), false));
        for isa in Isa::available() {
            // Whatever was measured when this process started.
            assert_eq!(choose(bf16, Some(isa.name()), None).unwrap(), (Some(isa), false));
            // Who asks for others is told.
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
