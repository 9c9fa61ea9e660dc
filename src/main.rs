//! The `rlood` binary: parse the command line, run a role.
fn main() {}
