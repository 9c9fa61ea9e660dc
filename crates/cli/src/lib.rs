//! The commands that talk to a server: `rlood submit`, `rlood watch`, `rlood pull` and the others. They use the public API alone,
//! through [`rlood_client`], so that what they do, any program can do.
//!
//! | module | what |
//! |---|---|
//! | `command` | [`Command`]: the subcommands, and which function runs each |
//! | `commands` | one module a command: its flags beside its code |
//! | `context` | [`Common`]: the flags of every command; the client and the output that a command gets |
//! | `target` | which server, with which key: flags, variables, profiles |
//! | `profiles` | the file of profiles, and the job that was submitted last |
//! | `names` | what a job or a checkpoint may be called |
//! | `job_file` | a job file with `--set`; its local files become datasets |
//! | `follow` | a job as it goes on: figures, lines, the live table, its outcome |
//! | `files` | local files, read piece by piece |
//! | `listing` | lists, page by page |
//! | `transfer` | folders that are downloaded |
//! | `output` | standard output, tables, numbers and times for people |
//! | `error` | [`CliError`] and the exit codes |
//!
//! # Exit codes
//!
//! 0 done; 1 the job failed, or an error of the server; 2 usage, or a request that is not valid; 3 not found; 4 not allowed;
//! 5 the server cannot be reached; 6 the job was cancelled; 7 the job is paused (`--until-paused`); 124 `--timeout`; 130 Ctrl-C.
//! `rlood verdict` adds 10 to 13.

mod command;
mod commands;
mod context;
mod error;
mod files;
mod follow;
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
