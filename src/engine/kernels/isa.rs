//! Which instructions the kernels use, chosen at run time.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

/// A rung of the ladder; each needs what the ones below it need, but for [`Isa::Portable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust: any machine; NEON where the compiler makes it so.
    Portable,
    /// 256-bit vectors with fused multiply-add.
    Avx2,
    /// 512-bit vectors.
    Avx512,
}

impl Isa {
    /// Every rung, the slowest first.
    pub const ALL: [Isa; 3] = [Isa::Portable, Isa::Avx2, Isa::Avx512];

    /// The name in `--isa`.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        }
    }

    /// Whether this machine can run it.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Isa::Avx2.is_available() && is_x86_feature_detected!("avx512f"),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 => false,
        }
    }

    /// The rungs this machine can run, the slowest first.
    pub fn available() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// The one that `RLOOD_ISA` names, or the best.
    pub fn chosen() -> Result<Isa, String> {
        match std::env::var("RLOOD_ISA") {
            Ok(name) if name != "auto" && !name.is_empty() => name.parse(),
            _ => Ok(Isa::best()),
        }
    }

    /// The fastest one this machine can run.
    pub fn best() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| Isa::available().last().unwrap_or(Isa::Portable))
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
        Isa::ALL.into_iter().find(|isa| isa.name() == name).ok_or(format!("{name:?} is none of {known}"))
    }
}
