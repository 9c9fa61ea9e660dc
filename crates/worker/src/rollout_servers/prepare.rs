//! Checks a server before it samples: that it has the base model of the job, reports the log-probs that it samples with, and has
//! loaded the adapter that the job trains.

use std::sync::Arc;
use std::time::Duration;

use super::client::{RolloutClient, SampleOne, ServerError};
use crate::reward::client::Pace;
use crate::spec::ComputeDtype;

/// Number of tokens, and the temperature, of the sample that shows which log-probs a server reports.
const MODE_TOKENS: usize = 16;
const MODE_TEMPERATURE: f64 = 0.5;
/// Waits between two attempts to load an adapter, and their number. A network file system may show a new directory late.
const FIRST_LOAD_WAIT: Duration = Duration::from_secs(1);
const LONGEST_LOAD_WAIT: Duration = Duration::from_secs(10);
pub(super) const MAX_LOADS: u32 = 12;
/// Versions of vLLM whose behavior was measured.
const KNOWN_VERSION: &str = "0.32.";

/// An adapter as the servers are to have it.
#[derive(Debug)]
pub(super) struct Version {
    /// Name of the adapter on every server.
    pub name: String,
    /// Directory of the adapter as the worker sees it.
    pub dir: std::path::PathBuf,
    /// Sequences of token ids, and the log-probs of each token but the first under the base model and under the adapter.
    pub probes: Vec<Vec<u32>>,
    pub base_logps: Vec<Vec<f32>>,
    pub logps: Vec<Vec<f32>>,
    /// Number of tokens that the longest prompt and its completion have together.
    pub max_tokens: usize,
}

/// How far a server's log-probs may be from ours, in nats.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tolerance {
    /// Limit of the mean difference under the base model.
    base_mean: f64,
    /// Lowest limit of the largest difference under an adapter.
    adapter_max: f64,
}

impl Tolerance {
    pub(super) fn of(dtype: ComputeDtype) -> Self {
        match dtype {
            ComputeDtype::F32 => Self { base_mean: 1e-4, adapter_max: 1e-3 },
            ComputeDtype::Bf16 => Self { base_mean: 0.02, adapter_max: 0.25 },
        }
    }
}

/// The result of the checks of a server.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Checked {
    /// Name of the base model.
    pub base: String,
    /// Limit of the largest difference of log-probs under an adapter.
    pub adapter_max: f64,
    /// The server's version, if its behavior was not measured.
    pub unknown_version: Option<String>,
}

/// The arguments of a preparation.
pub(super) struct Preparation {
    pub client: Arc<dyn RolloutClient>,
    /// The result of the checks; `None` = they are still to be done.
    pub checked: Option<Checked>,
    pub version: Arc<Version>,
    /// The adapter's directory as the server sees it.
    pub path: String,
    /// Beginning of the names of this job's adapters, and the names to keep.
    pub prefix: String,
    pub kept: Vec<String>,
    pub tolerance: Tolerance,
    pub pace: Pace,
}

impl Preparation {
    /// Checks the server unless that was done, loads the adapter, and compares its log-probs with ours.
    pub(super) async fn run(self) -> Result<Checked, ServerError> {
        let checked = match &self.checked {
            Some(checked) => checked.clone(),
            None => self.check().await?,
        };
        self.load().await?;
        let difference = self.adapter_difference().await?;
        if difference <= checked.adapter_max {
            return Ok(checked);
        }
        // Perhaps the server read the files while they were not all visible.
        self.client.unload(&self.version.name).await?;
        self.load().await?;
        let difference = self.adapter_difference().await?;
        if difference <= checked.adapter_max {
            return Ok(checked);
        }
        Err(ServerError::Unfit(format!(
            "the server's log-probs with the adapter differ from ours by up to {difference:.2e} nats (limit {:.2e}), while those of the base model agree: check its --max-lora-rank and its LoRA settings",
            checked.adapter_max
        )))
    }

    async fn check(&self) -> Result<Checked, ServerError> {
        let version = self.client.health().await?;
        let inventory = self.client.inventory().await?;
        if let Some(most) = inventory.max_model_len.filter(|most| *most < self.version.max_tokens) {
            return Err(ServerError::Unfit(format!(
                "the server reads at most {most} tokens, and a prompt with its completion can have {}: raise its --max-model-len, or lower sampling.max_completion_length",
                self.version.max_tokens
            )));
        }
        for (name, _) in &inventory.adapters {
            if name.starts_with(&self.prefix) && !self.kept.contains(name) {
                self.client.unload(name).await?;
            }
        }
        let adapter_max = self.check_base(&inventory.base).await?;
        self.check_mode(&inventory.base).await?;
        let unknown_version = Some(version).filter(|version| !version.starts_with(KNOWN_VERSION));
        Ok(Checked { base: inventory.base, adapter_max, unknown_version })
    }

    /// Compares the base model's log-probs with ours. Returns the limit for adapters, which follows from the differences here.
    async fn check_base(&self, base: &str) -> Result<f64, ServerError> {
        let (mut sum, mut count, mut largest) = (0.0, 0u32, 0.0f64);
        for (probe, ours) in self.version.probes.iter().zip(&self.version.base_logps) {
            let theirs = self.client.score(base, probe).await.map_err(|error| match error {
                ServerError::Unfit(why) => {
                    ServerError::Unfit(format!("{why} (has its base model the job's vocabulary?)"))
                }
                other => other,
            })?;
            for (ours, theirs) in ours.iter().zip(&theirs) {
                let difference = f64::from((ours - theirs).abs());
                (sum, count, largest) = (sum + difference, count + 1, largest.max(difference));
            }
        }
        let mean = sum / f64::from(count.max(1));
        if mean > self.tolerance.base_mean {
            return Err(ServerError::Unfit(format!(
                "the log-probs of the server's base model '{base}' differ from ours by {mean:.2e} nats on average (limit {:.0e}): it has another model, precision, quantization or rope setting",
                self.tolerance.base_mean
            )));
        }
        Ok((4.0 * largest).max(self.tolerance.adapter_max))
    }

    /// Finds out whether the log-probs of sampled tokens are those of the sampling distribution. At a temperature other than 1 they
    /// differ from those of the prompt, unless the server reports raw ones, or is always sure.
    async fn check_mode(&self, base: &str) -> Result<(), ServerError> {
        let Some(probe) = self.version.probes.first() else { return Ok(()) };
        let prompt = probe.iter().take(probe.len() / 2).copied().collect::<Vec<u32>>();
        let request = SampleOne {
            adapter: base.to_owned(),
            prompt: prompt.clone(),
            n: 1,
            seed: 0,
            temperature: MODE_TEMPERATURE,
            max_tokens: MODE_TOKENS,
            stop_token_ids: Vec::new(),
            vocab_size: usize::MAX,
            request_id: format!("{}check", self.prefix),
        };
        let Some(sampled) = self.client.sample(&request).await?.into_iter().next() else { return Ok(()) };
        let ids: Vec<u32> = prompt.iter().chain(&sampled.ids).copied().collect();
        let raw = self.client.score(base, &ids).await?;
        let raw = raw.iter().skip(prompt.len() - 1);
        let difference = sampled.logps.iter().zip(raw).map(|(own, raw)| (own - raw).abs()).fold(0.0f32, f32::max);
        let is_sure = sampled.logps.iter().all(|logp| *logp > -1e-2);
        if f64::from(difference) < self.tolerance.adapter_max && !is_sure {
            return Err(ServerError::Unfit(
                "the server reports log-probs before the temperature: start it with --logprobs-mode processed_logprobs"
                    .to_owned(),
            ));
        }
        Ok(())
    }

    async fn load(&self) -> Result<(), ServerError> {
        let mut wait = FIRST_LOAD_WAIT;
        for attempt in 1.. {
            match self.client.load(&self.version.name, &self.path).await {
                Ok(()) => return Ok(()),
                Err(ServerError::NoDirectory(why)) if attempt >= MAX_LOADS => {
                    return Err(ServerError::NoDirectory(format!(
                        "the server does not find {} ({why}): share the worker's folder of adapters with it (--adapter-dir, rollout.servers[].path_map), or run `rlood adapter-sidecar` beside it",
                        self.path
                    )));
                }
                Err(ServerError::NoDirectory(_)) => {}
                Err(error) => return Err(error),
            }
            tokio::time::sleep(self.pace.of(wait)).await;
            wait = (wait * 2).min(LONGEST_LOAD_WAIT);
        }
        Ok(())
    }

    /// Returns the largest difference between the server's log-probs and ours under the adapter, over one probe.
    async fn adapter_difference(&self) -> Result<f64, ServerError> {
        let Some((probe, ours)) = self.version.probes.iter().zip(&self.version.logps).next() else { return Ok(0.0) };
        let theirs = self.client.score(&self.version.name, probe).await?;
        Ok(ours.iter().zip(&theirs).map(|(ours, theirs)| f64::from((ours - theirs).abs())).fold(0.0, f64::max))
    }
}
