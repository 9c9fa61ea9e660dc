//! The CPU backend: weights are packed once, and a team of threads shares every operation. The result for a row has the
//! same bits whatever the other rows, the number of threads or the pass.
//!
//! Longer than 500 lines: it implements each operation of one interface.

mod attention;
mod delta;
mod linear;
mod matrix;
mod rows;

use std::convert::Infallible;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::types::gathered;
use super::{
    Activation, AdapterPass, AdapterShape, Attention, AttentionBackward, Buffers, CachedLayer, Choice, Chosen, Compute,
    Decode, Flat, FullSlot, Head, HeadBackward, LinearBackward, Rotation, concatenated,
};
use crate::error::{EngineError, Result};
use crate::kernels::attention::Segments;
use crate::kernels::delta::State;
use crate::kernels::four_bit::FourBit;
use crate::kernels::head;
use crate::kernels::isa::Isa;
use crate::kernels::pack::{PackDtype, PackedMatrix};
use crate::kernels::threads::Threads;
use crate::load;
use crate::ops::slices::{Group, Heads, TokenScore};
use crate::ops::{self, RopeTable};
use crate::spec::{ComputeDtype, footprint};

pub use attention::Cache;
pub use delta::DeltaNet;
pub use linear::Adapter;
pub use matrix::Matrix;
use matrix::Pool;

/// The CPU of this process. All models share its threads; each model has its own buffers.
#[derive(Clone, Debug)]
pub struct Cpu {
    dtype: PackDtype,
    isa: Isa,
    threads: Arc<Threads>,
    pool: Arc<Pool>,
    /// Key and value buffers of packed batches, kept for reuse.
    segments: Arc<Mutex<Segments>>,
}

/// A packed matrix `[out, in]` and its bias.
#[derive(Clone, Debug)]
pub struct Weight {
    matrix: Arc<PackedMatrix>,
    bias: Option<Arc<Vec<f32>>>,
}

/// Rotary angles by position.
#[derive(Debug)]
pub struct Angles {
    table: Arc<RopeTable>,
    positions: Vec<usize>,
    pool: Arc<Pool>,
}

impl Drop for Angles {
    fn drop(&mut self) {
        self.pool.return_positions(std::mem::take(&mut self.positions));
    }
}

impl Cpu {
    /// Creates a backend with the best instructions the machine supports, or those that `RLOOD_ISA` names.
    pub fn new(dtype: ComputeDtype) -> Result<Cpu> {
        Ok(Cpu::with_process_threads(dtype, Isa::chosen().map_err(EngineError::Input)?))
    }

    /// Creates a backend with the given instructions and the shared threads of the process.
    pub fn with_process_threads(dtype: ComputeDtype, isa: Isa) -> Cpu {
        Cpu::with(dtype, isa, Cpu::process_threads().clone())
    }

    /// The threads that all backends of the process share.
    pub fn process_threads() -> &'static Arc<Threads> {
        static THREADS: OnceLock<Arc<Threads>> = OnceLock::new();
        THREADS.get_or_init(|| Arc::new(Threads::new(rayon::current_num_threads())))
    }

    /// Creates a backend with the given instructions and threads.
    pub fn with(dtype: ComputeDtype, isa: Isa, threads: Arc<Threads>) -> Cpu {
        let dtype = match dtype {
            ComputeDtype::F32 => PackDtype::F32,
            ComputeDtype::Bf16 => PackDtype::Bf16,
        };
        Cpu { dtype, isa, threads, pool: Arc::default(), segments: Arc::default() }
    }

    /// The precision of the matrices.
    pub fn dtype(&self) -> ComputeDtype {
        match self.dtype {
            PackDtype::F32 => ComputeDtype::F32,
            PackDtype::Bf16 => ComputeDtype::Bf16,
        }
    }
}

/// Converts the language-model head to the kernels' type.
fn kernel_head(head: &Head<Cpu>) -> head::Head<'_> {
    head::Head { weight: &head.weight.matrix, softcap: head.softcap }
}

/// What the head's backward pass needs of its scores.
#[derive(Debug)]
pub struct ScoredRows {
    softmax: Vec<head::Softmax>,
    /// The rows whose sums are known.
    summed: Vec<bool>,
    /// A row for each input row, or none if no row is summed; see [`head::score_for_training`].
    sums: Matrix,
}

impl Buffers for Cpu {
    type Tensor = Matrix;
    type Vector = Arc<Vec<f32>>;
    type Weight = Weight;
    type FlatBuffer = Vec<f32>;

    fn release_cached(&self) {
        self.pool.trim(footprint::KEPT_BYTES);
        *self.segments.lock().unwrap_or_else(PoisonError::into_inner) = Segments::default();
    }

    fn upload_vector(&self, values: Vec<f32>) -> Result<Arc<Vec<f32>>> {
        Ok(Arc::new(values))
    }

    fn upload_weight(&self, values: Vec<f32>, inputs: usize, bias: Option<Vec<f32>>) -> Result<Weight> {
        let matrix = Arc::new(PackedMatrix::new_on(&self.threads, &values, inputs, self.dtype));
        Ok(Weight { matrix, bias: bias.map(Arc::new) })
    }

    fn upload_matrices(&self, matrices: Vec<load::Matrix>, inputs: usize, bias: Option<Vec<f32>>) -> Result<Weight> {
        let codes = |matrix: &load::Matrix| match matrix {
            load::Matrix::FourBit(codes) => Some(FourBit::clone(codes)),
            load::Matrix::Values(_) => None,
        };
        let packed = matrices.iter().map(codes).collect::<Option<Vec<FourBit>>>();
        let packed = packed.and_then(|codes| PackedMatrix::of_codes(&self.threads, &codes, inputs, self.dtype));
        match packed {
            Some(matrix) => Ok(Weight { matrix: Arc::new(matrix), bias: bias.map(Arc::new) }),
            // A layer that is quantized in part only, or blocks that do not fit the kernels.
            None => self.upload_weight(concatenated(matrices), inputs, bias),
        }
    }

    fn matrix_bytes(&self, weight: &Weight) -> Option<usize> {
        Some(weight.matrix.size_bytes())
    }

    fn vector_from(&self, parameters: &Vec<f32>, place: Range<usize>, offset: f32) -> Result<Arc<Vec<f32>>> {
        self.upload_vector(parameters[place].iter().map(|value| value + offset).collect())
    }

    fn weight_from(&self, parameters: &Vec<f32>, modules: &[FullSlot], inputs: usize) -> Result<Weight> {
        let (weight, bias) = gathered(parameters, modules, inputs);
        self.upload_weight(weight, inputs, bias)
    }

    fn alloc_zeroed(&self, len: usize) -> Result<Flat> {
        Ok(Flat::Host(vec![0.0; len]))
    }

    fn upload(&self, values: Flat) -> Result<Flat> {
        values.on_host()
    }

    fn device_buffer<'f>(&self, flat: &'f Flat) -> Result<&'f Vec<f32>> {
        flat.host()
    }

    fn device_buffer_mut<'f>(&self, flat: &'f mut Flat) -> Result<&'f mut Vec<f32>> {
        flat.host_mut()
    }

    fn download(&self, x: &Matrix) -> Result<Vec<f32>> {
        Ok(x.values().to_vec())
    }
}

impl Compute for Cpu {
    type Adapter = Arc<Adapter>;
    type Angles = Angles;
    /// The softmax's largest score and sum for each token and head, `[tokens, num_heads · 2]`.
    type Softmax = Matrix;
    type ScoredRows = ScoredRows;
    type DeltaNet = Arc<DeltaNet>;
    type DeltaStates = Vec<State>;

    fn adapter_from(&self, parameters: &Vec<f32>, shape: &AdapterShape) -> Result<Arc<Adapter>> {
        Ok(Arc::new(Adapter::new(parameters, shape, self)))
    }

    fn embed(&self, table: &Weight, ids: &[u32]) -> Result<Matrix> {
        Ok(self.lookup(&table.matrix, ids))
    }

    fn embed_vjp(&self, ids: &[u32], dy: &Matrix, gradient: &mut Vec<f32>, at: usize) -> Result<()> {
        for (index, id) in ids.iter().enumerate() {
            rows::add(gradient, at + *id as usize * dy.width(), dy.row(index));
        }
        Ok(())
    }

    fn select_rows(&self, x: &Matrix, rows: &[u32]) -> Result<Matrix> {
        Ok(self.gather(x, rows))
    }

    fn scatter_rows(&self, x: &Matrix, rows: &[u32], count: usize) -> Result<Matrix> {
        let mut out = self.pool.zeros(count, x.width());
        for (index, row) in rows.iter().enumerate() {
            rows::add(out.values_mut(), *row as usize * x.width(), x.row(index));
        }
        Ok(out)
    }

    fn concat_rows(&self, parts: &[&Matrix]) -> Result<Matrix> {
        let width = parts.first().map_or(0, |part| part.width());
        let mut out = self.pool.matrix(parts.iter().map(|part| part.rows()).sum(), width);
        let mut begin = 0;
        for part in parts {
            out.rows_mut(begin..begin + part.rows()).copy_from_slice(part.values());
            begin += part.rows();
        }
        Ok(out)
    }

    fn scaled(&self, x: &Matrix, factor: f32) -> Result<Matrix> {
        Ok(self.times(x, factor))
    }

    fn rows_scaled(&self, x: &Matrix, columns: Range<usize>, factors: &[f32]) -> Result<Matrix> {
        Ok(self.columns_times(x, columns, factors))
    }

    fn sum(&self, x: &Matrix, y: &Matrix) -> Result<Matrix> {
        Ok(self.plus(x, y))
    }

    fn columns(&self, x: &Matrix, columns: Range<usize>) -> Result<Matrix> {
        Ok(self.some_columns(x, columns))
    }

    fn concat_columns(&self, parts: &[&Matrix]) -> Result<Matrix> {
        Ok(self.side_by_side(parts))
    }

    fn rms_norm(&self, x: &Matrix, weight: &Arc<Vec<f32>>, eps: f32) -> Result<Matrix> {
        Ok(self.norm(x, weight, eps))
    }

    fn rms_norm_vjp(
        &self,
        x: &Matrix,
        weight: &Arc<Vec<f32>>,
        eps: f32,
        dy: &Matrix,
        residual: Option<&Matrix>,
    ) -> Result<Matrix> {
        Ok(self.norm_vjp(x, weight, eps, dy, residual))
    }

    fn rms_norm_weight_vjp(&self, x: &Matrix, eps: f32, dy: &Matrix, gradient: &mut Vec<f32>, at: usize) -> Result<()> {
        self.norm_weight_vjp(x, eps, dy, &mut gradient[at..at + x.width()]);
        Ok(())
    }

    fn linear(
        &self,
        x: &Matrix,
        weight: &Weight,
        adapter: Option<AdapterPass<'_, Self>>,
        residual: Option<&Matrix>,
    ) -> Result<Matrix> {
        Ok(self.product(x, weight, adapter.as_ref(), residual))
    }

    fn linear_mixed(
        &self,
        x: &Matrix,
        weight: &Weight,
        adapters: &[(&Arc<Adapter>, &[u32])],
        _plain: &[u32],
        residual: Option<&Matrix>,
    ) -> Result<Matrix> {
        Ok(self.product_mixed(x, weight, adapters, residual))
    }

    fn linear_vjp(&self, linear: &LinearBackward<'_, Self>, gradient: &mut Vec<f32>) -> Result<Matrix> {
        Ok(self.product_vjp(linear, gradient))
    }

    fn angles(&self, table: &Arc<RopeTable>, positions: &[usize]) -> Result<Angles> {
        Ok(Angles { table: table.clone(), positions: self.pool.positions(positions), pool: self.pool.clone() })
    }

    fn rotate(&self, rotation: &Rotation<'_, Self>, qkv: &Matrix) -> Result<Matrix> {
        Ok(self.rotate_rows(rotation, qkv))
    }

    fn rotate_vjp(&self, rotation: &Rotation<'_, Self>, qkv: Option<&Matrix>, dy: &Matrix) -> Result<Matrix> {
        Ok(self.rotate_rows_vjp(rotation, qkv, dy))
    }

    fn rotate_weight_vjp(
        &self,
        rotation: &Rotation<'_, Self>,
        qkv: &Matrix,
        dy: &Matrix,
        gradient: &mut Vec<f32>,
        at: (usize, usize),
    ) -> Result<()> {
        self.rotate_rows_weight_vjp(rotation, qkv, dy, gradient, at);
        Ok(())
    }

    fn attend(&self, attention: &Attention<'_>, qkv: &Matrix) -> Result<(Matrix, Matrix)> {
        Ok(self.attend_packed(attention, qkv))
    }

    fn attend_vjp(&self, backward: &AttentionBackward<'_, Self>) -> Result<Matrix> {
        Ok(self.attend_packed_vjp(backward))
    }

    fn gated(&self, activation: Activation, gate_up: &Matrix) -> Result<Matrix> {
        Ok(self.activate(activation, gate_up))
    }

    fn gated_vjp(&self, activation: Activation, gate_up: &Matrix, dy: &Matrix) -> Result<Matrix> {
        Ok(self.activate_vjp(activation, gate_up, dy))
    }

    fn gather_columns(&self, x: &Matrix, ranges: &[Range<usize>]) -> Result<Matrix> {
        Ok(self.ranges_of_columns(x, ranges))
    }

    fn sigmoid_gated(&self, x: &Matrix, gate: &Matrix) -> Result<Matrix> {
        Ok(self.gate(x, gate))
    }

    fn sigmoid_gated_vjp(&self, x: &Matrix, gate: &Matrix, dy: &Matrix) -> Result<(Matrix, Matrix)> {
        Ok(self.gate_vjp(x, gate, dy))
    }

    fn upload_delta_net(&self, weights: ops::delta::Weights) -> Result<Arc<DeltaNet>> {
        Ok(Arc::new(DeltaNet::new(weights)))
    }

    fn delta_net(&self, net: &Arc<DeltaNet>, groups: &[Group], x: &Matrix) -> Result<(Matrix, Vec<State>)> {
        Ok(self.delta_packed(net, groups, x))
    }

    fn delta_net_vjp(&self, net: &Arc<DeltaNet>, groups: &[Group], x: &Matrix, dy: &Matrix) -> Result<Matrix> {
        Ok(self.delta_packed_vjp(net, groups, x, dy))
    }

    fn score(
        &self,
        x: &Matrix,
        head: &Head<Self>,
        targets: &[u32],
        temperature: f64,
        trained: &[bool],
    ) -> Result<(Vec<TokenScore>, ScoredRows)> {
        let forward = head::Forward { x: x.values(), head: kernel_head(head), targets, temperature };
        let mut sums = self.pool.matrix(if trained.contains(&true) { x.rows() } else { 0 }, x.width());
        let scores = match sums.rows() {
            0 => head::score(&self.threads, self.isa, forward.x, forward.head, targets, temperature),
            _ => head::score_for_training(&self.threads, self.isa, &forward, trained, sums.values_mut()),
        };
        Ok((scores.tokens, ScoredRows { softmax: scores.softmax, summed: trained.to_vec(), sums }))
    }

    fn score_vjp(&self, backward: HeadBackward<'_, Self>, gradient: &mut Vec<f32>) -> Result<Matrix> {
        let HeadBackward { x, head, targets, temperature, scored, g, at } = backward;
        let ScoredRows { softmax, summed, sums } = scored;
        let weight = &*head.weight.matrix;
        let mut dx = if sums.rows() == 0 { self.pool.matrix(x.rows(), x.width()) } else { sums };
        let slot = at.map(|at| &mut gradient[at..at + weight.n() * weight.k()]);
        let forward = head::Forward { x: x.values(), head: kernel_head(head), targets, temperature };
        let given = head::Gradient { forward, softmax: &softmax, summed: &summed, g };
        head::score_vjp(&self.threads, self.isa, &given, dx.values_mut(), slot);
        Ok(dx)
    }

    fn logits(&self, x: &Matrix, head: &Head<Self>) -> Result<Matrix> {
        let mut logits = self.pool.matrix(x.rows(), head.weight.matrix.n());
        head::logits(&self.threads, self.isa, x.values(), kernel_head(head), logits.values_mut());
        Ok(logits)
    }
}

impl Decode for Cpu {
    type Cache = Cache;
    type PendingChoice = Infallible;
    type KeptPrompt = Arc<attention::Prompt>;

    fn samples_exactly(&self) -> bool {
        true
    }

    fn mixes_adapters(&self) -> bool {
        true
    }

    fn keep_prompt(&self, cache: &Cache, prompt: usize) -> Option<Arc<attention::Prompt>> {
        cache.kept(prompt)
    }

    fn kept_bytes(&self, kept: &Arc<attention::Prompt>) -> usize {
        kept.bytes()
    }

    fn add_prompt_after(
        &self,
        cache: &mut Cache,
        kept: &Arc<attention::Prompt>,
        shared: usize,
        length: usize,
    ) -> Option<usize> {
        cache.announce_after(kept, shared, length)
    }

    fn extend_prompts(
        &self,
        cache: &mut Cache,
        prompts: &[(usize, usize)],
        layer: usize,
        qkv: &Matrix,
    ) -> Result<Matrix> {
        Ok(self.attend_prompts(cache, prompts, layer, qkv))
    }

    fn new_cache(&self, heads: &Heads, layers: &[CachedLayer]) -> Cache {
        Cache::new(heads, layers)
    }

    fn add_prompts(&self, cache: &mut Cache, lengths: &[usize]) -> Result<usize> {
        Ok(cache.announce(lengths))
    }

    fn fill_prompts(&self, cache: &mut Cache, first: usize, layer: usize, qkv: &Matrix) -> Result<()> {
        cache.fill(first, layer, qkv);
        Ok(())
    }

    fn fill_states(&self, cache: &mut Cache, first: usize, layer: usize, states: Vec<State>) -> Result<()> {
        (first..).zip(states).for_each(|(prompt, state)| cache.set_state(prompt, layer, state));
        Ok(())
    }

    fn extend_states(
        &self,
        net: &Arc<DeltaNet>,
        cache: &mut Cache,
        prompts: &[(usize, usize)],
        layer: usize,
        x: &Matrix,
    ) -> Result<Matrix> {
        Ok(self.delta_prompts(net, cache, prompts, layer, x))
    }

    fn delta_net_cached(&self, net: &Arc<DeltaNet>, cache: &mut Cache, layer: usize, x: &Matrix) -> Result<Matrix> {
        Ok(self.delta_rows(net, cache, layer, x))
    }

    fn add_rows(&self, cache: &mut Cache, prompt: usize, copies: usize, max_new_tokens: usize) -> Result<()> {
        cache.add_rows(prompt, copies, max_new_tokens);
        Ok(())
    }

    fn close_prompts(&self, cache: &mut Cache) {
        cache.close();
    }

    fn attend_cached(&self, _: &Heads, cache: &mut Cache, layer: usize, qkv: &Matrix) -> Result<Matrix> {
        Ok(self.attend_rows(cache, layer, qkv))
    }

    fn retain_rows(&self, cache: &mut Cache, keep: &[bool]) {
        cache.retain(keep);
    }

    fn choose(&self, x: &Matrix, head: &Head<Self>, choice: Choice<'_>, chosen: &mut Vec<Chosen>) -> Result<()> {
        if choice.filters.are_off() {
            head::choose(&self.threads, self.isa, x.values(), kernel_head(head), choice.picks, chosen);
            return Ok(());
        }
        let mut logits = self.logits(x, head)?;
        let rows: Vec<Range<usize>> = (0..choice.picks.len()).map(|row| row..row + 1).collect();
        chosen.clear();
        chosen.resize(rows.len(), Chosen { token: 0, logp: 0.0 });
        self.threads.over(
            &rows,
            chosen,
            (logits.values_mut(), head.weight.matrix.n()),
            false,
            |row, chosen, logits| {
                chosen[0] = choice.among(row.start, logits);
            },
        );
        Ok(())
    }

    fn finish_choose(&self, choice: &Infallible) -> Result<Vec<Chosen>> {
        match *choice {}
    }
}
