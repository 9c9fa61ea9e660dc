//! The clipped sequence-level loss and its gradient with respect to log-probs, in f64.
