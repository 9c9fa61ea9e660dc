//! What a client asks ([`JobSpec`]: what was sent) and what it resolves to ([`Plan`]: what is true).
//!
//! `JobSpec` has optional fields and knows nothing of the server; [`resolve`] applies defaults, checks everything at
//! once and reports every error with a JSON pointer. A `Plan` is stored beside the spec, so that a changed default never
//! changes a past job.

pub mod plan;

pub use plan::*;
