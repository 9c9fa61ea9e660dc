//! The gated delta rule and its gradients in f64, one token and one value at a time.

use super::Shape;

/// The gradients of a sequence, in f64.
#[derive(Debug, Default)]
pub struct Gradients {
    pub d_qkv: Vec<f64>,
    pub d_beta: Vec<f64>,
    pub d_g: Vec<f64>,
    /// The gradient of the memory before the first token.
    pub d_memory: Vec<f64>,
}

/// The inputs of a sequence, in f64.
#[derive(Clone, Debug)]
pub struct Inputs {
    pub heads: Shape,
    pub qkv: Vec<f64>,
    pub beta: Vec<f64>,
    pub g: Vec<f64>,
    /// The memory before the first token.
    pub memory: Vec<f64>,
}

/// The offsets of a head's query, key and value in a row of qkv.
fn offsets(heads: &Shape, head: usize) -> (usize, usize, usize) {
    let k_head = head / (heads.num_value_heads / heads.num_key_heads);
    let (q, k) = (k_head * heads.key_dim, heads.key_width() + k_head * heads.key_dim);
    (q, k, 2 * heads.key_width() + head * heads.value_dim)
}

/// A token's memory after the decay, and what its key recalls.
struct Step {
    decayed: Vec<f64>,
    recalled: Vec<f64>,
}

impl Inputs {
    /// Walks over a head's tokens; returns the outputs, the steps, and the memory after the last token.
    fn walk(&self, head: usize) -> (Vec<f64>, Vec<Step>, Vec<f64>) {
        let Shape { num_value_heads, key_dim, value_dim, .. } = self.heads;
        let (q, k, v) = offsets(&self.heads, head);
        let mut memory = self.memory[head * key_dim * value_dim..][..key_dim * value_dim].to_vec();
        let (mut out, mut steps) = (Vec::new(), Vec::new());
        for (token, row) in self.qkv.chunks_exact(self.heads.conv_width()).enumerate() {
            let gate = token * num_value_heads + head;
            memory.iter_mut().for_each(|value| *value *= self.g[gate].exp());
            let decayed = memory.clone();
            let recalled: Vec<f64> =
                (0..value_dim).map(|j| (0..key_dim).map(|i| memory[i * value_dim + j] * row[k + i]).sum()).collect();
            for (at, value) in memory.iter_mut().enumerate() {
                let (i, j) = (at / value_dim, at % value_dim);
                *value += row[k + i] * self.beta[gate] * (row[v + j] - recalled[j]);
            }
            out.extend(
                (0..value_dim).map(|j| (0..key_dim).map(|i| memory[i * value_dim + j] * row[q + i]).sum::<f64>()),
            );
            steps.push(Step { decayed, recalled });
        }
        (out, steps, memory)
    }

    /// The outputs `[tokens][num_value_heads][value_dim]`, and the memory after the last token.
    pub fn forward(&self) -> (Vec<f64>, Vec<f64>) {
        let Shape { num_value_heads, value_dim, .. } = self.heads;
        let mut outputs = vec![0.0; self.beta.len() * value_dim];
        let mut memories = Vec::new();
        for head in 0..num_value_heads {
            let (out, _, memory) = self.walk(head);
            for (token, out) in out.chunks_exact(value_dim).enumerate() {
                outputs[(token * num_value_heads + head) * value_dim..][..value_dim].copy_from_slice(out);
            }
            memories.extend(memory);
        }
        (outputs, memories)
    }

    /// The gradients from those of the outputs and of the memory after the last token.
    pub fn backward(&self, d_out: &[f64], d_memory: &[f64]) -> Gradients {
        let heads = self.heads;
        let Shape { num_value_heads, key_dim, value_dim, .. } = heads;
        let mut all = Gradients {
            d_qkv: vec![0.0; self.qkv.len()],
            d_beta: vec![0.0; self.beta.len()],
            d_g: vec![0.0; self.g.len()],
            d_memory: d_memory.to_vec(),
        };
        for head in 0..num_value_heads {
            let (q, k, v) = offsets(&heads, head);
            let (_, steps, _) = self.walk(head);
            let d = &mut all.d_memory[head * key_dim * value_dim..][..key_dim * value_dim];
            for (token, Step { decayed, recalled }) in steps.iter().enumerate().rev() {
                let row = &self.qkv[token * heads.conv_width()..][..heads.conv_width()];
                let d_row = &mut all.d_qkv[token * heads.conv_width()..][..heads.conv_width()];
                let d_out = &d_out[(token * num_value_heads + head) * value_dim..][..value_dim];
                let gate = token * num_value_heads + head;
                let beta = self.beta[gate];
                let mut d_delta = vec![0.0; value_dim];
                for i in 0..key_dim {
                    for (j, d_delta) in d_delta.iter_mut().enumerate() {
                        let (at, delta) = (i * value_dim + j, beta * (row[v + j] - recalled[j]));
                        d_row[q + i] += (decayed[at] + row[k + i] * delta) * d_out[j];
                        d[at] += row[q + i] * d_out[j];
                        d_row[k + i] += d[at] * delta;
                        *d_delta += d[at] * row[k + i];
                    }
                }
                for (j, d_delta) in d_delta.iter().enumerate() {
                    all.d_beta[gate] += d_delta * (row[v + j] - recalled[j]);
                    d_row[v + j] += beta * d_delta;
                }
                for i in 0..key_dim {
                    for (j, d_delta) in d_delta.iter().enumerate() {
                        let at = i * value_dim + j;
                        d[at] -= row[k + i] * beta * d_delta;
                        d_row[k + i] -= decayed[at] * beta * d_delta;
                        all.d_g[gate] += d[at] * decayed[at];
                        d[at] *= self.g[gate].exp();
                    }
                }
            }
        }
        all
    }
}
