//! Where a tile's sums come from and go to.

use std::ops::Range;

use super::super::pack::PANEL;
use super::{Job, Start};

/// Where the sums of a tile start from and where they are stored: in the output, or in a
/// buffer at its edge, where the tile is wider.
pub(super) struct Place {
    pub from: *const f32,
    pub from_stride: usize,
    pub to: *mut f32,
    pub to_stride: usize,
}

impl Place {
    /// Finds the initial values of a tile `width` wide; `begin` holds those that all rows share.
    ///
    /// # Safety
    /// Rows and columns are within the job's bounds, and `edge` has room for the rows.
    pub unsafe fn new(
        job: &Job<'_>,
        fresh: bool,
        (rows, columns): (&Range<usize>, &Range<usize>),
        width: usize,
        (edge, begin): (*mut f32, &mut [f32; PANEL]),
    ) -> Place {
        let (first, valid) = (columns.start, columns.len());
        let at_edge = valid < width;
        // Safety: the caller guarantees what this `unsafe fn` requires.
        let y = unsafe { job.y(rows.start, first) };
        let (to, to_stride) = if at_edge { (edge, PANEL) } else { (y, job.stride) };
        let (from, from_stride) = match job.start {
            Start::Bias(bias) if fresh && at_edge => {
                begin[..valid].copy_from_slice(&bias[columns.clone()]);
                (begin.as_ptr(), 0)
            }
            Start::Bias(bias) if fresh => (bias[columns.clone()].as_ptr(), 0),
            Start::Zero if fresh => (begin.as_ptr(), 0),
            Start::Rows(rows_of_start) if fresh => (rows_of_start.at(rows.start, first), rows_of_start.stride),
            Start::Zero | Start::Bias(_) | Start::Rows(_) | Start::Add => (y.cast_const(), job.stride),
        };
        if !at_edge || from_stride == 0 {
            return Place { from, from_stride, to, to_stride };
        }
        for row in 0..rows.len() {
            // Safety: the caller guarantees the bounds and the room.
            unsafe { std::ptr::copy_nonoverlapping(from.add(row * from_stride), edge.add(row * PANEL), valid) };
        }
        Place { from: edge.cast_const(), from_stride: PANEL, to, to_stride }
    }

    /// Copies sums at the edge to the output.
    ///
    /// # Safety
    /// The same as for [`Place::new`].
    pub unsafe fn finish(&self, job: &Job<'_>, (rows, columns): (&Range<usize>, &Range<usize>), width: usize) {
        if columns.len() == width {
            return;
        }
        for (number, row) in rows.clone().enumerate() {
            // Safety: the caller guarantees what this `unsafe fn` requires.
            unsafe {
                let from = self.to.add(number * self.to_stride);
                std::ptr::copy_nonoverlapping(from, job.y(row, columns.start), columns.len());
            }
        }
    }
}
