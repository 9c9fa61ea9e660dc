//! The commands that connect to a server: `rlood submit`, `rlood watch`, `rlood pull` and the others. They use only the public
//! API, through [`rlood_client`], so any program can do the same.
//!
//! | module | content |
//! |---|---|
//! | `command` | [`Command`]: the subcommands and their dispatch |
//! | `commands` | one module for each command, with its flags and its code |
//! | `context` | [`Common`]: the flags of every command; the client and the output of a command |
//! | `target` | selection of the server and the key from flags, variables and profiles |
//! | `profiles` | the file of profiles, and the most recently submitted job |
//! | `names` | resolution of job and checkpoint names |
//! | `job_file` | job files, `--set`, and the upload of local files |
//! | `follow` | progress of a running job: metrics, lines, the live table, the outcome |
//! | `files` | reading of local files in pieces |
//! | `listing` | lists of the API, page by page |
//! | `transfer` | downloads of folders |
//! | `output` | standard output, tables, formatting of numbers and times |
//! | `error` | [`CliError`] and the exit codes |
//!
//! # Exit codes
//!
//! 0 success; 1 the job or the server failed; 2 invalid command line or request; 3 not found; 4 not allowed; 5 server
//! unreachable; 6 job cancelled; 7 job paused (`--until-paused`); 124 `--timeout`; 130 Ctrl-C. `rlood verdict` adds 10 to 13.

mod command;
mod commands;
mod context;
mod error;
mod files;
mod follow;
mod hub_token;
mod job_file;
mod listing;
mod names;
mod output;
mod profiles;
mod target;
mod transfer;

pub use command::{Command, run};
pub use commands::keys;
pub use context::Common;
pub use error::CliError;
