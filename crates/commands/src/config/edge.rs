//! Network limits of a server: host names, origins, number of connections, timeouts; and the reserve of free disk space.

use std::time::Duration;

use clap::Args;

use super::{ConfigError, parse_size_of};
use crate::outgoing::Net;

/// Default maximum number of connections.
const MAX_CONNECTIONS: u32 = 10_000;
/// Default free disk space below which jobs pause, in bytes.
const DISK_RESERVE_BYTES: u64 = 256 << 20;

/// Flags of the network limits.
#[derive(Debug, Clone, Args)]
pub struct EdgeArgs {
    /// Additional names by which clients may call this server (the Host header), comma-separated: rlood.internal, or *.example.com
    /// for all subdomains. The host of --public-url, localhost, the machine's name and, with keys, every literal address are always
    /// accepted. Other names are refused as protection against DNS rebinding.
    #[arg(long, env = "RLOOD_ALLOWED_HOSTS", value_delimiter = ',', value_name = "HOST,…")]
    pub allowed_hosts: Option<Vec<String>>,

    /// Origins whose web pages may call the API from a browser with a key, comma-separated: `https://app.example`. Default: none
    /// (no CORS headers are sent).
    #[arg(long, env = "RLOOD_CORS_ORIGINS", value_delimiter = ',', value_name = "ORIGIN,…")]
    pub cors_origins: Option<Vec<String>>,

    /// Reverse proxies in front of this server, comma-separated: 127.0.0.1, 10.0.0.0/8. Their X-Forwarded-For header is trusted, so
    /// that failed sign-ins and audit entries refer to the client and not to the proxy. Default: none.
    #[arg(long, env = "RLOOD_TRUSTED_PROXIES", value_delimiter = ',', value_name = "CIDR,…")]
    pub trusted_proxies: Option<Vec<String>>,

    /// Maximum number of connections. Beyond it the connection that has been idle longest is closed, then the oldest event stream,
    /// otherwise new connections. An eighth of the connections, at least 16 and at most half, is reserved for workers. The server
    /// raises its limit of open files (ulimit -n) as far as possible; that limit also applies.
    #[arg(long, env = "RLOOD_MAX_CONNECTIONS", default_value_t = MAX_CONNECTIONS, value_name = "N", value_parser = clap::value_parser!(u32).range(16..=1_000_000))]
    pub max_connections: u32,

    /// Maximum number of concurrent expensive requests: validating and tokenizing jobs, testing rewards, re-scoring. One key gets
    /// at most half of them; others wait, then get 429 or 503 with Retry-After. Default: one per core, at least 2.
    #[arg(long, env = "RLOOD_HEAVY_SLOTS", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub heavy_slots: Option<u32>,

    /// Free disk space below which running jobs pause (status_reason disk_full) and no job starts: bytes, or with a unit (256M, 2G;
    /// powers of 1024); 0 = never. Jobs resume automatically once 1.5 times this much is free. Datasets and checkpoints also leave
    /// this much free, and /readyz reports when less is left. Default: 256 MiB.
    #[arg(long, env = "RLOOD_DISK_RESERVE", value_name = "SIZE")]
    pub disk_reserve: Option<String>,
}

/// Validated network limits of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Edge {
    /// Host names in lower case; a leading `*.` matches all subdomains.
    pub allowed_hosts: Vec<String>,
    /// Origins as browsers send them: scheme, host, port.
    pub cors_origins: Vec<String>,
    /// Proxies whose X-Forwarded-For is trusted.
    pub trusted_proxies: Vec<Net>,
    /// Maximum number of connections.
    pub max_connections: u32,
    /// Maximum number of concurrent expensive requests; None = derived from the number of cores.
    pub heavy_slots: Option<u32>,
    /// Free disk space below which jobs pause, in bytes; 0 = never.
    pub disk_reserve_bytes: u64,
    /// Time limit for a request's headers, counted from the opening of the connection or the end of the previous response.
    pub header_timeout: Duration,
    /// Time limit between two pieces of a request's body.
    pub body_pause: Duration,
    /// Time limit between two pieces of a worker's upload: the same as the worker's own timeout.
    pub transfer_pause: Duration,
    /// Time limit for a connection without a request in flight.
    pub idle_timeout: Duration,
    /// Time limit for a client to accept data that was sent to it.
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
    /// Returns the network limits of `rlood reward-server`.
    ///
    /// # Errors
    /// Fails when a host is not a valid host name.
    pub fn of_reward_server(allowed_hosts: &[String], max_connections: u32) -> Result<Self, ConfigError> {
        Ok(Self { allowed_hosts: hosts(allowed_hosts)?, max_connections, ..Self::default() })
    }
}

/// Returns the entries of a host list in lower case, without blanks and empty entries.
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
        "--allowed-hosts: '{word}' is not a host name: use the form rlood.internal or *.example.com, without scheme and port"
    )))
}

fn origin(word: String) -> Result<String, ConfigError> {
    let bad =
        |why: &str| ConfigError::new(format!("--cors-origins: '{word}' {why}; use https://HOST or https://HOST:PORT"));
    if word == "*" {
        return Err(bad("would let every web page call this server"));
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
            "--trusted-proxies: '{word}' is neither an IP address nor a block of addresses such as 10.0.0.0/8"
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
