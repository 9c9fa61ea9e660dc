//! Batched decoding with a KV cache.
