//! The `rlood` binary: [`rlood::command_line`].

use std::process::ExitCode;

fn main() -> ExitCode {
    rlood::command_line::run()
}
