//! Events, metrics, samples, logs.
