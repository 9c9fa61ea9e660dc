//! Flat f32 values in the memory of the device that computes: trained parameters, their gradient, and AdamW's moments.
//! On a GPU they stay there. The host reads them for checkpoints, exports and metrics, never for updates.

use std::borrow::Cow;

#[cfg(feature = "cuda")]
use super::cuda;
use crate::error::{EngineError, Result};
use crate::optim::{self, AdamW};
use crate::spec::OptimizerPlan;

/// Parameters, or their gradient, in the order of [`Policy::parameters`](crate::model::Policy::parameters).
#[derive(Debug)]
pub enum Flat {
    /// Values in host memory, for the CPU and reference backends.
    Host(Vec<f32>),
    /// Values in a GPU's memory.
    #[cfg(feature = "cuda")]
    Cuda(cuda::Flat),
}

impl Flat {
    /// Number of values in the buffer.
    pub fn len(&self) -> usize {
        match self {
            Flat::Host(values) => values.len(),
            #[cfg(feature = "cuda")]
            Flat::Cuda(flat) => flat.len(),
        }
    }

    /// Whether the buffer has no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Allocates as many zeros in the same memory.
    pub fn zeros_like(&self) -> Result<Flat> {
        match self {
            Flat::Host(values) => Ok(Flat::Host(vec![0.0; values.len()])),
            #[cfg(feature = "cuda")]
            Flat::Cuda(flat) => Ok(Flat::Cuda(flat.zeros_like()?)),
        }
    }

    /// Waits for the values; copies them if they are not in host memory.
    pub fn values(&self) -> Result<Cow<'_, [f32]>> {
        match self {
            Flat::Host(values) => Ok(Cow::Borrowed(values)),
            #[cfg(feature = "cuda")]
            Flat::Cuda(flat) => Ok(Cow::Owned(flat.values()?)),
        }
    }

    /// Overwrites the values from index `at` on.
    pub fn write(&mut self, at: usize, values: &[f32]) -> Result<()> {
        match self {
            Flat::Host(all) => match all.get_mut(at..).and_then(|rest| rest.get_mut(..values.len())) {
                Some(place) => place.copy_from_slice(values),
                None => {
                    return Err(EngineError::Input(format!(
                        "cannot write {} values into a buffer of parameters from index {at} on",
                        values.len()
                    )));
                }
            },
            #[cfg(feature = "cuda")]
            Flat::Cuda(flat) => flat.write(at, values)?,
        }
        Ok(())
    }

    /// Waits until all queued writes are done.
    pub fn settle(&self) -> Result<()> {
        match self {
            Flat::Host(_) => Ok(()),
            #[cfg(feature = "cuda")]
            Flat::Cuda(flat) => flat.settle(),
        }
    }

    /// Clips the gradient like [`optim::clip_gradient_norm`]. A GPU sums the squares in f64 in a fixed order that
    /// differs from the host's, so the norm may differ from the host's in its last bits, but is the same in every run.
    pub fn clip(&mut self, max_norm: f64) -> Result<f64> {
        match self {
            Flat::Host(gradient) => Ok(optim::clip_gradient_norm(gradient, max_norm)),
            #[cfg(feature = "cuda")]
            Flat::Cuda(gradient) => {
                let norm = gradient.norm()?;
                if let Some(coefficient) = optim::clip_coefficient(norm, max_norm) {
                    gradient.scale(coefficient)?;
                }
                Ok(norm)
            }
        }
    }

    /// Moves the values to host memory.
    pub fn on_host(self) -> Result<Flat> {
        match self {
            Flat::Host(values) => Ok(Flat::Host(values)),
            #[cfg(feature = "cuda")]
            Flat::Cuda(flat) => Ok(Flat::Host(flat.values()?)),
        }
    }

    /// The values, if they are in host memory; an error otherwise.
    pub fn host(&self) -> Result<&Vec<f32>> {
        match self {
            Flat::Host(values) => Ok(values),
            #[cfg(feature = "cuda")]
            Flat::Cuda(_) => Err(elsewhere()),
        }
    }

    /// The values for writing, if they are in host memory; an error otherwise.
    pub fn host_mut(&mut self) -> Result<&mut Vec<f32>> {
        match self {
            Flat::Host(values) => Ok(values),
            #[cfg(feature = "cuda")]
            Flat::Cuda(_) => Err(elsewhere()),
        }
    }
}

/// The error for values in the memory of another backend.
#[cfg(feature = "cuda")]
pub(super) fn elsewhere() -> EngineError {
    EngineError::Input("flat values are in the memory of another device".to_owned())
}

/// AdamW, in the same memory as the parameters that it updates.
#[derive(Debug)]
pub enum Optimizer {
    /// AdamW's moments in host memory.
    Host(AdamW),
    /// AdamW's moments in a GPU's memory.
    #[cfg(feature = "cuda")]
    Cuda {
        /// The moments of AdamW, in 32 or in 8 bits as the plan asks.
        moments: cuda::Moments,
        /// Number of AdamW updates made so far.
        updates: u64,
        /// Number of parameters with weight decay; they come first.
        decayed: usize,
    },
}

impl Optimizer {
    /// Creates the optimizer from the state of a checkpoint, in the memory of the parameters.
    pub fn from_state(parameters: &Flat, adam: AdamW) -> Result<Optimizer> {
        match parameters {
            Flat::Host(_) => Ok(Optimizer::Host(adam)),
            #[cfg(feature = "cuda")]
            Flat::Cuda(flat) => {
                let AdamW { moments, updates, decayed } = adam;
                Ok(Optimizer::Cuda { moments: cuda::Moments::from_host(flat, &moments)?, updates, decayed })
            }
        }
    }

    /// Number of AdamW updates made; skipped steps do not count.
    pub fn updates(&self) -> u64 {
        match self {
            Optimizer::Host(adam) => adam.updates,
            #[cfg(feature = "cuda")]
            Optimizer::Cuda { updates, .. } => *updates,
        }
    }

    /// The optimizer's state for a checkpoint; copied if it is not in host memory.
    pub fn state(&self) -> Result<Cow<'_, AdamW>> {
        match self {
            Optimizer::Host(adam) => Ok(Cow::Borrowed(adam)),
            #[cfg(feature = "cuda")]
            Optimizer::Cuda { moments, updates, decayed } => {
                Ok(Cow::Owned(AdamW { moments: moments.values()?, updates: *updates, decayed: *decayed }))
            }
        }
    }

    /// Updates like [`AdamW::update`], bit for bit the same on every device.
    pub fn update(
        &mut self,
        parameters: &mut Flat,
        gradient: &Flat,
        learning_rate: f64,
        plan: &OptimizerPlan,
    ) -> Result<()> {
        match self {
            Optimizer::Host(adam) => adam.update(parameters.host_mut()?, gradient.host()?, learning_rate, plan),
            #[cfg(feature = "cuda")]
            Optimizer::Cuda { moments, updates, decayed } => {
                let (Flat::Cuda(parameters), Flat::Cuda(gradient)) = (parameters, gradient) else {
                    return Err(elsewhere());
                };
                optim::check_lengths(moments.len(), parameters.len(), gradient.len())?;
                let update = optim::update_number(*updates + 1, learning_rate, plan);
                moments.update(&update, *decayed, parameters, gradient)?;
                *updates += 1;
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{LrSchedulerType, OptimizerKind};

    #[test]
    fn values_are_written_where_they_belong_or_refused() {
        let mut flat = Flat::Host(vec![1.0; 4]);
        flat.write(2, &[5.0, 6.0]).expect("they fit");
        assert_eq!(*flat.values().expect("the host's"), [1.0, 1.0, 5.0, 6.0]);
        assert!(flat.write(3, &[7.0, 8.0]).is_err() && flat.write(5, &[]).is_err());
        assert_eq!(*flat.zeros_like().expect("zeros").values().expect("the host's"), [0.0; 4]);
        assert_eq!(flat.clip(0.0).expect("a norm"), 63f64.sqrt());
    }

    #[test]
    fn an_optimizer_of_another_adapter_is_refused() {
        let plan = OptimizerPlan {
            kind: OptimizerKind::Adamw,
            learning_rate: 0.1,
            adam_beta1: 0.9,
            adam_beta2: 0.999,
            adam_epsilon: 1e-8,
            weight_decay: 0.0,
            max_grad_norm: 1.0,
            lr_scheduler_type: LrSchedulerType::Constant,
            warmup_steps: 0,
        };
        let mut flat = Flat::Host(vec![1.0; 4]);
        let mut optimizer = Optimizer::from_state(&flat, AdamW::new(3)).expect("on the host");
        let gradient = flat.zeros_like().expect("zeros");
        let error = optimizer.update(&mut flat, &gradient, 0.1, &plan).expect_err("lengths differ").to_string();
        assert!(error.contains("3 moments, 4 parameters"), "{error}");
        assert_eq!((optimizer.updates(), flat.len()), (0, 4));
    }
}
