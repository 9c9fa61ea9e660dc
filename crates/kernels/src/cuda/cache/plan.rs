//! Distributes the attention of a decode step over the device. The result does not depend on the distribution, bit for
//! bit: a task covers one block of keys, or begins with the first block that its queries attend to.

use std::ops::Range;

use super::super::super::attention::first_seen;
use super::super::attention::{BLOCK, QUERIES};
use super::super::driver::CudaError;
use super::super::rows::Result;

/// Number of 32-bit words of a plan's header, of a row and of a task, as in the device code.
pub(super) const HEADER: usize = 4;
pub(super) const PLAN_ROW: usize = 16;
const PLAN_TASK: usize = 8;

/// A sequence of the cache during a decode step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct PlannedRow {
    /// Whether the sequence continues the same prompt as the previous one.
    pub shares: bool,
    /// Index of the prompt's first page in the list of page addresses.
    pub prompt_pages: usize,
    /// Index of the sequence's own first page in the list of page addresses.
    pub own_pages: usize,
    /// Number of tokens of the prompt.
    pub prompt_len: usize,
    /// Number of tokens after the prompt, including the new one.
    pub own_len: usize,
}

impl PlannedRow {
    /// The first block of keys that the new token attends to in its prompt, and in its own segment; the prompt's end if
    /// the window does not reach the prompt.
    fn first_blocks(&self, window: Option<usize>) -> (usize, usize) {
        let first = first_seen(self.prompt_len + self.own_len - 1, window);
        let of_prompt = if first >= self.prompt_len { self.prompt_len.div_ceil(BLOCK) } else { first / BLOCK };
        (of_prompt, first.saturating_sub(self.prompt_len) / BLOCK)
    }

    /// The blocks of the sequence's own segment that the new token attends to, without the last block.
    fn own_blocks(&self, window: Option<usize>) -> Range<usize> {
        self.first_blocks(window).1..(self.own_len - 1) / BLOCK
    }
}

/// Where the tasks of a row store their partial attention results.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Parts {
    count: usize,
    first: usize,
    step: usize,
    /// Number of rows of one head tile in a partial result, and this row's index among them.
    rows: usize,
    place: usize,
}

/// A task of the first launch: a range of blocks of keys whose partial result is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Task {
    row: usize,
    tokens: usize,
    own: bool,
    first: usize,
    end: usize,
    part: usize,
}

/// The thresholds that decide how the work is divided.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Spread {
    /// Number of warps that keep the whole device busy.
    pub warps: usize,
    /// Number of blocks that one warp processes alone if there are enough rows.
    pub long: usize,
}

impl Spread {
    /// Whether `blocks` blocks of keys, out of `all` in the step for each head tile, are divided into one task per
    /// block. That is the case if other warps would wait for a single task: it is long, and at least
    /// twice a warp's share.
    fn divides(self, blocks: usize, all: usize, head_tiles: usize) -> bool {
        blocks > self.long && blocks.saturating_mul(self.warps) >= 2 * all * head_tiles
    }
}

/// The plan of a decode step: which task processes which blocks of keys.
#[derive(Debug)]
pub(super) struct Plan {
    rows: Vec<(PlannedRow, Parts, usize, Parts, usize)>,
    tasks: Vec<Task>,
    /// Number of rows of partial results that all tasks store.
    pub parts: usize,
    heads_at_once: usize,
    head_tiles: usize,
}

impl Plan {
    pub fn new(
        rows: &[PlannedRow],
        window: Option<usize>,
        heads_at_once: usize,
        head_tiles: usize,
        spread: Spread,
    ) -> Plan {
        let mut plan = Plan { rows: Vec::new(), tasks: Vec::new(), parts: 0, heads_at_once, head_tiles };
        let chunks = chunks(rows, QUERIES / heads_at_once);
        let of_prompts: usize = chunks.iter().map(|chunk| prompt_blocks(&rows[chunk.clone()], window).len()).sum();
        let of_own: usize = rows.iter().map(|row| row.own_blocks(window).len()).sum();
        // If there are few rows, every block but a row's last one becomes a task.
        let few = rows.len() * head_tiles < spread.warps;
        for chunk in chunks {
            let prompt = prompt_blocks(&rows[chunk.clone()], window);
            let shared = chunk.len() > 1;
            let (prompt_parts, is_folded) = match few || spread.divides(prompt.len(), of_prompts, head_tiles) {
                true => (plan.tasks(chunk.start, chunk.len(), false, prompt.clone(), 1), true),
                false if shared => (plan.tasks(chunk.start, chunk.len(), false, prompt.clone(), prompt.len()), true),
                false => (Parts::default(), false),
            };
            for (place, index) in chunk.enumerate() {
                let row = rows[index];
                let own = row.own_blocks(window);
                let (own_parts, own_block) = match few || spread.divides(own.len(), of_own, head_tiles) {
                    true => (plan.tasks(index, 1, true, own.clone(), 1), own.end),
                    false => (Parts::default(), own.start),
                };
                let of_prompt = Parts { place: place * heads_at_once, ..prompt_parts };
                let prompt_block = if is_folded { prompt.end } else { prompt.start };
                plan.rows.push((row, of_prompt, prompt_block, own_parts, own_block));
            }
        }
        // Warps take tasks in turn, so put the long ones first.
        plan.tasks.sort_by_key(|task| std::cmp::Reverse(task.end - task.first));
        plan
    }

    /// Creates tasks for consecutive ranges of `at_once` blocks.
    fn tasks(&mut self, row: usize, tokens: usize, own: bool, blocks: Range<usize>, at_once: usize) -> Parts {
        let rows = tokens * self.heads_at_once;
        let mut parts = Parts { count: 0, first: self.parts, step: rows * self.head_tiles, rows, place: 0 };
        for first in blocks.clone().step_by(at_once.max(1)) {
            let end = (first + at_once).min(blocks.end);
            self.tasks.push(Task { row, tokens, own, first, end, part: self.parts });
            self.parts += parts.step;
            parts.count += 1;
        }
        parts
    }

    /// Encodes the plan as 32-bit words for the kernels.
    pub fn words(&self, row_capacity: usize) -> Result<Vec<i32>> {
        let mut words = Vec::with_capacity(HEADER + row_capacity * PLAN_ROW + self.tasks.len() * PLAN_TASK);
        words.extend([self.rows.len(), self.tasks.len(), 0, 0]);
        for (row, prompt, prompt_block, own, own_block) in &self.rows {
            words.extend([row.prompt_pages, row.own_pages, row.prompt_len, row.own_len]);
            words.extend([prompt.count, prompt.first, prompt.step, prompt.rows, prompt.place, *prompt_block]);
            words.extend([own.count, own.first, own.step, *own_block, 0, 0]);
        }
        words.resize(HEADER + row_capacity * PLAN_ROW, 0);
        for Task { row, tokens, own, first, end, part } in &self.tasks {
            words.extend([*row, *tokens, usize::from(*own), *first, *end, *part, 0, 0]);
        }
        let word =
            |word| i32::try_from(word).map_err(|_| CudaError::Input("the key-value cache is too large".to_owned()));
        words.into_iter().map(word).collect()
    }
}

/// Ranges of rows that share a prompt and fit into one tile of queries.
fn chunks(rows: &[PlannedRow], at_once: usize) -> Vec<Range<usize>> {
    let mut chunks: Vec<Range<usize>> = Vec::new();
    for (index, row) in rows.iter().enumerate() {
        match chunks.last_mut().filter(|chunk| row.shares && chunk.len() < at_once) {
            Some(chunk) => chunk.end = index + 1,
            None => chunks.push(index..index + 1),
        }
    }
    chunks
}

/// The blocks of the shared prompt that at least one of these rows attends to.
fn prompt_blocks(rows: &[PlannedRow], window: Option<usize>) -> Range<usize> {
    let end = rows[0].prompt_len.div_ceil(BLOCK);
    rows.iter().map(|row| row.first_blocks(window).0).min().unwrap_or(end)..end
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the blocks of a row's prompt and of its own segment in the order in which the plan processes them.
    fn folded(plan: &Plan, row: usize) -> (Vec<usize>, Vec<usize>) {
        let (planned, prompt, prompt_block, own, own_block) = &plan.rows[row];
        let blocks = |parts: &Parts, then: Range<usize>| -> Vec<usize> {
            let of_parts = (0..parts.count).flat_map(|index| {
                let part = parts.first + index * parts.step;
                let task = plan.tasks.iter().find(|task| task.part == part).expect("a part is a task's");
                assert!(task.end - task.first == 1 || index == 0, "only what begins the fold may be long");
                task.first..task.end
            });
            of_parts.chain(then).collect()
        };
        let of_prompt = blocks(prompt, *prompt_block..planned.prompt_len.div_ceil(BLOCK));
        (of_prompt, blocks(own, *own_block..planned.own_len.div_ceil(BLOCK)))
    }

    #[test]
    fn only_long_folds_are_divided_if_there_are_many_rows() {
        let row =
            |prompt_len, own_len| PlannedRow { shares: false, prompt_pages: 0, own_pages: 0, prompt_len, own_len };
        let mut rows = vec![row(64, 100); 15];
        rows.push(row(64 * 20, 64 * 30));
        let spread = Spread { warps: 16, long: 8 };
        let plan = Plan::new(&rows, None, 4, 1, spread);
        assert_eq!(plan.tasks.len(), 20 + 29);
        assert!(plan.tasks.iter().all(|task| task.row == 15 && task.end - task.first == 1));
        assert_eq!(plan.parts, (20 + 29) * 4);
        let all_long = vec![row(64 * 20, 64 * 30); 16];
        assert!(Plan::new(&all_long, None, 4, 1, spread).tasks.is_empty());
    }

    #[test]
    fn every_row_folds_the_blocks_that_it_sees_in_order() {
        let row =
            |shares, prompt_len, own_len| PlannedRow { shares, prompt_pages: 0, own_pages: 0, prompt_len, own_len };
        let rows = [row(false, 300, 5), row(true, 300, 200), row(true, 300, 1), row(false, 1, 64), row(false, 64, 65)];
        for window in [None, Some(1), Some(70), Some(250)] {
            let warps = [(1, 0), (1, 10), (1, usize::MAX), (8, 0), (8, 9), (8, usize::MAX), (16, 0), (16, 10)];
            for (heads_at_once, warps) in warps {
                let plan = Plan::new(&rows, window, heads_at_once, 2, Spread { warps, long: 1 });
                for (index, row) in rows.iter().enumerate() {
                    let (of_prompt, own) = folded(&plan, index);
                    let (first_prompt, first_own) = row.first_blocks(window);
                    let seen: Vec<usize> = (first_prompt..row.prompt_len.div_ceil(BLOCK)).collect();
                    // A row may process blocks that only other rows attend to; such blocks leave its result unchanged.
                    assert!(of_prompt.ends_with(&seen), "{of_prompt:?} for {seen:?}");
                    assert!(of_prompt.is_sorted() && of_prompt.windows(2).all(|pair| pair[0] + 1 == pair[1]));
                    assert_eq!(own, (first_own..row.own_len.div_ceil(BLOCK)).collect::<Vec<_>>());
                }
                assert!(plan.words(8).is_ok());
            }
        }
    }
}
