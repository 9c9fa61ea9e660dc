//! Registered models.
