//! `rlood`: RLOO training of language models as an HTTP service, in one binary.
//!
//! # The map, in the direction data flows
//!
//! | part | modules |
//! |---|---|
//! | words: plain types, no I/O | [`access`] [`callback`] [`causes`] [`id`] [`jinja`] [`json`] [`dataset`] [`spec`] [`doctor`] [`job`] [`lifecycle`] [`modelcard`] [`outgoing`] [`probe`] [`generation`] [`event`] [`sample`] [`protocol`] |
//! | durable | [`files`] [`store`] |
//! | rewards (async stays here) | [`reward`] |
//! | engine (synchronous; knows token ids, not jobs or HTTP) | [`engine`] |
//! | a reward model with its text | [`reward_model`] |
//! | the accept loop of a server | [`listen`] |
//! | processes | [`worker`] [`errand`] [`prober`] [`generator`] [`http`] [`courier`] [`keys`] [`backup`] [`supervisor`] [`serve`] [`demo`] [`convert`] [`mod@bench`] [`reward_server`] |
//!
//! Words are imported by everyone; nothing imports upward. `tests/it/layering.rs` holds the allowed edges.
//!
//! # One job through the files
//!
//! `POST /jobs` → `http::jobs` → [`spec`] (JobSpec → Plan) → `store::jobs` (row and event in one transaction) → queue →
//! [`worker`] claims over `http::worker` → [`engine::train`] on its own thread: load, text → per step:
//! rollout ← generate ← model (over a backend, the CPU's or a GPU's over its kernels) → `Host::score` → [`reward`] → advantage →
//! loss → optim → `Host::event` → `store::events` →
//! before anything is asked or used, the journal (`worker::journal` → `http::worker` → `store::journal`) →
//! every k steps a checkpoint → `Host::saved` → `http::worker` → [`files`] → `store::artifacts` → finish →
//! `http::events` (SSE) and `http::artifacts` (download).

#[cfg(any(test, feature = "failpoints"))]
pub mod failpoint;
#[cfg(not(any(test, feature = "failpoints")))]
mod failpoint;

pub mod config;

pub mod access;
pub mod callback;
pub mod causes;
pub mod dataset;
pub mod doctor;
pub mod event;
pub mod generation;
pub mod id;
pub mod jinja;
pub mod job;
pub mod json;
pub mod lifecycle;
pub mod modelcard;
pub mod outgoing;
pub mod probe;
pub mod protocol;
pub mod sample;
pub mod spec;

pub mod files;
pub mod store;

pub mod reward;

pub mod engine;

pub mod reward_model;

pub mod listen;

pub mod backup;
pub mod bench;
pub mod convert;
pub mod courier;
pub mod demo;
pub mod errand;
pub mod generator;
pub mod http;
pub mod keys;
pub mod prober;
pub mod reward_server;
pub mod serve;
pub mod supervisor;
pub mod worker;
