//! Measures how far the adapter has moved the weights: ‖s·B·A‖ / ‖W‖ over the adapted layers, with Frobenius norms.

use std::path::Path;

use rayon::prelude::*;

use super::error::Result;
use super::load::Weights;
use super::lora::ParameterInfo;
use crate::modelcard::ModelCard;
use crate::spec::LoraPlan;

/// The data of the base model that [`DeltaNorm::of`] needs; computed once per run.
#[derive(Debug)]
pub struct DeltaNorm {
    /// The factors A and B and the scaling s of each adapted layer.
    pairs: Vec<(ParameterInfo, ParameterInfo, f64)>,
    /// Frobenius norm of the base weights of all adapted layers.
    base_norm: f64,
}

impl DeltaNorm {
    /// Reads the adapted layers' weights once; `None` if the parameters are not a LoRA adapter.
    pub fn load(
        model_dir: &Path,
        card: &ModelCard,
        config: Option<&LoraPlan>,
        parameters: &[ParameterInfo],
    ) -> Result<Option<Self>> {
        let Some(config) = config else { return Ok(None) };
        let mut pairs = Vec::new();
        for a in parameters.iter().filter(|info| info.name.ends_with(".lora_A.weight")) {
            let name = a.name.replace(".lora_A.", ".lora_B.");
            let scaling = scaling_of(config, &a.name);
            pairs.extend(parameters.iter().find(|info| info.name == name).map(|b| (a.clone(), b.clone(), scaling)));
        }
        let mut weights = Weights::open(model_dir, card);
        let mut squares = 0.0;
        for (a, ..) in &pairs {
            let layer = a.name.trim_start_matches("base_model.model.").trim_end_matches(".lora_A.weight");
            let (values, _) = weights.values(&format!("{layer}.weight"))?;
            squares += values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>();
        }
        let known = !pairs.is_empty() && squares > 0.0;
        Ok(known.then(|| Self { pairs, base_norm: squares.sqrt() }))
    }

    /// The norm of the adapter's change, relative to the norm of the base weights.
    ///
    /// ‖BA‖² = tr(BᵀB·AAᵀ): only r × r matrices are computed, never the product BA itself.
    pub fn of(&self, parameters: &[f32]) -> f64 {
        let square = |(a, b, scaling): &(_, _, f64)| scaling.powi(2) * product_square(parameters, a, b);
        let squares: Vec<f64> = self.pairs.par_iter().map(square).collect();
        // Rounding can leave a tiny negative trace.
        squares.iter().sum::<f64>().max(0.0).sqrt() / self.base_norm
    }
}

/// The scaling `s` of the layer whose factor A has this name.
fn scaling_of(config: &LoraPlan, name: &str) -> f64 {
    let inside = name.trim_start_matches("base_model.model.model.layers.").trim_end_matches(".lora_A.weight");
    let rank = inside.split_once('.').and_then(|(layer, path)| config.of(layer.parse().ok()?, path));
    rank.map_or(0.0, |rank| config.scaling(rank))
}

/// Computes ‖BA‖² of one layer's factors: A is `[r, in]`, B is `[out, r]`.
fn product_square(parameters: &[f32], a: &ParameterInfo, b: &ParameterInfo) -> f64 {
    let values = |info: &ParameterInfo| {
        let length = info.shape.iter().product::<usize>();
        parameters.get(info.offset..info.offset + length).unwrap_or_default()
    };
    let rank = a.shape.first().copied().unwrap_or(0);
    if rank == 0 {
        return 0.0;
    }
    let rows: Vec<&[f32]> = values(a).chunks_exact((values(a).len() / rank).max(1)).collect();
    let mut b_gram = vec![0.0f64; rank * rank];
    for row in values(b).chunks_exact(rank) {
        for (k, &left) in row.iter().enumerate() {
            for (l, &right) in row.iter().enumerate() {
                b_gram[k * rank + l] += f64::from(left) * f64::from(right);
            }
        }
    }
    // Both Gram matrices, AAᵀ and BᵀB, are symmetric.
    let mut trace = 0.0;
    for (k, left) in rows.iter().enumerate() {
        trace += b_gram[k * rank + k] * dot(left, left);
        for (l, right) in rows.iter().enumerate().skip(k + 1) {
            trace += 2.0 * b_gram[k * rank + l] * dot(left, right);
        }
    }
    trace
}

/// Dot product Σ left·right, with several partial sums.
fn dot(left: &[f32], right: &[f32]) -> f64 {
    const SUMS: usize = 16;
    let mut sums = [0f64; SUMS];
    for (left, right) in left.chunks(SUMS).zip(right.chunks(SUMS)) {
        for ((sum, left), right) in sums.iter_mut().zip(left).zip(right) {
            *sum += f64::from(*left) * f64::from(*right);
        }
    }
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_trace_is_the_norm_of_the_product() {
        // The example is A = [[1, 2, 3], [0, 1, -1]], B = [[1, 0], [2, 1]], so BA = [[1, 2, 3], [2, 5, 5]].
        let parameters = [1.0, 2.0, 3.0, 0.0, 1.0, -1.0, 1.0, 0.0, 2.0, 1.0];
        let info = |name: &str, shape: &[usize], offset| ParameterInfo {
            name: name.to_owned(),
            shape: shape.to_vec(),
            offset,
        };
        let pairs = vec![(info("x.lora_A.weight", &[2, 3], 0), info("x.lora_B.weight", &[2, 2], 6), 2.0)];
        let delta = DeltaNorm { pairs, base_norm: 4.0 };
        assert!((delta.of(&parameters) - 2.0 * 68f64.sqrt() / 4.0).abs() < 1e-12);
        assert_eq!(delta.of(&[0.0; 10]), 0.0);
    }
}
