//! rlood demo: the main job, end to end, on the bundled model.
