//! Every flag and variable: default, unit, consequence.

use std::net::SocketAddr;
use std::path::PathBuf;

/// The settings of `rlood serve`.
#[derive(Clone)]
pub struct ServeConfig {
    /// The addresses to try, in order.
    pub listen: Vec<SocketAddr>,
    /// Where everything durable lies.
    pub data_dir: PathBuf,
    /// The admin key; None = no authentication, loopback only.
    pub api_key: Option<String>,
    /// What workers present.
    pub worker_token: String,
    /// Without a trailing slash.
    pub public_url: Option<String>,
    /// CIDRs and host names of private addresses that outgoing requests may reach.
    pub allow_outgoing: Vec<String>,
    /// Canonical directories models must lie under; None = anywhere.
    pub model_roots: Option<Vec<PathBuf>>,
}
