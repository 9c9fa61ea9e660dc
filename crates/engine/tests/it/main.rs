//! The integration tests of `rlood-engine`, in one binary.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod bits;
mod certificate;
mod episodes;
mod four_bit;
mod generate;
mod golden;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(feature = "cuda")]
mod gpu_training;
mod gradients;
mod interrupt;
mod kinds;
mod long;
mod memory;
mod merge;
mod models_page;
mod oracle;
mod overlap;
mod params;
mod parity;
mod points;
mod precision;
mod resume;
mod reward_model;
mod reward_values;
mod servers;
mod serving;
mod sources;
mod train;
mod trajectories;
mod variants;
mod vectors;
mod warm_up;
mod watch;
