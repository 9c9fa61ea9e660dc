//! Shared types of `rlood`, used by every other crate. They do no I/O, except that templates and schemas start threads.

pub mod callback;
pub mod certificate;
pub mod dataset;
pub mod digest;
pub mod doctor;
pub mod environment;
pub mod error_text;
pub mod event;
pub mod export;
pub mod failpoint;
mod finish_reason;
pub mod generate;
pub mod id;
pub mod job;
pub mod one_shot;
pub mod openai;
pub mod outgoing;
pub mod preflight;
pub mod protocol;
pub mod push;
pub mod rollout;
pub mod scopes;
pub mod serving;
pub mod spec;
pub mod storage;
pub mod strict_json;
pub mod task;
pub mod trajectory;
pub mod verdict;
pub mod webhooks;

use rlood_templates as jinja;
