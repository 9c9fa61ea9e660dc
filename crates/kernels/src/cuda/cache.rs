//! Keys and values of growing sequences, in pages of 64 positions of all layers; the rows of a prompt share its pages.
//! Each step appends a token to every row and computes attention, with the same bits as [`super::attention`].
//!
//! A step is planned once for all layers of a window ([`plan`]): which ranges of blocks many tasks fold in parallel
//! beforehand, and which ones the row folds itself.

mod pages;
mod plan;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use super::super::attention::Heads;
use super::attention::{BLOCK, Geometry, QUERIES, address, is_aligned, launch, scale, window_or_all};
use super::driver::{Buffer, CudaError, Device, Launch, params};
use super::rows::{Dtype, Result, Rows};
use pages::{Page, Pages};
use plan::{HEADER, PLAN_ROW, Plan, PlannedRow, Spread};

/// Keys and values of all layers.
#[derive(Debug)]
pub struct Cache {
    device: Device,
    heads: Heads,
    geometry: Geometry,
    num_layers: usize,
    dtype: Dtype,
    pages: Arc<Pages>,
    prompts: Vec<Arc<Prompt>>,
    rows: Vec<Row>,
    filling: Option<Filling>,
    tables: Tables,
    /// How a step's work is distributed over the device.
    spread: Spread,
    /// Whether a decode step is between its first and last layer.
    in_step: bool,
}

#[derive(Debug)]
struct Prompt {
    len: usize,
    pages: Vec<Page>,
}

#[derive(Debug)]
struct Row {
    prompt: Arc<Prompt>,
    len: usize,
    pages: Vec<Page>,
}

/// Where the tokens of the prompts from `first` on are stored in the cache.
#[derive(Debug)]
struct Filling {
    first: usize,
    rows: usize,
    /// Addresses of the pages of these prompts.
    pages: Buffer,
    /// Slot of each prompt token: index of its page · 64 + its position in the page.
    slots: Buffer,
}

/// The tables on the device that the kernels of a decode step read.
#[derive(Debug, Default)]
struct Tables {
    /// Addresses of the pages of all prompts and rows.
    pages: Option<Buffer>,
    /// Whether rows or pages changed since the tables were uploaded.
    is_stale: bool,
    /// Where each row's prompt pages and own pages start in the list of page addresses.
    starts: Vec<(usize, usize)>,
    /// One plan of the work per attention window.
    plans: Vec<(Option<usize>, Buffer)>,
    /// Number of rows that the uploaded plans have room for.
    row_capacity: usize,
    /// Partial results of attention: m and l (largest score and sum) in one buffer, o (weighted values) in the other.
    parts: Option<(Buffer, Buffer)>,
}

/// Number of blocks of keys that one warp always processes alone.
const LONG: usize = 8;

/// Number of one-warp thread blocks per multiprocessor, for the tasks of a decode step.
const TASKS_AT_ONCE: u32 = 4;

params! {
    struct FillPages {
        qkv: u64, pages: u64, slots: u64, at: u64,
        stride: u32, rows: u32, num_heads: u32, num_kv_heads: u32, dim: u32, vector: u32,
    }
}

params! {
    struct AttendCached {
        qkv: u64, out: u64, pages: u64, plan: u64, ml: u64, parts: u64, at: u64,
        stride: u32, out_stride: u32, rows: u32, row_capacity: u32, num_heads: u32, num_kv_heads: u32, dim: u32,
        heads_at_once: u32, head_tiles: u32, window: u32, vector: u32, scale: f32,
    }
}

impl Cache {
    /// Creates an empty key-value cache for `qkv` of this type.
    ///
    /// # Errors
    /// [`CudaError::Input`] if heads are wider than [`super::attention::MAX_HEAD_DIM`], or the numbers of
    /// heads do not divide.
    pub fn new(device: &Device, heads: &Heads, num_layers: usize, dtype: Dtype) -> Result<Cache> {
        let layer_bytes = BLOCK * 2 * heads.kv_width() * dtype.bytes();
        Ok(Cache {
            device: device.clone(),
            heads: *heads,
            geometry: Geometry::new(heads)?,
            num_layers,
            dtype,
            pages: Arc::new(Pages::new(device, num_layers.max(1) * layer_bytes)),
            prompts: Vec::new(),
            rows: Vec::new(),
            filling: None,
            tables: Tables::default(),
            spread: Spread { warps: 4 * (device.properties().multiprocessors as usize).max(32), long: LONG },
            in_step: false,
        })
    }

    /// Number of rows (sequences) in the cache.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Total bytes of the cache's pages, used or free.
    pub fn bytes(&self) -> usize {
        self.pages.bytes()
    }

    /// Announces prompts of these lengths to the cache; returns the index of the first one.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`] if there is no room.
    pub fn announce(&mut self, lengths: &[usize]) -> Result<usize> {
        let first = self.prompts.len();
        for len in lengths {
            let pages = self.pages.take(len.div_ceil(BLOCK))?;
            self.prompts.push(Arc::new(Prompt { len: *len, pages }));
        }
        self.filling = None;
        Ok(first)
    }

    /// Stores the keys and values of a layer for the prompts from index `first` on: qkv holds their tokens,
    /// one prompt after another.
    ///
    /// # Errors
    /// [`CudaError::Input`] if a shape does not match, or the layer does not exist.
    pub fn fill(&mut self, first: usize, layer: usize, qkv: Rows<'_>) -> Result<()> {
        self.check(layer, &qkv)?;
        if self.filling.as_ref().is_none_or(|filling| filling.first != first) {
            self.filling = Some(self.begin_filling(first)?);
        }
        let Some(filling) = &self.filling else { return Ok(()) };
        let Heads { num_heads, num_kv_heads, head_dim, .. } = self.heads;
        let qkv_address = address(&qkv, filling.rows, self.heads.width(), "qkv of the prompts")?;
        let params = FillPages {
            qkv: qkv_address,
            pages: filling.pages.pointer(),
            slots: filling.slots.pointer(),
            at: self.layer_at(layer),
            stride: qkv.stride as u32,
            rows: filling.rows as u32,
            num_heads: num_heads as u32,
            num_kv_heads: num_kv_heads as u32,
            dim: head_dim as u32,
            vector: is_aligned(qkv_address, qkv.stride, &self.heads).into(),
        };
        let grid = [filling.rows as u32, 1, 1];
        launch(
            &self.device,
            &format!("fill_pages_{}", self.dtype.name()),
            Launch { grid, block: 128, shared: 0 },
            &params,
        )
    }

    fn begin_filling(&self, first: usize) -> Result<Filling> {
        let prompts = self.prompts.get(first..).unwrap_or_default();
        let (mut pages, mut slots): (Vec<u64>, Vec<i32>) = Default::default();
        for prompt in prompts {
            let begin = pages.len() * BLOCK;
            slots.extend((begin..begin + prompt.len).map(|slot| slot as i32));
            pages.extend(prompt.pages.iter().map(Page::address));
        }
        let rows = slots.len();
        Ok(Filling { first, rows, pages: self.device.upload(&pages)?, slots: self.device.upload(&slots)? })
    }

    /// Adds rows (sequences) to the cache that continue a prompt. Pages are allocated as the rows grow.
    ///
    /// # Errors
    /// [`CudaError::Input`] if the prompt does not exist, or a step is in progress.
    pub fn add_rows(&mut self, prompt: usize, copies: usize, _max_new_tokens: usize) -> Result<()> {
        let Some(prompt) = self.prompts.get(prompt).filter(|_| !self.in_step) else {
            return Err(CudaError::Input(format!("no rows can continue prompt {prompt} now")));
        };
        self.rows.extend((0..copies).map(|_| Row { prompt: prompt.clone(), len: 0, pages: Vec::new() }));
        self.tables.is_stale = true;
        Ok(())
    }

    /// Marks the prompts announced so far as complete: no more rows will continue them, and each prompt is freed with
    /// the last row that continues it.
    pub fn close(&mut self) {
        self.prompts.clear();
        self.filling = None;
    }

    /// Keeps only the rows of the cache that are marked true.
    pub fn retain(&mut self, keep: &[bool]) {
        let mut keep = keep.iter();
        self.rows.retain(|_| keep.next().copied().unwrap_or(false));
        self.tables.is_stale = true;
    }

    /// Prepares appending a token in all layers: allocates pages and uploads the tables that the step's kernels read.
    /// Call it outside of a captured body; otherwise [`Cache::attend`] of layer 0 calls it. Buffers that are too small
    /// are replaced by buffers of twice the size, so that captured graphs rarely become invalid.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`]: the rows are unchanged, and the step can be started again with fewer rows.
    pub fn begin_step(&mut self) -> Result<()> {
        if self.in_step {
            return Ok(());
        }
        for row in &mut self.rows {
            if row.len == row.pages.len() * BLOCK {
                row.pages.extend(self.pages.take(1)?);
                self.tables.is_stale = true;
            }
        }
        self.upload_pages()?;
        let windows: Vec<Option<usize>> = self.tables.plans.iter().map(|(window, _)| *window).collect();
        for window in windows {
            self.upload_plan(window)?;
        }
        self.rows.iter_mut().for_each(|row| row.len += 1);
        self.in_step = true;
        Ok(())
    }

    fn upload_pages(&mut self) -> Result<()> {
        if !self.tables.is_stale && self.tables.pages.is_some() {
            return Ok(());
        }
        let mut list: Vec<u64> = Vec::new();
        self.tables.starts.clear();
        let mut shared: Option<(&Arc<Prompt>, usize)> = None;
        for row in &self.rows {
            let start = match shared {
                Some((prompt, start)) if Arc::ptr_eq(prompt, &row.prompt) => start,
                Some(_) | None => {
                    shared = Some((&row.prompt, list.len()));
                    list.extend(row.prompt.pages.iter().map(Page::address));
                    list.len() - row.prompt.pages.len()
                }
            };
            self.tables.starts.push((start, list.len()));
            list.extend(row.pages.iter().map(Page::address));
        }
        let buffer = room::<u64>(&self.device, self.tables.pages.take(), list.len())?;
        self.device.write(&buffer, 0, &list)?;
        self.tables.pages = Some(buffer);
        self.tables.is_stale = false;
        Ok(())
    }

    /// Plans the attention of a decode step for layers with this window, and uploads the plan. Lengths are those
    /// before the new token.
    fn upload_plan(&mut self, window: Option<usize>) -> Result<()> {
        let appended = usize::from(!self.in_step);
        let rows: Vec<PlannedRow> = (self.rows.iter().zip(&self.tables.starts))
            .enumerate()
            .map(|(index, (row, (prompt_pages, own_pages)))| PlannedRow {
                shares: index > 0 && Arc::ptr_eq(&row.prompt, &self.rows[index - 1].prompt),
                prompt_pages: *prompt_pages,
                own_pages: *own_pages,
                prompt_len: row.prompt.len,
                own_len: row.len + appended,
            })
            .collect();
        if rows.len() > self.tables.row_capacity {
            self.tables.row_capacity = rows.len().next_power_of_two();
        }
        let head_tiles = self.heads.num_kv_heads * self.geometry.head_tiles;
        let plan = Plan::new(&rows, window, self.geometry.heads_at_once, head_tiles, self.spread);
        let words = plan.words(self.tables.row_capacity)?;
        let (at, old) = match self.tables.plans.iter().position(|(known, _)| *known == window) {
            Some(at) => (at, Some(self.tables.plans.remove(at).1)),
            None => (self.tables.plans.len(), None),
        };
        let least = HEADER + self.tables.row_capacity.max(1) * PLAN_ROW;
        let buffer = room::<i32>(&self.device, old, words.len().max(least))?;
        self.device.write(&buffer, 0, &words)?;
        self.tables.plans.insert(at, (window, buffer));
        let (ml, parts) = self.tables.parts.take().unzip();
        let ml = room::<f32>(&self.device, ml, plan.parts * 2)?;
        let parts = room::<f32>(&self.device, parts, plan.parts * self.geometry.padded)?;
        self.tables.parts = Some((ml, parts));
        Ok(())
    }

    /// Appends one token per row in a layer (layers in order, each once per step) and computes attention: out `[rows,
    /// q_width]`, same type as qkv `[rows, width]`. Both may have more rows than are live, so that a graph serves a
    /// bucket of batch sizes; the remaining rows of `out` become zeros. Captured launches depend only on the bucket:
    /// lengths and tables are in device memory.
    ///
    /// # Errors
    /// [`CudaError::Input`] if a shape does not match, or layers are out of order. [`CudaError::OutOfMemory`] if
    /// no page is free.
    pub fn attend(&mut self, layer: usize, window: Option<usize>, qkv: Rows<'_>, out: Rows<'_>) -> Result<()> {
        self.check(layer, &qkv)?;
        if !self.in_step && layer == 0 {
            self.begin_step()?;
        }
        if !self.in_step || qkv.rows < self.rows.len() || out.dtype != self.dtype {
            return Err(CudaError::Input(format!(
                "{} live rows cannot attend in layer {layer} with {} rows of queries",
                self.rows.len(),
                qkv.rows
            )));
        }
        if !self.tables.plans.iter().any(|(known, _)| *known == window) {
            self.upload_plan(window)?;
        }
        let Tables { pages: Some(pages), plans, row_capacity, parts: Some((ml, parts)), .. } = &self.tables else {
            return Err(CudaError::Input("no step was started".to_owned()));
        };
        let Some((_, plan)) = plans.iter().find(|(known, _)| *known == window) else { return Ok(()) };
        let Heads { num_heads, num_kv_heads, head_dim, .. } = self.heads;
        let qkv_address = address(&qkv, qkv.rows, self.heads.width(), "qkv of a step")?;
        let params = AttendCached {
            qkv: qkv_address,
            out: address(&out, qkv.rows, self.heads.q_width(), "the output of attention")?,
            pages: pages.pointer(),
            plan: plan.pointer(),
            ml: ml.pointer(),
            parts: parts.pointer(),
            at: self.layer_at(layer),
            stride: qkv.stride as u32,
            out_stride: out.stride as u32,
            rows: qkv.rows as u32,
            row_capacity: *row_capacity as u32,
            num_heads: num_heads as u32,
            num_kv_heads: num_kv_heads as u32,
            dim: head_dim as u32,
            heads_at_once: self.geometry.heads_at_once as u32,
            head_tiles: self.geometry.head_tiles as u32,
            window: window_or_all(window),
            vector: is_aligned(qkv_address, qkv.stride, &self.heads).into(),
            scale: scale(&self.heads),
        };
        let shared = match self.dtype {
            Dtype::F32 => (QUERIES * self.geometry.padded * 4) as u32,
            Dtype::Bf16 => self.geometry.tile_bytes(QUERIES + 2 * BLOCK),
        };
        let at_once = self.device.properties().multiprocessors.max(1) * TASKS_AT_ONCE;
        let tasks = Launch { grid: [at_once, 1, 1], block: 32, shared };
        launch(&self.device, &self.geometry.kernel("attend_cached_tasks", self.dtype), tasks, &params)?;
        let head_tiles = num_kv_heads * self.geometry.head_tiles;
        let rows = Launch { grid: [qkv.rows as u32, head_tiles as u32, 1], block: 32, shared };
        launch(&self.device, &self.geometry.kernel("attend_cached_rows", self.dtype), rows, &params)?;
        if layer + 1 == self.num_layers {
            self.in_step = false;
        }
        Ok(())
    }

    /// Offset of a layer's keys and values in a page, in bytes.
    fn layer_at(&self, layer: usize) -> u64 {
        (layer * BLOCK * 2 * self.heads.kv_width() * self.dtype.bytes()) as u64
    }

    fn check(&self, layer: usize, qkv: &Rows<'_>) -> Result<()> {
        if layer >= self.num_layers || qkv.dtype != self.dtype {
            return Err(CudaError::Input(format!("layer {layer} of {} in {:?}", self.num_layers, qkv.dtype)));
        }
        Ok(())
    }
}

/// Returns the buffer, or a larger one if it has too little room for `count` elements.
fn room<T: super::driver::Plain>(device: &Device, old: Option<Buffer>, count: usize) -> Result<Buffer> {
    match old.filter(|buffer| buffer.count::<T>() >= count) {
        Some(buffer) => Ok(buffer),
        None => device.alloc(count.next_power_of_two().max(256) * size_of::<T>()),
    }
}
