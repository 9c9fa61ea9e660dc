//! One module for each subcommand of `rlood` that connects to a server, with the subcommand's flags and its code.

pub mod compare;
pub mod completions;
pub mod datasets;
pub mod events;
pub mod export;
pub mod generate;
pub mod keys;
pub mod list;
pub mod login;
pub mod logs;
pub mod merged;
pub mod metrics;
pub mod models;
pub mod profile;
pub mod pull;
pub mod push;
pub mod rewards;
pub mod samples;
pub mod show;
pub mod submit;
pub mod transitions;
pub mod verdict;
pub mod verify;
pub mod wait;
pub mod watch;
