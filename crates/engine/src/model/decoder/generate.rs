//! Generation: each prompt is computed once, then every row grows by one token per step.

use std::collections::HashMap;

use super::Decoder;
use crate::backend::{CachedLayer, Choice, Chosen, Decode, Step, Tokens};
use crate::error::{EngineError, Result};
use crate::model::Adapter;
use crate::model::batch::{Places, heads};
use crate::model::decode::{Picks, RowAdapters, Rows};
use crate::model::kept::KeptPrompts;
use crate::model::mixer::Mixer;
use crate::model::packing::Packing;
use crate::model::pass::{Applied, Pass};
use crate::model::rope::Angles;
use crate::spec::footprint::PREFILL_TOKENS;

impl<B: Decode> Decoder<B> {
    /// Whether sampling gives the log-probs of a training forward, bit for bit. It does not if a token's rotary angles
    /// depend on the final length of its sequence.
    pub fn samples_exactly(&self) -> bool {
        self.backend.samples_exactly() && !self.ropes.depend_on_length()
    }

    /// Creates a batch without rows.
    pub fn begin(&self, adapter: Adapter) -> Rows<B> {
        self.backend.release_cached();
        let cached: Vec<CachedLayer> = self.layers.iter().map(|layer| layer.mixer.cached_layer()).collect();
        let cache = self.backend.new_cache(&heads(&self.config), &cached);
        Rows {
            adapters: RowAdapters::Same(adapter),
            kept: KeptPrompts::new(self.config.delta_net.is_some()),
            cache,
            hidden: None,
            picked: None,
            due: None,
            lengths: Vec::new(),
            most: Vec::new(),
        }
    }

    /// Computes each distinct prompt once and appends `num_copies` rows per prompt, prompt by prompt.
    pub fn join(&self, rows: &mut Rows<B>, prompts: &[&[u32]], num_copies: usize, max_new_tokens: usize) -> Result<()> {
        let mut number: HashMap<&[u32], usize> = HashMap::new();
        let mut distinct: Vec<&[u32]> = Vec::new();
        for (index, prompt) in prompts.iter().enumerate() {
            if prompt.is_empty() {
                return Err(EngineError::Input(format!("prompt {index} is empty; at least one token is required")));
            }
            number.entry(prompt).or_insert_with(|| {
                distinct.push(prompt);
                distinct.len() - 1
            });
        }
        // The index in the cache, and the hidden state of the last token, of each distinct prompt.
        let mut known: Vec<usize> = Vec::with_capacity(distinct.len());
        let mut lasts: Vec<B::Tensor> = Vec::new();
        let mut rest = distinct.as_slice();
        while !rest.is_empty() {
            let mut tokens = 0;
            let fits = rest.iter().take_while(|p| {
                tokens += p.len();
                tokens <= PREFILL_TOKENS as usize
            });
            let (chunk, after) = rest.split_at(fits.count().max(1));
            let most: Vec<usize> = chunk.iter().map(|prompt| prompt.len() + max_new_tokens).collect();
            let (first, last) = self.prefill(rows, chunk, &most)?;
            known.extend(first..first + chunk.len());
            lasts.push(last);
            rest = after;
        }
        let last = self.backend.concat_rows(&lasts.iter().collect::<Vec<_>>())?;
        let mut copies: Vec<u32> = Vec::with_capacity(prompts.len() * num_copies);
        for prompt in prompts {
            let index = number[prompt];
            copies.extend(std::iter::repeat_n(index as u32, num_copies));
            rows.lengths.extend(std::iter::repeat_n(prompt.len(), num_copies));
            rows.most.extend(std::iter::repeat_n(prompt.len() + max_new_tokens, num_copies));
            self.backend.add_rows(&mut rows.cache, known[index], num_copies, max_new_tokens)?;
        }
        self.backend.close_prompts(&mut rows.cache);
        let joined = self.backend.select_rows(&last, &copies)?;
        rows.hidden = Some(match rows.hidden.take() {
            Some(hidden) => self.backend.concat_rows(&[&hidden, &joined])?,
            None => joined,
        });
        Ok(())
    }

    /// Computes prompts that will have at most `most` tokens each. Returns the first prompt's index in the cache, and the hidden
    /// row of each prompt's last token.
    pub(super) fn prefill(&self, rows: &mut Rows<B>, prompts: &[&[u32]], most: &[usize]) -> Result<(usize, B::Tensor)> {
        let applied = rows.adapters.applied();
        let (first, x) = self.prefill_with(&mut rows.cache, prompts, most, applied)?;
        let ends = prompts.iter().map(|prompt| prompt.len());
        Ok((first, self.backend.select_rows(&x, &last_rows(ends))?))
    }

    /// Computes prompts like [`Decoder::prefill`]; returns the hidden rows of all their tokens.
    pub(super) fn prefill_with(
        &self,
        cache: &mut B::Cache,
        prompts: &[&[u32]],
        most: &[usize],
        applied: Applied<'_>,
    ) -> Result<(usize, B::Tensor)> {
        let with_length = |(ids, most): (&&'_ [u32], &usize)| self.ropes.length_when_sampling(ids.len(), *most);
        let lengths_of = prompts.iter().zip(most).map(with_length);
        let prompts_and_lengths: Vec<_> = prompts.iter().copied().zip(lengths_of).collect();
        let packing = Packing::sequences(&prompts_and_lengths, self.windows(), &self.ropes);
        let batch = self.batch(&packing)?;
        let lengths: Vec<usize> = prompts.iter().map(|prompt| prompt.len()).collect();
        let mut x = self.embed(&packing.ids)?;
        let first = self.backend.add_prompts(cache, &lengths)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let (y, cached) = layer.forward(&self.backend, &x, &batch, Pass::applying(applied))?;
            x = y;
            Mixer::fill(&self.backend, cache, (first, index), cached)?;
        }
        Ok((first, x))
    }

    /// Computes the next-token logits of every sequence.
    pub fn next_logits(&self, rows: &Rows<B>) -> Result<Vec<f32>> {
        let Some(hidden) = &rows.hidden else { return Ok(Vec::new()) };
        self.backend.download(&self.backend.logits(&self.normed(hidden)?, &self.head)?)
    }

    /// Computes the next-token logits of some sequences.
    pub fn next_logits_of(&self, rows: &Rows<B>, which: &[u32]) -> Result<Vec<f32>> {
        let Some(hidden) = rows.hidden.as_ref().filter(|_| !which.is_empty()) else { return Ok(Vec::new()) };
        let hidden = self.backend.select_rows(hidden, which)?;
        self.backend.download(&self.backend.logits(&self.normed(&hidden)?, &self.head)?)
    }

    /// Chooses the next token of some sequences.
    pub fn choose_of(&self, rows: &Rows<B>, which: &[u32], choice: Choice<'_>, chosen: &mut Vec<Chosen>) -> Result<()> {
        chosen.clear();
        let Some(hidden) = rows.hidden.as_ref().filter(|_| !which.is_empty()) else { return Ok(()) };
        let hidden = self.backend.select_rows(hidden, which)?;
        self.backend.choose(&self.normed(&hidden)?, &self.head, choice, chosen)
    }

    /// Chooses the next token of every sequence, with one pick (temperature and random number) per sequence.
    pub fn choose(&self, rows: &Rows<B>, choice: Choice<'_>, chosen: &mut Vec<Chosen>) -> Result<()> {
        chosen.clear();
        let Choice { picks, filters } = choice;
        if let Some(due) = &rows.due {
            if due.filters != filters || due.picks != picks {
                return Err(EngineError::Input("the next tokens were chosen already, with other settings".to_owned()));
            }
            *chosen = due.wait(&self.backend)?;
            return Ok(());
        }
        let Some(hidden) = &rows.hidden else { return Ok(()) };
        match &rows.picked {
            Some(known) if known.filters == filters && picks.starts_with(&known.picks) => {
                let count = known.picks.len();
                let rest = Choice { picks: &picks[count..], filters };
                let mut joined = Vec::new();
                if !rest.picks.is_empty() {
                    let which: Vec<u32> = (count as u32..picks.len() as u32).collect();
                    let hidden = self.backend.select_rows(hidden, &which)?;
                    self.backend.choose(&self.normed(&hidden)?, &self.head, rest, &mut joined)?;
                }
                *chosen = known.wait(&self.backend)?;
                chosen.append(&mut joined);
                Ok(())
            }
            Some(_) | None => self.backend.choose(&self.normed(hidden)?, &self.head, choice, chosen),
        }
    }

    /// Appends one token to every sequence; starts choosing the next token if there are picks.
    pub fn append(&self, rows: &mut Rows<B>, tokens: &[u32], choice: Choice<'_>) -> Result<()> {
        self.check_ids(tokens)?;
        // The method append_ahead has already queued this step, for all sequences of that time.
        if rows.due.take().is_some() || tokens.is_empty() {
            return Ok(());
        }
        // Drop the previous choice now, so that its memory can be reused in this step.
        rows.picked = None;
        self.step(rows, Tokens::Known(tokens), choice)
    }

    /// Queues the step that appends the tokens which the last step chooses, before the host has read them.
    pub fn append_ahead(&self, rows: &mut Rows<B>, choice: Choice<'_>) -> Result<()> {
        let is_whole = |picks: &Picks<B>| picks.kept.is_none() && picks.picks.len() == rows.lengths.len();
        if rows.due.is_some() || !rows.picked.as_ref().is_some_and(is_whole) {
            return Ok(());
        }
        rows.due = rows.picked.take();
        self.step(rows, Tokens::Chosen(rows.lengths.len()), choice)
    }

    fn step(&self, rows: &mut Rows<B>, tokens: Tokens<'_>, choice: Choice<'_>) -> Result<()> {
        let backend = &self.backend;
        let length_of = |row: usize| self.ropes.length_when_sampling(rows.lengths[row] + 1, rows.most[row]);
        let token_tables = self.ropes.token_tables(&rows.lengths, length_of);
        let pass = Pass::applying(rows.adapters.applied());
        // Drop the previous residual stream now, so that its memory can be reused in this step.
        rows.hidden = None;
        let step = Step { table: &token_tables.full.table, tokens, positions: &rows.lengths, choice };
        let (x, picked) = backend.step(&mut rows.cache, &step, |cache, step| {
            let angles = Angles::new(backend, &token_tables, step.positions)?;
            let mut x = self.scaled_embeddings(backend.embed_step(&self.embedding, cache, step.tokens)?)?;
            for (index, layer) in self.layers.iter().enumerate() {
                let places = Places { positions: step.positions, angles: &angles };
                x = layer.step(backend, (&mut *cache, index), x, places, pass)?;
            }
            let picked = match step.choice.picks.is_empty() {
                true => None,
                false => backend.begin_choose(cache, || self.normed(&x), &self.head, step.choice)?,
            };
            Ok((x, picked))
        })?;
        rows.lengths.iter_mut().for_each(|length| *length += 1);
        rows.hidden = Some(x);
        let (picks, filters) = (choice.picks.to_vec(), choice.filters);
        rows.picked = picked.map(|picked| Picks { picks, filters, picked, kept: None });
        Ok(())
    }

    /// Keeps the sequences marked true; the others leave the batch.
    pub fn retain(&self, rows: &mut Rows<B>, keep: &[bool]) -> Result<()> {
        let kept: Vec<u32> = (0..keep.len()).filter(|row| keep[*row]).map(|row| row as u32).collect();
        // The pending choice is for the step after a queued one, so drop only the sequences that left. Without a queued
        // step the choice was read already, and its rows would no longer match.
        match &mut rows.picked {
            Some(picked) if rows.due.is_some() => picked.retain(&kept),
            _ => rows.picked = None,
        }
        self.backend.retain_rows(&mut rows.cache, keep);
        rows.adapters.change(|slots| {
            let mut keep = keep.iter();
            slots.retain(|_| keep.next().copied().unwrap_or(false));
        });
        rows.hidden = match rows.hidden.take() {
            Some(hidden) if !kept.is_empty() => Some(self.backend.select_rows(&hidden, &kept)?),
            Some(_) | None => None,
        };
        rows.lengths = kept.iter().map(|row| rows.lengths[*row as usize]).collect();
        rows.most = kept.iter().map(|row| rows.most[*row as usize]).collect();
        Ok(())
    }
}

/// The index of the last row of each of these runs of rows, which follow each other.
pub(super) fn last_rows(counts: impl Iterator<Item = usize>) -> Vec<u32> {
    let mut end = 0;
    let last = counts.map(|count| {
        end += count as u32;
        end - 1
    });
    last.collect()
}
