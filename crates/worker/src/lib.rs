//! The processes that compute for a server: the worker, which runs jobs on one device, and the children that answer one
//! request each ([`prober`], [`generator`], [`judge`], [`exporter`]). They know the server by the worker protocol alone.

pub mod args;
pub mod device;
mod exit;
pub mod exporter;
pub mod generator;
pub mod judge;
pub mod model_cache;
pub mod one_shot;
pub mod prober;
pub mod reward_model;
pub mod size;
pub mod worker;

use rlood_engine as engine;
use rlood_model_files as modelcard;
use rlood_rewards as reward;
use rlood_types::{
    callback, causes, digest, doctor, event, export, failpoint, generation, id, job, outgoing, probe, protocol, sample,
    spec, verdict,
};
