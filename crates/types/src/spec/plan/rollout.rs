//! Rollout servers: engines outside of the worker that sample the completions of a job.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Plan, SamplingPlan};

/// The engine that samples a job's completions in place of the worker's own, and how training corrects for the difference.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RolloutPlan {
    /// The engine that samples: `vllm` (servers with vLLM's HTTP API).
    pub engine: RolloutEngine,
    /// The servers, each with the same base model; empty with `colocate`.
    pub servers: Vec<RolloutServerPlan>,
    /// Whether the worker starts one server itself, on its own device.
    #[serde(default)]
    pub colocate: bool,
    /// Share of the device's memory that a server started by the worker may use; on a CPU, of the machine's memory.
    #[serde(default = "default_memory_share")]
    pub memory_share: f64,
    /// How training corrects for log-probs of the servers that differ from those of the trained model.
    pub correction: CorrectionPlan,
    /// Number of prompts that each server samples at a time.
    pub max_concurrency: u32,
    /// Seconds without any usable server after which the job pauses.
    pub timeout_s: u64,
}

fn default_memory_share() -> f64 {
    0.3
}

/// An engine that samples outside of the worker's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RolloutEngine {
    /// vLLM's OpenAI-compatible server, with adapters that are loaded while it runs.
    Vllm,
}

/// One rollout server. Its API key is stored with the job's secrets and never shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RolloutServerPlan {
    /// Address of the server, without `/v1`.
    #[schema(example = "http://10.0.0.7:8000")]
    pub url: String,
    /// Where the server sees the worker's folder of adapters; null = at the same path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_map: Option<PathMap>,
}

/// The beginning of a path as the worker sees it, and as a rollout server sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PathMap {
    /// The folder as the worker sees it.
    #[schema(example = "/mnt/adapters")]
    pub from: String,
    /// The same folder as the rollout server sees it.
    #[schema(example = "/adapters")]
    pub to: String,
}

/// The correction for servers whose log-probs differ from those of the trained model.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CorrectionPlan {
    /// The form of the importance weight.
    pub mode: CorrectionMode,
    /// Largest importance weight: larger ones are cut to it, or their tokens are masked.
    pub max: f64,
    /// Smallest importance weight, with the same consequence; null = no lower limit.
    #[serde(default)]
    pub min: Option<f64>,
}

/// The form of the importance weight exp(log-prob of the trained model − log-prob of the server).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum CorrectionMode {
    /// One weight for each completion; 0 outside of the limits.
    SequenceMask,
    /// One weight for each completion, cut to the limits.
    SequenceTruncate,
    /// One weight for each token; 0 outside of the limits.
    TokenMask,
    /// One weight for each token, cut to the limits.
    TokenTruncate,
    /// No weight. The job fails when the servers' log-probs differ from the model's.
    None,
}

impl RolloutServerPlan {
    /// Returns a path of the worker as this server sees it; `None` if the path is outside of the mapped folder.
    pub fn seen_path(&self, path: &str) -> Option<String> {
        let Some(PathMap { from, to }) = &self.path_map else { return Some(path.to_owned()) };
        let rest = path.strip_prefix(from.trim_end_matches('/'))?;
        (rest.is_empty() || rest.starts_with('/')).then(|| format!("{}{rest}", to.trim_end_matches('/')))
    }
}

impl SamplingPlan {
    /// Returns the name and the value of the first setting that changes which tokens can be sampled; temperature does not.
    pub fn filter(&self) -> Option<(&'static str, String)> {
        let filters = [
            ("top_p", self.top_p != 1.0, self.top_p.to_string()),
            ("top_k", self.top_k != 0, self.top_k.to_string()),
            ("min_p", self.min_p != 0.0, self.min_p.to_string()),
            ("repetition_penalty", self.repetition_penalty != 1.0, self.repetition_penalty.to_string()),
        ];
        filters.into_iter().find(|(_, is_on, _)| *is_on).map(|(name, _, value)| (name, value))
    }
}

/// Returns the name under which the API key of a rollout server is stored, by its position in `rollout.servers`.
pub fn rollout_secret_name(server: usize) -> String {
    format!("rollout:{server}")
}

impl Plan {
    /// Whether completions come from rollout servers instead of the engine that trains.
    pub fn samples_elsewhere(&self) -> bool {
        self.rollout.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_paths_inside_of_the_mapped_folder_are_seen_by_a_server() {
        let map = |from: &str, to: &str| RolloutServerPlan {
            url: String::new(),
            path_map: Some(PathMap { from: from.to_owned(), to: to.to_owned() }),
        };
        assert_eq!(map("/mnt/a", "/x").seen_path("/mnt/a/job-1").as_deref(), Some("/x/job-1"));
        assert_eq!(map("/mnt/a/", "/x/").seen_path("/mnt/a/job-1").as_deref(), Some("/x/job-1"));
        assert_eq!(map("/", "/x").seen_path("/mnt/a").as_deref(), Some("/x/mnt/a"));
        assert_eq!(map("/mnt/a", "/x").seen_path("/mnt/ab/job-1"), None);
        let same = RolloutServerPlan { url: String::new(), path_map: None };
        assert_eq!(same.seen_path("/mnt/a").as_deref(), Some("/mnt/a"));
    }
}
