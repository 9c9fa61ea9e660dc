//! Settings of the hub from which models and datasets are downloaded.

use std::fmt;

use clap::{Args, ValueEnum};

use super::ConfigError;
use crate::hub::{HubEnvironment, PUBLIC_ENDPOINT};

/// URL of the datasets server of huggingface.co.
const DATASETS_SERVER: &str = "https://datasets-server.huggingface.co";

/// Flags of the hub. Other settings are read from the variables of huggingface_hub: HF_TOKEN, HF_TOKEN_PATH,
/// HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, TRANSFORMERS_OFFLINE.
#[derive(Debug, Clone, Args)]
pub struct HubArgs {
    /// URL of the hub that models are downloaded from: the public one, or a mirror (http:// or https://). A private address must
    /// be allowed with --allow-outgoing.
    #[arg(long, env = "HF_ENDPOINT", default_value = PUBLIC_ENDPOINT, value_name = "URL")]
    pub hub_endpoint: String,

    /// The server that lists the hub's parquet copies of datasets, for datasets whose files have no supported format. Default: that
    /// of the public hub, if --hub-endpoint is the public hub; otherwise none.
    #[arg(long, env = "RLOOD_HUB_DATASETS_SERVER", value_name = "URL")]
    pub hub_datasets_server: Option<String>,

    /// Proxy for requests to the hub (http:// or https://, with user and password if required). The proxy then resolves names, so
    /// --allow-outgoing checks only the names and addresses in URLs. HTTPS_PROXY is ignored.
    #[arg(long, env = "RLOOD_HUB_PROXY", value_name = "URL", hide_env_values = true)]
    pub hub_proxy: Option<String>,

    /// Who may use the server's own token (HF_TOKEN) and the local cache of huggingface_hub for downloads: admins (on a server
    /// without keys: everyone) or everyone. Others send their own token in the header x-hub-token.
    #[arg(long, env = "RLOOD_HUB_TOKEN_FOR", value_enum, default_value_t = HubTokenFor::Admins, value_name = "WHO")]
    pub hub_token_for: HubTokenFor,
}

/// Who may use the server's own token and cache for downloads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum HubTokenFor {
    /// Keys with the scope admin; on a server without keys, every request.
    Admins,
    /// Every valid API key.
    Everyone,
}

/// Validated settings of the hub.
#[derive(Clone, PartialEq, Eq)]
pub struct HubConfig {
    /// The variables of huggingface_hub, such as HF_TOKEN.
    pub environment: HubEnvironment,
    /// Who may use the server's own hub token and cache.
    pub token_for: HubTokenFor,
    /// URL of the server that lists the hub's parquet copies of datasets.
    pub datasets_server: Option<reqwest::Url>,
    /// Proxy for requests to the hub.
    pub proxy: Option<reqwest::Url>,
}

impl fmt::Debug for HubConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HubConfig").field("endpoint", &self.environment.endpoint).finish_non_exhaustive()
    }
}

impl HubConfig {
    /// Returns settings with which the server contacts no hub.
    pub fn offline() -> HubConfig {
        HubConfig {
            environment: HubEnvironment { offline: true, ..HubEnvironment::read(|_| None) },
            token_for: HubTokenFor::Admins,
            datasets_server: None,
            proxy: None,
        }
    }

    /// Whether models can be obtained from the hub or from its local cache.
    pub fn may_be_asked(&self) -> bool {
        !self.environment.offline || self.environment.cache.as_ref().is_some_and(|cache| cache.is_dir())
    }

    /// Returns the URL of the server that lists the hub's parquet copies of datasets.
    pub fn datasets_server(&self) -> Option<reqwest::Url> {
        let public =
            || (self.environment.endpoint == PUBLIC_ENDPOINT).then(|| reqwest::Url::parse(DATASETS_SERVER).ok());
        self.datasets_server.clone().or_else(|| public().flatten())
    }

    /// Reads the hub settings from this process's environment variables.
    pub fn of_environment() -> HubConfig {
        let environment = HubEnvironment::read(|name| std::env::var(name).ok());
        HubConfig { environment, token_for: HubTokenFor::Admins, datasets_server: None, proxy: None }
    }
}

impl HubArgs {
    pub(super) fn resolve(&self) -> Result<HubConfig, ConfigError> {
        let HubArgs { hub_endpoint, hub_token_for, hub_datasets_server, hub_proxy } = self;
        let endpoint = hub_endpoint.trim().trim_end_matches('/');
        let is_url =
            reqwest::Url::parse(endpoint).is_ok_and(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
        if !is_url {
            return Err(ConfigError::new("--hub-endpoint (HF_ENDPOINT) must be an http:// or https:// URL"));
        }
        let mut config = HubConfig::of_environment();
        endpoint.clone_into(&mut config.environment.endpoint);
        config.token_for = *hub_token_for;
        config.datasets_server =
            read_url("--hub-datasets-server (RLOOD_HUB_DATASETS_SERVER)", hub_datasets_server.as_ref())?;
        config.proxy = read_url("--hub-proxy (RLOOD_HUB_PROXY)", hub_proxy.as_ref())?;
        Ok(config)
    }
}

fn read_url(name: &str, text: Option<&String>) -> Result<Option<reqwest::Url>, ConfigError> {
    let Some(text) = text.map(|text| text.trim()).filter(|text| !text.is_empty()) else { return Ok(None) };
    let url = reqwest::Url::parse(text).ok();
    let url = url.filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
    // The error does not repeat the URL, because it may contain a password.
    url.map(Some).ok_or_else(|| ConfigError::new(format!("{name} must be an http:// or https:// URL")))
}
