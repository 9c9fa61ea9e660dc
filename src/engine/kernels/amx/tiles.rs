//! Blocks of two tiles of rows by two of outputs.

use std::arch::asm;

/// Of a tile.
pub(super) const BYTES: usize = 1024;

/// Rows of inputs and a block of weights of one panel.
pub(super) struct Block {
    /// Tiles of 16 rows, `inputs_stride` bytes apart; inside one, blocks of 32 steps.
    pub inputs: *const u8,
    pub inputs_stride: usize,
    /// `[steps][16][32][2]` bf16
    pub weights: *const u8,
    /// Blocks of 32 steps.
    pub steps: usize,
    /// `[tiles of rows][16][32]`
    pub sums: *mut f32,
    /// The sums begin with zero instead of what is there.
    pub zero: bool,
}

impl Block {
    /// Add to the sums of so many tiles of rows.
    ///
    /// # Safety
    /// The machine has AMX, this thread's tiles are configured, and the pointers reach as far as they must.
    pub unsafe fn multiply(&self, tiles: usize) {
        let last_pair = tiles.saturating_sub(2) / 2 * 2;
        for tile in (0..tiles).step_by(2) {
            // Safety: the caller's.
            unsafe {
                if tile + 1 == tiles {
                    self.one(tile);
                    continue;
                }
                // What comes next: these weights' continuation, or the inputs of the next rows.
                let weights = self.weights.wrapping_add(self.steps * 2 * BYTES);
                let (a, b) = match tile {
                    0 => (weights, weights.wrapping_add(self.steps * BYTES)),
                    _ if tile == last_pair => {
                        let next = self.inputs.wrapping_add(self.steps * BYTES);
                        (next, next.wrapping_add(self.inputs_stride))
                    }
                    _ => {
                        let next = self.inputs.wrapping_add((tile + 2) * self.inputs_stride);
                        (next, next.wrapping_add(self.inputs_stride))
                    }
                };
                self.two(tile, a, b);
            }
        }
    }

    /// Two tiles of rows. Fetches ahead from `a` and `b`, as much as there are inputs.
    unsafe fn two(&self, tile: usize, a: *const u8, b: *const u8) {
        // Safety: the caller's. Fetching ahead touches nothing.
        unsafe {
            let sums = self.sums.add(tile * BYTES / 2);
            asm!(
                "test {zero}, {zero}",
                "jz 3f",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "jmp 2f",
                "3:",
                "tileloadd tmm0, [{sums} + {long}]",
                "tileloadd tmm1, [{sums} + {long} + 64]",
                "tileloadd tmm2, [{sums} + {long} + 2048]",
                "tileloadd tmm3, [{sums} + {long} + 2112]",
                "2:",
                "tileloadd tmm6, [{w} + {long}]",
                "prefetcht0 [{a}]",
                "prefetcht0 [{a} + 64]",
                "prefetcht0 [{a} + 128]",
                "prefetcht0 [{a} + 192]",
                "prefetcht0 [{a} + 256]",
                "prefetcht0 [{a} + 320]",
                "prefetcht0 [{a} + 384]",
                "prefetcht0 [{a} + 448]",
                "tileloadd tmm4, [{x} + {short}]",
                "prefetcht0 [{a} + 512]",
                "prefetcht0 [{a} + 576]",
                "prefetcht0 [{a} + 640]",
                "prefetcht0 [{a} + 704]",
                "prefetcht0 [{a} + 768]",
                "prefetcht0 [{a} + 832]",
                "prefetcht0 [{a} + 896]",
                "prefetcht0 [{a} + 960]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{w} + {long} + 64]",
                "prefetcht0 [{b}]",
                "prefetcht0 [{b} + 64]",
                "prefetcht0 [{b} + 128]",
                "prefetcht0 [{b} + 192]",
                "prefetcht0 [{b} + 256]",
                "prefetcht0 [{b} + 320]",
                "prefetcht0 [{b} + 384]",
                "prefetcht0 [{b} + 448]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{y} + {short}]",
                "prefetcht0 [{b} + 512]",
                "prefetcht0 [{b} + 576]",
                "prefetcht0 [{b} + 640]",
                "prefetcht0 [{b} + 704]",
                "prefetcht0 [{b} + 768]",
                "prefetcht0 [{b} + 832]",
                "prefetcht0 [{b} + 896]",
                "prefetcht0 [{b} + 960]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {x}, 1024",
                "add {y}, 1024",
                "add {a}, 1024",
                "add {b}, 1024",
                "add {w}, 2048",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{sums} + {long}], tmm0",
                "tilestored [{sums} + {long} + 64], tmm1",
                "tilestored [{sums} + {long} + 2048], tmm2",
                "tilestored [{sums} + {long} + 2112], tmm3",
                x = inout(reg) self.inputs.add(tile * self.inputs_stride) => _,
                y = inout(reg) self.inputs.add((tile + 1) * self.inputs_stride) => _,
                w = inout(reg) self.weights => _,
                a = inout(reg) a => _,
                b = inout(reg) b => _,
                steps = inout(reg) self.steps => _,
                short = in(reg) 64usize,
                long = in(reg) 128usize,
                sums = in(reg) sums,
                zero = in(reg) usize::from(self.zero),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }

    /// One tile of rows: the weights stream by, fetched ahead.
    unsafe fn one(&self, tile: usize) {
        /// Bytes ahead.
        const AHEAD: usize = 4096;
        // Safety: the caller's. Fetching ahead touches nothing.
        unsafe {
            let sums = self.sums.add(tile * BYTES / 2);
            asm!(
                "test {zero}, {zero}",
                "jz 3f",
                "tilezero tmm0",
                "tilezero tmm1",
                "jmp 2f",
                "3:",
                "tileloadd tmm0, [{sums} + {long}]",
                "tileloadd tmm1, [{sums} + {long} + 64]",
                "2:",
                "tileloadd tmm4, [{x} + {short}]",
                "tileloadd tmm6, [{w} + {long}]",
                "prefetcht0 [{a}]",
                "prefetcht0 [{a} + 64]",
                "prefetcht0 [{a} + 128]",
                "prefetcht0 [{a} + 192]",
                "prefetcht0 [{a} + 256]",
                "prefetcht0 [{a} + 320]",
                "prefetcht0 [{a} + 384]",
                "prefetcht0 [{a} + 448]",
                "prefetcht0 [{a} + 512]",
                "prefetcht0 [{a} + 576]",
                "prefetcht0 [{a} + 640]",
                "prefetcht0 [{a} + 704]",
                "prefetcht0 [{a} + 768]",
                "prefetcht0 [{a} + 832]",
                "prefetcht0 [{a} + 896]",
                "prefetcht0 [{a} + 960]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{w} + {long} + 64]",
                "prefetcht0 [{a} + 1024]",
                "prefetcht0 [{a} + 1088]",
                "prefetcht0 [{a} + 1152]",
                "prefetcht0 [{a} + 1216]",
                "prefetcht0 [{a} + 1280]",
                "prefetcht0 [{a} + 1344]",
                "prefetcht0 [{a} + 1408]",
                "prefetcht0 [{a} + 1472]",
                "prefetcht0 [{a} + 1536]",
                "prefetcht0 [{a} + 1600]",
                "prefetcht0 [{a} + 1664]",
                "prefetcht0 [{a} + 1728]",
                "prefetcht0 [{a} + 1792]",
                "prefetcht0 [{a} + 1856]",
                "prefetcht0 [{a} + 1920]",
                "prefetcht0 [{a} + 1984]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "add {x}, 1024",
                "add {a}, 2048",
                "add {w}, 2048",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{sums} + {long}], tmm0",
                "tilestored [{sums} + {long} + 64], tmm1",
                x = inout(reg) self.inputs.add(tile * self.inputs_stride) => _,
                w = inout(reg) self.weights => _,
                a = inout(reg) self.weights.wrapping_add(AHEAD) => _,
                steps = inout(reg) self.steps => _,
                short = in(reg) 64usize,
                long = in(reg) 128usize,
                sums = in(reg) sums,
                zero = in(reg) usize::from(self.zero),
                out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}
