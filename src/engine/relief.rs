//! When the memory of a GPU is full: what is computed at once is halved, once a run; then the run ends and says what
//! would help. A run that goes on from a checkpoint meets the same end at the same place, and halves again.

use serde_json::json;

use super::error::EngineError;
use super::{Halt, Run, memory};
use crate::event::Event;
use crate::spec::footprint::Footprint;

impl Run<'_> {
    /// Sequences that generation may decode at once, where each may grow to `tokens_per_row` tokens (prompt included).
    pub(super) fn generation_rows(&self, tokens_per_row: usize) -> usize {
        let rows = memory::generation_rows(&self.policy, self.plan.optimizer.kind, tokens_per_row);
        if self.halved { (rows / 2).max(1) } else { rows }
    }

    /// Try again with halves, if `error` says that memory is full and this is the first time; else the error, and what to
    /// change.
    pub(super) fn relieve(&mut self, error: EngineError) -> Result<(), Halt> {
        let EngineError::OutOfMemory(why) = error else { return Err(Halt::Error(error)) };
        if self.halved {
            return Err(Halt::Error(EngineError::OutOfMemory(self.cannot_go_on(&why))));
        }
        self.halved = true;
        self.micro_batching.max_tokens = (self.micro_batching.max_tokens / 2).max(1);
        self.policy.release();
        let tokens = self.micro_batching.max_tokens;
        let message = format!(
            "the memory of the GPU was full ({why}): from now on micro-batches have {tokens} tokens, and half as many rows are sampled at once"
        );
        let data = json!({ "micro_batch_tokens": tokens });
        Ok(self.host.event(Event::Warning { code: "out_of_memory".into(), message, data })?)
    }

    fn cannot_go_on(&self, why: &str) -> String {
        let tokens = self.micro_batching.max_tokens;
        let longest = self.prompts.iter().map(|prompt| prompt.ids.len() as u64).max();
        let card = self.policy.card();
        let (place, shape) = (self.policy.place(), card.config.shape());
        let needs = Footprint::on(place, self.plan, card.num_parameters, &shape, longest, tokens as u64).total;
        let needs = needs.div_ceil(1 << 20);
        format!(
            "{why}; micro-batches were halved already, to {tokens} tokens, and the run needs about {needs} MiB by the estimate. Lower training.micro_batch_tokens, sampling.max_completion_length or rloo.num_generations, set training.gradient_checkpointing, or use a smaller model"
        )
    }
}
