//! The integration tests, in one binary.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod access;
mod adapters;
mod artifacts;
mod backup;
mod bench;
mod bounds;
mod certificates;
mod chaos;
mod circles;
mod cli;
mod client;
#[path = "../../crates/rewards/tests/it/corpus.rs"]
mod corpus;
mod dashboard;
mod dataset_images;
mod datasets;
mod demo;
mod disk;
mod docs;
#[cfg(feature = "cuda")]
mod driver;
mod edge;
mod elsewhere;
mod env_check;
mod env_serve;
mod environment_kills;
mod environment_schemas;
mod environments;
mod eval_secrets;
mod exact;
mod exports;
#[cfg(feature = "failpoints")]
mod failpoints;
mod first_key;
mod fork;
mod fuzz;
mod http;
#[path = "../../crates/hub/tests/it/fake.rs"]
#[expect(dead_code, reason = "the tests of the hub's client use the rest")]
mod hub;
mod hub_dataset_downloads;
mod hub_datasets;
mod hub_models;
mod hub_owners;
mod hub_reward_models;
mod hub_space;
mod idempotency;
mod job_events;
mod job_moves;
mod job_records;
mod jobs_api;
mod kill;
mod kills;
mod later;
mod layering;
mod lifecycle;
mod load;
mod logs;
mod messages;
mod old_data;
mod openapi;
mod outage;
mod overlap;
mod owners;
mod playground;
mod preempt;
mod preflight;
mod processes;
mod protocol;
mod pushes;
mod python_rewards;
mod rescore;
mod retention;
mod retry;
mod revoked;
mod reward_check;
mod reward_edge;
mod reward_examples;
mod reward_health;
mod reward_schemas;
mod reward_server;
mod reward_values;
mod rollout_servers;
mod runtimes;
mod scale;
mod secrets;
mod served_as_trained;
mod server;
#[path = "../../crates/rewards/tests/it/service.rs"]
#[expect(dead_code, reason = "the tests of the rewards use the rest")]
mod service;
mod serving;
#[path = "../../crates/store/tests/it/setting.rs"]
mod setting;
mod sign_ins;
mod sources;
mod ssrf;
mod storage;
mod streams;
mod throttle;
mod tools;
mod transfer;
mod verdict;
mod versions;
mod warm_up;
mod worker_protocol;
mod workspace;
