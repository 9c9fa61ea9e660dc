//! A client of the Hugging Face hub's protocol: looks a repository up, chooses the files that a model needs, downloads them so that an
//! interruption costs nothing, and verifies every byte.
//!
//! The hub's own Rust crate (hf-hub 1.0) neither resumes nor verifies, stores a CDN's error page as weights, and brings a second TLS
//! stack; the requests here go through the client that the caller gives, which holds to the operator's rules on addresses.
//!
//! A revision is pinned to a commit by one request ([`Hub::plan_model`]); every later request names that commit. A file is identified by the
//! hash that the hub announces for it (SHA-256 of large files, git's SHA-1 of small ones), and so is the part of it that a broken
//! download leaves behind: a later download of the same file, of this revision or another, goes on from there.
//!
//! Facts of the protocol: huggingface_hub 2.4.0 (file_download.py, hf_api.py, utils/_http.py), the hub's documentation.

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
mod ranges;

pub use cache::{Cached, find_cached, verify_cached};
pub use choose::{ConvertedFile, RepoPlan};
pub use environment::{HubEnvironment, PUBLIC_ENDPOINT};
pub use error::HubError;
pub use fetch::Progress;
pub use hash::FileHash;
pub use http::{Hub, HubSettings, Token};
pub use id::{InvalidRepo, Repo, RepoKind};
pub use info::{RepoFile, RepoInfo};
pub use outline::clean_parts;
