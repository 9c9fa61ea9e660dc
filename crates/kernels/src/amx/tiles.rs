//! Multiplies with AMX: blocks of two tiles of input rows by two tiles of outputs.

use std::arch::asm;

use super::{Begin, Output, ROWS};

/// Size of an AMX tile in bytes.
pub(super) const BYTES: usize = 1024;

/// The operands of tile products: rows of inputs and a block of weights of one panel.
pub(super) struct Block {
    /// Packed inputs in tiles of 16 rows, `inputs_stride` bytes apart; each consists of blocks of 32 steps.
    pub inputs: *const u8,
    pub inputs_stride: usize,
    /// The weights, `[steps][16][32][2]` bf16.
    pub weights: *const u8,
    /// Number of blocks of 32 steps of the summed dimension.
    pub steps: usize,
    /// The weights of the next block, to prefetch; equal to `weights` if they are unknown.
    pub next: *const u8,
    /// The initial value of the sums in whole tiles, and where the sums are stored.
    pub from: Begin,
    pub to: Output,
    /// Number of whole tiles of rows; the sums of the others start from and end in `edge`.
    pub whole: usize,
    /// Memory for the sums of incomplete tiles, `[tiles of rows][16][32]`.
    pub edge: Output,
}

/// Where the sums of a tile of 16 rows and 32 outputs start from, and where they are stored. Strides are in bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// Initial values of the sums; null means zero.
    from: *const f32,
    from_stride: usize,
    to: *mut f32,
    to_stride: usize,
}

impl Place {
    pub(super) const NONE: Place =
        Place { from: std::ptr::null(), from_stride: 0, to: std::ptr::null_mut(), to_stride: 0 };

    /// Memory of the sums for one tile of rows; `from` and `to` refer to the first row.
    pub(super) fn new(from: Begin, to: Output, tile: usize) -> Place {
        let (from, from_stride) = match from {
            Begin::Zero => (std::ptr::null(), 0),
            Begin::Bias(bias) => (bias, 0),
            Begin::Rows(rows, stride) => (rows.wrapping_add(tile * ROWS * stride), stride),
        };
        let (to_stride, to) = (to.stride * size_of::<f32>(), to.at.wrapping_add(tile * ROWS * to.stride));
        Place { from, from_stride: from_stride * size_of::<f32>(), to, to_stride }
    }
}

/// Inline assembly that multiplies two tiles of rows by two of outputs, with prefetch instructions among the products.
macro_rules! two {
    ($block:expr, $tile:expr, [$($first:literal,)*], [$($second:literal,)*]) => {{
        let places = [$block.place($tile), $block.place($tile + 1)];
        asm!(
            "mov {at}, [{places}]",
            "test {at}, {at}",
            "jnz 3f",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "jmp 2f",
            "3:",
            "mov {stride}, [{places} + 8]",
            "tileloadd tmm0, [{at} + {stride}]",
            "tileloadd tmm1, [{at} + {stride} + 64]",
            "mov {at}, [{places} + 32]",
            "mov {stride}, [{places} + 40]",
            "tileloadd tmm2, [{at} + {stride}]",
            "tileloadd tmm3, [{at} + {stride} + 64]",
            "2:",
            "# {next}",
            "tileloadd tmm6, [{w} + {long}]",
            "tileloadd tmm4, [{x} + {short}]",
            $($first,)*
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{w} + {long} + 64]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            $($second,)*
            "tileloadd tmm5, [{y} + {short}]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {x}, 1024",
            "add {y}, 1024",
            "add {w}, 2048",
            "dec {steps}",
            "jnz 2b",
            "mov {at}, [{places} + 16]",
            "mov {stride}, [{places} + 24]",
            "tilestored [{at} + {stride}], tmm0",
            "tilestored [{at} + {stride} + 64], tmm1",
            "mov {at}, [{places} + 48]",
            "mov {stride}, [{places} + 56]",
            "tilestored [{at} + {stride}], tmm2",
            "tilestored [{at} + {stride} + 64], tmm3",
            x = inout(reg) $block.inputs.add($tile * $block.inputs_stride) => _,
            y = inout(reg) $block.inputs.add(($tile + 1) * $block.inputs_stride) => _,
            w = inout(reg) $block.weights => _,
            steps = inout(reg) $block.steps => _,
            next = inout(reg) $block.fetched($tile) => _,
            short = in(reg) 64usize,
            long = in(reg) 128usize,
            places = in(reg) places.as_ptr(),
            at = out(reg) _,
            stride = out(reg) _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }};
}

/// Number of row tiles up to which the weights are read from memory while they are multiplied; with more tiles, they
/// were prefetched into the cache.
const FEW: usize = 4;

impl Block {
    /// Multiplies `tiles` tiles of input rows by the block of weights, and adds the products to the sums.
    ///
    /// # Safety
    /// The machine has AMX, this thread's tiles are configured, and all pointers are valid for the accessed ranges.
    pub unsafe fn multiply(&self, tiles: usize) {
        for tile in (0..tiles).step_by(2) {
            // Safety: the caller guarantees what this `unsafe fn` requires.
            unsafe {
                match tile {
                    _ if tile + 1 == tiles => self.one(tile),
                    0 if tiles <= FEW => self.two_streaming(tile),
                    _ => self.two(tile),
                }
            }
        }
    }

    /// Address of the next block's weights that this pair of row tiles prefetches: each pair prefetches one part, until
    /// all parts are done.
    fn fetched(&self, tile: usize) -> *const u8 {
        const PAIRS: usize = 8;
        if tile / 2 < PAIRS { self.next.wrapping_add(tile / 2 * self.steps * 256) } else { self.weights }
    }

    fn place(&self, tile: usize) -> Place {
        match tile < self.whole {
            true => Place::new(self.from, self.to, tile),
            false => Place::new(Begin::Rows(self.edge.at, self.edge.stride), self.edge, tile),
        }
    }

    /// Multiplies two tiles of rows. If there are many rows, also prefetches the next block's weights
    /// into the second-level cache.
    unsafe fn two(&self, tile: usize) {
        // Safety: the caller guarantees what this `unsafe fn` requires.
        unsafe {
            two!(
                self,
                tile,
                ["prefetcht1 [{next}]", "prefetcht1 [{next} + 64]",],
                ["prefetcht1 [{next} + 128]", "prefetcht1 [{next} + 192]", "add {next}, 256",]
            )
        }
    }

    /// Multiplies two tiles of rows while the weights are read from memory, with prefetching.
    unsafe fn two_streaming(&self, tile: usize) {
        // Safety: the caller guarantees what this `unsafe fn` requires. Prefetching has no effect on memory.
        unsafe {
            two!(
                self,
                tile,
                [
                    ".irp line, 0, 64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 960",
                    "prefetcht0 [{w} + 8192 + \\line]",
                    ".endr",
                ],
                [
                    ".irp line, 0, 64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 960",
                    "prefetcht0 [{w} + 9216 + \\line]",
                    ".endr",
                ]
            )
        }
    }

    /// Multiplies one tile of rows while the weights are read from memory, with prefetching.
    unsafe fn one(&self, tile: usize) {
        // Safety: the caller guarantees what this `unsafe fn` requires. Prefetching has no effect on memory.
        unsafe {
            let Place { from, from_stride, to, to_stride } = self.place(tile);
            asm!(
                "test {from}, {from}",
                "jnz 3f",
                "tilezero tmm0",
                "tilezero tmm1",
                "jmp 2f",
                "3:",
                "tileloadd tmm0, [{from} + {from_stride}]",
                "tileloadd tmm1, [{from} + {from_stride} + 64]",
                "2:",
                "tileloadd tmm4, [{x} + {short}]",
                "tileloadd tmm6, [{w} + {long}]",
                ".irp line, 0, 64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 960",
                "prefetcht0 [{w} + 8192 + \\line]",
                ".endr",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{w} + {long} + 64]",
                ".irp line, 0, 64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 960",
                "prefetcht0 [{w} + 9216 + \\line]",
                ".endr",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "add {x}, 1024",
                "add {w}, 2048",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{to} + {to_stride}], tmm0",
                "tilestored [{to} + {to_stride} + 64], tmm1",
                x = inout(reg) self.inputs.add(tile * self.inputs_stride) => _,
                w = inout(reg) self.weights => _,
                steps = inout(reg) self.steps => _,
                short = in(reg) 64usize,
                long = in(reg) 128usize,
                from = in(reg) from,
                from_stride = in(reg) from_stride,
                to = in(reg) to,
                to_stride = in(reg) to_stride,
                out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}
