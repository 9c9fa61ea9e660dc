//! Matrix products at the model's sizes: with few rows as in decode (limited by reading the weights), and with many rows as in
//! training (forward and dX).

mod attention;
mod head;

use serde::{Deserialize, Serialize};

use super::shape::{LinearShape, linear_shapes};
use super::timing::repeat;
use super::{BenchError, Setting};
use crate::config::Precision;
use crate::engine::error::EngineError;
use crate::engine::kernels::gemm::{Output, Term, backward, forward};
use crate::engine::kernels::isa::Isa;
use crate::engine::kernels::pack::{PackDtype, PackedMatrix};
use crate::engine::kernels::threads::Threads;
use crate::engine::random::{Key, Stream};

/// Batch sizes of the measured decode products: rows of the input matrix.
pub const DECODE_ROWS: [usize; 3] = [1, 4, 16];

/// Number of input rows (tokens) of the measured training products.
pub const TRAINING_ROWS: usize = 1024;

/// Total size of the copies of one weight matrix that a measurement cycles through, in bytes, so that weights are not in the
/// CPU cache when they are used again.
const COPIES_BYTES: usize = 256 << 20;

/// Maximum number of elements in the input or output of one product. The engine never holds the logits of a whole batch either.
const MAX_ACTIVATIONS: usize = 1 << 25;

/// Minimum duration of measuring a matrix product, in seconds; multiplied by `--steps`.
const MIN_SECONDS: f64 = 0.04;

/// Results of all matrix products.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct KernelFigures {
    /// One entry per weight matrix of a layer, then the output head.
    pub products: Vec<Product>,
    /// Speed of forward and dX of the layers' matrices with [`TRAINING_ROWS`] rows, in 1e12 FLOPs per second.
    pub gemm_tflop_s: f64,
    /// Weights read per second by a decode step with 1, 4 and 16 rows over all matrices, in 1e9 bytes.
    pub decode_gb_s: Vec<f64>,
    /// Attention of one layer.
    pub attention: attention::AttentionFigures,
    /// The output head, computed in pieces of the vocabulary.
    pub head: head::HeadFigures,
}

/// Results of one matrix.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Product {
    /// Name of the tensor in the checkpoint.
    pub name: String,
    /// Number of outputs (rows of the weight).
    pub n: usize,
    /// Number of inputs (columns of the weight).
    pub k: usize,
    /// Packed weights read per second with 1, 4 and 16 rows, in 1e9 bytes.
    pub gb_s: Vec<f64>,
    /// Forward product with [`TRAINING_ROWS`] rows (fewer for the head), in 1e9 FLOPs per second.
    pub forward_gflop_s: f64,
    /// Speed of the dX product with the same number of rows, in 1e9 FLOPs per second.
    pub backward_gflop_s: f64,
}

/// Measures the seven matrices of a layer and the head.
///
/// # Errors
/// Fails when `RLOOD_ISA` names no instruction set of this machine.
pub fn measure(setting: &Setting<'_>) -> Result<KernelFigures, BenchError> {
    let config = &setting.card.config;
    let dtype = match setting.args.dtype {
        Precision::Bf16 => PackDtype::Bf16,
        Precision::F32 => PackDtype::F32,
    };
    let team = Team {
        isa: Isa::chosen().map_err(EngineError::Input)?,
        threads: Threads::new(setting.threads()),
        dtype,
        seconds: MIN_SECONDS * f64::from(setting.args.steps),
    };
    let mut totals = Totals::default();
    let mut products = Vec::new();
    for LinearShape { name, outputs, inputs, layers } in linear_shapes(config) {
        products.push(product(&team, (name, outputs, inputs), layers, &mut totals)?);
    }
    let gemm_tflop_s = totals.flops / totals.training_s / 1e12;
    products.push(product(&team, ("head", config.vocab_size, config.hidden_size), 1, &mut totals)?);
    let decode_gb_s = totals.decode_s.iter().map(|seconds| totals.bytes / seconds / 1e9).collect();
    let (attention, head) = (attention::measure(setting, &team)?, head::measure(setting, &team)?);
    Ok(KernelFigures { products, gemm_tflop_s, decode_gb_s, attention, head })
}

/// Sums of FLOPs, bytes and durations over all layers.
#[derive(Default)]
struct Totals {
    flops: f64,
    training_s: f64,
    bytes: f64,
    decode_s: [f64; DECODE_ROWS.len()],
}

/// How a matrix product is measured: threads, precision, minimum duration.
struct Team {
    isa: Isa,
    threads: Threads,
    dtype: PackDtype,
    seconds: f64,
}

fn product(
    team: &Team,
    (name, n, k): (&str, usize, usize),
    layers: usize,
    totals: &mut Totals,
) -> Result<Product, BenchError> {
    let isa = team.isa;
    let weight = random_values(0, n * k, 0.07);
    let first = PackedMatrix::new_on(&team.threads, &weight, k, team.dtype);
    drop(weight);
    let bytes = first.size_bytes();
    let copies = layers.min(COPIES_BYTES / bytes.max(1) + 1);
    let matrices: Vec<PackedMatrix> = std::iter::repeat_n(first, copies).collect();
    let training_rows = (MAX_ACTIVATIONS / n.max(k)).clamp(DECODE_ROWS[2], TRAINING_ROWS);
    let x = random_values(1, training_rows * n.max(k), 2.0);
    let mut y = vec![0.0; training_rows * n.max(k)];
    let mut turn = 0;
    let mut seconds = |rows: usize, towards_inputs: bool| {
        let timing = repeat(2, team.seconds, || -> Result<(), BenchError> {
            turn = (turn + 1) % matrices.len();
            let (input, output) = if towards_inputs { (n, k) } else { (k, n) };
            let term = Term { x: &x[..rows * input], stride: input, weight: &matrices[turn] };
            let out = Output { y: &mut y[..rows * output], stride: output, rows, add: false };
            match towards_inputs {
                false => forward(&team.threads, isa, &[term], None, out),
                true => backward(&team.threads, isa, &[term], out),
            }
            Ok(())
        });
        timing.map(|timing| timing.min_s)
    };
    let mut gb_s = Vec::new();
    for (rows, total) in DECODE_ROWS.into_iter().zip(&mut totals.decode_s) {
        let taken = seconds(rows, false)?;
        *total += taken * layers as f64;
        gb_s.push(bytes as f64 / taken / 1e9);
    }
    totals.bytes += (bytes * layers) as f64;
    let flops = 2.0 * (n * k * training_rows) as f64;
    let (forward_s, backward_s) = (seconds(training_rows, false)?, seconds(training_rows, true)?);
    totals.flops += 2.0 * flops * layers as f64;
    totals.training_s += (forward_s + backward_s) * layers as f64;
    Ok(Product {
        name: name.to_owned(),
        n,
        k,
        gb_s,
        forward_gflop_s: flops / forward_s / 1e9,
        backward_gflop_s: flops / backward_s / 1e9,
    })
}

/// Returns random values, uniform between -`width`/2 and `width`/2; each seed gives other values.
fn random_values(seed: usize, count: usize, width: f64) -> Vec<f32> {
    let key = Key::new(0, Stream::Init).with(seed as u64);
    (0..count as u64).map(|at| ((key.with(at).uniform() - 0.5) * width) as f32).collect()
}
