//! The trained parameters of a model (an adapter, all weights, or none), in one flat buffer.

use std::path::Path;

use super::batch::heads;
use super::full::Full;
use super::{Network, ParameterInfo, Policy, no_adapter, with_decoder};
use crate::backend::{Buffers, Compute, Flat};
use crate::error::{EngineError, Result};
use crate::lora::{self, Lora};
use crate::spec::LoraPlan;

/// The flat buffer of a model without trained parameters.
static NOTHING: Flat = Flat::Host(Vec::new());

impl Policy {
    /// Checks that the backend can train the model, apart from its memory.
    pub fn check_trainable(&self) -> Result<()> {
        with_decoder!(&self.network, |decoder| decoder.backend().check_trainable(&heads(&self.card.config)))
    }

    /// Adds a new adapter: A Kaiming-uniform with a = √5, B zero; the same seed gives the same values.
    pub fn add_lora(&mut self, config: &LoraPlan, seed: u64) -> Result<()> {
        self.set_lora(Lora::fresh(config, &self.card.config, seed)?)
    }

    /// Loads a PEFT adapter directory.
    pub fn load_lora(&mut self, dir: &Path) -> Result<()> {
        let config = lora::read_config(dir, &self.card.config)?;
        self.set_lora(Lora::read(&config, &self.card.config, &dir.join(lora::WEIGHTS))?)
    }

    /// Loads a PEFT adapter directory to be served under this number, beside others; training does not see it.
    pub fn serve_lora(&mut self, number: u32, dir: &Path) -> Result<()> {
        let config = lora::read_config(dir, &self.card.config)?;
        let mut lora = Lora::read(&config, &self.card.config, &dir.join(lora::WEIGHTS))?;
        lora.values = with_decoder!(&self.network, |decoder| decoder.backend().upload(lora.values))?;
        with_decoder!(&mut self.network, |decoder| decoder.serve_lora(number, &lora))
    }

    /// Frees an adapter that was served.
    pub fn stop_serving(&mut self, number: u32) {
        with_decoder!(&mut self.network, |decoder| decoder.stop_serving(number));
    }

    /// Computes the logits at all positions of a sequence under a served adapter or the base model, a few positions at a time:
    /// `f(first position, logits of consecutive positions)`.
    pub fn all_logits(
        &self,
        ids: &[u32],
        slot: Option<u32>,
        f: &mut dyn FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        if ids.is_empty() {
            return Err(EngineError::Input("a prompt is empty; at least one token is required".to_owned()));
        }
        with_decoder!(&self.network, |decoder| decoder.all_logits(ids, slot, f))
    }

    /// Loads the tensors of a PEFT adapter file whose config is known.
    pub fn load_lora_tensors(&mut self, config: &LoraPlan, file: &Path) -> Result<()> {
        self.set_lora(Lora::read(config, &self.card.config, file)?)
    }

    /// Writes `adapter_config.json` and `adapter_model.safetensors` into a directory, as PEFT does.
    pub fn save_lora(&self, dir: &Path, base_model_name_or_path: &str) -> Result<()> {
        let lora = self.lora.as_ref().ok_or_else(no_adapter)?;
        lora.write(dir, base_model_name_or_path)
    }

    /// The adapter's config, if there is an adapter.
    pub fn lora_config(&self) -> Option<&LoraPlan> {
        self.lora.as_ref().map(|lora| &lora.config)
    }

    /// Changes the dropout of the adapter, which is not part of its weights.
    pub fn set_lora_dropout(&mut self, dropout: f64) {
        if let Some(lora) = &mut self.lora {
            lora.config.dropout = dropout;
        }
    }

    /// Computes with the adapter's scale multiplied by a factor; the adapter is the same again afterwards, bit for bit.
    pub fn with_adapter_scaled<T>(&mut self, factor: f64, body: impl FnOnce(&Policy) -> Result<T>) -> Result<T> {
        let mut lora = self.lora.take().ok_or_else(no_adapter)?;
        let config = lora.config.clone();
        lora.config.alpha *= factor;
        lora.config.alpha_pattern.values_mut().for_each(|alpha| *alpha *= factor);
        self.set_lora(lora)?;
        let result = body(self);
        let mut lora = self.lora.take().ok_or_else(no_adapter)?;
        lora.config = config;
        self.set_lora(lora)?;
        result
    }

    /// Starts training all weights from the model's own values; `dir` is the directory it was loaded from.
    ///
    /// # Errors
    /// Fails for models with Gated DeltaNet layers, whose own weights have no gradient yet.
    pub fn train_all(&mut self, dir: &Path) -> Result<()> {
        self.check_full()?;
        let zeros = self.zeros(Full::len_of(&self.card))?;
        self.set_full(Full::of_model(dir, &self.card, zeros)?)
    }

    /// Starts training all weights from a checkpoint that [`Policy::save_full`] created.
    pub fn load_full(&mut self, dir: &Path) -> Result<()> {
        self.check_full()?;
        let zeros = self.zeros(Full::len_of(&self.card))?;
        self.set_full(Full::read(dir, &self.card, zeros)?)
    }

    /// Writes `model.safetensors` into a directory: all weights in f32, under transformers' names.
    pub fn save_full(&self, dir: &Path) -> Result<()> {
        let full = self
            .full
            .as_ref()
            .ok_or_else(|| EngineError::Input("not all weights of the model are trained".to_owned()))?;
        full.write(dir)
    }

    /// Whether all weights are trained.
    pub fn trains_all(&self) -> bool {
        self.full.is_some()
    }

    /// Copies the current policy as a reference; score it with [`Adapter::On`](super::Adapter::On). Frozen weights
    /// are shared, not copied.
    pub fn frozen_copy(&self) -> Policy {
        Policy { card: self.card.clone(), dtype: self.dtype, network: self.network.clone(), lora: None, full: None }
    }

    /// The trained tensors, in the order of the flat buffer.
    pub fn parameters(&self) -> Vec<ParameterInfo> {
        match (&self.lora, &self.full) {
            (_, Some(full)) => full.parameters.clone(),
            (Some(lora), None) => lora.parameters.iter().map(|p| p.info.clone()).collect(),
            (None, None) => Vec::new(),
        }
    }

    /// The flat buffer of trained parameters.
    pub fn flat(&self) -> &Flat {
        match (&self.lora, &self.full) {
            (_, Some(full)) => &full.values,
            (Some(lora), None) => &lora.values,
            (None, None) => &NOTHING,
        }
    }

    /// Number of values with weight decay, which come first in the flat buffer; all values of an adapter.
    pub fn decayed(&self) -> usize {
        self.full.as_ref().map_or(self.flat().len(), |full| full.decayed)
    }

    /// Allocates a zero gradient for all trained parameters.
    pub fn zero_gradient(&self) -> Result<Flat> {
        self.flat().zeros_like()
    }

    /// Copies the values of [`Policy::flat`] to the host.
    pub fn parameter_values(&self) -> Result<Vec<f32>> {
        Ok(self.flat().values()?.into_owned())
    }

    /// Replaces the flat buffer of trained parameters.
    pub fn set_parameter_values(&mut self, values: &[f32]) -> Result<()> {
        self.update_parameters(|flat| {
            if values.len() != flat.len() {
                let detail = format!("there are {} values for {} trainable parameters", values.len(), flat.len());
                return Err(EngineError::Input(detail));
            }
            flat.write(0, values)
        })
    }

    /// Changes the flat buffer of trained parameters in place, and updates the matrices used for computing.
    pub fn update_parameters(&mut self, change: impl FnOnce(&mut Flat) -> Result<()>) -> Result<()> {
        match (self.lora.take(), self.full.take()) {
            (_, Some(mut full)) => {
                let changed = change(&mut full.values);
                changed.and(self.set_full(full))
            }
            (Some(mut lora), None) => {
                let changed = change(&mut lora.values);
                changed.and(self.set_lora(lora))
            }
            (None, None) => Err(no_adapter()),
        }
    }

    /// Rejects models of which some weights can only be frozen.
    fn check_full(&self) -> Result<()> {
        let config = &self.card.config;
        if config.delta_net.is_none() {
            return Ok(());
        }
        let detail = format!(
            "{} models cannot be trained in full yet: the weights of layers of type linear_attention have no gradient; use lora",
            config.family
        );
        Err(EngineError::Input(detail))
    }

    /// Allocates `len` zeros in the memory where optimizer updates are computed.
    fn zeros(&self, len: usize) -> Result<Flat> {
        with_decoder!(&self.network, |decoder| decoder.backend().alloc_zeroed(len))
    }

    /// Installs these weights in the decoder and trains them from now on.
    fn set_full(&mut self, full: Full) -> Result<()> {
        with_decoder!(&mut self.network, |decoder| decoder.set_full(&full))?;
        self.lora = None;
        self.full = Some(full);
        Ok(())
    }

    fn set_lora(&mut self, mut lora: Lora) -> Result<()> {
        lora.values = with_decoder!(&self.network, |decoder| decoder.backend().upload(lora.values))?;
        with_decoder!(&mut self.network, |decoder| decoder.set_lora(&lora))?;
        self.lora = Some(lora);
        self.full = None;
        Ok(())
    }
}
