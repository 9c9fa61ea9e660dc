//! Products of up to 16 rows with a weight in 4-bit codes. The weight is the first operand of the tile product here, and the inputs
//! are the second. A row of the first operand has 32 inputs of one output, so that one permutation finds them in a table of this
//! output's 16 values. The bits are those of the other order, because the instruction adds the same products in the same order.
//!
//! No generated code uses tiles, so the sums stay in tiles 0 and 1 from one block of assembly to the next.

use std::arch::asm;
use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;

use super::super::gemm::pairs::{Begin, Parts, ROWS, STEPS, TILE_BYTES, Tiled, valid};
use super::super::gemm::product::{copy, room};
use super::super::gemm::tile::transpose_words;
use super::super::gemm::{Job, Side};
use super::super::pack::{CodeBlock, CodeRun, Line, PANEL};
use super::few;
use super::permission::configure;

/// Number of outputs in a tile.
const OUTPUTS: usize = 16;
/// Number of lines of codes for 32 inputs.
const STEP_LINES: usize = STEPS * PANEL / 128;
/// Number of blocks of 32 inputs that are expanded before they are multiplied.
const STEPS_AT_ONCE: usize = 2;
/// Size in bytes of expanded values, `[half of the panel][block of 32 inputs][16 outputs][32]` bf16.
const EXPANDED_BYTES: usize = 2 * STEPS_AT_ONCE * TILE_BYTES;
/// Number of words ahead of the current ones at which codes are prefetched.
const AHEAD: usize = 1024;

/// Whether [`product`] supports these products, for one tile of rows.
pub(super) fn takes(parts: &Parts<'_, '_>, panels: &Range<usize>) -> bool {
    // Every machine with AMX has these; the emulator also runs elsewhere.
    let has_permutations =
        std::arch::is_x86_feature_detected!("avx512bw") && std::arch::is_x86_feature_detected!("avx512vbmi");
    let is_taken = |job: &Job<'_>| {
        let has_exact_codes = || panels.clone().all(|panel| job.weight.has_exact_codes(panel));
        job.side == Side::Forward && (!job.weight.is_in_codes() || has_exact_codes())
    };
    let has_codes = parts.iter().flatten().any(|(job, ..)| job.weight.is_in_codes());
    has_codes && has_permutations && parts.iter().flatten().all(|(job, ..)| is_taken(job))
}

thread_local! {
    /// The transposed inputs, and the expanded values.
    static BUFFERS: RefCell<[Vec<Line>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
}

/// Computes the outputs of panels for rows that fit into one tile.
///
/// # Safety
/// The same as for [`super::super::gemm::pairs::product`], and [`takes`] returns true; `sums` has room for two panels of one tile.
pub(super) unsafe fn product(parts: &Parts<'_, '_>, rows: &Range<usize>, panels: Range<usize>, sums: *mut f32) {
    for (job, tiled, sum) in parts.iter().flatten() {
        // Safety: the caller guarantees what this `unsafe fn` requires.
        unsafe {
            if !job.weight.is_in_codes() {
                few::product(&[Some((job, *tiled, sum.clone())), None], rows, panels.clone(), sums);
                continue;
            }
            configure(rows.len());
            BUFFERS.with_borrow_mut(|[transposed, expanded]| {
                let inputs = Inputs::new(tiled, sum, rows, transposed);
                for panel in panels.clone() {
                    one_panel(job, &inputs, sum, (panel, rows), sums, expanded);
                }
            });
            configure(ROWS);
        }
    }
}

/// Packed inputs as the second operand: `[block of 32 steps][16][rows][2]` bf16. Strides are in bytes.
struct Inputs {
    at: *const u8,
    block_stride: usize,
    pair_stride: usize,
}

impl Inputs {
    /// # Safety
    /// The machine has AVX-512.
    unsafe fn new(tiled: &Tiled, sum: &Range<usize>, rows: &Range<usize>, buffer: &mut Vec<Line>) -> Inputs {
        let (from, count) = (tiled.at(rows.start, sum.start), rows.len());
        let pair_stride = 4 * count;
        if count == 1 {
            // One row has its pairs in this order anyway.
            return Inputs { at: from, block_stride: TILE_BYTES, pair_stride };
        }
        let blocks = sum.len().div_ceil(STEPS);
        let to = room(buffer, blocks * 16 * count).cast::<u32>();
        for block in 0..blocks {
            // Safety: the packed inputs are whole tiles, and the buffer has room for all blocks.
            unsafe { transpose(from.add(block * TILE_BYTES).cast(), 16, to.add(block * 16 * count), count) };
        }
        Inputs { at: to.cast_const().cast(), block_stride: 16 * pair_stride, pair_stride }
    }
}

/// Transposes up to 16 rows of 16 words, `stride` apart.
///
/// # Safety
/// The machine has AVX-512, and the pointers are valid for all words.
#[target_feature(enable = "avx512f")]
unsafe fn transpose(from: *const u32, stride: usize, to: *mut u32, rows: usize) {
    // Safety: the caller guarantees what this `unsafe fn` requires.
    unsafe {
        let rows_of_words = std::array::from_fn(|row| match row < rows {
            true => _mm512_loadu_si512(from.add(row * stride).cast()),
            false => _mm512_setzero_si512(),
        });
        for (column, words) in transpose_words(rows_of_words).into_iter().enumerate() {
            _mm512_mask_storeu_epi32(to.add(column * rows).cast(), first_lanes(rows), words);
        }
    }
}

/// The reverse of [`transpose`].
///
/// # Safety
/// The same as for [`transpose`].
#[target_feature(enable = "avx512f")]
unsafe fn transpose_back(from: *const u32, to: *mut u32, stride: usize, rows: usize) {
    // Safety: the caller guarantees what this `unsafe fn` requires.
    unsafe {
        let columns =
            std::array::from_fn(|column| _mm512_maskz_loadu_epi32(first_lanes(rows), from.add(column * rows).cast()));
        for (row, words) in transpose_words(columns).into_iter().enumerate().take(rows) {
            _mm512_storeu_si512(to.add(row * stride).cast(), words);
        }
    }
}

/// A mask of the first lanes of a vector.
fn first_lanes(count: usize) -> u16 {
    ((1u32 << count) - 1) as u16
}

/// Computes the outputs of one panel.
///
/// # Safety
/// The same as for [`product`]; the tiles are configured for as many columns as there are rows.
unsafe fn one_panel(
    job: &Job<'_>,
    inputs: &Inputs,
    sum: &Range<usize>,
    (panel, rows): (usize, &Range<usize>),
    sums: *mut f32,
    expanded: &mut Vec<Line>,
) {
    let Some(run) = job.weight.code_run(panel, sum.clone()) else { return };
    let (valid, column, count) = (valid(job, panel), panel * PANEL, rows.len());
    // Safety: the caller guarantees what this `unsafe fn` requires.
    unsafe {
        // The sums as `[rows][32]`, and as tiles hold them, `[32][rows]`: the same for one row.
        let transposed = if count == 1 { sums } else { sums.add(ROWS * PANEL) };
        let halves = [0, OUTPUTS].map(|first| (sums.add(first).cast(), transposed.add(first * count).cast()));
        let begin = Begin::of(job, sum.start <= job.depth(panel).start, rows.start, column);
        if let Begin::Zero = begin {
            asm!("tilezero tmm0", "tilezero tmm1", out("tmm0") _, out("tmm1") _, options(nostack, nomem));
        } else {
            sums.write_bytes(0, count * PANEL);
            begin.copy(rows.clone(), rows.start, valid, sums);
            if count > 1 {
                halves.into_iter().for_each(|(sums, transposed)| transpose(sums, PANEL, transposed, count));
            }
            asm!(
                "tileloadd tmm0, [{first} + {stride}]",
                "tileloadd tmm1, [{second} + {stride}]",
                first = in(reg) halves[0].1,
                second = in(reg) halves[1].1,
                stride = in(reg) 4 * count,
                out("tmm0") _, out("tmm1") _,
                options(nostack, readonly),
            );
        }
        add_codes(&run, inputs, expanded);
        asm!(
            "tilestored [{first} + {stride}], tmm0",
            "tilestored [{second} + {stride}], tmm1",
            first = in(reg) halves[0].1,
            second = in(reg) halves[1].1,
            stride = in(reg) 4 * count,
            options(nostack),
        );
        if count > 1 {
            halves.into_iter().for_each(|(sums, transposed)| transpose_back(transposed, sums, PANEL, count));
        }
        let y = job.y(rows.start, column);
        for row in 0..count {
            copy(sums.add(row * PANEL), y.add(row * job.stride), valid);
        }
    }
}

/// Adds the products of a panel's codes to tiles 0 and 1.
///
/// # Safety
/// The machine has AMX and the permutations, and the inputs cover those of the codes.
unsafe fn add_codes(run: &CodeRun<'_>, inputs: &Inputs, expanded: &mut Vec<Line>) {
    let buffers = room(expanded, 2 * EXPANDED_BYTES / 4).cast::<u8>();
    let (mut blocks, mut x, mut slot, mut waiting) = (run.blocks(), inputs.at, 0, None);
    // Safety: the caller guarantees what this `unsafe fn` requires; there is room for two blocks.
    unsafe {
        let mut add = |(values, steps)| {
            multiply(values, steps, x, inputs);
            x = x.wrapping_add(steps * inputs.block_stride);
        };
        while let Some(block) = blocks.take_next() {
            for lines in block.lines.chunks(STEPS_AT_ONCE * STEP_LINES) {
                let (values, steps) = (buffers.add(slot * EXPANDED_BYTES), lines.len() / STEP_LINES);
                match steps {
                    1 => expand::<1>(&block, lines, values),
                    _ => expand::<STEPS_AT_ONCE>(&block, lines, values),
                }
                // The values before these are multiplied: loads of tiles wait until the stores of their rows are done.
                if let Some(before) = waiting.replace((values.cast_const(), steps)) {
                    add(before);
                }
                slot = 1 - slot;
            }
        }
        waiting.into_iter().for_each(add);
    }
}

/// Multiplies the values of blocks of 32 inputs with the inputs, and adds the products to tiles 0 and 1.
///
/// # Safety
/// The machine has AMX, and the pointers are valid for all steps, of which there is at least one.
unsafe fn multiply(values: *const u8, steps: usize, x: *const u8, inputs: &Inputs) {
    // Safety: the caller guarantees what this `unsafe fn` requires.
    unsafe {
        asm!(
            "2:",
            "tileloadd tmm6, [{x} + {pair_stride}]",
            "tileloadd tmm4, [{first} + {row_stride}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{second} + {row_stride}]",
            "tdpbf16ps tmm1, tmm5, tmm6",
            "add {x}, {block_stride}",
            "add {first}, 1024",
            "add {second}, 1024",
            "dec {steps}",
            "jnz 2b",
            x = inout(reg) x => _,
            first = inout(reg) values => _,
            second = inout(reg) values.add(steps * TILE_BYTES) => _,
            steps = inout(reg) steps => _,
            pair_stride = in(reg) inputs.pair_stride,
            block_stride = in(reg) inputs.block_stride,
            row_stride = in(reg) 64usize,
            out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm5") _, out("tmm6") _,
            options(nostack, readonly),
        );
    }
}

/// Instructions that write the values of 32 inputs of an output: the 16 bytes of their codes, then their order, then the table.
macro_rules! step {
    ($low:literal, $high:literal, $out:literal) => {
        concat!(
            "vpbroadcastq {words}, qword ptr [{codes} + ",
            $low,
            "]\n",
            "vpbroadcastq {words}{{{upper}}}, qword ptr [{codes} + ",
            $high,
            "]\n",
            "vpmultishiftqb {words}, {shifts}, {words}\n",
            // This reads the lowest five bits of each word: a code, and one bit more. The table has each value twice.
            "vpermw {words}, {words}, {values}\n",
            "vmovdqa64 zmmword ptr [{out} + ",
            $out,
            "], {words}\n",
        )
    };
}

/// Inline assembly that expands the codes of 16 outputs. The arguments are the instructions that round the 16 values of an output to
/// bf16 and write each twice, and those of each step.
macro_rules! expand {
    ($of:expr, [$($round:literal),*], [$($step:expr),*]) => {{
        let (block, half, codes, out): (&CodeBlock<'_>, usize, *const u8, *mut u8) = $of;
        asm!(
            "2:",
            "vmulps {values}, {table}, dword ptr [{scales}]{{1to16}}",
            $($round,)*
            $($step,)*
            "add {scales}, 4",
            "add {codes}, 8",
            "add {out}, 64",
            "dec {outputs}",
            "jnz 2b",
            "# {half} {tops}",
            table = in(zmm_reg) _mm512_loadu_ps(block.table.as_ptr()),
            half = in(zmm_reg) _mm512_set1_epi32(0x8000),
            tops = in(zmm_reg) _mm512_loadu_si512(TOPS.as_ptr().cast()),
            shifts = in(zmm_reg) _mm512_loadu_si512(SHIFTS.as_ptr().cast()),
            upper = in(kreg) 0xf0u8,
            scales = inout(reg) block.scales.as_ptr().add(half * OUTPUTS) => _,
            codes = inout(reg) codes => _,
            out = inout(reg) out => _,
            outputs = inout(reg) OUTPUTS => _,
            values = out(zmm_reg) _,
            words = out(zmm_reg) _,
            options(nostack),
        )
    }};
}

/// Writes the values of the codes of `STEPS` blocks of 32 inputs, 1 or 2, as `[half of the panel][STEPS][16 outputs][32]` bf16.
///
/// # Safety
/// The machine has AVX512-BF16 and the permutations, and there is room.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512bf16")]
unsafe fn expand<const STEPS: usize>(block: &CodeBlock<'_>, lines: &[Line], out: *mut u8) {
    for line in lines {
        // A prefetch has no effect on memory, whatever the address.
        _mm_prefetch::<_MM_HINT_T0>(line.0.as_ptr().wrapping_add(AHEAD).cast());
    }
    for half in 0..2 {
        // Safety: the caller guarantees the room. A group of 16 inputs has 256 bytes of codes, and an output 8 of them.
        unsafe {
            let codes = lines.as_ptr().cast::<u8>().add(half * OUTPUTS * 8);
            let of = (block, half, codes, out.add(half * STEPS * TILE_BYTES));
            match (block.has_ties, STEPS) {
                (false, 1) => expand!(
                    of,
                    ["vpaddd {values}, {values}, {half}", "vpermb {values}, {tops}, {values}"],
                    [step!(0, 256, 0)]
                ),
                (false, _) => expand!(
                    of,
                    ["vpaddd {values}, {values}, {half}", "vpermb {values}, {tops}, {values}"],
                    [step!(0, 256, 0), step!(512, 768, 1024)]
                ),
                (true, 1) => expand!(of, ["vcvtne2ps2bf16 {values}, {values}, {values}"], [step!(0, 256, 0)]),
                (true, _) => expand!(
                    of,
                    ["vcvtne2ps2bf16 {values}, {values}, {values}"],
                    [step!(0, 256, 0), step!(512, 768, 1024)]
                ),
            }
        }
    }
}

/// The bytes of the upper halves of 16 words, twice.
static TOPS: [u8; 64] = {
    let mut tops = [0; 64];
    let mut byte = 0;
    while byte < 64 {
        tops[byte] = (4 * (byte / 2 % 16) + 2 + byte % 2) as u8;
        byte += 1;
    }
    tops
};

/// The first bit of each input's code within the eight bytes that an output has for a group of 16 inputs, each twice.
static SHIFTS: [u8; 64] = {
    let mut shifts = [0; 64];
    let mut byte = 0;
    while byte < 64 {
        let input = byte / 2 % 16;
        shifts[byte] = (input % 2 * 32 + input / 2 * 4) as u8;
        byte += 1;
    }
    shifts
};
