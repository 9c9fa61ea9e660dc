//! Generation for many requests at once. Requests join the batch of their base model as soon as there is room, each with its
//! own adapter, settings and random numbers; their answers leave it as they end.
//!
//! An answer is a function of the request and the weights alone: it does not depend on the other rows of the batch, except
//! for the rounding of a backend's matrix products (none on the CPU).

mod answer;
mod choose;

use std::collections::VecDeque;
use std::sync::Arc;

use super::error::Result;
use super::model::{Chosen, DecodeState, Joining, Pick, Policy};
use super::random::{Key, Stream};
use super::sampling::Sampler;
use super::text::Text;
use answer::Answer;
use choose::Settings;
use rlood_types::serving::{ServedPiece, ServedPurpose, ServedRequest, TokenLogprobs};

/// Limits of a [`Batcher`].
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Maximum number of answers that are generated at once.
    pub max_rows: usize,
    /// Memory of keys and values above which no answer begins, and running ones are paused, in bytes.
    pub cache_bytes: usize,
    /// Maximum memory of prompts that later prompts may continue, in bytes.
    pub kept_bytes: usize,
}

/// Number of tokens of an answer for which there must be room when it begins.
const FIRST_TOKENS: usize = 256;

/// Numbers of tokens since a [`Batcher`] was created.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Prompt tokens that were computed.
    pub prompt_tokens: u64,
    /// Prompt tokens whose keys and values were taken from other prompts.
    pub reused_tokens: u64,
    /// Tokens of all answers.
    pub tokens: u64,
}

/// A base model with its served adapters, and the answers that are being generated.
#[derive(Debug)]
pub struct Batcher {
    policy: Policy,
    text: Arc<Text>,
    limits: Limits,
    /// The batches with answers; a single one if the backend mixes adapters, else one for each adapter.
    batches: Vec<Batch>,
    waiting: VecDeque<Waiting>,
    /// Answers that left their batch because the memory of keys and values ran short; they continue before new ones begin.
    paused: VecDeque<Row>,
    counts: Counts,
}

/// A request that waits for room.
#[derive(Debug)]
struct Waiting {
    id: u64,
    slot: Option<u32>,
    request: Arc<ServedRequest>,
}

#[derive(Debug)]
struct Batch {
    slot: Option<u32>,
    state: DecodeState,
    /// The answers, one per row of the key-value cache.
    rows: Vec<Row>,
}

/// An answer that is being generated.
#[derive(Debug)]
struct Row {
    id: u64,
    slot: Option<u32>,
    request: Arc<ServedRequest>,
    settings: Arc<Settings>,
    key: Key,
    answer: Answer,
}

impl Row {
    /// Creates the answers of a request.
    fn of(waiting: &Waiting) -> impl Iterator<Item = Row> {
        let settings = Arc::new(Settings::of(&waiting.request));
        let (id, slot, request) = (waiting.id, waiting.slot, waiting.request.clone());
        (0..request.num_choices).map(move |choice| Row {
            id,
            slot,
            settings: settings.clone(),
            key: key(&request, choice),
            answer: Answer::new(&request, choice),
            request: request.clone(),
        })
    }

    /// Number of tokens of prompt and answer.
    fn num_tokens(&self) -> usize {
        self.request.ids.len() + self.answer.num_tokens()
    }
}

/// A token that was chosen, with its log-probs if they were requested.
pub(crate) struct Selected {
    token: u32,
    logprobs: Option<TokenLogprobs>,
}

impl Batcher {
    /// Creates a batcher without answers for a model and its tokenizer.
    pub fn new(policy: Policy, text: Arc<Text>, limits: Limits) -> Batcher {
        let (batches, waiting, paused) = (Vec::new(), VecDeque::new(), VecDeque::new());
        Batcher { policy, text, limits, batches, waiting, paused, counts: Counts::default() }
    }

    /// The model, to add and remove served adapters.
    pub fn policy_mut(&mut self) -> &mut Policy {
        &mut self.policy
    }

    /// Changes the limit of the memory of keys and values, in bytes.
    pub fn limit_cache(&mut self, bytes: usize) {
        self.limits.cache_bytes = bytes;
    }

    /// The model and its adapters.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Maximum number of tokens of a prompt and its answer, whose keys and values fit into the memory.
    pub fn most_tokens(&self) -> usize {
        self.limits.cache_bytes / self.bytes_of(1).max(1)
    }

    /// Removes an adapter. None of its answers may be running.
    pub fn stop_serving(&mut self, slot: u32) {
        for batch in &mut self.batches {
            self.policy.forget_prompts(&mut batch.state, Some(slot));
        }
        self.batches.retain(|batch| !batch.rows.is_empty() || batch.slot != Some(slot));
        self.policy.stop_serving(slot);
    }

    /// Adds a request; it joins a batch in a later [`Batcher::admit`].
    pub fn push(&mut self, id: u64, slot: Option<u32>, request: Arc<ServedRequest>) {
        self.waiting.push_back(Waiting { id, slot, request });
    }

    /// Drops a request and its answers.
    ///
    /// # Errors
    /// Fails if the backend fails.
    pub fn cancel(&mut self, id: u64) -> Result<()> {
        self.waiting.retain(|waiting| waiting.id != id);
        self.paused.retain(|row| row.id != id);
        for batch in &mut self.batches {
            batch.retain(&self.policy, |row| row.id != id)?;
        }
        Ok(())
    }

    /// Number of answers that are generated now.
    pub fn running(&self) -> usize {
        self.batches.iter().map(|batch| batch.rows.len()).sum()
    }

    /// Number of answers that wait for room.
    pub fn waiting(&self) -> usize {
        self.waiting.iter().map(|waiting| waiting.request.num_choices as usize).sum::<usize>() + self.paused.len()
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.paused.is_empty() && self.running() == 0
    }

    /// Whether an answer of this adapter, or of the base model, is running or waiting.
    pub fn uses(&self, slot: Option<u32>) -> bool {
        let rows = self.batches.iter().flat_map(|batch| &batch.rows).chain(&self.paused);
        rows.map(|row| row.slot).chain(self.waiting.iter().map(|waiting| waiting.slot)).any(|other| other == slot)
    }

    /// Numbers of tokens so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Moves waiting requests into batches as far as there is room, and computes their prompts. The log-probs of prompts, if
    /// requested, are appended to `pieces`.
    ///
    /// # Errors
    /// Fails if the backend fails; the batcher must not be used any more then.
    pub fn admit(&mut self, pieces: &mut Vec<ServedPiece>) -> Result<()> {
        let mut joining: Vec<Row> = Vec::new();
        let mut rows = self.running();
        let mut bytes = self.cache_bytes();
        while let Some(row) = self.paused.front() {
            let more = self.bytes_of(row.num_tokens() + FIRST_TOKENS);
            if rows > 0 && (rows >= self.limits.max_rows || bytes + more > self.limits.cache_bytes) {
                break;
            }
            (rows, bytes) = (rows + 1, bytes + more);
            joining.extend(self.paused.pop_front());
        }
        // Requests join in order, so that a large one is not passed by small ones for ever.
        while let Some(next) = self.waiting.front().filter(|_| self.paused.is_empty()) {
            let count = next.request.num_choices as usize;
            let most = next.request.ids.len() + FIRST_TOKENS.min(next.request.max_tokens as usize);
            let more = self.bytes_of(most) * count;
            let fits = rows + count <= self.limits.max_rows && bytes + more <= self.limits.cache_bytes;
            if !fits && rows > 0 {
                break;
            }
            (rows, bytes) = (rows + count, bytes + more);
            let Some(next) = self.waiting.pop_front() else { break };
            let is_answered = next.request.echo && self.echo(&next, pieces)?;
            if !is_answered && next.request.max_tokens > 0 {
                joining.extend(Row::of(&next));
            }
        }
        while let Some(first) = joining.first() {
            let slot = first.slot;
            let mixes = self.policy.mixes_adapters();
            let (now, later) = joining.into_iter().partition(|row| mixes || row.slot == slot);
            joining = later;
            self.join(if mixes { None } else { slot }, now)?;
        }
        Ok(())
    }

    /// Memory of the keys and values of a sequence, in bytes.
    fn bytes_of(&self, tokens: usize) -> usize {
        let config = &self.policy.card().config;
        let width = 2 * config.num_key_value_heads * config.head_dim.next_multiple_of(16);
        config.num_hidden_layers * width * size_of::<f32>() * tokens
    }

    /// Memory of the keys and values of all running answers, in bytes. A prompt with several answers counts once for each.
    fn cache_bytes(&self) -> usize {
        let rows = self.batches.iter().flat_map(|batch| &batch.rows);
        self.bytes_of(rows.map(Row::num_tokens).sum())
    }

    /// Adds answers to the batch of this slot. Answers to the same prompt are copies of it; one that was paused continues after
    /// its tokens so far.
    fn join(&mut self, slot: Option<u32>, rows: Vec<Row>) -> Result<()> {
        let found = self.batches.iter().position(|batch| batch.slot == slot);
        let index = match found {
            Some(index) => index,
            None => {
                let state = self.policy.begin_serving(self.limits.kept_bytes);
                self.batches.push(Batch { slot, state, rows: Vec::new() });
                self.batches.len() - 1
            }
        };
        let sequences: Vec<Vec<u32>> =
            rows.iter().map(|row| [row.request.ids.as_slice(), row.answer.ids()].concat()).collect();
        let joining = rows.iter().zip(&sequences).map(|(row, ids)| Joining {
            ids,
            copies: 1,
            max_new_tokens: row.request.max_tokens as usize - row.answer.num_tokens(),
            slot: row.slot,
        });
        let joined = self.policy.join_served(&mut self.batches[index].state, &joining.collect::<Vec<_>>())?;
        self.counts.prompt_tokens += joined.computed as u64;
        self.counts.reused_tokens += joined.reused as u64;
        self.batches[index].rows.extend(rows);
        Ok(())
    }

    /// Sends the log-probs of a prompt. A request for at most one more token is answered from the same logits, so that the
    /// prompt is computed once; then the result is true.
    fn echo(&mut self, waiting: &Waiting, pieces: &mut Vec<ServedPiece>) -> Result<bool> {
        let request = waiting.request.clone();
        let ids = &request.ids;
        let top = request.logprobs.unwrap_or(0) as usize;
        let mut prompt: Vec<Option<TokenLogprobs>> = vec![None];
        let mut last: Vec<f32> = Vec::new();
        let vocab_size = self.policy.card().config.vocab_size;
        self.policy.all_logits(ids, waiting.slot, &mut |first, logits| {
            let rows = logits.chunks_exact(vocab_size);
            prompt.extend(choose::prompt_logprobs(rows, &ids[first + 1..], top).into_iter().map(Some));
            if first + logits.len() / vocab_size == ids.len() {
                last = logits[logits.len() - vocab_size..].to_vec();
            }
            Ok(())
        })?;
        self.counts.prompt_tokens += ids.len() as u64;
        pieces.push(ServedPiece { id: waiting.id, prompt: Some(prompt), ..ServedPiece::default() });
        if request.max_tokens == 1 {
            let settings = Settings::of(&request);
            for choice in 0..request.num_choices {
                let mut answer = Answer::new(&request, choice);
                let uniform = key(&request, choice).with(0).uniform();
                let selected = settings.choose(&mut last.clone(), ids, &answer, uniform);
                self.counts.tokens += 1;
                pieces.extend(answer.push(&self.text, waiting.id, &request, selected)?);
            }
        }
        Ok(request.max_tokens <= 1)
    }

    /// Chooses the next token of every running answer; appends the pieces of answers to `pieces`. Call [`Batcher::advance`]
    /// afterwards.
    ///
    /// # Errors
    /// Fails if the backend fails; the batcher must not be used any more then.
    pub fn choose(&mut self, pieces: &mut Vec<ServedPiece>) -> Result<()> {
        for batch in self.batches.iter_mut().filter(|batch| !batch.rows.is_empty()) {
            let selected = batch.select(&self.policy)?;
            self.counts.tokens += selected.len() as u64;
            for (row, selected) in batch.rows.iter_mut().zip(selected) {
                pieces.extend(row.answer.push(&self.text, row.id, &row.request, selected)?);
            }
        }
        Ok(())
    }

    /// Removes the answers that ended, and computes one step of the others.
    ///
    /// # Errors
    /// Fails if the backend fails; the batcher must not be used any more then.
    pub fn advance(&mut self) -> Result<()> {
        for batch in self.batches.iter_mut().filter(|batch| !batch.rows.is_empty()) {
            batch.retain(&self.policy, |row| !row.answer.has_ended())?;
        }
        self.pause()?;
        for batch in self.batches.iter_mut().filter(|batch| !batch.rows.is_empty()) {
            let tokens: Vec<u32> = batch.rows.iter().filter_map(|row| row.answer.last_token()).collect();
            self.policy.append(&mut batch.state, &tokens)?;
        }
        Ok(())
    }
}

impl Batcher {
    /// Takes answers out of their batches, the youngest first, until the others have room for their keys and values. Their
    /// tokens so far are computed again when they continue, with the same bits.
    fn pause(&mut self) -> Result<()> {
        while self.running() > 1 && self.cache_bytes() > self.limits.cache_bytes {
            let Some(batch) = self.batches.iter_mut().rev().find(|batch| !batch.rows.is_empty()) else { break };
            let Some(row) = batch.rows.pop() else { break };
            let keep: Vec<bool> = (0..=batch.rows.len()).map(|index| index < batch.rows.len()).collect();
            self.policy.retain(&mut batch.state, &keep)?;
            self.paused.push_front(row);
        }
        Ok(())
    }
}

/// The random key of an answer, which is that of [`super::generate`].
fn key(request: &ServedRequest, choice: u32) -> Key {
    let (stream, prompt) = match request.purpose {
        ServedPurpose::Request => (Stream::Generate, 0),
        ServedPurpose::Verdict(prompt) => (Stream::Verdict, prompt),
    };
    Key::new(request.seed, stream).with(prompt).with(u64::from(choice))
}

impl Batch {
    fn retain(&mut self, policy: &Policy, keep: impl Fn(&Row) -> bool) -> Result<()> {
        let keep: Vec<bool> = self.rows.iter().map(keep).collect();
        if keep.iter().all(|keep| *keep) {
            return Ok(());
        }
        policy.retain(&mut self.state, &keep)?;
        let mut keep = keep.into_iter();
        self.rows.retain(|_| keep.next().unwrap_or(false));
        Ok(())
    }

    /// Chooses the next token of each row. Rows without any setting but temperature and seed are chosen inside the head, the
    /// others from their logits; which way a row takes depends on its own request only.
    fn select(&self, policy: &Policy) -> Result<Vec<Selected>> {
        let (plain, others): (Vec<u32>, Vec<u32>) =
            (0..self.rows.len() as u32).partition(|row| self.rows[*row as usize].settings.is_plain());
        let uniform = |row: &Row| row.key.with(row.answer.num_tokens() as u64).uniform();
        let pick = |row: &u32| {
            let row = &self.rows[*row as usize];
            Pick { temperature: row.request.temperature, uniform: uniform(row) }
        };
        let picks: Vec<Pick> = plain.iter().map(pick).collect();
        let mut chosen: Vec<Chosen> = Vec::new();
        policy.choose_of(&self.state, &plain, &picks, &mut chosen)?;
        let mut logits = policy.next_logits_of(&self.state, &others)?;
        let from_logits = choose::in_parallel(&mut logits, |index, logits| {
            let row = &self.rows[others[index] as usize];
            row.settings.choose(logits, &row.request.ids, &row.answer, uniform(row))
        });
        let mut selected: Vec<(u32, Selected)> = others.into_iter().zip(from_logits).collect();
        selected.extend(
            plain.into_iter().zip(chosen).map(|(row, chosen)| (row, Selected { token: chosen.token, logprobs: None })),
        );
        selected.sort_unstable_by_key(|(row, _)| *row);
        Ok(selected.into_iter().map(|(_, selected)| selected).collect())
    }
}
