//! Events, step metrics, samples, logs.
