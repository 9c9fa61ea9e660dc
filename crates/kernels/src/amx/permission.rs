//! Checks whether this process may use AMX tiles and whether they compute correctly, and configures their shapes.

use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::cell::Cell;
use std::sync::OnceLock;

use super::super::gemm;
use super::super::isa::Isa;
use super::ROWS;

/// The reason why AMX is not used; `None` if it is used.
pub(in super::super) fn refused() -> Option<&'static str> {
    static REFUSED: OnceLock<Option<&str>> = OnceLock::new();
    *REFUSED.get_or_init(|| {
        if !Isa::Avx512.is_available() {
            return Some("the CPU has no AVX-512");
        }
        if !has_tiles() {
            return Some("the CPU has no AMX for bf16");
        }
        if !is_permitted() {
            return Some("the operating system does not permit AMX");
        }
        check()
    })
}

/// Whether the CPU has AMX-BF16 and AMX-TILE.
fn has_tiles() -> bool {
    const NEEDED: u32 = 1 << 22 | 1 << 24;
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & NEEDED == NEEDED
}

/// Requests permission to use the tile state, once per process.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_PRCTL: usize = 158;
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const TILE_DATA: usize = 18;
    let result: isize;
    // Safety: the call does not access this process's memory.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") TILE_DATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

/// Compares the products of AMX with those of AVX-512, for a few odd shapes.
fn check() -> Option<&'static str> {
    const SHAPES: [(usize, usize, usize); 4] = [(1, 1, 1), (17, 65, 33), (33, 31, 70), (5, 100, 300)];
    // Inputs and weights are exact in bf16; only the order of the sums differs.
    const TOLERANCE: f32 = 1e-3;
    let wrong = SHAPES.iter().any(|shape| gemm::apart(Isa::Amx, Isa::Avx512, *shape) > TOLERANCE);
    wrong.then_some("AMX gives wrong products on this machine")
}

thread_local! {
    /// The number of columns for which this thread has configured its tiles, 0 before the first time. No other code configures tiles.
    static CONFIGURED: Cell<usize> = const { Cell::new(0) };
}

/// The shapes of the AMX tiles, as `ldtilecfg` reads them: see [`configure`].
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Configures the shapes of this thread's AMX tiles, if they are others: 16 rows of 64 bytes, but tiles 0, 1 and 6 have only this many
/// columns of 4 bytes, for products with [`super::codes`].
pub(super) fn configure(columns: usize) {
    const TILES: usize = 8;
    if CONFIGURED.replace(columns) == columns {
        return;
    }
    let mut configuration =
        Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    configuration.row_bytes[..TILES].fill(64);
    configuration.rows[..TILES].fill(ROWS as u8);
    for tile in [0, 1, 6] {
        configuration.row_bytes[tile] = 4 * columns as u16;
    }
    // Safety: the machine has AMX tiles.
    unsafe { std::arch::asm!("ldtilecfg [{}]", in(reg) &raw const configuration, options(nostack, readonly)) };
}
