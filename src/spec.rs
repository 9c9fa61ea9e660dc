//! What a client asks, and what it resolves to.
