//! Next-token training on the answers, with AdamW and a linear decay.

use std::time::Instant;

use candle_core::{D, Device, Tensor, Var};
use tokenizers::Tokenizer;

use crate::Failure;
use crate::model::{Model, Shape};
use crate::text::{Random, Text};
use crate::tokenizer::{END, PAD, prompt};

/// What a training run is given.
pub struct Settings {
    /// Seed of the first weights.
    pub seed: u64,
    /// Optimizer steps.
    pub steps: usize,
    /// Examples a step.
    pub batch: usize,
    /// Highest learning rate.
    pub learning_rate: f64,
}

/// A step's examples go through the model in this many parts, one thread each; gradients are summed in a fixed order,
/// so that neither the number of cores nor who is first changes a bit.
const THREADS: usize = 2;

/// Rows that go through the model together: few enough for the caches.
const MICRO_BATCH: usize = 32;

/// Token ids with the flat positions that predict, and what they predict.
pub struct Batch {
    /// (B, T), padded on the right.
    pub tokens: Tensor,
    /// (N): row * T + column of each position before a completion token.
    pub at: Tensor,
    /// (N, 1): the completion tokens.
    pub targets: Tensor,
}

impl Batch {
    /// From prompts and completions.
    pub fn new(rows: &[(Vec<u32>, Vec<u32>)], pad: u32) -> candle_core::Result<Self> {
        let length = rows.iter().map(|(prompt, completion)| prompt.len() + completion.len() - 1).max().unwrap_or(1);
        let (mut tokens, mut at, mut targets) = (Vec::new(), Vec::new(), Vec::new());
        for (row, (prompt, completion)) in rows.iter().enumerate() {
            let start = tokens.len();
            tokens.extend(prompt);
            tokens.extend(&completion[..completion.len() - 1]);
            tokens.resize(start + length, pad);
            for (i, token) in completion.iter().enumerate() {
                at.push((row * length + prompt.len() - 1 + i) as u32);
                targets.push(*token);
            }
        }
        let count = at.len();
        Ok(Self {
            tokens: Tensor::from_vec(tokens, (rows.len(), length), &Device::Cpu)?,
            at: Tensor::from_vec(at, count, &Device::Cpu)?,
            targets: Tensor::from_vec(targets, (count, 1), &Device::Cpu)?,
        })
    }

    /// The log-probability of each completion token (N).
    pub fn log_probs(&self, model: &Model) -> candle_core::Result<Tensor> {
        let logits = model.logits(&self.tokens, &self.at)?;
        let shifted = logits.broadcast_sub(&logits.detach().max_keepdim(D::Minus1)?)?;
        let log_sum = shifted.exp()?.sum_keepdim(D::Minus1)?.log()?;
        (shifted.gather(&self.targets, D::Minus1)? - log_sum)?.squeeze(1)
    }
}

/// The token ids of a question's prompt and of an answer with its end.
pub fn encode(tokenizer: &Tokenizer, question: &str, answer: u32) -> Result<(Vec<u32>, Vec<u32>), Failure> {
    let prompt = tokenizer.encode_fast(prompt(question), false)?.get_ids().to_vec();
    let completion = tokenizer.encode_fast(format!("{answer}{END}"), false)?.get_ids().to_vec();
    Ok((prompt, completion))
}

/// Trains a model from scratch.
pub fn train(tokenizer: &Tokenizer, shape: Shape, text: &mut Text, settings: &Settings) -> Result<Model, Failure> {
    let model = Model::random(shape, &mut Random::new(settings.seed))?;
    let pad = tokenizer.token_to_id(PAD).ok_or("no pad token")?;
    let mut optimizer = AdamW::new(&model);
    let (started, mut smooth) = (Instant::now(), 0.0);
    for step in 0..settings.steps {
        let mut rows = Vec::with_capacity(settings.batch);
        for _ in 0..settings.batch {
            let (problem, answer) = text.next_example();
            rows.push(encode(tokenizer, &problem.question(), answer)?);
        }
        let (loss, gradients) = gradients(&model, &rows, pad)?;
        optimizer.step(&model, gradients, settings.learning_rate * schedule(step, settings.steps))?;
        smooth = if step == 0 { loss } else { 0.98 * smooth + 0.02 * loss };
        if (step + 1) % 50 == 0 || step + 1 == settings.steps {
            let seconds = started.elapsed().as_secs_f64();
            println!("step {:>5}/{}  loss {smooth:.4}  {seconds:.0} s", step + 1, settings.steps);
        }
    }
    Ok(model)
}

/// A short warm-up, then a straight line to zero.
fn schedule(step: usize, steps: usize) -> f64 {
    let warm_up = ((step + 1) as f64 / 50.0).min(1.0);
    warm_up * (1.0 - step as f64 / steps as f64)
}

/// Mean negative log-likelihood over the step's completion tokens, and its gradient per parameter.
fn gradients(model: &Model, rows: &[(Vec<u32>, Vec<u32>)], pad: u32) -> Result<(f64, Vec<Vec<f32>>), Failure> {
    let total: usize = rows.iter().map(|(_, completion)| completion.len()).sum();
    let parts = std::thread::scope(|scope| {
        let threads: Vec<_> = rows
            .chunks(rows.len().div_ceil(THREADS))
            .map(|rows| scope.spawn(move || part(model, rows, pad, total)))
            .collect();
        threads.into_iter().map(|thread| thread.join().map_err(|_| "a thread panicked")).collect::<Vec<_>>()
    });
    let mut sum = (0.0, Vec::new());
    for part in parts {
        add(&mut sum, part??);
    }
    Ok(sum)
}

/// One thread's part of loss and gradients.
fn part(model: &Model, rows: &[(Vec<u32>, Vec<u32>)], pad: u32, total: usize) -> Result<(f64, Vec<Vec<f32>>), Failure> {
    let mut sum = (0.0, Vec::new());
    for rows in rows.chunks(MICRO_BATCH) {
        add(&mut sum, micro_batch(model, &Batch::new(rows, pad)?, total)?);
    }
    Ok(sum)
}

/// Adds loss and gradients.
fn add(sum: &mut (f64, Vec<Vec<f32>>), (loss, gradients): (f64, Vec<Vec<f32>>)) {
    sum.0 += loss;
    if sum.1.is_empty() {
        sum.1 = gradients;
    } else {
        for (sum, gradient) in sum.1.iter_mut().flatten().zip(gradients.iter().flatten()) {
            *sum += gradient;
        }
    }
}

/// Loss and gradients of a few rows.
fn micro_batch(model: &Model, batch: &Batch, total: usize) -> Result<(f64, Vec<Vec<f32>>), Failure> {
    let loss = (batch.log_probs(model)?.sum_all()? * (-1.0 / total as f64))?;
    let store = loss.backward()?;
    let mut gradients = Vec::with_capacity(model.parameters().len());
    for (name, var) in model.parameters() {
        let gradient = store.get(var).ok_or_else(|| format!("{name} has no gradient"))?;
        gradients.push(gradient.flatten_all()?.to_vec1::<f32>()?);
    }
    Ok((f64::from(loss.to_scalar::<f32>()?), gradients))
}

/// AdamW (Loshchilov and Hutter 2019); matrices decay, norms do not. Gradients are clipped by their global norm.
struct AdamW {
    step: i32,
    moments: Vec<(Vec<f32>, Vec<f32>)>,
}

const BETA_1: f32 = 0.9;
const BETA_2: f32 = 0.98;
const EPSILON: f32 = 1e-8;
const WEIGHT_DECAY: f32 = 0.1;
const MAX_GRAD_NORM: f64 = 1.0;

impl AdamW {
    fn new(model: &Model) -> Self {
        let zeros = |var: &Var| vec![0f32; var.elem_count()];
        let moments = model.parameters().iter().map(|(_, var)| (zeros(var), zeros(var))).collect();
        Self { step: 0, moments }
    }

    fn step(&mut self, model: &Model, gradients: Vec<Vec<f32>>, learning_rate: f64) -> Result<(), Failure> {
        self.step += 1;
        let norm = gradients.iter().flatten().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
        let clip = (MAX_GRAD_NORM / (norm + 1e-6)).min(1.0) as f32;
        let learning_rate = learning_rate as f32;
        let correct_1 = 1.0 - BETA_1.powi(self.step);
        let correct_2 = 1.0 - BETA_2.powi(self.step);
        for (((_, var), gradient), (first, second)) in model.parameters().iter().zip(gradients).zip(&mut self.moments) {
            let decay = if var.rank() > 1 { 1.0 - learning_rate * WEIGHT_DECAY } else { 1.0 };
            let mut values = var.flatten_all()?.to_vec1::<f32>()?;
            for (((value, gradient), first), second) in
                values.iter_mut().zip(&gradient).zip(first.iter_mut()).zip(second.iter_mut())
            {
                let gradient = gradient * clip;
                *first = BETA_1 * *first + (1.0 - BETA_1) * gradient;
                *second = BETA_2 * *second + (1.0 - BETA_2) * gradient * gradient;
                let change = (*first / correct_1) / ((*second / correct_2).sqrt() + EPSILON);
                *value = *value * decay - learning_rate * change;
            }
            var.set(&Tensor::from_vec(values, var.shape(), &Device::Cpu)?)?;
        }
        Ok(())
    }
}
