//! Client for the Hugging Face Hub: looks up a repository, selects the files that a model needs, and downloads them with resume
//! and verification of every byte; pushes files in one commit.
//!
//! The Hub's own Rust crate (hf-hub 1.0) does not resume or verify downloads, stores a CDN's error page as weights, and adds a
//! second TLS stack. This crate uses the HTTP client that the caller provides, which enforces
//! the operator's outgoing address policy.
//!
//! One request resolves a revision to a commit ([`Hub::plan_model`]), and every later request uses that commit. A file is
//! identified by the hash that the Hub announces (SHA-256 for large files, git's SHA-1 for small ones), and so is the partial
//! file of an interrupted download: a later download of the same content, of any revision, resumes it.
//!
//! Protocol details are taken from huggingface_hub 2.4.0 (file_download.py, hf_api.py,
//! utils/_http.py) and the Hub's documentation.

mod cache;
mod choose;
mod environment;
mod error;
mod fetch;
mod hash;
mod http;
mod id;
mod info;
mod outline;
mod part;
mod progress;
mod push;
mod ranges;
mod upload;
mod write;

pub use cache::{Cached, find_cached, find_snapshot, verify_cached};
pub use choose::{ConvertedFile, RepoPlan};
pub use environment::{HubEnvironment, PUBLIC_ENDPOINT};
pub use error::HubError;
pub use fetch::RESERVED_BYTES;
pub use hash::FileHash;
pub use http::{Hub, HubSettings, Token};
pub use id::{InvalidRepo, Repo, RepoKind};
pub use info::{RepoFile, RepoInfo};
pub use outline::clean_parts;
pub use progress::Progress;
pub use push::{Push, PushContent, PushFile, Pushed};
