//! Handles a GPU that is out of memory: the number of tokens and sequences computed concurrently is halved, once per
//! run. If memory runs out again, the run ends with advice. A run that resumes from a checkpoint runs out of memory at
//! the same point and halves again.

use serde_json::json;

use super::error::EngineError;
use super::host::{Host, RunEnd};
use super::memory;
use super::run::{Data, Model};
use crate::event::Event;
use crate::spec::Plan;
use crate::spec::footprint::Footprint;

/// Number of sequences that generation may decode concurrently on this GPU, if each grows to
/// `tokens_per_row` tokens (prompt included).
pub(super) fn generation_rows(model: &Model, plan: &Plan, tokens_per_row: usize) -> usize {
    let rows = memory::generation_rows(&model.policy, plan.optimizer.kind, tokens_per_row);
    if model.halved_after_oom { (rows / 2).max(1) } else { rows }
}

/// Halves the batch sizes if `error` reports that GPU memory is full and this is the first time; else returns the error
/// with advice on what to change.
pub(super) fn halve_batches(
    model: &mut Model,
    error: EngineError,
    plan: &Plan,
    data: &Data,
    host: &mut dyn Host,
) -> Result<(), RunEnd> {
    let EngineError::OutOfMemory(why) = error else { return Err(RunEnd::Failed(error)) };
    if model.halved_after_oom {
        return Err(RunEnd::Failed(EngineError::OutOfMemory(cannot_go_on(model, &why, plan, data))));
    }
    model.halved_after_oom = true;
    model.micro_batching.max_tokens = (model.micro_batching.max_tokens / 2).max(1);
    model.policy.release();
    let tokens = model.micro_batching.max_tokens;
    let message = format!(
        "the GPU ran out of memory ({why}): from now on micro-batches have {tokens} tokens, and half as many rows are sampled concurrently"
    );
    let data = json!({ "micro_batch_tokens": tokens });
    host.event(Event::Warning { code: "out_of_memory".into(), message, data })
}

fn cannot_go_on(model: &Model, why: &str, plan: &Plan, data: &Data) -> String {
    let tokens = model.micro_batching.max_tokens;
    let longest = data.prompts.iter().map(|prompt| prompt.ids.len() as u64).max();
    let card = model.policy.card();
    let (place, shape) = (model.policy.place(), card.shape());
    let needs = Footprint::on(place, plan, card.num_parameters, &shape, longest, tokens as u64).total;
    let needs = needs.div_ceil(1 << 20);
    format!(
        "{why}; micro-batches were already halved to {tokens} tokens, and the run needs an estimated {needs} MiB. Lower training.micro_batch_tokens, sampling.max_completion_length or rloo.num_generations, set training.gradient_checkpointing, or use a smaller model"
    )
}
