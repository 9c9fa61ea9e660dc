//! The instruction sets of the kernels, chosen at run time.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

/// An instruction set of the CPU. Each one needs those before it, except [`Isa::Portable`], and except that [`Isa::Amx`]
/// does not need [`Isa::Avx512Bf16`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust for any machine; NEON if the compiler vectorizes to it.
    Portable,
    /// AVX2: 256-bit vectors with fused multiply-add.
    Avx2,
    /// AVX-512, with 512-bit vectors.
    Avx512,
    /// AVX-512 with the instruction that multiplies pairs of bf16 (AVX512-BF16); packs of f32 use AVX-512.
    Avx512Bf16,
    /// AMX: products of bf16 tiles; packs of f32 use AVX-512.
    Amx,
}

impl Isa {
    /// All instruction sets, the slowest first.
    pub const ALL: [Isa; 5] = [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::Amx];

    /// The instruction set's name, as in `--isa`.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512_bf16",
            Isa::Amx => "amx",
        }
    }

    /// Whether this machine supports the instruction set.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Isa::Avx2.is_available() && is_x86_feature_detected!("avx512f"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => super::dpbf16::refused().is_none(),
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => super::amx::refused().is_none(),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => false,
        }
    }

    /// Whether this machine supports the instruction set, or a test emulates it.
    pub(super) fn runs(self) -> bool {
        #[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
        if matches!(self, Isa::Avx512Bf16 | Isa::Amx) && crate::amx::tests::emulator::is_installed() {
            return true;
        }
        self.is_available()
    }

    /// The reason why AMX is not used: the machine lacks it, or it is faulty or not permitted; None if it is used.
    pub fn refused() -> Option<&'static str> {
        #[cfg(target_arch = "x86_64")]
        return super::amx::refused();
        #[cfg(not(target_arch = "x86_64"))]
        Some("only x86-64 CPUs have AMX")
    }

    /// Whether products with packs of bf16 round their inputs to bf16. The other instruction sets
    /// convert the weights to f32 instead.
    pub fn rounds_inputs(self) -> bool {
        matches!(self, Isa::Avx512Bf16 | Isa::Amx)
    }

    /// The speed of bf16 multiply-adds of AVX512-BF16 on this machine, divided by the speed of f32 multiply-adds of
    /// AVX-512; `None` if the machine does not support AVX512-BF16. It is measured once per process, in a few
    /// milliseconds. `auto` chooses [`Isa::Avx512Bf16`] if it is at least [`Isa::MIN_BF16_GAIN`].
    pub fn bf16_gain() -> Option<f64> {
        #[cfg(target_arch = "x86_64")]
        return super::dpbf16::gain();
        #[cfg(not(target_arch = "x86_64"))]
        None
    }

    /// The lowest [`Isa::bf16_gain`] for which `auto` chooses [`Isa::Avx512Bf16`].
    // Some CPUs run the instruction at half the speed of f32 multiply-adds, others at twice the speed.
    pub const MIN_BF16_GAIN: f64 = 1.3;

    /// The instruction set for kernels without products of bf16 packs, which are all that AMX and AVX512-BF16 add.
    pub fn vectors(self) -> Isa {
        self.min(Isa::Avx512)
    }

    /// Returns the instruction set with this name; `auto` is the fastest.
    ///
    /// # Errors
    /// Fails if the name is unknown or this machine does not support the instruction set. The message
    /// lists the supported ones.
    pub fn choose(name: &str) -> Result<Isa, String> {
        if name == "auto" {
            return Ok(Isa::best());
        }
        let isa: Isa = name.parse()?;
        if isa.is_available() {
            return Ok(isa);
        }
        let available: Vec<&str> = Isa::available().map(Isa::name).collect();
        let why = match Isa::refused() {
            Some(why) if isa == Isa::Amx => format!(" ({why})"),
            _ if isa == Isa::Avx512Bf16 => " (it requires a CPU with AVX512-BF16)".to_owned(),
            _ => String::new(),
        };
        Err(format!(
            "the instruction set {name} does not run on this machine{why}: use auto or one of {}",
            available.join(", ")
        ))
    }

    /// Returns the instruction set of `RLOOD_ISA`, or the fastest if it is not set. The variable is read once.
    ///
    /// # Errors
    /// Fails if the name is unknown or this machine does not support the instruction set, like [`Isa::choose`].
    pub fn chosen() -> Result<Isa, String> {
        static CHOSEN: OnceLock<Result<Isa, String>> = OnceLock::new();
        let choose = || Isa::choose(&std::env::var("RLOOD_ISA").unwrap_or_else(|_| "auto".to_owned()));
        CHOSEN.get_or_init(choose).clone()
    }

    /// The instruction set that `RLOOD_ISA` requests; `None` if it is `auto` or not set.
    pub fn requested() -> Option<Isa> {
        let name = std::env::var("RLOOD_ISA").ok().filter(|name| name != "auto")?;
        Isa::choose(&name).ok()
    }

    /// The instruction sets this machine supports, the slowest first.
    pub fn available() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// The fastest instruction set this machine supports. [`Isa::Avx512Bf16`] only counts as faster than [`Isa::Avx512`]
    /// if its measured speed is high enough.
    pub fn best() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        let is_worthwhile =
            |isa: &Isa| *isa != Isa::Avx512Bf16 || Isa::bf16_gain().is_some_and(|gain| gain >= Isa::MIN_BF16_GAIN);
        *BEST.get_or_init(|| {
            Isa::available().collect::<Vec<_>>().into_iter().rfind(is_worthwhile).unwrap_or(Isa::Portable)
        })
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = String;

    fn from_str(name: &str) -> Result<Isa, String> {
        let known = Isa::ALL.map(Isa::name).join(", ");
        Isa::ALL
            .into_iter()
            .find(|isa| isa.name() == name)
            .ok_or_else(|| format!("the instruction set {name:?} is not one of auto, {known}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instruction_set_is_chosen_by_its_name() {
        assert_eq!(Isa::choose("auto"), Ok(Isa::best()));
        for isa in Isa::ALL {
            match Isa::choose(isa.name()) {
                Ok(chosen) => assert_eq!(chosen, isa),
                Err(message) => assert!(!isa.is_available() && message.contains("portable"), "{message}"),
            }
        }
        assert!(Isa::choose("sse9").is_err_and(|message| message.contains("avx512")));
    }

    #[test]
    fn auto_chooses_avx512_bf16_if_it_is_faster() {
        assert_eq!(Isa::bf16_gain().is_some(), Isa::Avx512Bf16.is_available());
        let Some(gain) = Isa::bf16_gain() else { return };
        assert!(gain > 0.2 && gain < 8.0, "{gain}");
        if !Isa::Amx.is_available() {
            assert_eq!(Isa::best() == Isa::Avx512Bf16, gain >= Isa::MIN_BF16_GAIN);
        }
    }

    #[test]
    fn amx_is_refused_with_a_reason() {
        assert_eq!(Isa::Amx.is_available(), Isa::refused().is_none());
    }
}
