//! The language-model head.

use super::{Chosen, Cpu, Matrix, Pick, Weight, rows};
use crate::engine::backend::HeadBackward;
use crate::engine::kernels::gemm::{self, Output, Rows, Term};
use crate::engine::ops::slices::{self, TokenScore};

impl Cpu {
    pub(super) fn all_logits(&self, x: &Matrix, head: &Weight) -> Matrix {
        let mut logits = self.pool.matrix(x.rows(), head.matrix.n());
        let (rows, stride) = (x.rows(), logits.width());
        let out = Output { y: logits.values_mut(), stride, rows, add: false };
        let terms = [Term { x: x.values(), stride: x.width(), weight: &head.matrix }];
        gemm::forward(&self.threads, self.isa, &terms, None, out);
        logits
    }

    pub(super) fn token_scores(&self, x: &Matrix, head: &Weight, targets: &[u32], temperature: f64) -> Vec<TokenScore> {
        let logits = self.all_logits(x, head);
        (0..x.rows()).map(|row| slices::token_score(logits.row(row), targets[row] as usize, temperature)).collect()
    }

    pub(super) fn token_scores_vjp(&self, backward: &HeadBackward<'_, Self>, gradient: &mut [f32]) -> Matrix {
        let HeadBackward { x, head, targets, temperature, scores: _, g, at } = backward;
        let mut d_logits = self.all_logits(x, head);
        for row in 0..x.rows() {
            slices::token_score_vjp(d_logits.rows_mut(row..row + 1), targets[row] as usize, *temperature, g[row]);
        }
        let mut dx = self.pool.matrix(x.rows(), x.width());
        let (rows, stride) = (x.rows(), x.width());
        let out = Output { y: dx.values_mut(), stride, rows, add: false };
        let terms = [Term { x: d_logits.values(), stride: d_logits.width(), weight: &head.matrix }];
        gemm::backward(&self.threads, self.isa, &terms, out);
        if let Some(at) = at {
            let slot = &mut gradient[*at..at + head.matrix.n() * x.width()];
            gemm::outer(&self.threads, self.isa, rows, all(&d_logits), all(x), slot);
        }
        dx
    }

    pub(super) fn choose_tokens(&self, x: &Matrix, head: &Weight, picks: &[Pick]) -> Vec<Chosen> {
        let logits = self.all_logits(x, head);
        let _ = rows::add;
        (0..x.rows()).map(|row| crate::engine::backend::reference::choose(logits.row(row), picks[row])).collect()
    }
}

fn all(x: &Matrix) -> Rows<'_> {
    Rows { values: x.values(), width: x.width(), stride: x.width() }
}
