//! Generation: prompts are computed once and share their keys and values; rows join, grow by one token
//! per step, and leave.

use super::kept::{Joined, Joining, KeptPrompts};
use super::pass::{Applied, MixedRows};
use super::{Adapter, Logits, Network, Policy, with_decoder};
#[cfg(feature = "cuda")]
use crate::backend::cuda::Cuda;
use crate::backend::{Choice, Chosen, Decode, Pick, cpu::Cpu, reference::Reference};
use crate::error::{EngineError, Result};
use crate::sampling::Filters;

/// The sequences of a running generation: the state of one batch.
#[derive(Debug)]
pub struct DecodeState(OnBackend);

#[derive(Debug)]
enum OnBackend {
    Cpu(Rows<Cpu>),
    Reference(Rows<Reference>),
    #[cfg(feature = "cuda")]
    Cuda(Box<Rows<Cuda>>),
}

/// The sequences being decoded: their KV cache, and the residual stream from which each one's next token is chosen.
#[derive(Debug)]
pub struct Rows<B: Decode> {
    /// The adapters of the sequences.
    pub adapters: RowAdapters,
    /// Prompts whose keys and values later prompts may begin with.
    pub kept: KeptPrompts<B>,
    /// The key-value cache of all sequences.
    pub cache: B::Cache,
    /// The residual stream `[rows, hidden]` after the last layer; None without sequences.
    pub hidden: Option<B::Tensor>,
    /// The choice of the next tokens, if the last step started it; sequences that joined later are not included.
    pub picked: Option<Picks<B>>,
    /// The choice of the current tokens, if the step that appends them was queued before the host read them.
    pub due: Option<Picks<B>>,
    /// Number of tokens of each sequence, prompt included.
    pub lengths: Vec<usize>,
    /// Maximum number of tokens of each sequence, prompt included.
    pub most: Vec<usize>,
}

/// The adapters of the sequences of a batch.
#[derive(Debug)]
pub enum RowAdapters {
    /// The trained adapter of all sequences, or none.
    Same(Adapter),
    /// The served adapter of each sequence.
    Served {
        /// The slot of each sequence's adapter; None is the base model.
        slots: Vec<Option<u32>>,
        /// The sequences sorted by their adapters.
        mixed: MixedRows,
    },
}

impl RowAdapters {
    /// The adapters that a step applies.
    pub fn applied(&self) -> Applied<'_> {
        match self {
            RowAdapters::Same(Adapter::On) => Applied::Trained,
            RowAdapters::Same(Adapter::Off) => Applied::Nothing,
            RowAdapters::Served { mixed, .. } => mixed.applied(),
        }
    }

    /// Changes the adapters of the sequences; does nothing if all have the same.
    pub fn change(&mut self, change: impl FnOnce(&mut Vec<Option<u32>>)) {
        if let RowAdapters::Served { slots, mixed } = self {
            change(slots);
            *mixed = MixedRows::new(slots);
        }
    }
}

/// A choice of next tokens that has started.
#[derive(Debug)]
pub struct Picks<B: Decode> {
    /// Temperature and random number of each sequence.
    pub picks: Vec<Pick>,
    /// The token filters (top-k, top-p, min-p) of the choice.
    pub filters: Filters,
    /// The pending choice, for the sequences that existed when it started.
    pub picked: B::PendingChoice,
    /// Indices of the sequences that remain, if some have left since the choice started.
    pub kept: Option<Vec<u32>>,
}

impl<B: Decode> Picks<B> {
    /// Waits for the chosen tokens of the remaining sequences.
    pub fn wait(&self, backend: &B) -> Result<Vec<Chosen>> {
        let chosen = backend.finish_choose(&self.picked)?;
        Ok(match &self.kept {
            Some(kept) => kept.iter().map(|row| chosen[*row as usize]).collect(),
            None => chosen,
        })
    }

    /// Keeps the choices of these sequences, in this order.
    pub fn retain(&mut self, rows: &[u32]) {
        self.picks = rows.iter().map(|row| self.picks[*row as usize]).collect();
        self.kept = Some(match &self.kept {
            Some(kept) => rows.iter().map(|row| kept[*row as usize]).collect(),
            None => rows.to_vec(),
        });
    }
}

/// Runs `$body` with the decoder and its batch of sequences.
macro_rules! with_rows {
    ($policy:expr, $state:expr, |$decoder:ident, $rows:ident| $body:expr) => {
        match (&$policy.network, $state) {
            (Network::Cpu($decoder), OnBackend::Cpu($rows)) => $body,
            (Network::Reference($decoder), OnBackend::Reference($rows)) => $body,
            #[cfg(feature = "cuda")]
            (Network::Cuda($decoder), OnBackend::Cuda($rows)) => $body,
            (Network::Cpu(_) | Network::Reference(_), _) => Err(other_policy()),
            #[cfg(feature = "cuda")]
            (Network::Cuda(_), _) => Err(other_policy()),
        }
    };
}

impl Policy {
    /// Creates a batch without sequences.
    pub fn begin(&self, adapter: Adapter) -> DecodeState {
        DecodeState(match &self.network {
            Network::Cpu(decoder) => OnBackend::Cpu(decoder.begin(adapter)),
            Network::Reference(decoder) => OnBackend::Reference(decoder.begin(adapter)),
            #[cfg(feature = "cuda")]
            Network::Cuda(decoder) => OnBackend::Cuda(Box::new(decoder.begin(adapter))),
        })
    }

    /// Creates a batch for sequences that may have served adapters ([`Policy::serve_lora`]). Keys and values of up to
    /// `kept_bytes` of prompts stay for later prompts that begin with the same tokens.
    pub fn begin_serving(&self, kept_bytes: usize) -> DecodeState {
        let mut state = self.begin(Adapter::Off);
        let served = RowAdapters::Served { slots: Vec::new(), mixed: MixedRows::default() };
        match &mut state.0 {
            OnBackend::Cpu(rows) => (rows.adapters, rows.kept.limit_bytes) = (served, kept_bytes),
            OnBackend::Reference(rows) => (rows.adapters, rows.kept.limit_bytes) = (served, kept_bytes),
            #[cfg(feature = "cuda")]
            OnBackend::Cuda(rows) => (rows.adapters, rows.kept.limit_bytes) = (served, kept_bytes),
        }
        state
    }

    /// Whether the sequences of one batch may have different adapters.
    pub fn mixes_adapters(&self) -> bool {
        with_decoder!(&self.network, |decoder| decoder.mixes_adapters())
    }

    /// Appends sequences to a batch of [`Policy::begin_serving`], each with its own adapter and length; equal beginnings of
    /// prompts are computed once.
    pub fn join_served(&self, state: &mut DecodeState, joining: &[Joining<'_>]) -> Result<Joined> {
        with_rows!(self, &mut state.0, |decoder, rows| decoder.join_served(rows, joining))
    }

    /// Forgets the kept prompts of an adapter, or of the base model.
    pub fn forget_prompts(&self, state: &mut DecodeState, slot: Option<u32>) {
        match &mut state.0 {
            OnBackend::Cpu(rows) => rows.kept.forget(slot),
            OnBackend::Reference(rows) => rows.kept.forget(slot),
            #[cfg(feature = "cuda")]
            OnBackend::Cuda(rows) => rows.kept.forget(slot),
        }
    }

    /// Computes each distinct prompt once, and appends `num_copies` sequences per prompt, prompt by prompt; they wait
    /// for their first token. A sequence grows by at most `max_new_tokens`.
    pub fn join(
        &self,
        state: &mut DecodeState,
        prompts: &[&[u32]],
        num_copies: usize,
        max_new_tokens: usize,
    ) -> Result<()> {
        if prompts.is_empty() || num_copies == 0 {
            return Ok(());
        }
        with_rows!(self, &mut state.0, |decoder, rows| decoder.join(rows, prompts, num_copies, max_new_tokens))
    }

    /// Returns the next-token logits of every sequence being decoded.
    pub fn next_logits(&self, state: &DecodeState) -> Result<Logits> {
        let values = with_rows!(self, &state.0, |decoder, rows| decoder.next_logits(rows))?;
        Ok(Logits { values, vocab_size: self.card.config.vocab_size })
    }

    /// Returns the next-token logits of some sequences, in this order.
    pub fn next_logits_of(&self, state: &DecodeState, which: &[u32]) -> Result<Logits> {
        let values = with_rows!(self, &state.0, |decoder, rows| decoder.next_logits_of(rows, which))?;
        Ok(Logits { values, vocab_size: self.card.config.vocab_size })
    }

    /// Chooses the next token of some sequences, like [`Policy::choose_into`], with one pick for each of them.
    pub fn choose_of(
        &self,
        state: &DecodeState,
        which: &[u32],
        picks: &[Pick],
        chosen: &mut Vec<Chosen>,
    ) -> Result<()> {
        let choice = Choice { picks, filters: Filters::OFF };
        with_rows!(self, &state.0, |decoder, rows| decoder.choose_of(rows, which, choice, chosen))
    }

    /// Chooses the next token of every sequence within the head: the logits never leave the backend.
    pub fn choose(&self, state: &DecodeState, picks: &[Pick]) -> Result<Vec<Chosen>> {
        let mut chosen = Vec::new();
        self.choose_into(state, Choice { picks, filters: Filters::OFF }, &mut chosen)?;
        Ok(chosen)
    }

    /// Chooses tokens like [`Policy::choose`], with filters; the result replaces the content of `chosen`.
    pub fn choose_into(&self, state: &DecodeState, choice: Choice<'_>, chosen: &mut Vec<Chosen>) -> Result<()> {
        state.check(choice.picks.len(), "picks")?;
        with_rows!(self, &state.0, |decoder, rows| decoder.choose(rows, choice, chosen))
    }

    /// Appends one token to every sequence being decoded.
    pub fn append(&self, state: &mut DecodeState, tokens: &[u32]) -> Result<()> {
        self.append_and_pick(state, tokens, Choice { picks: &[], filters: Filters::OFF })
    }

    /// Appends tokens like [`Policy::append`]. If the backend benefits, also starts choosing each sequence's next token
    /// with this choice. [`Policy::choose_into`] then waits for the result; call it with the same picks, followed by
    /// those of sequences that joined later.
    pub fn append_and_pick(&self, state: &mut DecodeState, tokens: &[u32], choice: Choice<'_>) -> Result<()> {
        state.check(tokens.len(), "tokens")?;
        if !choice.picks.is_empty() {
            state.check(choice.picks.len(), "picks")?;
        }
        with_rows!(self, &mut state.0, |decoder, rows| decoder.append(rows, tokens, choice))
    }

    /// Whether the backend benefits from [`Policy::append_ahead`].
    pub fn decodes_ahead(&self) -> bool {
        match &self.network {
            Network::Cpu(_) | Network::Reference(_) => false,
            #[cfg(feature = "cuda")]
            Network::Cuda(_) => true,
        }
    }

    /// Queues the next step ahead. Call it after [`Policy::append_and_pick`]: it queues the step that appends the
    /// tokens being chosen, before the host has read them, and starts choosing the following tokens with this choice.
    /// [`Policy::choose_into`] then returns the tokens of the first choice, [`Policy::retain`] may drop some rows, and
    /// [`Policy::append_and_pick`] with the remaining rows finds its step already done. Does nothing if rows joined or
    /// left since the choice started. No rows may join until the tokens are read.
    pub fn append_ahead(&self, state: &mut DecodeState, choice: Choice<'_>) -> Result<()> {
        state.check(choice.picks.len(), "picks")?;
        with_rows!(self, &mut state.0, |decoder, rows| decoder.append_ahead(rows, choice))
    }

    /// Keeps the sequences marked true; the others leave the batch.
    pub fn retain(&self, state: &mut DecodeState, keep: &[bool]) -> Result<()> {
        state.check(keep.len(), "marks")?;
        with_rows!(self, &mut state.0, |decoder, rows| decoder.retain(rows, keep))
    }
}

fn other_policy() -> EngineError {
    EngineError::Input("the batch of sequences belongs to another policy".to_owned())
}

impl DecodeState {
    /// Number of sequences being decoded.
    pub fn len(&self) -> usize {
        self.lengths().len()
    }

    /// Whether the batch has no sequences.
    pub fn is_empty(&self) -> bool {
        self.lengths().is_empty()
    }

    /// Length of each sequence in tokens, prompt included.
    pub fn lengths(&self) -> &[usize] {
        match &self.0 {
            OnBackend::Cpu(rows) => &rows.lengths,
            OnBackend::Reference(rows) => &rows.lengths,
            #[cfg(feature = "cuda")]
            OnBackend::Cuda(rows) => &rows.lengths,
        }
    }

    fn check(&self, given: usize, what: &str) -> Result<()> {
        match self.len() {
            live if live == given => Ok(()),
            live => Err(EngineError::Input(format!("{given} {what} were given for {live} sequences"))),
        }
    }
}
