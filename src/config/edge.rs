//! Settings of the server's edge: who may call it by which name, from which pages, how many at once, how slowly; and how
//! much of the disk it leaves free.

use std::time::Duration;

use clap::Args;

use super::{ConfigError, parse_size_of};
use crate::outgoing::Net;

/// Connections at once, unless set otherwise.
const MAX_CONNECTIONS: u32 = 10_000;
/// Free disk below which jobs pause, bytes.
const DISK_RESERVE_BYTES: u64 = 256 << 20;

/// Flags of the edge.
#[derive(Debug, Clone, Args)]
pub struct EdgeArgs {
    /// Names, besides its own addresses, by which clients may call this server (the Host header), comma-separated:
    /// rlood.internal, or *.example.com for all below it. The host of --public-url, localhost, the machine's name and, with
    /// keys, every literal address are accepted anyway. Others are refused: a page whose name was made to point here
    /// (DNS rebinding) must not reach it.
    #[arg(long, env = "RLOOD_ALLOWED_HOSTS", value_delimiter = ',', value_name = "HOST,…")]
    pub allowed_hosts: Option<Vec<String>>,

    /// Web pages of other origins that may call the API from a browser with a key, comma-separated: `https://app.example`.
    /// Default: none (no CORS headers are sent).
    #[arg(long, env = "RLOOD_CORS_ORIGINS", value_delimiter = ',', value_name = "ORIGIN,…")]
    pub cors_origins: Option<Vec<String>>,

    /// Reverse proxies in front of this server, comma-separated: 127.0.0.1, 10.0.0.0/8. Of them X-Forwarded-For is believed, so
    /// that failed sign-ins are counted, and changes recorded, for the client and not for the proxy. Default: none.
    #[arg(long, env = "RLOOD_TRUSTED_PROXIES", value_delimiter = ',', value_name = "CIDR,…")]
    pub trusted_proxies: Option<Vec<String>>,

    /// Connections at once; beyond them the one that was idle longest makes room, then the oldest event stream, else new ones
    /// are closed. An eighth of them, at least 16 and at most half, is kept for workers. The limit of open files (ulimit -n)
    /// is raised as far as it goes, and bounds this too.
    #[arg(long, env = "RLOOD_MAX_CONNECTIONS", default_value_t = MAX_CONNECTIONS, value_name = "N", value_parser = clap::value_parser!(u32).range(16..=1_000_000))]
    pub max_connections: u32,

    /// Requests whose heavy work runs at once: checking and tokenising jobs, trying rewards, re-scoring. One key gets half of
    /// them at most; others wait, then get 429 or 503 with Retry-After. Default: one for each core, at least 2.
    #[arg(long, env = "RLOOD_HEAVY_SLOTS", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub heavy_slots: Option<u32>,

    /// Free disk below which jobs pause (status_reason disk_full) and none starts: bytes, or with a unit (256M, 2G; powers of
    /// 1024); 0 = never. They go on by themselves once half as much again is free. Datasets and checkpoints leave as much
    /// free, and /readyz says when it is less. Default: 256 MiB.
    #[arg(long, env = "RLOOD_DISK_RESERVE", value_name = "SIZE")]
    pub disk_reserve: Option<String>,
}

/// What the edge runs with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Edge {
    /// In lower case; a first `*.` stands for everything below.
    pub allowed_hosts: Vec<String>,
    /// As browsers send them: scheme, host, port.
    pub cors_origins: Vec<String>,
    /// Whose X-Forwarded-For is believed.
    pub trusted_proxies: Vec<Net>,
    /// Connections at once.
    pub max_connections: u32,
    /// Requests whose heavy work runs at once; None = by the number of cores.
    pub heavy_slots: Option<u32>,
    /// Free disk below which jobs pause, bytes; 0 = never.
    pub disk_reserve_bytes: u64,
    /// For a request's head, from the first moment it could come.
    pub header_timeout: Duration,
    /// Between two pieces of a request's body.
    pub body_pause: Duration,
    /// The same for what a worker sends: as long as the worker itself waits.
    pub transfer_pause: Duration,
    /// Without any request in flight.
    pub idle_timeout: Duration,
    /// For a client to take what it was sent.
    pub write_timeout: Duration,
}

impl Default for Edge {
    fn default() -> Self {
        Self {
            allowed_hosts: Vec::new(),
            cors_origins: Vec::new(),
            trusted_proxies: Vec::new(),
            max_connections: MAX_CONNECTIONS,
            heavy_slots: None,
            disk_reserve_bytes: DISK_RESERVE_BYTES,
            header_timeout: Duration::from_secs(20),
            body_pause: Duration::from_secs(30),
            transfer_pause: crate::protocol::TRANSFER_STALL,
            idle_timeout: Duration::from_secs(75),
            write_timeout: Duration::from_secs(60),
        }
    }
}

impl EdgeArgs {
    pub(super) fn resolve(&self) -> Result<Edge, ConfigError> {
        let words = |given: &Option<Vec<String>>| words(given.as_deref().unwrap_or_default());
        Ok(Edge {
            allowed_hosts: hosts(self.allowed_hosts.as_deref().unwrap_or_default())?,
            cors_origins: words(&self.cors_origins).into_iter().map(origin).collect::<Result<_, _>>()?,
            trusted_proxies: words(&self.trusted_proxies).iter().map(proxy).collect::<Result<_, _>>()?,
            max_connections: self.max_connections,
            heavy_slots: self.heavy_slots,
            disk_reserve_bytes: match self.disk_reserve.as_deref().filter(|size| !size.is_empty()) {
                Some(size) => parse_size_of("--disk-reserve", size)?.unwrap_or(0),
                None => DISK_RESERVE_BYTES,
            },
            ..Edge::default()
        })
    }
}

impl Edge {
    /// The edge of a reward server.
    ///
    /// # Errors
    /// When a host is not a host name.
    pub fn of_reward_server(allowed_hosts: &[String], max_connections: u32) -> Result<Self, ConfigError> {
        Ok(Self { allowed_hosts: hosts(allowed_hosts)?, max_connections, ..Self::default() })
    }
}

/// Without blanks and empty entries, in lower case.
fn words(given: &[String]) -> Vec<String> {
    given.iter().map(|word| word.trim().to_ascii_lowercase()).filter(|word| !word.is_empty()).collect()
}

fn hosts(given: &[String]) -> Result<Vec<String>, ConfigError> {
    words(given).into_iter().map(host).collect()
}

fn host(word: String) -> Result<String, ConfigError> {
    let name = word.strip_prefix("*.").unwrap_or(&word);
    let label =
        |label: &str| !label.is_empty() && label.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_');
    let address = name.parse::<std::net::IpAddr>().is_ok();
    if address || name.trim_end_matches('.').split('.').all(label) {
        return Ok(word.trim_end_matches('.').to_owned());
    }
    Err(ConfigError::new(format!(
        "--allowed-hosts: '{word}' is not a host name: write rlood.internal or *.example.com, without scheme and port"
    )))
}

fn origin(word: String) -> Result<String, ConfigError> {
    let bad = |why: &str| {
        ConfigError::new(format!("--cors-origins: '{word}' {why}; write https://HOST or https://HOST:PORT"))
    };
    if word == "*" {
        return Err(bad("would let every page in the world call this server"));
    }
    let url = reqwest::Url::parse(&word).map_err(|_| bad("is not an origin"))?;
    let plain = url.path() == "/" && url.query().is_none() && url.fragment().is_none() && url.username().is_empty();
    if !matches!(url.scheme(), "http" | "https") || !plain {
        return Err(bad("is not an origin"));
    }
    Ok(url.origin().ascii_serialization())
}

fn proxy(word: &String) -> Result<Net, ConfigError> {
    Net::parse(word).ok_or_else(|| {
        ConfigError::new(format!(
            "--trusted-proxies: '{word}' is neither an address nor a block of addresses (10.0.0.0/8)"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> EdgeArgs {
        EdgeArgs {
            allowed_hosts: None,
            cors_origins: None,
            trusted_proxies: None,
            max_connections: 100,
            heavy_slots: None,
            disk_reserve: None,
        }
    }

    #[test]
    fn hosts_and_origins_are_names_and_nothing_else() {
        let given = EdgeArgs {
            allowed_hosts: Some(vec![" Rlood.Internal ".into(), "*.example.com".into(), "".into()]),
            cors_origins: Some(vec!["https://App.example:443".into(), "http://a.example:8080/".into()]),
            trusted_proxies: Some(vec!["127.0.0.1".into(), " 10.0.0.0/8".into()]),
            disk_reserve: Some("1G".into()),
            ..args()
        };
        let edge = given.resolve().unwrap();
        assert_eq!(edge.allowed_hosts, ["rlood.internal", "*.example.com"]);
        assert_eq!(edge.cors_origins, ["https://app.example", "http://a.example:8080"]);
        assert_eq!(edge.disk_reserve_bytes, 1 << 30);
        assert_eq!(edge.trusted_proxies.len(), 2);
        assert!(edge.trusted_proxies[1].contains("10.9.8.7".parse().unwrap()));
        for bad in ["proxy.example", "10.0.0.0/33", "*"] {
            assert!(EdgeArgs { trusted_proxies: Some(vec![bad.into()]), ..args() }.resolve().is_err(), "{bad}");
        }
        for bad in ["http://x", "a:80", "*", "a b", "*.*"] {
            assert!(EdgeArgs { allowed_hosts: Some(vec![bad.into()]), ..args() }.resolve().is_err(), "{bad}");
        }
        for bad in ["*", "app.example", "https://a.example/path", "ftp://a.example", "null"] {
            assert!(EdgeArgs { cors_origins: Some(vec![bad.into()]), ..args() }.resolve().is_err(), "{bad}");
        }
    }
}
