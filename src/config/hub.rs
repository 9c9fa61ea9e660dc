//! Settings of the hub that models come from.

use std::fmt;

use clap::{Args, ValueEnum};

use super::ConfigError;
use crate::hub::{HubEnvironment, PUBLIC_ENDPOINT};

/// Of the public hub.
const DATASETS_SERVER: &str = "https://datasets-server.huggingface.co";

/// Flags of the hub. What huggingface_hub reads for the rest is read here too: HF_TOKEN, HF_TOKEN_PATH, HF_HOME, HF_HUB_CACHE,
/// HF_HUB_OFFLINE, TRANSFORMERS_OFFLINE.
#[derive(Debug, Clone, Args)]
pub struct HubArgs {
    /// The hub that models come from: the public one, or a mirror (http:// or https://). A private address must be permitted by
    /// --allow-outgoing.
    #[arg(long, env = "HF_ENDPOINT", default_value = PUBLIC_ENDPOINT, value_name = "URL")]
    pub hub_endpoint: String,

    /// The server that lists the hub's own copies of data sets in parquet: for those whose files are in no format that is read here.
    /// Default: that of the public hub, where --hub-endpoint is the public hub; else none.
    #[arg(long, env = "RLOOD_HUB_DATASETS_SERVER", value_name = "URL")]
    pub hub_datasets_server: Option<String>,

    /// The proxy that the hub is asked through (http:// or https://, with user and password where it wants them). Names are then resolved
    /// by the proxy: --allow-outgoing sees the names and addresses in URLs, and no more. HTTPS_PROXY is not read.
    #[arg(long, env = "RLOOD_HUB_PROXY", value_name = "URL", hide_env_values = true)]
    pub hub_proxy: Option<String>,

    /// Whose downloads may use the server's own token (HF_TOKEN) and the local cache of huggingface_hub: admins (without keys
    /// everybody is one) or everyone. Others send a token of their own in the header x-hub-token.
    #[arg(long, env = "RLOOD_HUB_TOKEN_FOR", value_enum, default_value_t = HubTokenFor::Admins, value_name = "WHO")]
    pub hub_token_for: HubTokenFor,
}

/// Whose downloads may use the server's own rights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum HubTokenFor {
    /// Keys with the scope admin, and everybody on a server without keys.
    Admins,
    /// Every key.
    Everyone,
}

/// What a server knows of the hub.
#[derive(Clone, PartialEq, Eq)]
pub struct HubConfig {
    /// As the variables say.
    pub environment: HubEnvironment,
    /// Whose downloads may use its token and cache.
    pub token_for: HubTokenFor,
    /// Lists the hub's own copies of data sets.
    pub datasets_server: Option<reqwest::Url>,
    /// What the hub is asked through.
    pub proxy: Option<reqwest::Url>,
}

impl fmt::Debug for HubConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HubConfig").field("endpoint", &self.environment.endpoint).finish_non_exhaustive()
    }
}

impl HubConfig {
    /// Nothing is asked of any hub.
    pub fn offline() -> HubConfig {
        HubConfig {
            environment: HubEnvironment { offline: true, ..HubEnvironment::read(|_| None) },
            token_for: HubTokenFor::Admins,
            datasets_server: None,
            proxy: None,
        }
    }

    /// Whether the hub, or its local cache in its place, can give a model.
    pub fn may_be_asked(&self) -> bool {
        !self.environment.offline || self.environment.cache.as_ref().is_some_and(|cache| cache.is_dir())
    }

    /// Lists the hub's own copies of data sets in parquet.
    pub fn datasets_server(&self) -> Option<reqwest::Url> {
        let public =
            || (self.environment.endpoint == PUBLIC_ENDPOINT).then(|| reqwest::Url::parse(DATASETS_SERVER).ok());
        self.datasets_server.clone().or_else(|| public().flatten())
    }

    /// As this process's variables say.
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
    // Not the text itself: it may hold a password.
    url.map(Some).ok_or_else(|| ConfigError::new(format!("{name} must be an http:// or https:// URL")))
}
