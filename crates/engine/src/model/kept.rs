//! Prompts of earlier sequences, whose keys and values later prompts may continue.

use crate::backend::Decode;
use crate::kernels::attention::BLOCK;

/// Number of tokens from which equal beginnings of prompts are computed once.
pub const MIN_SHARED: usize = 2 * BLOCK;

/// Sequences that join a batch: copies of one prompt.
#[derive(Clone, Copy, Debug)]
pub struct Joining<'a> {
    /// Token ids of the prompt; at least one.
    pub ids: &'a [u32],
    /// Number of sequences that continue the prompt.
    pub copies: usize,
    /// Maximum number of tokens by which a sequence grows.
    pub max_new_tokens: usize,
    /// The slot of the adapter; None is the base model.
    pub slot: Option<u32>,
}

/// Number of prompt tokens of sequences that joined a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Joined {
    /// Tokens whose keys and values were computed.
    pub computed: usize,
    /// Tokens whose keys and values were taken from other prompts.
    pub reused: usize,
}

/// Prompts of earlier sequences; the least recently used ones are dropped when their memory exceeds the limit.
#[derive(Debug)]
pub struct KeptPrompts<B: Decode> {
    /// Maximum memory of the prompts, in bytes.
    pub limit_bytes: usize,
    /// Whether later prompts must begin with all tokens of a kept one: the states of a Gated DeltaNet are known at its end only.
    pub is_whole: bool,
    /// The prompts; the most recently used one is last.
    prompts: Vec<Kept<B>>,
}

/// A prompt of an earlier sequence.
#[derive(Debug)]
pub struct Kept<B: Decode> {
    /// The slot of the adapter that computed it; None is the base model.
    pub slot: Option<u32>,
    /// Token ids of the prompt.
    pub ids: Vec<u32>,
    /// The keys and values.
    pub prompt: B::KeptPrompt,
    /// Memory of the keys and values, in bytes.
    pub bytes: usize,
}

impl<B: Decode> Default for KeptPrompts<B> {
    fn default() -> Self {
        KeptPrompts { limit_bytes: 0, is_whole: false, prompts: Vec::new() }
    }
}

impl<B: Decode> KeptPrompts<B> {
    /// Creates an empty list; `is_whole` says whether later prompts must begin with all tokens of a kept one.
    pub fn new(is_whole: bool) -> Self {
        KeptPrompts { is_whole, ..KeptPrompts::default() }
    }
}

/// Number of equal tokens at the beginning of two prompts.
pub fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

impl<B: Decode> KeptPrompts<B> {
    /// Forgets the prompts of an adapter, or of the base model.
    pub fn forget(&mut self, slot: Option<u32>) {
        self.prompts.retain(|kept| kept.slot != slot);
    }

    /// The longest beginning of a prompt that a kept prompt has, in whole blocks and without the prompt's last token.
    pub fn find(&mut self, slot: Option<u32>, ids: &[u32]) -> Option<(B::KeptPrompt, usize)> {
        let shared = |kept: &Kept<B>| {
            let count = common(&kept.ids, &ids[..ids.len() - 1]) / BLOCK * BLOCK;
            if kept.slot == slot && (!self.is_whole || count == kept.ids.len()) { count } else { 0 }
        };
        let best = (0..self.prompts.len()).max_by_key(|index| shared(&self.prompts[*index]))?;
        let count = shared(&self.prompts[best]);
        if count < MIN_SHARED {
            return None;
        }
        let kept = self.prompts.remove(best);
        let prompt = kept.prompt.clone();
        self.prompts.push(kept);
        Some((prompt, count))
    }

    /// Adds a prompt, and drops the least recently used ones if the memory exceeds the limit.
    pub fn add(&mut self, kept: Kept<B>) {
        // A prompt that must be continued at its end can only be continued after a whole block.
        let is_useless = self.is_whole && !kept.ids.len().is_multiple_of(BLOCK);
        if kept.bytes > self.limit_bytes || kept.ids.len() < MIN_SHARED || is_useless {
            return;
        }
        // A prompt that is the beginning of the new one is not needed any more, unless only it can be continued at its end.
        let replaces = |other: &Kept<B>| match self.is_whole {
            true => kept.ids == other.ids,
            false => kept.ids.starts_with(&other.ids),
        };
        self.prompts.retain(|other| other.slot != kept.slot || !replaces(other));
        self.prompts.push(kept);
        let mut bytes: usize = self.prompts.iter().map(|kept| kept.bytes).sum();
        while bytes > self.limit_bytes {
            bytes -= self.prompts.remove(0).bytes;
        }
    }
}
