//! The command line of `rlood`, and the subcommands other than the API server and the processes that compute for it.
//!
//! | module | contents |
//! |---|---|
//! | [`config`] | the flags of every subcommand, and the settings that they make |
//! | [`commands`] | backup, benchmark, checks of services and others, one module each |
//! | [`listen`] | the accept loop of a server |
//! | [`reward_server`] | a reward model as a reward service |

pub mod commands;
pub mod config;
pub mod listen;
pub mod reward_server;

use rlood_engine as engine;
use rlood_hub as hub;
use rlood_model_files as modelcard;
use rlood_rewards as reward;
use rlood_store as store;
use rlood_store::files;
use rlood_types::{digest, environment, error_text, event, id, outgoing, protocol, rollout, scopes, spec, storage};
use rlood_worker::reward_model;
