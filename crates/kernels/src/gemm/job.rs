//! One matrix product, as the kernels of all instruction sets expect it: the direction of the weight, checked inputs
//! and outputs, and the initial values of the sums.

use std::ops::Range;

use super::super::pack::{PANEL, PackedMatrix};
use super::super::threads::Shared;
#[cfg(target_arch = "x86_64")]
use super::pairs;
use super::{Output, Part, Term};

/// The direction in which a weight is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Side {
    /// Forward: y = x·Wᵀ, sums over the weight's inputs.
    Forward,
    /// Backward: dx = dy·W, sums over the weight's outputs. Blocks of 32 inputs are transposed on demand,
    /// once for many rows.
    Backward,
}

/// The initial values of a product's sums.
#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Start<'a> {
    Zero,
    Bias(&'a [f32]),
    Rows(StartRows<'a>),
    /// The sums start from the existing values of the output.
    Add,
}

/// Rows of other values, such as a residual, that sums start from; row 0 and output 0 come first.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct StartRows<'a> {
    pub(super) values: &'a [f32],
    pub stride: usize,
}

impl StartRows<'_> {
    /// Address of a row's initial values, from one output on.
    pub fn at(&self, row: usize, output: usize) -> *const f32 {
        self.values[row * self.stride + output..(row + 1) * self.stride].as_ptr()
    }
}

/// The checked outputs of a product.
pub(super) struct Target {
    pub y: Shared<f32>,
    pub stride: usize,
    /// Index of the row that comes first in y.
    pub first_row: usize,
    /// The range of outputs to compute; the first one is column 0 of y.
    pub columns: Range<usize>,
    pub add: bool,
}

impl Target {
    pub(super) fn new(out: Output<'_>, columns: Range<usize>) -> Target {
        let Output { y, stride, rows, add } = out;
        assert!(stride >= columns.len() || rows <= 1, "rows overlap");
        assert!(
            rows == 0 || y.len() >= (rows - 1) * stride + columns.len(),
            "the slice of a matrix product's output is too short"
        );
        Target { y: Shared::new(y), stride, first_row: 0, columns, add }
    }

    pub(super) fn start<'a>(&self, bias: Option<&'a [f32]>) -> Start<'a> {
        let Some(bias) = bias else { return if self.add { Start::Add } else { Start::Zero } };
        assert!(
            bias.len() >= self.columns.end && !self.add,
            "the bias of a matrix product has another shape, or is added twice"
        );
        Start::Bias(bias)
    }
}

/// Rows of inputs of a product.
#[derive(Clone, Copy, Debug, Default)]
pub(in super::super) struct Inputs<'a> {
    pub values: &'a [f32],
    pub stride: usize,
    /// Index of the row that comes first in the values.
    pub first_row: usize,
    /// The step of the summed dimension at column 0.
    pub first: usize,
}

impl<'a> Inputs<'a> {
    pub(super) fn of(term: &Term<'a>, first: usize) -> Inputs<'a> {
        Inputs { values: term.x, stride: term.stride, first_row: 0, first }
    }

    pub(super) fn check(&self, rows: usize, width: usize) {
        assert!(
            rows == 0 || self.values.len() >= (rows - 1) * self.stride + width,
            "the slice of a matrix product's input is too short"
        );
    }

    /// The inputs of a row, for a range of steps of the summed dimension.
    pub(in super::super) fn row(&self, row: usize, steps: &Range<usize>) -> &'a [f32] {
        &self.values[(row - self.first_row) * self.stride..][steps.start - self.first..steps.end - self.first]
    }
}

/// A product with one weight.
#[derive(Clone)]
pub(in super::super) struct Job<'a> {
    pub side: Side,
    pub weight: &'a PackedMatrix,
    pub inputs: Inputs<'a>,
    /// The range of the weight's summed dimension.
    pub sum: Range<usize>,
    /// The part of the summed dimension that each range of outputs needs; empty if all outputs need all of it.
    pub(super) parts: &'a [Part],
    pub start: Start<'a>,
    pub(super) y: Shared<f32>,
    pub stride: usize,
    pub(super) first_row: usize,
    /// The range of outputs to compute; the first one is column 0 of y.
    pub columns: Range<usize>,
    /// Id of the public call: inputs that were packed for a call serve all cells of that call.
    pub call: u64,
    /// Index of the thread's buffer for packed inputs that this job uses.
    pub slot: usize,
    /// The packed inputs of all rows, if they were packed once for all threads.
    #[cfg(target_arch = "x86_64")]
    pub tiled: Option<pairs::Tiled>,
    /// The whole transposed weight, if it was transposed once for all threads.
    #[cfg(target_arch = "x86_64")]
    pub transposed: Option<pairs::Transposed>,
}

impl<'a> Job<'a> {
    pub(super) fn new(
        side: Side,
        weight: &'a PackedMatrix,
        inputs: Inputs<'a>,
        start: Start<'a>,
        target: &Target,
        call: u64,
    ) -> Job<'a> {
        let sum = 0..if side == Side::Forward { weight.k() } else { weight.n() };
        let Target { y, stride, first_row, ref columns, add: _ } = *target;
        Job {
            side,
            weight,
            inputs,
            sum,
            parts: &[],
            start,
            y,
            stride,
            first_row,
            columns: columns.clone(),
            call,
            slot: 0,
            #[cfg(target_arch = "x86_64")]
            tiled: None,
            #[cfg(target_arch = "x86_64")]
            transposed: None,
        }
    }

    /// The part of the summed dimension that a panel of outputs needs. Begins at a multiple of the block size of AMX.
    pub(in super::super) fn depth(&self, panel: usize) -> Range<usize> {
        if self.parts.is_empty() {
            return self.sum.clone();
        }
        let outputs = panel * PANEL..(panel + 1) * PANEL;
        let meets = |part: &&(Range<usize>, Range<usize>)| part.0.start < outputs.end && outputs.start < part.0.end;
        let all = self.parts.iter().filter(meets).map(|part| part.1.clone());
        let all = all.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0);
        all.start / PANEL * PANEL..all.end.next_multiple_of(PANEL).min(self.sum.end)
    }

    /// Address of one output of the product.
    ///
    /// # Safety
    /// The row and output are among those of this job.
    pub(in super::super) unsafe fn y(&self, row: usize, output: usize) -> *mut f32 {
        unsafe { self.y.at((row - self.first_row) * self.stride + output - self.columns.start) }
    }

    /// Writes the outputs of a product without anything to sum: their initial values.
    pub(super) fn empty(&self, rows: Range<usize>, panels: Range<usize>) {
        for row in rows {
            for output in panels.start * PANEL..(panels.end * PANEL).min(self.columns.end) {
                let value = match self.start {
                    Start::Zero => 0.0,
                    Start::Bias(bias) => bias[output],
                    Start::Rows(rows) => rows.values[row * rows.stride + output],
                    Start::Add => return,
                };
                // Safety: the bounds were checked when the job was created.
                unsafe { *self.y(row, output) = value };
            }
        }
    }
}
