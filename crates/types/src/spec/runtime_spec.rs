//! Reads the runtime and the devices that a job asks for.

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::ResourcesPlan;
use super::foreign::advice;
use super::reader::Reader;
use super::settings::{RESOURCES, RUNTIME, Section};

/// The runtime that a job asks for.
#[derive(Debug, Clone, Deserialize)]
pub struct RuntimeSpec {
    /// The program that trains: `own`, `trl` or `auto`.
    pub name: RuntimeChoice,
    /// Whether linear layers are quantized to 8 bits.
    pub load_in_8bit: bool,
    /// The stage of DeepSpeed's ZeRO; `None` = without DeepSpeed.
    pub zero_stage: Option<u8>,
    /// Whether DeepSpeed keeps its parts in the memory of the CPU.
    pub offload: bool,
}

/// A runtime by name, or the choice between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RuntimeChoice {
    /// The engine of rlood.
    Own,
    /// The RLOOTrainer of TRL.
    Trl,
    /// The engine of rlood, or TRL where only that can train the job.
    Auto,
}

/// Reads the sections `runtime` and `resources`.
pub(super) fn read_runtime(document: &Reader<'_>) -> (RuntimeSpec, ResourcesPlan) {
    (read(&RUNTIME, document.section("runtime")), read(&RESOURCES, document.section("resources")))
}

fn read<T: DeserializeOwned>(section: &Section, reader: Reader<'_>) -> T {
    let values = section.read(&reader);
    reader.finish(advice);
    values.into_plan()
}
