//! Emulates the AMX instructions of this crate on machines without AMX: the instructions raise SIGILL, and the
//! signal handler executes them.
//!
//! Semantics and faults follow Intel's manual, volume 2. A fault that the CPU would raise ends the
//! process with a message.

use std::cell::RefCell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

const TILES: usize = 8;
const ROWS: usize = 16;
const ROW_BYTES: usize = 64;

/// The tiles of a thread.
struct State {
    configured: bool,
    /// Number of rows, and bytes per row, of each tile.
    shapes: [(usize, usize); TILES],
    data: [[[u8; ROW_BYTES]; ROWS]; TILES],
}

impl State {
    const NEW: State = State { configured: false, shapes: [(0, 0); TILES], data: [[[0; ROW_BYTES]; ROWS]; TILES] };
}

thread_local! {
    static STATE: RefCell<State> = const { RefCell::new(State::NEW) };
}

/// An instruction with resolved addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Instruction {
    Configure(usize),
    Release,
    Zero(usize),
    Load {
        tile: usize,
        base: usize,
        stride: usize,
    },
    Store {
        tile: usize,
        base: usize,
        stride: usize,
    },
    /// Matrix product: sums += a · b.
    Multiply {
        sums: usize,
        a: usize,
        b: usize,
    },
}

static INSTALLED: AtomicBool = AtomicBool::new(false);

/// Whether [`install`] succeeded in this process.
pub(crate) fn is_installed() -> bool {
    INSTALLED.load(Ordering::Relaxed)
}

/// Installs the emulator, so that this process can run AMX and AVX512-BF16 code. Returns false if that is impossible,
/// because packing needs AVX-512.
pub(crate) fn install() -> bool {
    static DONE: OnceLock<bool> = OnceLock::new();
    *DONE.get_or_init(|| {
        if !crate::isa::Isa::Avx512.is_available() {
            return false;
        }
        // If the machine has AMX, the hardware executes the instructions.
        crate::amx::refused();
        // Safety: the handler only uses operations permitted in signal handlers.
        let result = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handle as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
            libc::sigaction(libc::SIGILL, &raw const action, std::ptr::null_mut())
        };
        INSTALLED.store(result == 0, Ordering::Relaxed);
        result == 0
    })
}

extern "C" fn handle(_signal: i32, _info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // Safety: the kernel passes a valid context, and the instruction pointer points to code.
    unsafe {
        let registers = &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs;
        let at = registers[libc::REG_RIP as usize] as usize;
        let code = std::slice::from_raw_parts(at as *const u8, 15);
        let register = |number: usize| registers[ORDER[number] as usize] as usize;
        let Some((instruction, length)) = decode(code, at, register) else {
            if crate::dpbf16::tests::emulator::execute(context) {
                return;
            }
            // The emulators do not know the instruction: it is raised again with the default handler, which ends the
            // process.
            libc::signal(libc::SIGILL, libc::SIG_DFL);
            return;
        };
        let done = STATE.with_borrow_mut(|state| state.execute(instruction));
        if let Err(fault) = done {
            for part in ["AMX would fault: ", fault, "\n"] {
                libc::write(2, part.as_ptr().cast(), part.len());
            }
            libc::abort();
        }
        registers[libc::REG_RIP as usize] += length as i64;
    }
}

/// The registers in the order of their encoding.
pub(crate) const ORDER: [i32; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];

/// Decodes an AMX instruction in VEX encoding; returns it with its length.
fn decode(code: &[u8], at: usize, register: impl Fn(usize) -> usize) -> Option<(Instruction, usize)> {
    // The encoding is: C4 RXB.mmmmm W.vvvv.L.pp opcode modrm …
    let [0xc4, one, two, opcode, modrm, ..] = *code else { return None };
    let (r, x, b) = (usize::from(!one >> 7 & 1), usize::from(!one >> 6 & 1), usize::from(!one >> 5 & 1));
    let map = one & 0x1f;
    let (wide, third, long, prefix) = (two >> 7, usize::from(!two >> 3 & 15), two >> 2 & 1, two & 3);
    if map != 2 || wide != 0 || long != 0 {
        return None;
    }
    let (mode, reg, rm) = (modrm >> 6, usize::from(modrm >> 3 & 7), usize::from(modrm & 7));
    if mode == 3 {
        let instruction = match (opcode, prefix) {
            (0x49, 0) if modrm == 0xc0 => Instruction::Release,
            (0x49, 3) if rm == 0 && r == 0 => Instruction::Zero(reg),
            (0x5c, 2) if r == 0 && b == 0 && third < TILES => Instruction::Multiply { sums: reg, a: rm, b: third },
            _ => return None,
        };
        return Some((instruction, 5));
    }
    let mut length = 5;
    let (mut base, mut index, mut scaled) = (None, 0, false);
    if rm == 4 {
        let sib = code[5];
        length += 1;
        let (scale, i, low) = (sib >> 6, usize::from(sib >> 3 & 7) | x << 3, usize::from(sib & 7));
        scaled = true;
        if i != 4 {
            index = register(i) << scale;
        }
        if !(low == 5 && mode == 0) {
            base = Some(register(low | b << 3));
        }
    } else if !(rm == 5 && mode == 0) {
        base = Some(register(rm | b << 3));
    }
    let four = || i32::from_le_bytes([code[length], code[length + 1], code[length + 2], code[length + 3]]) as isize;
    let (displacement, bytes) = match mode {
        1 => (code[length] as i8 as isize, 1),
        2 => (four(), 4),
        _ if base.is_none() => (four(), 4),
        _ => (0, 0),
    };
    length += bytes;
    let address = match (base, scaled) {
        (Some(base), _) => base.wrapping_add_signed(displacement),
        (None, true) => displacement as usize,
        // Relative addresses count from the end of the instruction.
        (None, false) => (at + length).wrapping_add_signed(displacement),
    };
    let instruction = match (opcode, prefix) {
        (0x49, 0) if reg == 0 => Instruction::Configure(address.wrapping_add(index)),
        (0x4b, 1 | 3) if scaled && r == 0 => Instruction::Load { tile: reg, base: address, stride: index },
        (0x4b, 2) if scaled && r == 0 => Instruction::Store { tile: reg, base: address, stride: index },
        _ => return None,
    };
    Some((instruction, length))
}

impl State {
    fn execute(&mut self, instruction: Instruction) -> Result<(), &'static str> {
        match instruction {
            // Safety: the CPU would read the same 64 bytes.
            Instruction::Configure(from) => self.configure(unsafe { &*(from as *const [u8; 64]) }),
            Instruction::Release => {
                *self = State::NEW;
                Ok(())
            }
            Instruction::Zero(tile) => {
                self.shape(tile)?;
                self.data[tile] = [[0; ROW_BYTES]; ROWS];
                Ok(())
            }
            Instruction::Load { tile, base, stride } => {
                let (rows, bytes) = self.shape(tile)?;
                self.data[tile] = [[0; ROW_BYTES]; ROWS];
                for (row, data) in self.data[tile].iter_mut().enumerate().take(rows) {
                    let from = base.wrapping_add(row.wrapping_mul(stride)) as *const u8;
                    // Safety: the CPU would read the same bytes.
                    unsafe { std::ptr::copy_nonoverlapping(from, data.as_mut_ptr(), bytes) };
                }
                Ok(())
            }
            Instruction::Store { tile, base, stride } => {
                let (rows, bytes) = self.shape(tile)?;
                for (row, data) in self.data[tile].iter().enumerate().take(rows) {
                    let to = base.wrapping_add(row.wrapping_mul(stride)) as *mut u8;
                    // Safety: the CPU would write the same bytes.
                    unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, bytes) };
                }
                Ok(())
            }
            Instruction::Multiply { sums, a, b } => self.multiply(sums, a, b),
        }
    }

    /// Executes LDTILECFG, which sets the tile shapes.
    fn configure(&mut self, from: &[u8; 64]) -> Result<(), &'static str> {
        *self = State::NEW;
        match from[0] {
            0 => return Ok(()),
            1 => {}
            _ => return Err("no such palette"),
        }
        if from[1] != 0 {
            return Err("a start row");
        }
        if from[2..16].iter().any(|byte| *byte != 0) {
            return Err("reserved bytes of the configuration");
        }
        for tile in 0..16 {
            let bytes = usize::from(u16::from_le_bytes([from[16 + 2 * tile], from[17 + 2 * tile]]));
            let rows = usize::from(from[48 + tile]);
            if tile >= TILES {
                if rows != 0 || bytes != 0 {
                    return Err("a ninth tile");
                }
                continue;
            }
            if rows > ROWS || bytes > ROW_BYTES {
                return Err("a tile larger than the palette's");
            }
            if (rows == 0) != (bytes == 0) {
                return Err("a tile with rows but no bytes, or the reverse");
            }
            self.shapes[tile] = (rows, bytes);
        }
        self.configured = true;
        Ok(())
    }

    fn shape(&self, tile: usize) -> Result<(usize, usize), &'static str> {
        if !self.configured {
            return Err("tiles are not configured on this thread");
        }
        match self.shapes[tile] {
            (0, _) => Err("this tile has no shape"),
            shape => Ok(shape),
        }
    }

    /// Executes TDPBF16PS, the product of two tiles.
    fn multiply(&mut self, sums: usize, a: usize, b: usize) -> Result<(), &'static str> {
        if sums == a || a == b || sums == b {
            return Err("a tile used twice");
        }
        let ((rows, bytes), (a_rows, a_bytes), (b_rows, b_bytes)) = (self.shape(sums)?, self.shape(a)?, self.shape(b)?);
        if bytes % 4 != 0 || a_bytes % 4 != 0 || b_bytes % 4 != 0 {
            return Err("rows of broken pairs");
        }
        if rows != a_rows || bytes != b_bytes || a_bytes / 4 != b_rows {
            return Err("tiles that do not fit");
        }
        for row in 0..rows {
            for column in 0..bytes / 4 {
                let (mut even, mut odd) = (0f32, 0f32);
                for step in 0..a_bytes / 4 {
                    let (x, w) = (&self.data[a][row][4 * step..], &self.data[b][step][4 * column..]);
                    even = flush(value(x).mul_add(value(w), even));
                    odd = flush(value(&x[2..]).mul_add(value(&w[2..]), odd));
                }
                let sum = &mut self.data[sums][row][4 * column..][..4];
                let before = flush(f32::from_le_bytes([sum[0], sum[1], sum[2], sum[3]]));
                sum.copy_from_slice(&flush(before + flush(even + odd)).to_le_bytes());
            }
        }
        Ok(())
    }
}

/// Reads a bf16 as f32.
fn value(from: &[u8]) -> f32 {
    flush(f32::from_bits(u32::from(u16::from_le_bytes([from[0], from[1]])) << 16))
}

/// Replaces subnormal numbers by zero.
fn flush(value: f32) -> f32 {
    if value.is_subnormal() { 0.0 } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn configuration(rows: u8, bytes: u16) -> [u8; 64] {
        let mut configuration = [0; 64];
        configuration[0] = 1;
        for tile in 0..TILES {
            configuration[16 + 2 * tile..][..2].copy_from_slice(&bytes.to_le_bytes());
            configuration[48 + tile] = rows;
        }
        configuration
    }

    #[test]
    fn the_amx_instructions_are_decoded() {
        // The encodings below come from an assembler.
        let register = |number: usize| 0x1000 * (number + 1);
        let cases: [(&[u8], Instruction, usize); 6] = [
            // ldtilecfg [rdi]
            (&[0xc4, 0xe2, 0x78, 0x49, 0x07], Instruction::Configure(0x8000), 5),
            // tilerelease
            (&[0xc4, 0xe2, 0x78, 0x49, 0xc0], Instruction::Release, 5),
            // tilezero tmm3
            (&[0xc4, 0xe2, 0x7b, 0x49, 0xd8], Instruction::Zero(3), 5),
            // tileloadd tmm6, [r9 + rcx + 64]
            (
                &[0xc4, 0xc2, 0x7b, 0x4b, 0x74, 0x09, 0x40],
                Instruction::Load { tile: 6, base: 0xa040, stride: 0x2000 },
                7,
            ),
            // tilestored [rsi + rax + 2112], tmm3
            (
                &[0xc4, 0xe2, 0x7a, 0x4b, 0x9c, 0x06, 0x40, 0x08, 0x00, 0x00],
                Instruction::Store { tile: 3, base: 0x7840, stride: 0x1000 },
                10,
            ),
            // tdpbf16ps tmm1, tmm4, tmm7
            (&[0xc4, 0xe2, 0x42, 0x5c, 0xcc], Instruction::Multiply { sums: 1, a: 4, b: 7 }, 5),
        ];
        for (code, instruction, length) in cases {
            let mut padded = [0x90; 15];
            padded[..code.len()].copy_from_slice(code);
            assert_eq!(decode(&padded, 0, register), Some((instruction, length)));
        }
        // vfmadd231ps is not an AMX instruction.
        assert_eq!(decode(&[0xc4, 0xe2, 0x75, 0xb8, 0xc2, 0x90, 0x90], 0, register), None);
    }

    #[test]
    fn instructions_that_the_cpu_rejects_are_rejected() {
        let mut state = State::NEW;
        assert!(state.execute(Instruction::Zero(0)).is_err());
        assert!(state.configure(&configuration(17, 64)).is_err());
        assert!(state.configure(&configuration(16, 65)).is_err());
        assert!(state.configure(&configuration(16, 0)).is_err());
        assert!(state.configure(&configuration(8, 64)).is_ok());
        assert!(state.execute(Instruction::Zero(0)).is_ok());
        // 32 steps need 16 rows of weights.
        assert!(state.execute(Instruction::Multiply { sums: 0, a: 1, b: 2 }).is_err());
        assert!(state.configure(&configuration(16, 64)).is_ok());
        assert!(state.execute(Instruction::Multiply { sums: 0, a: 1, b: 2 }).is_ok());
        assert!(state.execute(Instruction::Multiply { sums: 0, a: 1, b: 1 }).is_err());
        assert!(state.execute(Instruction::Release).is_ok());
        assert!(state.execute(Instruction::Zero(0)).is_err());
    }
}
