//! Flags of `rlood adapter-sidecar`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Clone, Args)]
pub struct SidecarArgs {
    /// Address of the rlood server, from which adapters are downloaded.
    #[arg(long, env = "RLOOD_SERVER", default_value = "http://127.0.0.1:8080", value_name = "URL")]
    pub server: String,

    /// API key with the scope `read`, if the server requires keys. Other users can see flags in the process list, so pass it in
    /// the variable instead.
    #[arg(long, env = "RLOOD_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub api_key: Option<String>,

    /// Address of the vLLM server beside it, which should listen on the loopback address only.
    #[arg(long, default_value = "http://127.0.0.1:8000", value_name = "URL")]
    pub vllm: String,

    /// Address to listen on. Jobs name it in `rollout.servers[].url` instead of vLLM's.
    #[arg(long, default_value = "127.0.0.1:8001", value_name = "ADDRESS")]
    pub listen: SocketAddr,

    /// Folder for the downloaded adapters, which vLLM must be able to read.
    #[arg(long, value_name = "DIR")]
    pub dir: PathBuf,
}
