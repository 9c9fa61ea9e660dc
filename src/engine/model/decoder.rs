//! The decoder over any backend: packed forward, backward layer by layer, prefill and decode.

use std::collections::HashMap;
use std::sync::Arc;

use super::decode::{Picks, Rows};
use super::layer::{self, Batch, Layer, Norm, Saved};
use super::packing::{Packing, Target};
use super::pass::Pass;
use super::rope::RopeTables;
use super::{Adapter, EMBEDDING, HEAD, NORM, Row, unknown_token};
use crate::engine::backend::{Backend, Choice, Chosen, Flat, FullSlot, HeadBackward, Step, Tokens};
use crate::engine::error::{EngineError, Result};
use crate::engine::load::Weights;
use crate::engine::lora::Lora;
use crate::engine::model::full::Full;
use crate::engine::ops::slices::TokenScore;
use crate::modelcard::ModelConfig;
use crate::spec::footprint::PREFILL_TOKENS;

/// A model's weights on a backend.
#[derive(Clone, Debug)]
pub struct Decoder<B: Backend> {
    backend: B,
    config: Arc<ModelConfig>,
    embedding: B::Weight,
    layers: Vec<Layer<B>>,
    norm: Norm<B>,
    /// The embedding itself where tied.
    head: B::Weight,
    /// Where the gradients of embedding and head begin, where they are trained.
    slots: Option<(usize, usize)>,
    rope: Arc<RopeTables>,
    gradient_checkpointing: bool,
}

/// From the new scores to dL/dlogp, one a target.
pub type TargetLoss<'l> = dyn FnMut(&[TokenScore]) -> Result<Vec<f32>> + 'l;

impl<B: Backend> Decoder<B> {
    /// Load a checkpoint's weights.
    pub fn load(backend: B, weights: &mut Weights, config: &ModelConfig) -> Result<Self> {
        let mut matrix =
            |name: &str| -> Result<B::Weight> { backend.weight(weights.values(name)?.0, config.hidden_size, None) };
        let embedding = matrix(EMBEDDING)?;
        let head = if config.tie_word_embeddings { embedding.clone() } else { matrix(HEAD)? };
        let layers = (0..config.num_hidden_layers)
            .map(|index| Layer::load(&backend, weights, config, index))
            .collect::<Result<Vec<Layer<B>>>>()?;
        let norm = Norm::new(&backend, weights.values(NORM)?.0)?;
        let rope = Arc::new(RopeTables::new(config));
        Ok(Decoder {
            backend,
            config: Arc::new(config.clone()),
            embedding,
            layers,
            norm,
            head,
            slots: None,
            rope,
            gradient_checkpointing: false,
        })
    }

    /// What computes.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Another phase begins, or memory is short.
    pub fn release(&self) {
        self.backend.release();
    }

    /// Whether sampling gives the log-probs of a training forward, bit for bit.
    pub fn samples_exactly(&self) -> bool {
        self.backend.samples_exactly()
    }

    /// Compute a layer's activations again in the backward instead of keeping them; changes no number.
    pub fn set_gradient_checkpointing(&mut self, gradient_checkpointing: bool) {
        self.gradient_checkpointing = gradient_checkpointing;
    }

    /// Train an adapter with these values.
    pub fn set_lora(&mut self, lora: &Lora) -> Result<()> {
        let parameters = self.backend.held(&lora.values)?;
        let law = (lora.config.r, lora.config.scaling());
        for (index, layer) in self.layers.iter_mut().enumerate() {
            for linear in layer.linears_mut() {
                linear.set_lora(&self.backend, parameters, law, |module| lora.slots(index, module))?;
            }
        }
        Ok(())
    }

    /// Train all weights, beginning with these values.
    pub fn set_full(&mut self, full: &Full) -> Result<()> {
        let backend = self.backend.clone();
        let parameters = backend.held(&full.values)?;
        // New weights come while the old ones are there: what a training pass took makes room.
        backend.release();
        // One matrix at a time, so that no second copy of the model is alive.
        let (vocab, hidden) = (self.config.vocab_size, self.config.hidden_size);
        let matrix = |name: &str| -> Result<B::Weight> {
            let slot = FullSlot { outputs: 0..vocab, weight: full.place(name)?.start, bias: None };
            backend.weight_of(parameters, &[slot], hidden)
        };
        let at = |name: &str| full.place(name).map(|place| place.start);
        self.embedding = matrix(EMBEDDING)?;
        let tied = self.config.tie_word_embeddings;
        self.head = if tied { self.embedding.clone() } else { matrix(HEAD)? };
        self.slots = Some((at(EMBEDDING)?, at(if tied { EMBEDDING } else { HEAD })?));
        self.norm = Norm::trained(&backend, parameters, full.place(NORM)?)?;
        for (index, layer) in self.layers.iter_mut().enumerate() {
            let name = |inside: &str| format!("model.layers.{index}.{inside}");
            layer.set_norms(&backend, parameters, |inside| full.place(&name(inside)))?;
            for linear in layer.linears_mut() {
                linear.set_weights(&backend, parameters, |module| {
                    let path = module.path();
                    Ok((at(&name(&format!("{path}.weight")))?, at(&name(&format!("{path}.bias"))).ok()))
                })?;
            }
        }
        Ok(())
    }

    /// Rows of the vocabulary.
    fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    fn windows(&self) -> &[Option<usize>] {
        &self.config.windows
    }

    /// Pack rows to be scored.
    pub fn pack(&self, rows: &[Row<'_>]) -> Result<Packing> {
        for row in rows {
            self.check_ids(row.completion)?;
        }
        Packing::rows(rows, self.windows(), |n| self.rope.table(n))
    }

    fn check_ids(&self, ids: &[u32]) -> Result<()> {
        match ids.iter().find(|id| **id as usize >= self.vocab_size()) {
            Some(id) => Err(EngineError::Input(unknown_token(*id, self.vocab_size() as u32))),
            None => Ok(()),
        }
    }

    fn embed(&self, ids: &[u32]) -> Result<B::Tensor> {
        self.check_ids(ids)?;
        self.backend.embed(&self.embedding, ids)
    }

    fn batch<'p>(&self, packing: &'p Packing) -> Result<Batch<'p, B>> {
        Ok(Batch { packing, angles: self.backend.angles(&packing.table, &packing.positions)? })
    }

    /// The residual stream after the last layer.
    fn hidden(&self, packing: &Packing, adapter: Adapter) -> Result<B::Tensor> {
        let batch = self.batch(packing)?;
        let mut x = self.embed(&packing.ids)?;
        for layer in &self.layers {
            x = layer.forward(&self.backend, &x, &batch, Pass::inference(adapter))?.0;
        }
        Ok(x)
    }

    fn normed(&self, x: &B::Tensor) -> Result<B::Tensor> {
        self.backend.rms_norm(x, &self.norm.weight, self.eps())
    }

    fn eps(&self) -> f32 {
        self.config.rms_norm_eps as f32
    }

    /// Log-probs and entropies of the packing's targets; no gradient.
    pub fn score(&self, packing: &Packing, temperature: f64, adapter: Adapter) -> Result<Vec<TokenScore>> {
        let x = self.hidden(packing, adapter)?;
        let (from, ids) = split(&packing.targets);
        let normed = self.normed(&self.backend.select(&x, &from)?)?;
        drop(x);
        let (scores, _) = self.backend.score(&normed, &self.head, &ids, temperature)?;
        Ok(scores)
    }

    /// Forward, loss, backward: what it adds to the gradient may come later.
    pub fn forward_backward(
        &self,
        packing: &Packing,
        temperature: f64,
        pass: Pass<'_>,
        loss: &mut TargetLoss<'_>,
        gradient: &mut Flat,
    ) -> Result<()> {
        let backend = &self.backend;
        let gradient = backend.held_mut(gradient)?;
        let batch = self.batch(packing)?;
        // Forward, keeping each layer's input, and what its backward reads unless that is to be computed again.
        let mut inputs: Vec<(B::Tensor, Option<Saved<B>>)> = Vec::with_capacity(self.layers.len());
        let mut x = self.embed(&packing.ids)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let pass = pass.in_layer(index);
            let (y, saved) = if self.gradient_checkpointing {
                (layer.forward(backend, &x, &batch, pass)?.0, None)
            } else {
                match layer.forward_saving(backend, &x, &batch, pass, true)? {
                    (Some(y), saved) => (y, Some(saved)),
                    (None, _) => return Err(EngineError::Input("a layer gave no output".to_owned())),
                }
            };
            inputs.push((std::mem::replace(&mut x, y), saved));
        }
        let (from, ids) = split(&packing.targets);
        let hidden = backend.select(&x, &from)?;
        drop(x);
        let normed = self.normed(&hidden)?;
        let (scores, normalizers) = backend.score(&normed, &self.head, &ids, temperature)?;
        let g = loss(&scores)?;
        if g.iter().all(|g| *g == 0.0) {
            return Ok(());
        }
        // Backward from the top, one layer's activations at a time.
        let head = HeadBackward {
            x: &normed,
            head: &self.head,
            targets: &ids,
            temperature,
            normalizers: &normalizers,
            g: &g,
            at: self.slots.map(|(_, head)| head),
        };
        let d_normed = backend.score_vjp(&head, gradient)?;
        drop(normed);
        let d_hidden = backend.rms_norm_vjp(&hidden, &self.norm.weight, self.eps(), &d_normed, None)?;
        if let Some(at) = self.norm.slot {
            backend.rms_norm_weight_vjp(&hidden, self.eps(), &d_normed, gradient, at)?;
        }
        drop((hidden, d_normed));
        let mut dx = backend.spread(&d_hidden, &from, packing.ids.len())?;
        drop(d_hidden);
        for (index, layer) in self.layers.iter().enumerate().rev() {
            let Some((input, saved)) = inputs.pop() else { break };
            let pass = pass.in_layer(index);
            let saved = match saved {
                Some(saved) => saved,
                None => layer.forward_saving(backend, &input, &batch, pass, false)?.1,
            };
            dx = layer.vjp(backend, (&input, saved), &batch, &dx, pass, gradient)?;
        }
        match self.slots {
            Some((at, _)) => backend.embed_vjp(&packing.ids, &dx, gradient, at),
            None => Ok(()),
        }
    }

    /// The full logits at some positions of one sequence.
    pub fn logits(&self, ids: &[u32], positions: &[usize], adapter: Adapter) -> Result<Vec<f32>> {
        let packing = Packing::sequences(&[ids], self.windows(), |n| self.rope.table(n));
        let x = self.hidden(&packing, adapter)?;
        let at: Vec<u32> = positions.iter().map(|p| *p as u32).collect();
        let normed = self.normed(&self.backend.select(&x, &at)?)?;
        self.backend.values(&self.backend.logits(&normed, &self.head)?)
    }

    /// The normed hidden state of each sequence's last token, `[sequences][hidden_size]`: what a score head reads.
    pub fn last_hidden(&self, sequences: &[&[u32]]) -> Result<Vec<f32>> {
        let packing = Packing::sequences(sequences, self.windows(), |n| self.rope.table(n));
        let x = self.hidden(&packing, Adapter::Off)?;
        let mut end = 0;
        let last: Vec<u32> = sequences
            .iter()
            .map(|sequence| {
                end += sequence.len() as u32;
                end - 1
            })
            .collect();
        self.backend.values(&self.normed(&self.backend.select(&x, &last)?)?)
    }

    /// No rows yet.
    pub fn begin(&self, adapter: Adapter) -> Rows<B> {
        self.backend.release();
        let cache = self.backend.cache(&layer::heads(&self.config), self.layers.len());
        Rows { adapter, cache, hidden: None, picked: None, due: None, lengths: Vec::new() }
    }

    /// Compute each distinct prompt once and append `num_copies` rows for each, prompt-major.
    pub fn join(&self, rows: &mut Rows<B>, prompts: &[&[u32]], num_copies: usize, max_new_tokens: usize) -> Result<()> {
        let mut number: HashMap<&[u32], usize> = HashMap::new();
        let mut distinct: Vec<&[u32]> = Vec::new();
        for (index, prompt) in prompts.iter().enumerate() {
            if prompt.is_empty() {
                return Err(EngineError::Input(format!("prompt {index} is empty; at least one token is needed")));
            }
            number.entry(prompt).or_insert_with(|| {
                distinct.push(prompt);
                distinct.len() - 1
            });
        }
        // (number in the cache, last hidden row) of each distinct prompt.
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
            let (first, last) = self.prefill(rows, chunk)?;
            known.extend(first..first + chunk.len());
            lasts.push(last);
            rest = after;
        }
        let last = self.backend.stack(&lasts.iter().collect::<Vec<_>>())?;
        let mut copies: Vec<u32> = Vec::with_capacity(prompts.len() * num_copies);
        for prompt in prompts {
            let index = number[prompt];
            copies.extend(std::iter::repeat_n(index as u32, num_copies));
            rows.lengths.extend(std::iter::repeat_n(prompt.len(), num_copies));
            self.backend.cache_rows(&mut rows.cache, known[index], num_copies, max_new_tokens)?;
        }
        self.backend.close_prompts(&mut rows.cache);
        let joined = self.backend.select(&last, &copies)?;
        rows.hidden = Some(match rows.hidden.take() {
            Some(hidden) => self.backend.stack(&[&hidden, &joined])?,
            None => joined,
        });
        Ok(())
    }

    /// The first prompt's number in the cache, and the last token's hidden row of each.
    fn prefill(&self, rows: &mut Rows<B>, prompts: &[&[u32]]) -> Result<(usize, B::Tensor)> {
        let packing = Packing::sequences(prompts, self.windows(), |n| self.rope.table(n));
        let batch = self.batch(&packing)?;
        let lengths: Vec<usize> = prompts.iter().map(|prompt| prompt.len()).collect();
        let mut x = self.embed(&packing.ids)?;
        let first = self.backend.cache_prompts(&mut rows.cache, &lengths)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let (y, qkv) = layer.forward(&self.backend, &x, &batch, Pass::inference(rows.adapter))?;
            x = y;
            self.backend.fill_prompts(&mut rows.cache, first, index, &qkv)?;
        }
        let mut end = 0;
        let last = lengths.iter().map(|length| {
            end += *length as u32;
            end - 1
        });
        Ok((first, self.backend.select(&x, &last.collect::<Vec<u32>>())?))
    }

    /// Next-token logits of every row.
    pub fn next_logits(&self, rows: &Rows<B>) -> Result<Vec<f32>> {
        let Some(hidden) = &rows.hidden else { return Ok(Vec::new()) };
        self.backend.values(&self.backend.logits(&self.normed(hidden)?, &self.head)?)
    }

    /// The next token of every row, one pick each.
    pub fn choose(&self, rows: &Rows<B>, choice: Choice<'_>, chosen: &mut Vec<Chosen>) -> Result<()> {
        chosen.clear();
        let Choice { picks, filters } = choice;
        if let Some(due) = &rows.due {
            if due.filters != filters || due.picks != picks {
                return Err(EngineError::Input("the tokens were chosen already, by another choice".to_owned()));
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
                    let hidden = self.backend.select(hidden, &which)?;
                    self.backend.choose(&self.normed(&hidden)?, &self.head, rest, &mut joined)?;
                }
                *chosen = known.wait(&self.backend)?;
                chosen.append(&mut joined);
                Ok(())
            }
            Some(_) | None => self.backend.choose(&self.normed(hidden)?, &self.head, choice, chosen),
        }
    }

    /// Append one token to every row, and begin to choose the next if there are picks.
    pub fn append(&self, rows: &mut Rows<B>, tokens: &[u32], choice: Choice<'_>) -> Result<()> {
        self.check_ids(tokens)?;
        // By append_ahead, for all rows of then.
        if rows.due.take().is_some() || tokens.is_empty() {
            return Ok(());
        }
        // Its memory is used again.
        rows.picked = None;
        self.step(rows, Tokens::Known(tokens), choice)
    }

    /// Append the tokens that the last step chooses, which nobody has read yet.
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
        let table = self.rope.table(rows.lengths.iter().max().map_or(1, |length| length + 1));
        let pass = Pass::inference(rows.adapter);
        // Its memory is used again.
        rows.hidden = None;
        let step = Step { table: &table, tokens, positions: &rows.lengths, choice };
        let (x, picked) = backend.step(&mut rows.cache, &step, |cache, step| {
            let angles = backend.angles(step.table, step.positions)?;
            let mut x = backend.embed_step(&self.embedding, cache, step.tokens)?;
            for (index, layer) in self.layers.iter().enumerate() {
                let qkv = layer.project(backend, &x, &angles, pass)?;
                let attended = backend.attend_cached(&layer.heads, cache, index, layer.window, &qkv)?;
                x = layer.finish(backend, &x, &attended, pass)?;
            }
            let picked = match step.choice.picks.is_empty() {
                true => None,
                false => backend.pick_ahead(cache, || self.normed(&x), &self.head, step.choice)?,
            };
            Ok((x, picked))
        })?;
        rows.lengths.iter_mut().for_each(|length| *length += 1);
        rows.hidden = Some(x);
        let (picks, filters) = (choice.picks.to_vec(), choice.filters);
        rows.picked = picked.map(|picked| Picks { picks, filters, picked, kept: None });
        Ok(())
    }

    /// Keep the rows marked true; the others leave.
    pub fn retain(&self, rows: &mut Rows<B>, keep: &[bool]) -> Result<()> {
        let kept: Vec<u32> = (0..keep.len()).filter(|row| keep[*row]).map(|row| row as u32).collect();
        // What was chosen has been read, and is of rows in another order; or it is of the step after that.
        match &mut rows.picked {
            Some(picked) if rows.due.is_some() => picked.retain(&kept),
            _ => rows.picked = None,
        }
        self.backend.retain(&mut rows.cache, keep);
        rows.hidden = match rows.hidden.take() {
            Some(hidden) if !kept.is_empty() => Some(self.backend.select(&hidden, &kept)?),
            Some(_) | None => None,
        };
        rows.lengths = kept.iter().map(|row| rows.lengths[*row as usize]).collect();
        Ok(())
    }
}

fn split(targets: &[Target]) -> (Vec<u32>, Vec<u32>) {
    targets.iter().map(|target| (target.from as u32, target.id)).unzip()
}
