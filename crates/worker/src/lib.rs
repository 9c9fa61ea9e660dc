//! Processes that compute for a server: the worker, which runs jobs on one device, and one-shot child processes that answer one
//! request each ([`preflight`], [`judge`], [`exporter`]), and processes that keep models loaded ([`serving`]). The
//! worker communicates with the server only through the worker protocol.

pub mod args;
pub mod certify;
pub mod device;
mod exit;
pub mod exporter;
pub mod judge;
pub mod model_cache;
pub mod one_shot;
pub mod preflight;
pub mod reward_model;
mod rollout_servers;
pub mod runtime;
pub mod serving;
pub mod size;
pub mod worker;

use rlood_engine as engine;
use rlood_model_files as modelcard;
use rlood_rewards as reward;
use rlood_types::{
    callback, dataset, digest, doctor, environment, error_text, event, export, failpoint, id, job, outgoing, protocol,
    rollout, spec, verdict,
};
