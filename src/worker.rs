//! One process, one device: claim, engine thread, heartbeats and events, finish.
