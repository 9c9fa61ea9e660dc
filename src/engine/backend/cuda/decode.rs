//! Decoding: the cache of a generation, and its steps, which are recorded as graphs. A graph serves all batches of a
//! bucket: the batch is filled up with rows whose results nobody reads.

use super::{Cuda, Step, Tensor};
use crate::engine::error::Result;
use crate::engine::kernels::cuda::cache;
use crate::engine::kernels::cuda::driver::Device;
use crate::engine::kernels::cuda::rows::Dtype;
use crate::engine::ops::slices::Heads;

/// Keys and values of rows, made when the first prompt comes.
#[derive(Debug)]
pub struct Cache {
    heads: Heads,
    num_layers: usize,
    dtype: Dtype,
    pages: Option<cache::Cache>,
}

impl Cache {
    pub(super) fn new(heads: &Heads, num_layers: usize, dtype: Dtype) -> Cache {
        Cache { heads: *heads, num_layers, dtype, pages: None }
    }

    /// The pages.
    pub(super) fn made(&mut self, device: &Device) -> Result<&mut cache::Cache> {
        let pages = match self.pages.take() {
            Some(pages) => pages,
            None => cache::Cache::new(device, &self.heads, self.num_layers, self.dtype)?,
        };
        Ok(self.pages.insert(pages))
    }

    pub(super) fn close(&mut self) {
        if let Some(pages) = &mut self.pages {
            pages.close();
        }
    }

    pub(super) fn retain(&mut self, keep: &[bool]) {
        if let Some(pages) = &mut self.pages {
            pages.retain(keep);
        }
    }
}

/// Rows of the graph that serves so many: few enough sizes that each is soon recorded, none much larger than it must be.
fn bucket(rows: usize) -> usize {
    match rows {
        0..=8 => rows.next_power_of_two(),
        9..=64 => rows.next_multiple_of(8),
        65..=256 => rows.next_multiple_of(16),
        _ => rows.next_multiple_of(32),
    }
}

impl Cuda {
    /// [`Backend::step`](super::Backend::step) as a graph.
    pub(super) fn recorded_step(
        &self,
        cache: &mut Cache,
        step: &Step<'_>,
        mut body: impl FnMut(&mut Cache, &Step<'_>) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let rows = step.tokens.len();
        let bucket = bucket(rows);
        let fill = |values: &[u32]| -> Vec<u32> {
            values.iter().copied().chain(std::iter::repeat_n(0, bucket - rows)).collect()
        };
        let tokens = fill(step.tokens);
        let positions: Vec<usize> =
            step.positions.iter().copied().chain(std::iter::repeat_n(0, bucket - rows)).collect();
        // Neither the table nor the cache's own tables may move while a graph that reads them is recorded.
        self.table(step.table)?;
        cache.made(&self.device)?.begin_step()?;
        let filled = Step { table: step.table, tokens: &tokens, positions: &positions };
        let out = self.device.graph(bucket as u64, || body(cache, &filled))?;
        Ok(out.first(rows))
    }
}
