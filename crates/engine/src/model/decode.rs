//! Generation: prompts are computed once and their keys and values shared; rows join, grow by a token at a time, and
//! leave.

use super::{Adapter, Logits, Network, Policy};
#[cfg(feature = "cuda")]
use crate::backend::cuda::Cuda;
use crate::backend::{Choice, Chosen, Decode, Pick, cpu::Cpu, reference::Reference};
use crate::error::{EngineError, Result};
use crate::sampling::Filters;

/// Sequences in the middle of generation.
#[derive(Debug)]
pub struct DecodeState(OnBackend);

#[derive(Debug)]
enum OnBackend {
    Cpu(Rows<Cpu>),
    Reference(Rows<Reference>),
    #[cfg(feature = "cuda")]
    Cuda(Box<Rows<Cuda>>),
}

/// Live rows: their KV cache, and the residual stream that each one's next token is chosen from.
#[derive(Debug)]
pub struct Rows<B: Decode> {
    /// With or without the adapter.
    pub adapter: Adapter,
    /// Keys and values.
    pub cache: B::Cache,
    /// `[rows, hidden]` after the last layer; None without rows.
    pub hidden: Option<B::Tensor>,
    /// The next tokens of the first rows, where the last step began to choose them.
    pub picked: Option<Picks<B>>,
    /// Those of the step before it, where the last step, which appends them, was queued before anybody read them.
    pub due: Option<Picks<B>>,
    /// Tokens of each row, prompt included.
    pub lengths: Vec<usize>,
    /// The most that each will have.
    pub most: Vec<usize>,
}

/// A choice of tokens that was begun.
#[derive(Debug)]
pub struct Picks<B: Decode> {
    /// How, one a row.
    pub picks: Vec<Pick>,
    /// How.
    pub filters: Filters,
    /// Of the rows that there were then.
    pub picked: B::PendingChoice,
    /// Those of them that are left, where some are not.
    pub kept: Option<Vec<u32>>,
}

impl<B: Decode> Picks<B> {
    /// Wait for the tokens.
    pub fn wait(&self, backend: &B) -> Result<Vec<Chosen>> {
        let chosen = backend.finish_choose(&self.picked)?;
        Ok(match &self.kept {
            Some(kept) => kept.iter().map(|row| chosen[*row as usize]).collect(),
            None => chosen,
        })
    }

    /// Keep these rows, in this order.
    pub fn retain(&mut self, rows: &[u32]) {
        self.picks = rows.iter().map(|row| self.picks[*row as usize]).collect();
        self.kept = Some(match &self.kept {
            Some(kept) => rows.iter().map(|row| kept[*row as usize]).collect(),
            None => rows.to_vec(),
        });
    }
}

/// Run `$body` with the decoder and its rows.
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
    /// A batch without rows.
    pub fn begin(&self, adapter: Adapter) -> DecodeState {
        DecodeState(match &self.network {
            Network::Cpu(decoder) => OnBackend::Cpu(decoder.begin(adapter)),
            Network::Reference(decoder) => OnBackend::Reference(decoder.begin(adapter)),
            #[cfg(feature = "cuda")]
            Network::Cuda(decoder) => OnBackend::Cuda(Box::new(decoder.begin(adapter))),
        })
    }

    /// Compute the prompts, each distinct one once, and append `num_copies` rows for each, prompt-major; they await
    /// their first token. A row grows by at most `max_new_tokens`.
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

    /// Next-token logits, one row a live row.
    pub fn next_logits(&self, state: &DecodeState) -> Result<Logits> {
        let values = with_rows!(self, &state.0, |decoder, rows| decoder.next_logits(rows))?;
        Ok(Logits { values, vocab_size: self.card.config.vocab_size })
    }

    /// The next token of every live row, chosen by the head itself: no logits leave the backend.
    pub fn choose(&self, state: &DecodeState, picks: &[Pick]) -> Result<Vec<Chosen>> {
        let mut chosen = Vec::new();
        self.choose_into(state, Choice { picks, filters: Filters::OFF }, &mut chosen)?;
        Ok(chosen)
    }

    /// As [`Policy::choose`], perhaps with filters; the tokens replace what is in `chosen`.
    pub fn choose_into(&self, state: &DecodeState, choice: Choice<'_>, chosen: &mut Vec<Chosen>) -> Result<()> {
        state.check(choice.picks.len(), "picks")?;
        with_rows!(self, &state.0, |decoder, rows| decoder.choose(rows, choice, chosen))
    }

    /// Append one token to every live row.
    pub fn append(&self, state: &mut DecodeState, tokens: &[u32]) -> Result<()> {
        self.append_and_pick(state, tokens, Choice { picks: &[], filters: Filters::OFF })
    }

    /// As [`Policy::append`], and where the backend gains by it begin to choose each row's next token by this choice:
    /// [`Policy::choose_into`] with the same picks, and those of rows that joined after them, then waits for that.
    pub fn append_and_pick(&self, state: &mut DecodeState, tokens: &[u32], choice: Choice<'_>) -> Result<()> {
        state.check(tokens.len(), "tokens")?;
        if !choice.picks.is_empty() {
            state.check(choice.picks.len(), "picks")?;
        }
        with_rows!(self, &mut state.0, |decoder, rows| decoder.append(rows, tokens, choice))
    }

    /// Whether [`Policy::append_ahead`] gains anything.
    pub fn decodes_ahead(&self) -> bool {
        match &self.network {
            Network::Cpu(_) | Network::Reference(_) => false,
            #[cfg(feature = "cuda")]
            Network::Cuda(_) => true,
        }
    }

    /// After [`Policy::append_and_pick`]: queue the step that appends the tokens which that one chooses, before they are
    /// read, and begin to choose the next by this choice. [`Policy::choose_into`] then gives the tokens (by the first
    /// choice), [`Policy::retain`] may drop rows of them, and [`Policy::append_and_pick`] with the rest finds its step done.
    /// Not done where rows joined or left since the tokens were asked for. No rows may join until they are read.
    pub fn append_ahead(&self, state: &mut DecodeState, choice: Choice<'_>) -> Result<()> {
        state.check(choice.picks.len(), "picks")?;
        with_rows!(self, &mut state.0, |decoder, rows| decoder.append_ahead(rows, choice))
    }

    /// Keep the rows marked true; the others leave the batch.
    pub fn retain(&self, state: &mut DecodeState, keep: &[bool]) -> Result<()> {
        state.check(keep.len(), "marks")?;
        with_rows!(self, &mut state.0, |decoder, rows| decoder.retain(rows, keep))
    }
}

fn other_policy() -> EngineError {
    EngineError::Input("the rows belong to another policy".to_owned())
}

impl DecodeState {
    /// How many rows are live.
    pub fn len(&self) -> usize {
        self.lengths().len()
    }

    /// Whether no row is live.
    pub fn is_empty(&self) -> bool {
        self.lengths().is_empty()
    }

    /// Each live row's length in tokens, prompt included.
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
            live => Err(EngineError::Input(format!("{given} {what} for {live} live rows"))),
        }
    }
}
