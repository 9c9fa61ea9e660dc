//! Generation for many requests at once: sequences with adapters of their own join a batch, and prompts that begin like earlier
//! ones continue their keys and values.

use std::ops::Range;

use super::generate::last_rows;
use super::{Decoder, Lora};
use crate::backend::Decode;
use crate::error::{EngineError, Result};
use crate::kernels::attention::BLOCK;
use crate::model::batch::Places;
use crate::model::decode::Rows;
use crate::model::kept::{Joined, Joining, Kept, MIN_SHARED, common};
use crate::model::packing::Packing;
use crate::model::pass::{Applied, Pass};
use crate::model::rope::Angles;
use crate::spec::footprint::PREFILL_TOKENS;

/// A prompt in the cache, with the hidden row of its last token.
struct Computed<B: Decode> {
    index: usize,
    last: B::Tensor,
}

/// A prompt that begins like a kept one.
struct Continued<'a> {
    ids: &'a [u32],
    most: usize,
    /// Index of the prompt in the cache.
    index: usize,
    shared: usize,
}

impl<B: Decode> Decoder<B> {
    /// Whether the sequences of one batch may have different adapters.
    pub fn mixes_adapters(&self) -> bool {
        self.backend.mixes_adapters()
    }

    /// Adds an adapter that is served.
    pub fn serve_lora(&mut self, number: u32, lora: &Lora) -> Result<()> {
        let parameters = self.backend.device_buffer(&lora.values)?;
        for (index, layer) in self.layers.iter_mut().enumerate() {
            for linear in layer.linears_mut() {
                linear.serve(&self.backend, number, parameters, |module| lora.slot(index, module))?;
            }
        }
        Ok(())
    }

    /// Removes an adapter that was served.
    pub fn stop_serving(&mut self, number: u32) {
        self.layers.iter_mut().flat_map(|layer| layer.linears_mut()).for_each(|linear| linear.stop_serving(number));
    }

    /// Appends sequences to the batch.
    pub fn join_served(&self, rows: &mut Rows<B>, joining: &[Joining<'_>]) -> Result<Joined> {
        for one in joining {
            if one.ids.is_empty() {
                return Err(EngineError::Input("a prompt is empty; at least one token is required".to_owned()));
            }
            self.check_ids(one.ids)?;
        }
        let mut slots: Vec<Option<u32>> = joining.iter().map(|one| one.slot).collect();
        slots.sort_unstable();
        slots.dedup();
        let mut joined = Joined::default();
        let mut computed: Vec<Option<Computed<B>>> = joining.iter().map(|_| None).collect();
        for slot in slots {
            let of_slot: Vec<usize> = (0..joining.len()).filter(|index| joining[*index].slot == slot).collect();
            self.compute_prompts(rows, joining, &of_slot, &mut computed, &mut joined)?;
        }
        let mut lasts: Vec<B::Tensor> = Vec::new();
        lasts.extend(rows.hidden.take());
        for (one, computed) in joining.iter().zip(computed).filter(|(one, _)| one.copies > 0) {
            let Some(Computed { index, last }) = computed else { continue };
            self.backend.add_rows(&mut rows.cache, index, one.copies, one.max_new_tokens)?;
            rows.lengths.extend(std::iter::repeat_n(one.ids.len(), one.copies));
            rows.most.extend(std::iter::repeat_n(one.ids.len() + one.max_new_tokens, one.copies));
            rows.adapters.change(|slots| slots.extend(std::iter::repeat_n(one.slot, one.copies)));
            lasts.push(self.backend.select_rows(&last, &vec![0; one.copies])?);
        }
        self.backend.close_prompts(&mut rows.cache);
        rows.hidden = match lasts.len() {
            0 => None,
            1 => lasts.pop(),
            _ => Some(self.backend.concat_rows(&lasts.iter().collect::<Vec<_>>())?),
        };
        Ok(joined)
    }

    /// Computes the prompts of one adapter: those that begin like kept prompts continue them, equal ones are computed once.
    fn compute_prompts(
        &self,
        rows: &mut Rows<B>,
        joining: &[Joining<'_>],
        which: &[usize],
        computed: &mut [Option<Computed<B>>],
        joined: &mut Joined,
    ) -> Result<()> {
        let slot = joining[which[0]].slot;
        let mut distinct: Vec<(&[u32], usize, Vec<usize>)> = Vec::new();
        for index in which {
            let Joining { ids, max_new_tokens, .. } = joining[*index];
            let most = ids.len() + max_new_tokens;
            // Angles may depend on the final length, so prompts share their keys only if that is equal.
            let same = |(other, other_most, _): &&mut (&[u32], usize, Vec<usize>)| {
                *other == ids && (*other_most == most || !self.ropes.depend_on_length())
            };
            match distinct.iter_mut().find(same) {
                Some((_, _, places)) => {
                    joined.reused += ids.len();
                    places.push(*index);
                }
                None => distinct.push((ids, most, vec![*index])),
            }
        }
        self.share_beginning(rows, slot, &distinct, joined)?;
        let (mut fresh, mut continued): (Vec<usize>, Vec<(usize, Continued<'_>)>) = (Vec::new(), Vec::new());
        for (number, (ids, most, _)) in distinct.iter().enumerate() {
            let found = match self.ropes.depend_on_length() {
                true => None,
                false => rows.kept.find(slot, ids),
            };
            let added = found.and_then(|(kept, shared)| {
                let index = self.backend.add_prompt_after(&mut rows.cache, &kept, shared, ids.len())?;
                Some(Continued { ids, most: *most, index, shared })
            });
            match added {
                Some(one) => continued.push((number, one)),
                None => fresh.push(number),
            }
        }
        let mut done: Vec<(usize, Computed<B>)> = Vec::with_capacity(distinct.len());
        for chunk in chunks(&fresh, |number| distinct[*number].0.len()) {
            let prompts: Vec<&[u32]> = fresh[chunk.clone()].iter().map(|number| distinct[*number].0).collect();
            let most: Vec<usize> = fresh[chunk.clone()].iter().map(|number| distinct[*number].1).collect();
            let applied = slot.map_or(Applied::Nothing, Applied::Served);
            let (first, x) = self.prefill_with(&mut rows.cache, &prompts, &most, applied)?;
            joined.computed += prompts.iter().map(|prompt| prompt.len()).sum::<usize>();
            for (place, last) in last_rows(prompts.iter().map(|prompt| prompt.len())).into_iter().enumerate() {
                let last = self.backend.select_rows(&x, &[last])?;
                done.push((fresh[chunk.start + place], Computed { index: first + place, last }));
            }
        }
        for chunk in chunks(&continued, |(_, one)| one.ids.len() - one.shared) {
            let lasts = self.continue_prompts(rows, slot, &continued[chunk.clone()])?;
            for ((number, one), last) in continued[chunk].iter().zip(lasts) {
                joined.computed += one.ids.len() - one.shared;
                joined.reused += one.shared;
                done.push((*number, Computed { index: one.index, last }));
            }
        }
        for (number, one) in done {
            let (ids, _, places) = &distinct[number];
            self.keep(rows, slot, ids, one.index);
            for place in places {
                let last = self.backend.select_rows(&one.last, &[0])?;
                computed[*place] = Some(Computed { index: one.index, last });
            }
        }
        Ok(())
    }

    /// Computes a long beginning that all prompts have in common as a prompt of its own, so that each of them continues it.
    fn share_beginning(
        &self,
        rows: &mut Rows<B>,
        slot: Option<u32>,
        distinct: &[(&[u32], usize, Vec<usize>)],
        joined: &mut Joined,
    ) -> Result<()> {
        let [(first, _, _), others @ ..] = distinct else { return Ok(()) };
        let shared = others.iter().map(|(ids, _, _)| common(first, ids)).min().unwrap_or(0);
        let beginning = &first[..shared / BLOCK * BLOCK];
        let is_known = beginning.len() < MIN_SHARED
            || rows.kept.limit_bytes == 0
            || self.ropes.depend_on_length()
            || rows.kept.find(slot, first).is_some_and(|(_, known)| known >= beginning.len().min(first.len() - 1));
        if is_known {
            return Ok(());
        }
        let applied = slot.map_or(Applied::Nothing, Applied::Served);
        let (index, _) = self.prefill_with(&mut rows.cache, &[beginning], &[beginning.len()], applied)?;
        joined.computed += beginning.len();
        self.keep(rows, slot, beginning, index);
        Ok(())
    }

    /// Keeps a prompt of the cache for later prompts that begin with its tokens.
    fn keep(&self, rows: &mut Rows<B>, slot: Option<u32>, ids: &[u32], index: usize) {
        if rows.kept.limit_bytes == 0 || self.ropes.depend_on_length() {
            return;
        }
        if let Some(prompt) = self.backend.keep_prompt(&rows.cache, index) {
            let bytes = self.backend.kept_bytes(&prompt);
            rows.kept.add(Kept { slot, ids: ids.to_vec(), prompt, bytes });
        }
    }

    /// Computes the remaining tokens of prompts that begin like kept ones; returns the hidden row of each one's last token.
    fn continue_prompts(
        &self,
        rows: &mut Rows<B>,
        slot: Option<u32>,
        prompts: &[(usize, Continued<'_>)],
    ) -> Result<Vec<B::Tensor>> {
        let backend = &self.backend;
        let (mut ids, mut positions, mut most) = (Vec::new(), Vec::new(), Vec::new());
        for (_, prompt) in prompts {
            ids.extend_from_slice(&prompt.ids[prompt.shared..]);
            positions.extend(prompt.shared..prompt.ids.len());
            most.extend(std::iter::repeat_n(prompt.most, prompt.ids.len() - prompt.shared));
        }
        let counts: Vec<(usize, usize)> =
            prompts.iter().map(|(_, prompt)| (prompt.index, prompt.ids.len() - prompt.shared)).collect();
        let tables = self.ropes.token_tables(&positions, |token| most[token]);
        let angles = Angles::new(backend, &tables, &positions)?;
        let pass = Pass::applying(slot.map_or(Applied::Nothing, Applied::Served));
        let mut x = self.embed(&ids)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let places = Places { positions: &positions, angles: &angles };
            x = layer.extend(backend, &mut rows.cache, (&counts, index), x, (places, pass))?;
        }
        let last = last_rows(counts.iter().map(|(_, count)| *count));
        last.into_iter().map(|row| backend.select_rows(&x, &[row])).collect()
    }

    /// Computes the logits at all positions of a sequence, a few rows at a time: `f(first position, logits)`.
    pub fn all_logits(
        &self,
        ids: &[u32],
        slot: Option<u32>,
        f: &mut dyn FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let applied = slot.map_or(Applied::Nothing, Applied::Served);
        let packing = Packing::sequences(&[(ids, ids.len())], self.windows(), &self.ropes);
        let x = self.hidden_with(&packing, applied)?;
        let at_once = (LOGITS_AT_ONCE / self.vocab_size()).max(1);
        for begin in (0..ids.len()).step_by(at_once) {
            let rows: Vec<u32> = (begin..(begin + at_once).min(ids.len())).map(|row| row as u32).collect();
            let normed = self.normed(&self.backend.select_rows(&x, &rows)?)?;
            f(begin, &self.backend.download(&self.backend.logits(&normed, &self.head)?)?)?;
        }
        Ok(())
    }
}

/// Number of logits that [`Decoder::all_logits`] holds at a time.
const LOGITS_AT_ONCE: usize = 8 << 20;

/// Divides prompts into runs of at most as many tokens as one prefill computes.
fn chunks<T>(prompts: &[T], tokens: impl Fn(&T) -> usize) -> Vec<Range<usize>> {
    let mut chunks: Vec<Range<usize>> = Vec::new();
    let mut sum = 0;
    for (index, prompt) in prompts.iter().enumerate() {
        sum += tokens(prompt);
        match chunks.last_mut() {
            Some(chunk) if sum <= PREFILL_TOKENS as usize => chunk.end = index + 1,
            Some(_) | None => {
                sum = tokens(prompt);
                chunks.push(index..index + 1);
            }
        }
    }
    chunks
}
