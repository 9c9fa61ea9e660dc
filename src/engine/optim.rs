//! AdamW, global-norm clipping, learning-rate schedules.
