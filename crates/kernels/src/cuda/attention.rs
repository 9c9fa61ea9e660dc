//! Causal attention of a packed batch: groups of a prompt and the completions that continue it.
//!
//! A query processes the keys it attends to in blocks of 64 positions: first those of the prompt, counted from the
//! prompt's start, then those of its completion, counted from the completion's start. A block yields its largest score,
//! Σ p and Σ p·v; these results are folded from left to right, block by block. Decode computes the same bits
//! ([`super::cache`]), however its blocks are distributed over the device. Tensor cores compute the products of bf16.
//! The backward pass (formulas of FlashAttention-2, Dao 2023, arXiv:2307.08691) iterates over the keys of each query,
//! then over the queries of each key, without atomic additions.

#[cfg(test)]
pub(super) mod tests;

use super::super::attention::{Group, Heads};
use super::driver::{Buffer, CudaError, Device, Launch, params};
use super::rows::{Dtype, Result, Rows};

/// Number of positions in a block of keys.
pub const BLOCK: usize = 64;
/// Maximum width of an attention head.
pub const MAX_HEAD_DIM: usize = 256;
/// Number of queries that a warp processes.
pub(super) const QUERIES: usize = 16;
/// Number of queries that a thread block processes.
const TILE: usize = 64;
const THREADS: u32 = 128;

/// How the query heads of a key head are divided among thread blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Geometry {
    /// Number of query heads that a thread block processes together.
    pub heads_at_once: usize,
    /// Number of thread blocks that share the query heads of one key head.
    pub head_tiles: usize,
    /// The padded head width for which a kernel was compiled.
    pub padded: usize,
}

impl Geometry {
    pub fn new(heads: &Heads) -> Result<Geometry> {
        let Heads { num_heads, num_kv_heads, head_dim, .. } = *heads;
        if num_kv_heads == 0 || num_heads == 0 || !num_heads.is_multiple_of(num_kv_heads) {
            return Err(CudaError::Input(format!(
                "{num_heads} query heads are not a multiple of {num_kv_heads} key heads"
            )));
        }
        let padded = [32, 64, 128, MAX_HEAD_DIM].into_iter().find(|padded| *padded >= head_dim);
        let Some(padded) = padded.filter(|_| head_dim > 0) else {
            return Err(CudaError::Input(format!(
                "head_dim {head_dim} is not supported on CUDA devices; from 1 to {MAX_HEAD_DIM} are"
            )));
        };
        let heads_at_once = heads.group_size().min(QUERIES);
        Ok(Geometry { heads_at_once, head_tiles: heads.group_size().div_ceil(heads_at_once), padded })
    }

    /// Bytes of shared memory for this many rows of bf16, one head wide.
    pub fn tile_bytes(&self, rows: usize) -> u32 {
        (rows * (self.padded + 8) * 2) as u32
    }

    pub fn kernel(&self, name: &str, dtype: Dtype) -> String {
        format!("{name}_{}_{}", dtype.name(), self.padded)
    }
}

/// Attention window (number of positions a token attends to) as the kernels expect it: the largest i32 means all.
pub(super) fn window_or_all(window: Option<usize>) -> u32 {
    window.map_or(i32::MAX as u32, |window| window.clamp(1, i32::MAX as usize) as u32)
}

/// Scale of the attention scores in units of log 2, because kernels compute powers of 2.
pub(super) fn scale(heads: &Heads) -> f32 {
    heads.scale * std::f32::consts::LOG2_E
}

/// Returns the device address of rows after checking their shape.
pub(super) fn address(rows: &Rows<'_>, count: usize, width: usize, what: &str) -> Result<u64> {
    if rows.rows != count || rows.width != width || (count > 1 && rows.stride < width) {
        let Rows { rows, width: columns, stride, .. } = *rows;
        return Err(CudaError::Input(format!(
            "{what} is [{rows}, {columns}] with stride {stride}; [{count}, {width}] is required"
        )));
    }
    let values = if count == 0 { 0 } else { (count - 1) * rows.stride + width };
    match rows.dtype {
        Dtype::F32 => rows.buffer.at::<f32>(rows.at, values),
        Dtype::Bf16 => rows.buffer.at::<u16>(rows.at, values),
    }
}

/// Whether the heads in these rows are aligned to 16 bytes.
pub(super) fn is_aligned(address: u64, stride: usize, heads: &Heads) -> bool {
    address.is_multiple_of(16) && stride.is_multiple_of(8) && heads.head_dim.is_multiple_of(8)
}

fn same_dtype(rows: &[&Rows<'_>]) -> Result<Dtype> {
    match rows {
        [first, rest @ ..] if rest.iter().all(|rows| rows.dtype == first.dtype) => Ok(first.dtype),
        _ => Err(CudaError::Input("attention needs input and output of the same type".to_owned())),
    }
}

/// The prompts and completions of a packed batch, as tables on the device; shared by all layers with
/// the same attention window.
#[derive(Debug)]
pub struct Layout {
    heads: Heads,
    groups: Vec<Group>,
    window: Option<usize>,
    geometry: Geometry,
    tokens: usize,
    /// Tiles of queries `[tiles][8]`, see `QueryTile` in the device code.
    tiles: Buffer,
    num_tiles: usize,
    /// Tiles of keys `[key tiles][6]`, see `KeyTile`.
    key_tiles: Buffer,
    num_key_tiles: usize,
    /// Position of each token in its own sequence.
    positions: Buffer,
}

impl Layout {
    /// Creates the tables of groups that follow one another; `window` is the number of positions a token attends
    /// to, its own included.
    ///
    /// # Errors
    /// [`CudaError::Input`] if heads are wider than [`MAX_HEAD_DIM`], or the numbers of heads do not divide.
    pub fn new(device: &Device, heads: &Heads, groups: &[Group], window: Option<usize>) -> Result<Layout> {
        let geometry = Geometry::new(heads)?;
        let at_once = TILE / geometry.heads_at_once;
        let (mut tiles, mut key_tiles, mut positions) = (Vec::new(), Vec::new(), Vec::new());
        let int = |value: usize| {
            i32::try_from(value)
                .map_err(|_| CudaError::Input("a batch of 2³¹ tokens or more is not supported".to_owned()))
        };
        let mut row = 0;
        for group in groups {
            let (prompt_row, group_end) = (row, row + group.len());
            // A prompt is a sequence of its own, whose keys all rows of its group may attend to.
            let prompt = std::iter::once((group.prompt_len, 0, group_end));
            let completions = group.completion_lens.iter().map(|len| (*len, group.prompt_len, 0));
            for (len, prompt_len, seen_until) in prompt.chain(completions) {
                for first in (0..len).step_by(at_once) {
                    let tokens = at_once.min(len - first);
                    tiles.push([row + first, tokens, first, row, len, prompt_row, prompt_len, 0]);
                }
                for first in (0..len).step_by(BLOCK) {
                    let (begin, end) = (row + first, seen_until.max(row + len));
                    key_tiles.push([begin, BLOCK.min(len - first), prompt_len + first, begin, end, 0]);
                }
                positions.extend(prompt_len..prompt_len + len);
                row += len;
            }
        }
        // The last tokens of a sequence attend to the most positions, so their tiles come first.
        tiles.sort_by_key(|tile| std::cmp::Reverse(tile[2] + tile[6]));
        key_tiles.sort_by_key(|tile| std::cmp::Reverse(tile[4] - tile[3]));
        let ints = |values: &mut dyn Iterator<Item = usize>| values.map(int).collect::<Result<Vec<i32>>>();
        Ok(Layout {
            heads: *heads,
            groups: groups.to_vec(),
            window,
            geometry,
            tokens: positions.len(),
            num_tiles: tiles.len(),
            tiles: device.upload(&ints(&mut tiles.into_iter().flatten())?)?,
            num_key_tiles: key_tiles.len(),
            key_tiles: device.upload(&ints(&mut key_tiles.into_iter().flatten())?)?,
            positions: device.upload(&ints(&mut positions.into_iter())?)?,
        })
    }

    /// Whether the tables were created for these arguments.
    pub fn is_for(&self, heads: &Heads, groups: &[Group], window: Option<usize>) -> bool {
        self.heads == *heads && self.window == window && self.groups == groups
    }

    /// Number of rows (tokens) of the batch.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    fn head_tiles(&self) -> u32 {
        (self.heads.num_kv_heads * self.geometry.head_tiles) as u32
    }
}

params! {
    struct Attend {
        qkv: u64, out: u64, lse: u64, tiles: u64,
        stride: u32, out_stride: u32, num_heads: u32, num_kv_heads: u32, dim: u32, heads_at_once: u32, head_tiles: u32,
        window: u32, vector: u32, scale: f32,
    }
}

/// Computes out `[tokens, q_width]` (same type as qkv) from qkv `[tokens, width]` after qk-norm and rotary embedding.
/// softmax `[tokens, num_heads]` (f32, contiguous) receives log₂ Σ 2^score for [`attend_vjp`].
///
/// # Errors
/// [`CudaError::Input`] if a shape does not match.
pub fn attend(device: &Device, layout: &Layout, qkv: Rows<'_>, out: Rows<'_>, softmax: Rows<'_>) -> Result<()> {
    let Layout { heads, geometry, tokens, .. } = layout;
    let dtype = same_dtype(&[&qkv, &out])?;
    let params = Attend {
        qkv: address(&qkv, *tokens, heads.width(), "qkv")?,
        out: address(&out, *tokens, heads.q_width(), "the output of attention")?,
        lse: softmax_address(layout, &softmax)?,
        tiles: layout.tiles.pointer(),
        stride: qkv.stride as u32,
        out_stride: out.stride as u32,
        num_heads: heads.num_heads as u32,
        num_kv_heads: heads.num_kv_heads as u32,
        dim: heads.head_dim as u32,
        heads_at_once: geometry.heads_at_once as u32,
        head_tiles: geometry.head_tiles as u32,
        window: window_or_all(layout.window),
        vector: 0,
        scale: scale(heads),
    };
    let params = Attend { vector: is_aligned(params.qkv, qkv.stride, heads).into(), ..params };
    let shared = match dtype {
        Dtype::F32 => (TILE * geometry.padded * 4) as u32,
        Dtype::Bf16 => geometry.tile_bytes(TILE + 2 * BLOCK),
    };
    let grid = [layout.num_tiles as u32 * layout.head_tiles(), 1, 1];
    launch(device, &geometry.kernel("attend", dtype), Launch { grid, block: THREADS, shared }, &params)
}

fn softmax_address(layout: &Layout, softmax: &Rows<'_>) -> Result<u64> {
    if softmax.dtype != Dtype::F32 || (layout.tokens > 1 && softmax.stride != softmax.width) {
        return Err(CudaError::Input("the softmax of attention must be in contiguous rows of f32".to_owned()));
    }
    address(softmax, layout.tokens, layout.heads.num_heads, "the softmax of attention")
}

/// Static shared memory of `attend_keys` in bytes, in addition to the dynamic part; the other kernels have none.
const KEYS_STATIC_BYTES: u32 = 768;

/// Launches a kernel that may need more shared memory than the device has.
pub(super) fn launch<P: super::driver::Params>(
    device: &Device,
    kernel: &str,
    launch: Launch,
    params: &P,
) -> Result<()> {
    let (needed, most) = (launch.shared, device.properties().shared_bytes);
    if needed > most {
        return Err(too_wide(needed, most));
    }
    if launch.grid.contains(&0) { Ok(()) } else { device.launch(kernel, launch, params) }
}

fn too_wide(needed: u32, most: u32) -> CudaError {
    CudaError::Input(format!(
        "heads as wide as the model's need {needed} bytes of shared memory a block, of which this GPU has {most}: use a \
         GPU with more, such as an A100 or H100, or the CPU"
    ))
}

/// The backward kernel that iterates over the queries of each key, and the shared memory of both
/// backward kernels in bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
struct BackwardShared {
    kernel: &'static str,
    queries: u32,
    keys: u32,
}

impl BackwardShared {
    fn new(device: &Device, geometry: &Geometry, dtype: Dtype) -> Result<BackwardShared> {
        if dtype == Dtype::F32 {
            return Ok(BackwardShared { kernel: "attend_queries", queries: 0, keys: 0 });
        }
        let most = device.properties().shared_bytes;
        // The same number of tiles in shared memory as in the device code.
        let stages = if geometry.padded <= 128 { 2 } else { 1 };
        let queries = |stages| geometry.tile_bytes(2 * TILE + stages * 2 * BLOCK);
        let keys = geometry.tile_bytes(2 * BLOCK + stages * TILE);
        let shared = match geometry.padded == 128 && queries(stages) > most {
            true => BackwardShared { kernel: "attend_queries_one_stage", queries: queries(1), keys },
            false => BackwardShared { kernel: "attend_queries", queries: queries(stages), keys },
        };
        let needed = shared.queries.max(keys + KEYS_STATIC_BYTES);
        if needed > most { Err(too_wide(needed, most)) } else { Ok(shared) }
    }
}

/// Checks that the device can train heads of this width; call it before a long rollout.
///
/// # Errors
/// [`CudaError::Input`] if heads are wider than [`MAX_HEAD_DIM`] or than the shared memory allows, or the numbers of
/// heads do not divide.
pub fn check_trainable(device: &Device, heads: &Heads, dtype: Dtype) -> Result<()> {
    BackwardShared::new(device, &Geometry::new(heads)?, dtype).map(|_| ())
}

/// The inputs of attention's backward pass, [`attend_vjp`].
#[derive(Clone, Copy, Debug)]
pub struct Backward<'a> {
    /// The batch tables of the forward pass.
    pub layout: &'a Layout,
    /// The input `qkv` of the forward pass.
    pub qkv: Rows<'a>,
    /// The output of the forward pass.
    pub out: Rows<'a>,
    /// The softmax values from [`attend`].
    pub softmax: Rows<'a>,
    /// The gradient dL/dout of attention's output, with the same type as qkv.
    pub dy: Rows<'a>,
}

params! {
    struct AttendDelta {
        out: u64, d_out: u64, delta: u64,
        stride: u32, d_stride: u32, tokens: u32, num_heads: u32, dim: u32, pad: u32,
    }
}

params! {
    struct AttendQueries {
        qkv: u64, d_out: u64, lse: u64, delta: u64, d_qkv: u64, tiles: u64,
        stride: u32, d_out_stride: u32, d_stride: u32, num_heads: u32, num_kv_heads: u32, dim: u32, heads_at_once: u32,
        head_tiles: u32, window: u32, vector: u32, scale: f32, natural: f32,
    }
}

params! {
    struct AttendKeys {
        qkv: u64, d_out: u64, lse: u64, delta: u64, d_qkv: u64, tiles: u64, positions: u64,
        stride: u32, d_out_stride: u32, d_stride: u32, num_heads: u32, num_kv_heads: u32, dim: u32, window: u32,
        vector: u32, scale: f32, natural: f32,
    }
}

/// Computes d_qkv `[tokens, width]` (same type as qkv) = dL/dqkv of [`attend`]; writes every element. Deterministic.
///
/// # Errors
/// [`CudaError::Input`] if a shape does not match. [`CudaError::OutOfMemory`] if there is no room for one value
/// per token and head.
pub fn attend_vjp(device: &Device, backward: &Backward<'_>, d_qkv: Rows<'_>) -> Result<()> {
    let Backward { layout, qkv, out, softmax, dy } = *backward;
    let Layout { heads, geometry, tokens, .. } = layout;
    let dtype = same_dtype(&[&qkv, &out, &dy, &d_qkv])?;
    let delta = device.alloc(tokens * heads.num_heads * 4)?;
    let d_out = address(&dy, *tokens, heads.q_width(), "dL/dout of attention")?;
    let of_delta = AttendDelta {
        out: address(&out, *tokens, heads.q_width(), "the output of attention")?,
        d_out,
        delta: delta.pointer(),
        stride: out.stride as u32,
        d_stride: dy.stride as u32,
        tokens: *tokens as u32,
        num_heads: heads.num_heads as u32,
        dim: heads.head_dim as u32,
        pad: 0,
    };
    let blocks = (tokens * heads.num_heads).div_ceil(THREADS as usize / 32) as u32;
    let name = format!("attend_delta_{}", dtype.name());
    launch(device, &name, Launch { grid: [blocks, 1, 1], block: THREADS, shared: 0 }, &of_delta)?;
    let qkv_address = address(&qkv, *tokens, heads.width(), "qkv")?;
    let aligned = is_aligned(qkv_address, qkv.stride, heads) && is_aligned(d_out, dy.stride, heads);
    let queries = AttendQueries {
        qkv: qkv_address,
        d_out,
        lse: softmax_address(layout, &softmax)?,
        delta: delta.pointer(),
        d_qkv: address(&d_qkv, *tokens, heads.width(), "dL/dqkv")?,
        tiles: layout.tiles.pointer(),
        stride: qkv.stride as u32,
        d_out_stride: dy.stride as u32,
        d_stride: d_qkv.stride as u32,
        num_heads: heads.num_heads as u32,
        num_kv_heads: heads.num_kv_heads as u32,
        dim: heads.head_dim as u32,
        heads_at_once: geometry.heads_at_once as u32,
        head_tiles: geometry.head_tiles as u32,
        window: window_or_all(layout.window),
        vector: aligned.into(),
        scale: scale(heads),
        natural: heads.scale,
    };
    let shared = BackwardShared::new(device, geometry, dtype)?;
    let grid = [layout.num_tiles as u32 * layout.head_tiles(), 1, 1];
    let of_queries = Launch { grid, block: THREADS, shared: shared.queries };
    launch(device, &geometry.kernel(shared.kernel, dtype), of_queries, &queries)?;
    let AttendQueries { qkv, d_out, lse, delta, d_qkv, stride, d_out_stride, d_stride, .. } = queries;
    let AttendQueries { num_heads, num_kv_heads, dim, window, vector, scale, natural, .. } = queries;
    let (tiles, positions) = (layout.key_tiles.pointer(), layout.positions.pointer());
    let keys = AttendKeys {
        qkv,
        d_out,
        lse,
        delta,
        d_qkv,
        tiles,
        positions,
        stride,
        d_out_stride,
        d_stride,
        num_heads,
        num_kv_heads,
        dim,
        window,
        vector,
        scale,
        natural,
    };
    let grid = [layout.num_key_tiles as u32 * num_kv_heads, 1, 1];
    let of_keys = Launch { grid, block: THREADS, shared: shared.keys };
    launch(device, &geometry.kernel("attend_keys", dtype), of_keys, &keys)
}
