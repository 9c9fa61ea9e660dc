//! Row-major matrices whose memory is reused.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// A matrix of f32 `[rows, width]`.
#[derive(Debug)]
pub struct Matrix {
    values: Vec<f32>,
    width: usize,
    pool: Arc<Pool>,
}

impl Matrix {
    /// All values of the matrix, row by row.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// All values of the matrix, row by row, for writing.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// Number of values in a row of the matrix.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Number of rows in the matrix.
    pub fn rows(&self) -> usize {
        self.values.len().checked_div(self.width).unwrap_or(0)
    }

    /// The values of one row of the matrix.
    pub fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.width..(row + 1) * self.width]
    }

    /// The values of a range of rows of the matrix, for writing.
    pub fn rows_mut(&mut self, rows: Range<usize>) -> &mut [f32] {
        &mut self.values[rows.start * self.width..rows.end * self.width]
    }
}

impl Drop for Matrix {
    fn drop(&mut self) {
        self.pool.return_buffer(std::mem::take(&mut self.values));
    }
}

/// Memory of dropped matrices, kept for reuse.
#[derive(Debug, Default)]
pub struct Pool {
    free: Mutex<Vec<Vec<f32>>>,
    positions: Mutex<Vec<Vec<usize>>>,
}

/// Maximum number of buffers kept: as many as a training pass over a deep model uses simultaneously.
const MAX_FREE: usize = 1024;

impl Pool {
    /// Returns a matrix with uninitialized (old) values.
    pub fn matrix(self: &Arc<Self>, rows: usize, width: usize) -> Matrix {
        let len = rows * width;
        let mut values = self.take_buffer(len).unwrap_or_else(|| vec![0.0; len]);
        if values.len() < len {
            values.resize(len, 0.0);
        } else {
            values.truncate(len);
        }
        Matrix { values, width, pool: self.clone() }
    }

    /// Returns a matrix of zeros.
    pub fn zeros(self: &Arc<Self>, rows: usize, width: usize) -> Matrix {
        let mut matrix = self.matrix(rows, width);
        matrix.values.fill(0.0);
        matrix
    }

    /// Copies positions into a reused buffer.
    pub fn positions(&self, positions: &[usize]) -> Vec<usize> {
        let free = self.positions.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut copy = free.unwrap_or_default();
        copy.clear();
        copy.extend_from_slice(positions);
        copy
    }

    /// Returns a buffer of positions to the pool.
    pub fn return_positions(&self, positions: Vec<usize>) {
        let mut free = self.positions.lock().unwrap_or_else(PoisonError::into_inner);
        if free.len() < MAX_FREE {
            free.push(positions);
        }
    }

    /// Returns the smallest free buffer of the pool that is large enough, unless it is far too large.
    fn take_buffer(&self, len: usize) -> Option<Vec<f32>> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |buffer: &Vec<f32>| (len..=4 * len.max(256)).contains(&buffer.capacity());
        let best = (0..free.len()).filter(|index| fits(&free[*index])).min_by_key(|index| free[*index].capacity());
        best.map(|index| free.swap_remove(index))
    }

    fn return_buffer(&self, values: Vec<f32>) {
        if values.capacity() == 0 {
            return;
        }
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if free.len() < MAX_FREE {
            free.push(values);
        }
    }

    /// Frees buffers beyond a total of `bytes`, the largest ones first.
    pub fn trim(&self, bytes: u64) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let size = |buffer: &Vec<f32>| (size_of::<f32>() * buffer.capacity()) as u64;
        free.sort_by_key(Vec::capacity);
        let mut held: u64 = free.iter().map(size).sum();
        while held > bytes
            && let Some(largest) = free.pop()
        {
            held -= size(&largest);
        }
    }
}
