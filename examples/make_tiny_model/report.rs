//! How well the written model knows the right and the wrong answers.

use std::path::Path;

use candle_core::{D, Device, Tensor};
use tokenizers::Tokenizer;

use crate::Failure;
use crate::model::{Model, Shape};
use crate::text::{Problem, Text, WORDINGS};
use crate::tokenizer::{END, PAD};
use crate::train::{Batch, encode};

/// Longest answer, its end included.
const MAX_TOKENS: usize = 5;

struct Measured {
    problem: Problem,
    greedy: String,
    right: f64,
    wrong: f64,
}

/// Prints greedy accuracy and the probabilities of right and wrong answers, held-out and job data, by wording.
pub fn print(tokenizer: &Tokenizer, shape: Shape, model_dir: &Path, text: &Text) -> Result<(), Failure> {
    let model = Model::load(shape, &model_dir.join("model.safetensors"))?;
    let parameters: usize = model.parameters().iter().map(|(_, var)| var.elem_count()).sum();
    println!("{parameters} parameters, {} tokens in the vocabulary", shape.vocab_size);
    let held_out = measure(tokenizer, &model, text.held_out())?;
    println!(
        "held-out: wording | n | greedy right | greedy right or wrong | p(right) mean, 5th percentile, least | p(wrong) mean"
    );
    for (index, wording) in WORDINGS.iter().enumerate() {
        let rows: Vec<&Measured> = held_out.iter().filter(|row| row.problem.wording == index).collect();
        line(wording.template, &rows);
    }
    line("held-out", &held_out.iter().collect::<Vec<_>>());
    let job = measure(tokenizer, &model, &text.job_rows(crate::JOB_SEED, 256))?;
    line("256 of the job's", &job.iter().collect::<Vec<_>>());
    Ok(())
}

fn line(name: &str, rows: &[&Measured]) {
    let n = rows.len();
    let mean = |f: &dyn Fn(&Measured) -> f64| rows.iter().map(|row| f(row)).sum::<f64>() / n as f64;
    let is = |greedy: &str, answer: u32| greedy == answer.to_string();
    let right = mean(&|row| f64::from(u8::from(is(&row.greedy, row.problem.right()))));
    let known = mean(&|row| {
        let known = is(&row.greedy, row.problem.right()) || is(&row.greedy, row.problem.wrong());
        f64::from(u8::from(known))
    });
    let mut probabilities: Vec<f64> = rows.iter().map(|row| row.right).collect();
    probabilities.sort_by(f64::total_cmp);
    println!(
        "{name:<30} | {n:>4} | {right:.3} | {known:.3} | {:.3}, {:.3}, {:.3} | {:.3}",
        mean(&|row| row.right),
        probabilities[n / 20],
        probabilities[0],
        mean(&|row| row.wrong),
    );
}

fn measure(tokenizer: &Tokenizer, model: &Model, problems: &[Problem]) -> Result<Vec<Measured>, Failure> {
    let greedy = greedy(tokenizer, model, problems)?;
    let right = probabilities(tokenizer, model, problems, Problem::right)?;
    let wrong = probabilities(tokenizer, model, problems, Problem::wrong)?;
    Ok(problems
        .iter()
        .zip(greedy)
        .zip(right.into_iter().zip(wrong))
        .map(|((&problem, greedy), (right, wrong))| Measured { problem, greedy, right, wrong })
        .collect())
}

/// The probability of a whole answer, its end included.
fn probabilities(
    tokenizer: &Tokenizer,
    model: &Model,
    problems: &[Problem],
    answer: fn(&Problem) -> u32,
) -> Result<Vec<f64>, Failure> {
    let pad = tokenizer.token_to_id(PAD).ok_or("no pad token")?;
    let rows = problems
        .iter()
        .map(|problem| encode(tokenizer, &problem.question(), answer(problem)))
        .collect::<Result<Vec<_>, _>>()?;
    let log_probs = Batch::new(&rows, pad)?.log_probs(model)?.to_vec1::<f32>()?;
    let mut rest = log_probs.as_slice();
    let mut probabilities = Vec::with_capacity(rows.len());
    for (_, completion) in &rows {
        let (own, after) = rest.split_at(completion.len());
        probabilities.push(own.iter().copied().map(f64::from).sum::<f64>().exp());
        rest = after;
    }
    Ok(probabilities)
}

/// Greedy answers, the whole text gone through again for each token.
fn greedy(tokenizer: &Tokenizer, model: &Model, problems: &[Problem]) -> Result<Vec<String>, Failure> {
    let end = tokenizer.token_to_id(END).ok_or("no end token")?;
    let mut rows = problems
        .iter()
        .map(|problem| Ok(encode(tokenizer, &problem.question(), 0)?.0))
        .collect::<Result<Vec<_>, Failure>>()?;
    let starts: Vec<usize> = rows.iter().map(Vec::len).collect();
    for _ in 0..MAX_TOKENS {
        let length = rows.iter().map(Vec::len).max().unwrap_or(0);
        let at: Vec<u32> = rows.iter().enumerate().map(|(i, row)| (i * length + row.len() - 1) as u32).collect();
        let padded: Vec<u32> = rows
            .iter()
            .flat_map(|row| row.iter().copied().chain(std::iter::repeat_n(end, length - row.len())))
            .collect();
        let tokens = Tensor::from_vec(padded, (rows.len(), length), &Device::Cpu)?;
        let at = Tensor::from_vec(at, rows.len(), &Device::Cpu)?;
        let best = model.logits(&tokens, &at)?.argmax(D::Minus1)?.to_vec1::<u32>()?;
        for (row, token) in rows.iter_mut().zip(best) {
            row.push(token);
        }
    }
    rows.iter()
        .zip(starts)
        .map(|(row, start)| {
            let completion = row[start..].split(|&token| token == end).next().unwrap_or_default();
            tokenizer.decode(completion, true)
        })
        .collect()
}
