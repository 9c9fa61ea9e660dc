//! When the memory of a GPU is full: what is computed at once is halved, once a run; then the run ends and says what
//! would help. A run that goes on from a checkpoint meets the same end at the same place, and halves again.

use serde_json::json;

use super::error::EngineError;
use super::host::{Host, RunEnd};
use super::memory;
use super::run::{Data, Model};
use crate::event::Event;
use crate::spec::Plan;
use crate::spec::footprint::Footprint;

/// Sequences that generation may decode at once, where each may grow to `tokens_per_row` tokens (prompt included).
pub(super) fn generation_rows(model: &Model, plan: &Plan, tokens_per_row: usize) -> usize {
    let rows = memory::generation_rows(&model.policy, plan.optimizer.kind, tokens_per_row);
    if model.halved_after_oom { (rows / 2).max(1) } else { rows }
}

/// Halves what is computed at once, if `error` says that memory is full and this is the first time; else returns the error,
/// and what to change.
pub(super) fn relieve(
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
        "the memory of the GPU was full ({why}): from now on micro-batches have {tokens} tokens, and half as many rows are sampled at once"
    );
    let data = json!({ "micro_batch_tokens": tokens });
    host.event(Event::Warning { code: "out_of_memory".into(), message, data })
}

fn cannot_go_on(model: &Model, why: &str, plan: &Plan, data: &Data) -> String {
    let tokens = model.micro_batching.max_tokens;
    let longest = data.prompts.iter().map(|prompt| prompt.ids.len() as u64).max();
    let card = model.policy.card();
    let (place, shape) = (model.policy.place(), card.config.shape());
    let needs = Footprint::on(place, plan, card.num_parameters, &shape, longest, tokens as u64).total;
    let needs = needs.div_ceil(1 << 20);
    format!(
        "{why}; micro-batches were halved already, to {tokens} tokens, and the run needs about {needs} MiB by the estimate. Lower training.micro_batch_tokens, sampling.max_completion_length or rloo.num_generations, set training.gradient_checkpointing, or use a smaller model"
    )
}
