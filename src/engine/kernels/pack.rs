//! Weight matrices in the order in which the kernels read them. One pack serves decode, forward and dX.

use std::ops::Range;

use half::bf16;

/// Outputs side by side in a panel.
pub const PANEL: usize = 32;

/// How the values of a pack are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PackDtype {
    /// As they are.
    F32,
    /// Rounded to bf16; sums stay in f32.
    Bf16,
}

/// One cache line.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
struct Line([u32; 16]);

/// A weight `[n, k]` (n outputs, k inputs), in panels of [`PANEL`] outputs, padded with zeros.
///
/// | dtype | layout |
/// |---|---|
/// | f32 | `[n / 32][k][32]` f32 |
/// | bf16 | `[n / 32][k / 2][32][2]` bf16: pairs of inputs side by side, which is what AMX multiplies (VNNI) |
#[derive(Clone, Debug)]
pub struct PackedMatrix {
    n: usize,
    k: usize,
    dtype: PackDtype,
    lines: Vec<Line>,
}

impl PackedMatrix {
    /// Pack `weight`, row-major `[n, k]`, n = weight.len() / k.
    pub fn new(weight: &[f32], k: usize, dtype: PackDtype) -> PackedMatrix {
        let n = weight.len().checked_div(k).unwrap_or(0);
        let mut packed = PackedMatrix { n, k, dtype, lines: vec![] };
        packed.lines = vec![Line::default(); packed.panels() * packed.panel_words() / 16];
        packed.set(weight);
        packed
    }

    /// Replace the values; the shape stays.
    pub fn set(&mut self, weight: &[f32]) {
        let (k, words) = (self.k, self.panel_words());
        if weight.is_empty() {
            return;
        }
        for (panel, lines) in self.lines.chunks_exact_mut(words / 16).enumerate() {
            let rows = weight.chunks_exact(k).skip(panel * PANEL).take(PANEL);
            for (column, row) in rows.enumerate() {
                let (half, lane) = (column / 16, column % 16);
                match self.dtype {
                    PackDtype::F32 => {
                        for (index, value) in row.iter().enumerate() {
                            lines[index * 2 + half].0[lane] = value.to_bits();
                        }
                    }
                    PackDtype::Bf16 => {
                        for (index, pair) in row.chunks(2).enumerate() {
                            let low = u32::from(bf16::from_f32(pair[0]).to_bits());
                            let high = pair.get(1).map_or(0, |value| u32::from(bf16::from_f32(*value).to_bits()));
                            lines[index * 2 + half].0[lane] = low | (high << 16);
                        }
                    }
                }
            }
        }
    }

    /// Outputs.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.k
    }

    /// How the values are held.
    pub fn dtype(&self) -> PackDtype {
        self.dtype
    }

    /// Panels of outputs.
    pub fn panels(&self) -> usize {
        self.n.div_ceil(PANEL)
    }

    /// Bytes held.
    pub fn size_bytes(&self) -> usize {
        self.lines.len() * size_of::<Line>()
    }

    /// One row (the weights of one output), as the kernels see it.
    pub fn row(&self, output: usize, out: &mut [f32]) {
        let (half, lane) = (output % PANEL / 16, output % 16);
        let lines = &self.lines[output / PANEL * self.panel_words() / 16..];
        for (index, out) in out.iter_mut().enumerate().take(self.k) {
            *out = f32::from_bits(match self.dtype {
                PackDtype::F32 => lines[index * 2 + half].0[lane],
                PackDtype::Bf16 => {
                    let pair = lines[index / 2 * 2 + half].0[lane];
                    if index % 2 == 0 { pair << 16 } else { pair & 0xffff_0000 }
                }
            });
        }
    }

    /// The inputs `block·32 …` of some outputs: `[outputs][32]`, zeros where there are fewer inputs. `outputs` begins at
    /// a panel.
    pub(super) fn turn(&self, block: usize, outputs: Range<usize>, out: &mut Vec<f32>) {
        let first = block * PANEL;
        let count = (self.k - first).min(PANEL);
        out.clear();
        out.resize(outputs.len() * PANEL, 0.0);
        for (output, out) in outputs.zip(out.chunks_exact_mut(PANEL)) {
            let (panel, half, lane) = (output / PANEL, output % PANEL / 16, output % 16);
            let lines = &self.lines[panel * self.panel_words() / 16..][..self.panel_words() / 16];
            match self.dtype {
                PackDtype::F32 => {
                    let lines = lines[first * 2..][..count * 2].chunks_exact(2);
                    for (out, pair) in out.iter_mut().zip(lines) {
                        *out = f32::from_bits(pair[half].0[lane]);
                    }
                }
                PackDtype::Bf16 => {
                    let lines = lines[first..][..count.div_ceil(2) * 2].chunks_exact(2);
                    for (out, pair) in out.chunks_exact_mut(2).zip(lines) {
                        out[0] = f32::from_bits(pair[half].0[lane] << 16);
                        out[1] = f32::from_bits(pair[half].0[lane] & 0xffff_0000);
                    }
                }
            }
        }
    }

    /// 32-bit words of a panel.
    pub(super) fn panel_words(&self) -> usize {
        PANEL
            * match self.dtype {
                PackDtype::F32 => self.k,
                PackDtype::Bf16 => self.k.div_ceil(2),
            }
    }

    /// The first word.
    pub(super) fn words(&self) -> *const u32 {
        self.lines.as_ptr().cast()
    }
}
