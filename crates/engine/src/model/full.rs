//! Full fine-tuning: every weight of the decoder in one flat buffer, under the names of the original checkpoint.
//! Matrices come first, then norms and biases, which have no weight decay. The buffer holds the weights in f32 in the
//! backend's memory; the matrices used for computing are copies in the compute type.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use crate::backend::Flat;
use crate::error::{EngineError, Result};
use crate::load::{self, Weights};
use crate::lora::ParameterInfo;
use crate::modelcard::{self, ModelCard, weights};
use crate::tensors::{self, Data};

/// File name of the weights in a checkpoint of full fine-tuning.
pub const WEIGHTS: &str = "model.safetensors";

/// All weights of a model and their positions in the flat buffer.
#[derive(Debug)]
pub struct Full {
    /// The parameters under their names in transformers, in the order of the buffer.
    pub parameters: Vec<ParameterInfo>,
    /// Number of values with weight decay; they come first.
    pub decayed: usize,
    /// The flat buffer of all weights.
    pub values: Flat,
    ranges: HashMap<String, Range<usize>>,
}

impl Full {
    /// Reads the weights of a model directory.
    pub fn of_model(dir: &Path, card: &ModelCard, values: Flat) -> Result<Full> {
        let mut weights = Weights::open(dir, card);
        Full::fill(card, values, |name| Ok(weights.values(name)?.0))
    }

    /// Reads the weights of a checkpoint that [`Full::write`] created.
    pub fn read(dir: &Path, card: &ModelCard, values: Flat) -> Result<Full> {
        let damaged = |error: String| EngineError::Checkpoint(error);
        let header = weights::read_header(dir, WEIGHTS).map_err(|error| damaged(error.to_string()))?;
        let path = dir.join(WEIGHTS);
        let failed = |source| EngineError::Io { path: path.clone(), source };
        let file = modelcard::open(dir, WEIGHTS).map_err(|error| damaged(error.to_string()))?;
        let shapes: HashMap<String, Vec<usize>> = card.config.tensors().into_iter().collect();
        Full::fill(card, values, |name| {
            let location =
                header.tensors.get(name).ok_or_else(|| damaged(format!("{WEIGHTS}: tensor {name} is missing")))?;
            if Some(&location.shape) != shapes.get(name) {
                return Err(damaged(format!("{WEIGHTS}: tensor {name} has the wrong shape {:?}", location.shape)));
            }
            load::read_values(&file, location).map_err(failed)
        })
    }

    /// Fills the buffer tensor by tensor, so that there is never a second copy of the model.
    fn fill(card: &ModelCard, mut values: Flat, mut values_of: impl FnMut(&str) -> Result<Vec<f32>>) -> Result<Full> {
        let (mut parameters, mut ranges) = (Vec::new(), HashMap::new());
        let (mut offset, mut decayed) = (0, 0);
        let (matrices, others): (Vec<_>, Vec<_>) =
            card.config.tensors().into_iter().partition(|(name, _)| decays(name));
        for (name, shape) in matrices.into_iter().chain(others) {
            let tensor = values_of(&name)?;
            values.write(offset, &tensor)?;
            ranges.insert(name.clone(), offset..offset + tensor.len());
            decayed += if decays(&name) { tensor.len() } else { 0 };
            parameters.push(ParameterInfo { name, shape, offset });
            offset += tensor.len();
        }
        Ok(Full { parameters, decayed, values, ranges })
    }

    /// Number of values in the flat buffer of a model.
    pub fn len_of(card: &ModelCard) -> usize {
        card.config.tensors().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
    }

    /// The range of a tensor's values in the buffer, and in any other buffer with the same layout.
    pub fn place(&self, name: &str) -> Result<Range<usize>> {
        self.ranges.get(name).cloned().ok_or_else(|| EngineError::Input(format!("the model has no weight {name}")))
    }

    /// Writes `model.safetensors` in f32.
    pub fn write(&self, dir: &Path) -> Result<()> {
        let values = self.values.values()?;
        let tensors: Vec<tensors::Tensor<'_>> = self
            .parameters
            .iter()
            .map(|info| {
                let range = info.offset..info.offset + info.shape.iter().product::<usize>();
                tensors::Tensor { name: &info.name, shape: &info.shape, data: Data::F32(&values[range]) }
            })
            .collect();
        tensors::write_finite(&dir.join(WEIGHTS), &tensors)
    }
}

/// Whether weight decay applies to a tensor with this name: not to norms and biases,
/// like `Trainer.get_decay_parameter_names` of transformers.
fn decays(name: &str) -> bool {
    !name.contains("norm") && !name.ends_with("bias")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_decay_and_nothing_else_does() {
        let dir = rlood_test_support::tiny_model();
        let card = crate::modelcard::read(&dir).unwrap();
        let tensors = card.config.tensors();
        assert!(tensors.iter().all(|(name, shape)| decays(name) == (shape.len() == 2)), "{tensors:?}");
        assert!(decays("lm_head.weight") && decays("model.embed_tokens.weight"));
        assert!(!decays("model.layers.0.self_attn.q_proj.bias") && !decays("model.layers.0.self_attn.q_norm.weight"));

        let full = Full::of_model(&dir, &card, Flat::Host(vec![0.0; Full::len_of(&card)])).unwrap();
        let (before, after): (Vec<_>, Vec<_>) = full.parameters.iter().partition(|info| info.offset < full.decayed);
        assert!(before.iter().all(|info| decays(&info.name)) && after.iter().all(|info| !decays(&info.name)));
        assert!(!before.is_empty() && !after.is_empty());
    }
}
