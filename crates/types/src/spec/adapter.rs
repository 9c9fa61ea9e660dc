//! Which linear layers an adapter covers, and with which rank and alpha.
//!
//! A plan has names only: of modules (`q_proj`), or of modules in one layer (`layers.3.self_attn.q_proj`) if layers differ. PEFT can
//! read both. [`PeftConfig`] reads what PEFT writes, which may also be regular expressions, layer numbers and exclusions.

mod peft;

use super::plan::LoraPlan;

pub use peft::{PeftConfig, StoredModule};

/// Rank and alpha of one linear layer's adapter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ModuleRank {
    /// Rank of the layer's adapter.
    pub r: u32,
    /// Alpha of the layer's adapter: the numerator of its scaling.
    pub alpha: f64,
}

impl LoraPlan {
    /// Creates a plan for all seven projections.
    pub fn all_linear(r: u32, alpha: f64) -> LoraPlan {
        let target_modules = super::settings::ALL_LINEAR.map(str::to_owned).to_vec();
        let (rank_pattern, alpha_pattern) = Default::default();
        LoraPlan { r, alpha, dropout: 0.0, target_modules, use_rslora: false, rank_pattern, alpha_pattern }
    }

    /// Returns the adapter of the linear layer at `path` (`self_attn.q_proj`) in a decoder layer; `None` = it has none.
    pub fn of(&self, layer: usize, path: &str) -> Option<ModuleRank> {
        let key = format!("layers.{layer}.{path}");
        let is_here = |name: &String| is_named(&key, name);
        self.target_modules.iter().any(is_here).then(|| ModuleRank {
            r: self.rank_pattern.iter().find(|(name, _)| is_here(name)).map_or(self.r, |(_, r)| *r),
            alpha: self.alpha_pattern.iter().find(|(name, _)| is_here(name)).map_or(self.alpha, |(_, alpha)| *alpha),
        })
    }

    /// Returns the scaling `s` in y = W x + b + s·B(A x).
    pub fn scaling(&self, rank: ModuleRank) -> f64 {
        let r = f64::from(rank.r);
        if self.use_rslora { rank.alpha / r.sqrt() } else { rank.alpha / r }
    }

    /// Whether the weights of one adapter fit the other: everything except dropout is equal.
    pub fn is_compatible_with(&self, other: &LoraPlan) -> bool {
        let sorted = |plan: &LoraPlan| {
            let mut names = plan.target_modules.clone();
            names.sort();
            LoraPlan { dropout: 0.0, target_modules: names, ..plan.clone() }
        };
        sorted(self) == sorted(other)
    }
}

/// Whether a dotted key has this name: the whole key, or its end after a dot.
fn is_named(key: &str, name: &str) -> bool {
    key.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}
