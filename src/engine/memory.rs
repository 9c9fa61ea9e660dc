//! What a run needs, in bytes.
