//! Compose store, http, supervisor and the requeue tick; drain on SIGTERM.
