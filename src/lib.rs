//! `rlood`: RLOO training of language models as an HTTP service, in one binary.
//!
//! # The map: modules above may use modules below, never the reverse
//!
//! | crate or module | contents |
//! |---|---|
//! | [`command_line`] | parses the command line, runs a role |
//! | [`serve`] [`supervisor`] [`webhook_sender`] [`http`] [`demo`] | the API server, the demo; dependencies: `tests/it/layering.rs` |
//! | [`downloads`] [`bundle`] | downloads of models and datasets from a hub; the bundled models |
//! | `rlood-commands`: [`commands`] [`reward_server`] [`listen`] [`config`] | the other subcommands; the accept loop of a server; the command line |
//! | `rlood-cli` | the commands that talk to a server, over the public API alone |
//! | `rlood-client` | a typed client of the public API; independent of the server |
//! | `rlood-worker`: [`worker`] [`preflight`](rlood_worker::preflight) [`serving`](rlood_worker::serving) [`judge`] [`exporter`] [`reward_model`] | the processes that compute |
//! | `rlood-store`: [`store`] [`files`] | the database and the data directory |
//! | `rlood-rewards`: [`reward`] | all rewards; asynchronous |
//! | `rlood-data`: [`data`] | reads and maps files of rows; blocking |
//! | `rlood-hub`: [`hub`] | a client of the hub's protocol; independent of jobs |
//! | `rlood-engine`: [`engine`] | the training loop; synchronous, works on token ids, independent of jobs and HTTP |
//! | `rlood-chat`: [`chat`] | turns of a chat: tool calls in texts, the tokens of the next turn; no I/O |
//! | `rlood-model-files`: [`modelcard`] | the contents of a model's folder, without tensors |
//! | `rlood-kernels` | compute kernels of the engine; all unsafe code |
//! | `rlood-types`: [`callback`] [`dataset`] [`digest`] [`doctor`] [`error_text`] [`event`] [`export`] [`failpoint`] [`generate`] [`id`] [`job`] [`one_shot`] [`outgoing`] [`preflight`] [`protocol`] [`push`] [`rollout`] [`scopes`] [`spec`] [`storage`] [`strict_json`] [`verdict`] [`webhooks`] | shared plain types, no I/O |
//! | `rlood-templates`: [`jinja`] | templates in a sandbox |
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

pub use rlood_chat as chat;
pub use rlood_commands::{commands, config, listen, reward_server};
pub use rlood_data as data;
pub use rlood_engine as engine;
pub use rlood_hub as hub;
pub use rlood_model_files as modelcard;
pub use rlood_rewards as reward;
pub use rlood_store as store;
pub use rlood_store::files;
pub use rlood_templates as jinja;
pub use rlood_types::{
    callback, dataset, digest, doctor, environment, error_text, event, export, failpoint, generate, id, job, one_shot,
    openai, outgoing, preflight, protocol, push, rollout, scopes, serving, spec, storage, strict_json, task, verdict,
    webhooks,
};
pub use rlood_worker::{exporter, judge, reward_model, worker};

pub mod bundle;
pub mod command_line;
pub mod demo;
pub mod downloads;
pub mod http;
pub mod serve;
pub mod supervisor;
pub mod webhook_sender;
