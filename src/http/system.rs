//! Health, metrics, workers.
