//! Multiplies with AMX: blocks of two tiles of input rows by two tiles of outputs.

use std::arch::asm;

use super::super::gemm::pairs::{Block, Output, ROWS};

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

    /// Where the sums of a tile of rows start from, with a stride in elements, and where they are stored.
    pub(super) fn new((from, from_stride, to): (*const f32, usize, Output)) -> Place {
        let bytes = size_of::<f32>();
        Place { from, from_stride: from_stride * bytes, to: to.at, to_stride: to.stride * bytes }
    }
}

/// Inline assembly that multiplies two tiles of rows by two of outputs, with prefetch instructions among the products.
macro_rules! two {
    ($block:expr, $tile:expr, [$($first:literal,)*], [$($second:literal,)*]) => {{
        let places = [place($block, $tile), place($block, $tile + 1)];
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
            next = inout(reg) fetched($block, $tile) => _,
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

/// Multiplies the tiles of a block's rows by its weights, and adds the products to the sums.
///
/// # Safety
/// The machine has AMX, this thread's tiles are configured, and all pointers are valid for the accessed ranges.
pub(super) unsafe fn multiply(block: &Block) {
    let tiles = block.rows.div_ceil(ROWS);
    for tile in (0..tiles).step_by(2) {
        // Safety: the caller guarantees what this `unsafe fn` requires.
        unsafe {
            match tile {
                _ if tile + 1 == tiles => one(block, tile),
                0 if tiles <= FEW => two_streaming(block, tile),
                _ => two(block, tile),
            }
        }
    }
}

/// Address of the next block's weights that this pair of row tiles prefetches: each pair prefetches one part, until
/// all parts are done.
fn fetched(block: &Block, tile: usize) -> *const u8 {
    const PAIRS: usize = 8;
    if tile / 2 < PAIRS { block.next.wrapping_add(tile / 2 * block.steps * 256) } else { block.weights }
}

fn place(block: &Block, tile: usize) -> Place {
    Place::new(block.place(tile * ROWS))
}

/// Multiplies two tiles of rows. If there are many rows, also prefetches the next block's weights
/// into the second-level cache.
unsafe fn two(block: &Block, tile: usize) {
    // Safety: the caller guarantees what this `unsafe fn` requires.
    unsafe {
        two!(
            block,
            tile,
            ["prefetcht1 [{next}]", "prefetcht1 [{next} + 64]",],
            ["prefetcht1 [{next} + 128]", "prefetcht1 [{next} + 192]", "add {next}, 256",]
        )
    }
}

/// Multiplies two tiles of rows while the weights are read from memory, with prefetching.
unsafe fn two_streaming(block: &Block, tile: usize) {
    // Safety: the caller guarantees what this `unsafe fn` requires. Prefetching has no effect on memory.
    unsafe {
        two!(
            block,
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
unsafe fn one(block: &Block, tile: usize) {
    // Safety: the caller guarantees what this `unsafe fn` requires. Prefetching has no effect on memory.
    unsafe {
        let Place { from, from_stride, to, to_stride } = place(block, tile);
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
            x = inout(reg) block.inputs.add(tile * block.inputs_stride) => _,
            w = inout(reg) block.weights => _,
            steps = inout(reg) block.steps => _,
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
