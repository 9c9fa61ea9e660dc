//! The language-model head `[vocab, hidden]`, streamed: a buffer of bounded size holds the logits of some rows; `[rows,
//! vocab]` is never in memory.
//!
//! For each row and 512 tokens, the largest logit, Σ eᶻ and Σ eᶻ·z are kept and combined in a fixed order. With
//! [`Gemm::Exact`], [`choose`] therefore reports exactly the log-probs of [`score`], bit for bit.

#[cfg(test)]
mod tests;

use super::super::head::{Chosen, Filters, Pick, TokenScore, factor};
use super::attention::address;
use super::driver::{Buffer, CudaError, Device, Launch, params};
use super::gemm::{Form, Gemm, Product, outer, product};
use super::rows::{Dtype, Result, Rows, size};

/// Number of tokens in a cell, a part of the vocabulary.
const CELL: usize = 512;
/// Minimum number of rows whose logits are in memory together.
const MIN_ROWS: usize = 16;
/// Maximum size of a grid in y, in blocks.
const GRID_Y: usize = 1 << 14;

/// The language-model head, and the implementation of its matrix products.
#[derive(Clone, Copy, Debug)]
pub struct Head<'a> {
    /// The matrix `[vocab, hidden]` of the head, with the same type as the input rows.
    pub weight: Rows<'a>,
    /// The implementation of the products.
    pub gemm: Gemm,
    /// Maximum number of f32 logits in memory; those of 16 rows are, even if they exceed it.
    pub max_logits: usize,
}

/// The normalizers of each row's probabilities, on the device: `[rows][2]` of f64. Behind them are the rows' scores, `[rows][2]` of
/// f32, so that one copy reads both.
#[derive(Debug)]
pub struct Normalizers {
    buffer: Buffer,
    rows: usize,
}

params! {
    struct HeadCells {
        logits: u64, cells: u64, picks: u64, stride: u64,
        rows: u32, vocab: u32, cells_of_row: u32, t: f32,
    }
}

params! {
    struct HeadScores {
        logits: u64, cells: u64, targets: u64, scores: u64, normalizers: u64, stride: u64,
        rows: u32, cells_of_row: u32, t: f32, pad: u32,
    }
}

params! {
    struct HeadGradient {
        logits: u64, d_logits: u64, normalizers: u64, targets: u64, g: u64, stride: u64, d_stride: u64,
        rows: u32, vocab: u32, columns: u32, t: f32,
    }
}

params! {
    struct HeadChoose {
        logits: u64, cells: u64, picks: u64, filters: u64, tokens: u64, logps: u64, stride: u64,
        rows: u32, vocab: u32, cells_of_row: u32, pad: u32,
    }
}

/// The logits of some rows, and their cells: the sums over each 512 tokens.
struct Logits {
    buffer: Buffer,
    cells: Buffer,
    vocab: usize,
    stride: usize,
    cells_of_row: usize,
    /// Number of rows whose logits fit into memory together.
    at_once: usize,
}

impl Logits {
    fn new(device: &Device, head: &Head<'_>, rows: usize) -> Result<Logits> {
        let vocab = head.weight.rows;
        if vocab == 0 || head.weight.width == 0 {
            return Err(CudaError::Input("the head has no tokens".to_owned()));
        }
        // Kernels read and write up to eight logits together, so pad each row.
        let stride = vocab.next_multiple_of(64);
        let at_once = (head.max_logits / stride).max(MIN_ROWS).min(rows.max(1));
        let cells_of_row = vocab.div_ceil(CELL);
        let buffer = device.alloc(at_once * stride * 4)?;
        let cells = device.alloc(at_once * cells_of_row * 3 * 4)?;
        Ok(Logits { buffer, cells, vocab, stride, cells_of_row, at_once })
    }

    fn rows(&self, rows: usize) -> Rows<'_> {
        Rows { buffer: &self.buffer, at: 0, rows, width: self.vocab, stride: self.stride, dtype: Dtype::F32 }
    }

    /// Computes the logits of some rows.
    fn compute(&self, device: &Device, head: &Head<'_>, x: Rows<'_>) -> Result<()> {
        product(device, head.gemm, &Product::new(Form::Nt, x, head.weight), self.rows(x.rows))
    }

    /// Computes the cells (sums over 512 tokens) of `rows` rows, at 1 / temperature `t`, or at the temperature
    /// of each row's pick.
    fn summarize(&self, device: &Device, rows: usize, t: f32, picks: u64) -> Result<()> {
        let params = HeadCells {
            logits: self.buffer.pointer(),
            cells: self.cells.pointer(),
            picks,
            stride: self.stride as u64,
            rows: rows as u32,
            vocab: self.vocab as u32,
            cells_of_row: self.cells_of_row as u32,
            t,
        };
        let grid = [self.cells_of_row.div_ceil(4) as u32, rows.min(GRID_Y) as u32, rows.div_ceil(GRID_Y) as u32];
        device.launch("head_cells", Launch { grid, block: 128, shared: 0 }, &params)
    }
}

/// Selects `rows` rows from `first` on; a single row stands for all of them.
fn some<'a>(x: Rows<'a>, first: usize, rows: usize) -> Rows<'a> {
    Rows { at: x.at + first * x.stride, rows, ..x }
}

fn check(head: &Head<'_>, x: &Rows<'_>, rows: usize) -> Result<()> {
    address(x, rows, head.weight.width, "the input of the head")?;
    if x.dtype == head.weight.dtype {
        Ok(())
    } else {
        Err(CudaError::Input(format!("rows of type {:?} do not match a head of type {:?}", x.dtype, head.weight.dtype)))
    }
}

fn check_targets(head: &Head<'_>, targets: &[u32]) -> Result<()> {
    match targets.iter().find(|target| **target as usize >= head.weight.rows) {
        Some(target) => {
            Err(CudaError::Input(format!("token {target} is not below the vocabulary size {}", head.weight.rows)))
        }
        None => Ok(()),
    }
}

/// Computes the log-prob of each row's target, log-softmax(x · weightᵀ / temperature), and the entropy. x `[rows,
/// hidden]` is already normed.
///
/// # Errors
/// [`CudaError::Input`] if a shape or type does not match, or a target is not a token.
pub fn score(
    device: &Device,
    head: &Head<'_>,
    x: Rows<'_>,
    targets: &[u32],
    temperature: f64,
) -> Result<(Vec<TokenScore>, Normalizers)> {
    let rows = targets.len();
    check(head, &x, rows)?;
    check_targets(head, targets)?;
    let buffer = device.alloc(rows * 2 * (8 + 4))?;
    if rows > 0 {
        let (logits, targets) = (Logits::new(device, head, rows)?, device.upload(targets)?);
        let t = factor(temperature);
        for first in (0..rows).step_by(logits.at_once) {
            let count = logits.at_once.min(rows - first);
            logits.compute(device, head, some(x, first, count))?;
            logits.summarize(device, count, t, 0)?;
            let params = HeadScores {
                logits: logits.buffer.pointer(),
                cells: logits.cells.pointer(),
                targets: targets.at::<u32>(first, count)?,
                scores: buffer.at::<f32>(2 * (2 * rows + first), 2 * count)?,
                normalizers: buffer.at::<f64>(2 * first, 2 * count)?,
                stride: logits.stride as u64,
                rows: count as u32,
                cells_of_row: logits.cells_of_row as u32,
                t,
                pad: 0,
            };
            let grid = [count.div_ceil(4) as u32, 1, 1];
            device.launch("head_scores", Launch { grid, block: 128, shared: 0 }, &params)?;
        }
    }
    let words = device.download::<u32>(&buffer, 0, 6 * rows)?;
    Ok((scores_of(&words), Normalizers { buffer, rows }))
}

/// Decodes normalizers and scores as words: four words of two normalizers for each row, then two words of its scores.
fn scores_of(words: &[u32]) -> Vec<TokenScore> {
    let (normalizers, scores) = words.split_at(words.len() / 6 * 4);
    let of_row = |(normalizer, score): (&[u32], &[u32])| {
        let sum = f64::from_bits(u64::from(normalizer[2]) | (u64::from(normalizer[3]) << 32));
        let (logp, entropy) = (f32::from_bits(score[0]), f32::from_bits(score[1]));
        // The kernel computes −log(sum) for a target with the largest logit, and less for any other.
        let largest = -sum.ln();
        TokenScore { logp, entropy, is_top: logp >= largest as f32 }
    };
    normalizers.chunks_exact(4).zip(scores.chunks_exact(2)).map(of_row).collect()
}

/// The inputs of [`score_vjp`].
#[derive(Clone, Copy, Debug)]
pub struct Backward<'a> {
    /// The rows passed to [`score`].
    pub x: Rows<'a>,
    /// The targets passed to [`score`].
    pub targets: &'a [u32],
    /// The temperature passed to [`score`].
    pub temperature: f64,
    /// The normalizers returned by [`score`].
    pub normalizers: &'a Normalizers,
    /// The gradient dL/dlogp of each row.
    pub g: &'a [f32],
    /// A matrix `[vocab, hidden]` of f32 to which dL/dweight is added, if given.
    pub d_weight: Option<Rows<'a>>,
}

/// Computes dx `[rows, hidden]` (f32, or bf16 if x is) = dL/dx of the log-probs.
///
/// # Errors
/// [`CudaError::Input`] if a shape or type does not match, or a target is not a token.
pub fn score_vjp(device: &Device, head: &Head<'_>, backward: &Backward<'_>, dx: Rows<'_>) -> Result<()> {
    let Backward { x, targets, temperature, normalizers, g, d_weight } = *backward;
    let rows = targets.len();
    check(head, &x, rows)?;
    check_targets(head, targets)?;
    address(&dx, rows, head.weight.width, "dL/dx of the head")?;
    if normalizers.rows != rows || g.len() != rows {
        return Err(CudaError::Input(format!(
            "{} normalizers and {} gradients for {rows} rows",
            normalizers.rows,
            g.len()
        )));
    }
    if rows == 0 {
        return Ok(());
    }
    let logits = Logits::new(device, head, rows)?;
    let (targets, g) = (device.upload(targets)?, device.upload(g)?);
    let d_logits = device.alloc(logits.at_once * logits.stride * x.dtype.bytes())?;
    for first in (0..rows).step_by(logits.at_once) {
        let count = logits.at_once.min(rows - first);
        let x = some(x, first, count);
        logits.compute(device, head, x)?;
        let params = HeadGradient {
            logits: logits.buffer.pointer(),
            d_logits: d_logits.pointer(),
            normalizers: normalizers.buffer.at::<f64>(2 * first, 2 * count)?,
            targets: targets.at::<u32>(first, count)?,
            g: g.at::<f32>(first, count)?,
            stride: logits.stride as u64,
            d_stride: logits.stride as u64,
            rows: count as u32,
            vocab: logits.vocab as u32,
            columns: logits.stride as u32,
            t: factor(temperature),
        };
        let blocks = logits.stride.div_ceil(8 * 256) as u32;
        let grid = [blocks, count.min(GRID_Y) as u32, count.div_ceil(GRID_Y) as u32];
        let name = format!("head_gradient_{}", x.dtype.name());
        device.launch(&name, Launch { grid, block: 256, shared: 0 }, &params)?;
        let dy = Rows { buffer: &d_logits, dtype: x.dtype, ..logits.rows(count) };
        product(device, head.gemm, &Product::new(Form::Nn, dy, head.weight), some(dx, first, count))?;
        if let Some(d_weight) = d_weight {
            outer(device, head.gemm, dy, x, 1.0, d_weight)?;
        }
    }
    Ok(())
}

/// Chooses one token per row: at temperature 0 the first of the largest logits, else the first token at which the
/// sum of its probability and those of all lower ids exceeds `uniform`. With [`Gemm::Exact`], `logp` is exactly
/// the result of [`score`].
///
/// The method is inversion of the distribution function, not the maximum of logits with Gumbel noise, so that the
/// single random number of a row gives the same token as on the CPU. It is not slower either: log-probs need the sums
/// of 512 tokens anyway. A warp then searches these sums (297 for 151,936 tokens) and one cell, whereas noise would
/// need a random number for each token.
///
/// With filters, it chooses among the tokens that pass top-k, top-p and min-p, in this order (ties go to the lowest
/// id). The temperature must then be above 0, and `logp` still refers to the unfiltered distribution.
///
/// # Errors
/// [`CudaError::Input`] if a shape or type does not match, or filters are used at temperature 0 or below.
pub fn choose(device: &Device, head: &Head<'_>, x: Rows<'_>, picks: &[Pick], filters: &Filters) -> Result<Vec<Chosen>> {
    let chosen = device.alloc(chosen_bytes(picks.len()))?;
    begin_choose(device, head, x, picks, filters, &chosen)?;
    Ok(chosen_of(&device.download(&chosen, 0, 2 * picks.len())?, picks.len()))
}

/// Size in bytes of the output of [`begin_choose`] for `rows` rows.
pub fn chosen_bytes(rows: usize) -> usize {
    rows * 2 * 4
}

/// Starts [`choose`] without waiting, since graphs must not wait. `chosen` receives one token per row (u32), then one
/// log-prob per row (f32); read it with [`chosen_of`].
///
/// # Errors
/// [`CudaError::Input`] if a shape or type does not match, or filters are used at temperature 0 or below.
pub fn begin_choose(
    device: &Device,
    head: &Head<'_>,
    x: Rows<'_>,
    picks: &[Pick],
    filters: &Filters,
    chosen: &Buffer,
) -> Result<()> {
    let rows = picks.len();
    check(head, &x, rows)?;
    let values: Vec<f64> = picks.iter().flat_map(|pick| [pick.temperature, pick.uniform]).collect();
    let values = device.upload(&values)?;
    if rows == 0 {
        return Ok(());
    }
    let Filters { top_k, top_p, min_p } = *filters;
    let filters = match filters.are_off() {
        true => None,
        false if picks.iter().any(|pick| pick.temperature <= 0.0) => {
            return Err(CudaError::Input("filters need a temperature above 0".to_owned()));
        }
        false => Some(device.upload(&[top_p, min_p, f64::from(top_k)])?),
    };
    let logits = Logits::new(device, head, rows)?;
    for first in (0..rows).step_by(logits.at_once) {
        let count = logits.at_once.min(rows - first);
        logits.compute(device, head, some(x, first, count))?;
        let picks = values.at::<f64>(2 * first, 2 * count)?;
        logits.summarize(device, count, 1.0, picks)?;
        let params = HeadChoose {
            logits: logits.buffer.pointer(),
            cells: logits.cells.pointer(),
            picks,
            filters: filters.as_ref().map_or(0, Buffer::pointer),
            tokens: chosen.at::<u32>(first, count)?,
            logps: chosen.at::<f32>(rows + first, count)?,
            stride: logits.stride as u64,
            rows: count as u32,
            vocab: logits.vocab as u32,
            cells_of_row: logits.cells_of_row as u32,
            pad: 0,
        };
        // Shared memory for filters: 8 sums and a list of 512 logits for each of 16 warps, and one f64 and u32 per cell.
        // Without filters only the f64.
        let (name, block, shared) = match filters {
            Some(_) => ("head_choose_filtered", 512, 16 * (8 * 8 + 512 * 4) + 12 * logits.cells_of_row),
            None => ("head_choose", 32, 8 * logits.cells_of_row),
        };
        let launch = Launch { grid: [count as u32, 1, 1], block, shared: size(shared)? };
        device.launch(name, launch, &params)?;
    }
    Ok(())
}

/// Decodes the output of [`begin_choose`] for the first `rows` rows; `words` holds two words for each row.
pub fn chosen_of(words: &[u32], rows: usize) -> Vec<Chosen> {
    let (tokens, logps) = words.split_at(words.len() / 2);
    let chosen = tokens.iter().zip(logps).take(rows);
    chosen.map(|(token, logp)| Chosen { token: *token, logp: f32::from_bits(*logp) }).collect()
}

/// Computes out `[rows, vocab]` (f32) = x · weightᵀ.
///
/// # Errors
/// [`CudaError::Input`] if a shape or type does not match.
pub fn logits(device: &Device, head: &Head<'_>, x: Rows<'_>, out: Rows<'_>) -> Result<()> {
    check(head, &x, x.rows)?;
    address(&out, x.rows, head.weight.rows, "the logits")?;
    if x.rows == 0 { Ok(()) } else { product(device, head.gemm, &Product::new(Form::Nt, x, head.weight), out) }
}
