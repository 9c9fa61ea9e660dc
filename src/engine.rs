//! The RLOO loop.

pub mod advantage;
pub mod checkpoint;
pub mod error;
pub mod generate;
pub mod head;
pub mod host;
pub mod load;
pub mod lora;
pub mod loss;
pub mod memory;
pub mod metrics;
pub mod model;
pub mod ops;
pub mod optim;
pub mod random;
pub mod rollout;
pub mod sampling;
pub mod text;
