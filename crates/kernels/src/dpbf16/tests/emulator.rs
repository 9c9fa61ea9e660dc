//! Emulates `VDPBF16PS` on machines without AVX512-BF16: the instruction raises SIGILL, and the signal handler of
//! [`crate::amx::tests::emulator`] calls [`execute`].
//!
//! The emulator supports these forms of the instruction (Intel's manual, volume 2): 512 bits without a mask; the second factor
//! is a register, memory, or one pair in memory that is used for all lanes. The handler reads and writes the registers in
//! the frame that the operating system saved (XSAVE, Intel's manual, volume 1, chapter 13).

use std::arch::x86_64::__cpuid_count;

use half::bf16;

use super::super::naive;

/// Number of f32 values in a register.
const LANES: usize = 16;
/// Number of bytes in a register.
const BYTES: usize = 64;

/// The second factor of the instruction: the number of a register, or an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Factor {
    Register(usize),
    Memory(usize),
    /// Address of one pair that is used for all lanes.
    Pair(usize),
}

/// The instruction `sums += a · b`, with resolved addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Instruction {
    sums: usize,
    a: usize,
    b: Factor,
}

/// Executes the instruction that raised a signal, and continues after it. Returns false if it is another instruction.
///
/// The function skips an instruction `ud2` before it. With `ud2`, a test uses the emulator also on machines with AVX512-BF16.
pub(crate) fn execute(context: *mut libc::c_void) -> bool {
    const UD2: [u8; 2] = [0x0f, 0x0b];
    // Safety: the operating system passes a valid context, and the instruction pointer points to code.
    unsafe {
        let machine = &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext;
        let mut at = machine.gregs[libc::REG_RIP as usize] as usize;
        if std::slice::from_raw_parts(at as *const u8, 2) == UD2 {
            at += UD2.len();
        }
        let code = std::slice::from_raw_parts(at as *const u8, 15);
        let register = |number: usize| machine.gregs[crate::amx::tests::emulator::ORDER[number] as usize] as usize;
        let Some((Instruction { sums, a, b }, length)) = decode(code, at, register) else { return false };
        let Some(frame) = Frame::new(machine.fpregs.cast()) else { return false };
        let b = match b {
            Factor::Register(number) => frame.read(number),
            Factor::Memory(address) => (address as *const [u8; BYTES]).read_unaligned(),
            Factor::Pair(address) => {
                let pair = (address as *const [u8; 4]).read_unaligned();
                std::array::from_fn(|byte| pair[byte % 4])
            }
        };
        frame.write(sums, &multiply(&frame.read(sums), &frame.read(a), &b));
        machine.gregs[libc::REG_RIP as usize] = (at + length) as i64;
    }
    true
}

fn multiply(sums: &[u8; BYTES], a: &[u8; BYTES], b: &[u8; BYTES]) -> [u8; BYTES] {
    let mut out = *sums;
    let pair = |from: &[u8; BYTES], at: usize| {
        [bf16::from_le_bytes([from[at], from[at + 1]]), bf16::from_le_bytes([from[at + 2], from[at + 3]])]
    };
    for at in (0..BYTES).step_by(BYTES / LANES) {
        let sum = f32::from_le_bytes([sums[at], sums[at + 1], sums[at + 2], sums[at + 3]]);
        out[at..at + 4].copy_from_slice(&naive(sum, pair(a, at), pair(b, at)).to_le_bytes());
    }
    out
}

/// Decodes `VDPBF16PS` in its EVEX encoding. Returns the instruction and its length in bytes.
fn decode(code: &[u8], at: usize, register: impl Fn(usize) -> usize) -> Option<(Instruction, usize)> {
    // 62 RXBR'0mmm W.vvvv.1.pp z.L'L.b.V'.aaa opcode modrm …
    let [0x62, one, two, three, 0x52, modrm, ..] = *code else { return None };
    let bit = |byte: u8, bit: u8| usize::from(!byte >> bit & 1);
    let (r, x, b, r_high) = (bit(one, 7), bit(one, 6), bit(one, 5), bit(one, 4));
    let is_ours = one & 0xf == 2 && two & 0x87 == 0x06 && three & 0xe7 == 0x40;
    if !is_ours {
        return None;
    }
    let is_pair = three & 0x10 != 0;
    let a = usize::from(!two >> 3 & 15) | bit(three, 3) << 4;
    let (mode, reg, rm) = (modrm >> 6, usize::from(modrm >> 3 & 7), usize::from(modrm & 7));
    let sums = reg | r << 3 | r_high << 4;
    if mode == 3 {
        let b = Factor::Register(rm | b << 3 | x << 4);
        return (!is_pair).then_some((Instruction { sums, a, b }, 6));
    }
    let mut length = 6;
    let (mut base, mut index, mut scaled) = (None, 0, false);
    if rm == 4 {
        let sib = code[length];
        length += 1;
        scaled = true;
        let (i, low) = (usize::from(sib >> 3 & 7) | x << 3, usize::from(sib & 7));
        if i != 4 {
            index = register(i) << (sib >> 6);
        }
        if !(low == 5 && mode == 0) {
            base = Some(register(low | b << 3));
        }
    } else if !(rm == 5 && mode == 0) {
        base = Some(register(rm | b << 3));
    }
    let (displacement, bytes) = match (mode, base) {
        // A displacement of one byte is in units of the factor's size.
        (1, _) => (code[length] as i8 as isize * if is_pair { 4 } else { BYTES as isize }, 1),
        (2, _) | (_, None) => (i32::from_le_bytes(code[length..length + 4].try_into().ok()?) as isize, 4),
        _ => (0, 0),
    };
    length += bytes;
    // Without a base and an index, the displacement is relative to the end of the instruction.
    let begin = base.unwrap_or(if scaled { 0 } else { at + length });
    let address = begin.wrapping_add(index).wrapping_add_signed(displacement);
    let b = if is_pair { Factor::Pair(address) } else { Factor::Memory(address) };
    Some((Instruction { sums, a, b }, length))
}

/// The registers that the operating system saved, and will restore after the signal handler.
struct Frame(*mut u8);

/// Numbers of the XSAVE components: registers XMM, upper halves of YMM, upper halves of ZMM 0 to 15, and ZMM 16 to 31.
const XMM: u32 = 1;
const YMM: u32 = 2;
const ZMM: u32 = 6;
const MORE: u32 = 7;

impl Frame {
    /// Returns `None` if the frame contains only part of the registers.
    unsafe fn new(at: *mut u8) -> Option<Frame> {
        const MAGIC: u32 = 0x4650_5853;
        // Safety: a frame begins with 512 bytes, whose last 48 bytes describe the rest.
        unsafe { (at.add(464).cast::<u32>().read_unaligned() == MAGIC).then_some(Frame(at)) }
    }

    /// Address and number of bytes of a component.
    fn component(&self, number: u32) -> (*mut u8, usize) {
        match number {
            XMM => (self.0.wrapping_add(160), 256),
            _ => {
                let leaf = __cpuid_count(0xd, number);
                (self.0.wrapping_add(leaf.ebx as usize), leaf.eax as usize)
            }
        }
    }

    /// Address of the bit mask of components that are saved; the others are zero.
    fn present(&self) -> *mut u64 {
        self.0.wrapping_add(512).cast()
    }

    /// The components that contain parts of a register, from the lowest part, and the number of bytes of each part.
    fn parts(number: usize) -> &'static [(u32, usize)] {
        const LOW: [(u32, usize); 3] = [(XMM, 16), (YMM, 16), (ZMM, 32)];
        const HIGH: [(u32, usize); 1] = [(MORE, 64)];
        if number < 16 { &LOW } else { &HIGH }
    }

    unsafe fn read(&self, number: usize) -> [u8; BYTES] {
        let (mut out, mut at) = ([0; BYTES], 0);
        for (component, bytes) in Self::parts(number) {
            // Safety: the component has 16 such parts.
            unsafe {
                if self.present().read_unaligned() & 1 << component != 0 {
                    let from = self.component(*component).0.add(number % 16 * bytes);
                    std::ptr::copy_nonoverlapping(from, out.as_mut_ptr().add(at), *bytes);
                }
            }
            at += bytes;
        }
        out
    }

    unsafe fn write(&self, number: usize, value: &[u8; BYTES]) {
        let mut at = 0;
        for (component, bytes) in Self::parts(number) {
            let (to, len) = self.component(*component);
            // Safety: the component has 16 such parts.
            unsafe {
                let present = self.present().read_unaligned();
                if present & 1 << component == 0 {
                    to.write_bytes(0, len);
                    self.present().write_unaligned(present | 1 << component);
                }
                std::ptr::copy_nonoverlapping(value.as_ptr().add(at), to.add(number % 16 * bytes), *bytes);
            }
            at += bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::arch::asm;
    use std::arch::x86_64::{__m512, _mm512_loadu_ps, _mm512_storeu_ps};

    use super::*;

    #[test]
    fn the_decoder_recognizes_the_forms_of_the_instruction() {
        let register = |number: usize| 0x1000 * (number + 1);
        // The machine code of an assembler.
        let cases: [(&[u8], Instruction); 5] = [
            // vdpbf16ps zmm1, zmm2, zmm3
            (&[0x62, 0xf2, 0x6e, 0x48, 0x52, 0xcb], Instruction { sums: 1, a: 2, b: Factor::Register(3) }),
            // vdpbf16ps zmm30, zmm29, zmm28
            (&[0x62, 0x02, 0x16, 0x40, 0x52, 0xf4], Instruction { sums: 30, a: 29, b: Factor::Register(28) }),
            // vdpbf16ps zmm1, zmm2, zmmword ptr [rdi + 128]
            (&[0x62, 0xf2, 0x6e, 0x48, 0x52, 0x4f, 0x02], Instruction { sums: 1, a: 2, b: Factor::Memory(0x8080) }),
            // vdpbf16ps zmm1, zmm2, dword ptr [rdi + 8]{1to16}
            (&[0x62, 0xf2, 0x6e, 0x58, 0x52, 0x4f, 0x02], Instruction { sums: 1, a: 2, b: Factor::Pair(0x8008) }),
            // vdpbf16ps zmm1, zmm2, zmmword ptr [r9 + 2*rcx + 4096]
            (
                &[0x62, 0xd2, 0x6e, 0x48, 0x52, 0x4c, 0x49, 0x40],
                Instruction { sums: 1, a: 2, b: Factor::Memory(0xa000 + 0x4000 + 4096) },
            ),
        ];
        for (code, instruction) in cases {
            let mut padded = [0x90; 15];
            padded[..code.len()].copy_from_slice(code);
            assert_eq!(decode(&padded, 0, register), Some((instruction, code.len())), "{code:x?}");
        }
        // The decoder rejects the instruction with a mask, with 256 bits, and another instruction (vpdpwssd).
        for other in [
            [0x62, 0xf2, 0x6e, 0x49, 0x52, 0xcb],
            [0x62, 0xf2, 0x6e, 0x28, 0x52, 0xcb],
            [0x62, 0xf2, 0x6d, 0x48, 0x52, 0xcb],
        ] {
            assert_eq!(decode(&[other.as_slice(), &[0x90; 9]].concat(), 0, register), None);
        }
    }

    /// Executes three emulated instructions, each after `ud2`. Their second factors are in memory, one pair in memory for all
    /// lanes, and in a register.
    #[target_feature(enable = "avx512f")]
    fn emulated(sums: &[f32; 16], a: &[f32; 16], b: &[f32; 16]) -> [[f32; 16]; 3] {
        // Safety: the loads and stores are inside the arrays, and the handler continues after the instructions.
        unsafe {
            let [mut one, mut two, mut three]: [__m512; 3] = [_mm512_loadu_ps(sums.as_ptr()); 3];
            let (a, in_register) = (_mm512_loadu_ps(a.as_ptr()), _mm512_loadu_ps(b.as_ptr()));
            asm!(
                "ud2",
                "vdpbf16ps zmm1, zmm17, zmmword ptr [{b} - 64]",
                "ud2",
                "vdpbf16ps zmm18, zmm17, dword ptr [{b} + 2*{index} - 72]{{1to16}}",
                "ud2",
                "vdpbf16ps zmm3, zmm17, zmm20",
                b = in(reg) b.as_ptr().cast::<u8>().wrapping_add(64),
                index = in(reg) 8usize,
                inout("zmm1") one, inout("zmm18") two, inout("zmm3") three, in("zmm17") a, in("zmm20") in_register,
            );
            let mut out = [[0.0; 16]; 3];
            for (out, value) in out.iter_mut().zip([one, two, three]) {
                _mm512_storeu_ps(out.as_mut_ptr(), value);
            }
            out
        }
    }

    #[test]
    fn the_handler_reads_and_writes_the_registers() {
        if !crate::amx::tests::emulator::install() {
            return;
        }
        let words =
            |seed: u32| std::array::from_fn(|lane| f32::from_bits(0x3f80_4000 + (lane as u32 * 37 + seed) * 0x1_0003));
        let (sums, a, b): ([f32; 16], [f32; 16], [f32; 16]) = (words(1), words(2), words(3));
        // Safety: the emulator is only installed if the machine has AVX-512.
        let found = unsafe { emulated(&sums, &a, &b) };
        let pair = |word: f32| [word.to_bits() as u16, (word.to_bits() >> 16) as u16].map(bf16::from_bits);
        for lane in 0..16 {
            let expected = naive(sums[lane], pair(a[lane]), pair(b[lane]));
            assert_eq!(found[0][lane].to_bits(), expected.to_bits(), "memory, {lane}");
            assert_eq!(found[2][lane].to_bits(), expected.to_bits(), "register, {lane}");
            let expected = naive(sums[lane], pair(a[lane]), pair(b[2]));
            assert_eq!(found[1][lane].to_bits(), expected.to_bits(), "one pair, {lane}");
        }
    }
}
