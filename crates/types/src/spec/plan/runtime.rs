//! The runtime's section of a plan: which program trains the job, on how many devices, and what it guarantees.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A program that trains jobs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RuntimeName {
    /// The engine of rlood, which is part of its binary.
    #[default]
    Own,
    /// The RLOOTrainer of TRL, which the worker starts as one Python process per device.
    Trl,
}

/// The program that trains the job, and the settings that only TRL has.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RuntimePlan {
    /// The program that trains.
    pub name: RuntimeName,
    /// Whether linear layers are quantized to 8 bits when the model is loaded (LLM.int8 of bitsandbytes).
    #[serde(default)]
    pub load_in_8bit: bool,
    /// How DeepSpeed divides the training between the devices: 2 divides gradients and moments, 3 also the weights; null = every
    /// device holds all of them.
    #[serde(default)]
    #[schema(minimum = 2, maximum = 3)]
    pub zero_stage: Option<u8>,
    /// Whether DeepSpeed keeps what it divides in the memory of the CPU instead of the GPUs.
    #[serde(default)]
    pub offload: bool,
    /// Versions of the Python packages when the job was accepted, by name; empty for rlood's own engine.
    #[serde(default)]
    pub versions: BTreeMap<String, String>,
    /// The guarantees for a job that is interrupted.
    #[serde(default)]
    pub guarantees: Guarantees,
}

impl RuntimePlan {
    /// Whether rlood's own engine trains the job.
    pub fn is_own(&self) -> bool {
        self.name == RuntimeName::Own
    }
}

/// The guarantees for a job that is interrupted. Those of other runtimes are weaker than those of rlood's own engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Guarantees {
    /// The similarity of an interrupted run to one that was not interrupted.
    pub resume: ResumeGuarantee,
    /// When a pause takes effect. A cancelled job always ends immediately.
    pub stop: StopGuarantee,
}

/// The similarity of an interrupted run to one that was not interrupted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ResumeGuarantee {
    /// Both end with the same bytes on the same kind of device.
    #[default]
    Exact,
    /// Both end with the same bytes on a CPU with the same packages. Nothing of the kind is claimed for a GPU.
    ExactCpu,
    /// Recorded completions are not sampled again, and recorded rewards are not requested again. The weights of both may differ.
    Recorded,
}

/// When a pause takes effect.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum StopGuarantee {
    /// A pause takes effect between two tokens.
    #[default]
    Token,
    /// A pause takes effect at the end of the generation block.
    Step,
}

/// The devices that a job needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ResourcesPlan {
    /// Number of devices of one worker that train together. The TRL runtime starts one process on each.
    #[schema(minimum = 1, maximum = 64)]
    pub devices: u32,
}

impl ResourcesPlan {
    /// Whether the job needs a single device, as every job before this section existed.
    pub fn is_one(&self) -> bool {
        self.devices == 1
    }
}

impl Default for ResourcesPlan {
    fn default() -> Self {
        Self { devices: 1 }
    }
}

/// A runtime beside rlood's own engine that a worker can start, as the worker reports it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RuntimeFacts {
    /// Name of the runtime: `trl`.
    pub runtime: String,
    /// Versions of the Python packages, by name.
    pub versions: BTreeMap<String, String>,
    /// Optional parts that are installed: `vlm`, `quantized`, `deepspeed`.
    pub extras: Vec<String>,
    /// Number of devices that one job can use.
    pub devices: u32,
    /// Whether the devices are GPUs.
    pub gpus: bool,
}

/// The minor version of TRL whose private methods the runner extends.
const TRL_VERSION: &str = "1.16.";

impl RuntimeFacts {
    /// Whether rlood can drive the installed version of TRL.
    pub fn is_usable(&self) -> bool {
        self.runtime == "trl" && self.versions.get("trl").is_some_and(|version| version.starts_with(TRL_VERSION))
    }
}
