//! Rewards to advantages, in f64.
