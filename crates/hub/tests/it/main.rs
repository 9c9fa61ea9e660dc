//! The hub's client against a fake hub on two ports.

mod downloads;
mod fake;
mod plans;
mod python;
