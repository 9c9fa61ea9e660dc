//! Decoding: the cache of a generation, and its steps, which are recorded as graphs, from the look-up of the tokens to the
//! choice of the next ones. A graph serves all batches of a bucket: the batch is filled up with rows whose results nobody
//! reads. What was chosen is all that the host waits for.

use super::{Cuda, Step, Stepped, Tensor};
use crate::engine::backend::{Choice, Chosen, Pick};
use crate::engine::error::Result;
use crate::engine::kernels::cuda::cache;
use crate::engine::kernels::cuda::driver::{Buffer, Device};
use crate::engine::kernels::cuda::head::{self, Head};
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

/// Tokens chosen on the device.
#[derive(Debug)]
pub struct Picked {
    /// As `head::begin_choose` leaves them.
    chosen: Buffer,
    rows: usize,
}

impl Picked {
    /// Ask for them.
    pub(super) fn begin(device: &Device, head: &Head<'_>, x: &Tensor, choice: Choice<'_>) -> Result<Picked> {
        let chosen = head::begin_choose(device, head, x.rows(), choice.picks, &choice.filters)?;
        Ok(Picked { chosen, rows: choice.picks.len() })
    }

    /// Wait for them.
    pub(super) fn wait(&self, device: &Device) -> Result<Vec<Chosen>> {
        Ok(head::read_chosen(device, &self.chosen, self.rows)?)
    }
}

/// Rows of the graph that serves so many: few enough sizes that each is soon recorded, none much larger than it must be.
fn bucket(rows: usize) -> usize {
    match rows {
        0..=8 => rows.next_power_of_two(),
        9..=64 => rows.next_multiple_of(8),
        65..=256 => rows.next_multiple_of(16),
        _ => rows.next_multiple_of((rows.next_power_of_two() / 16).max(32)),
    }
}

impl Cuda {
    /// [`Backend::step`](super::Backend::step) as a graph.
    pub(super) fn recorded_step(
        &self,
        cache: &mut Cache,
        step: &Step<'_>,
        mut body: impl FnMut(&mut Cache, &Step<'_>) -> Result<Stepped<Cuda>>,
    ) -> Result<Stepped<Cuda>> {
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
        // Nobody reads what is drawn for the rows that fill up; without picks there is nothing to choose.
        let Choice { picks, filters } = step.choice;
        let mut picks = picks.to_vec();
        if !picks.is_empty() {
            picks.resize(bucket, Pick { temperature: 1.0, uniform: 0.0 });
        }
        let choice = Choice { picks: &picks, filters };
        let filled = Step { table: step.table, tokens: &tokens, positions: &positions, choice };
        let kind = match (picks.is_empty(), filters.are_off()) {
            (true, _) => 0,
            (false, true) => 1,
            (false, false) => 2,
        };
        let key = 3 * bucket as u64 + kind;
        let (out, picked) = self.device.graph(key, || body(cache, &filled))?;
        Ok((out.first(rows), picked.map(|picked| Picked { rows, ..picked })))
    }
}
