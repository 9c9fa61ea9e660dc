//! From logits to a token: temperature, top-k, top-p, min-p, repetition penalty.
