//! Checks the host names by which clients call a server, as protection against DNS rebinding.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::LazyLock;

use axum::extract::{ConnectInfo, Request};
use axum::http::{HeaderValue, Version, header};

/// The name of the server in a request: from its target, from `Host`, or both.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Name {
    /// The name with the port, as sent.
    pub whole: String,
    /// The host without brackets around an IPv6 address.
    pub host: String,
}

/// Returns the server names in a request. Several or malformed `Host` headers, which intermediaries may interpret differently,
/// are an error. Only a request that did not come over a socket, as in tests, may have no name.
///
/// # Errors
/// Fails when the request's `Host` violates HTTP (RFC 9112, 3.2). The caller answers 400 with the returned text.
pub fn names_of(request: &Request) -> Result<Vec<Name>, &'static str> {
    let mut hosts = request.headers().get_all(header::HOST).iter();
    let (host, target) = (hosts.next(), request.uri().authority());
    if hosts.next().is_some() {
        return Err("send one 'host' header, not several");
    }
    let is_named = host.is_some() || (request.version() >= Version::HTTP_2 && target.is_some());
    if !is_named && request.extensions().get::<ConnectInfo<SocketAddr>>().is_some() {
        return Err("send a 'host' header with the name of this server");
    }
    let texts = target.map(|target| Ok(target.as_str())).into_iter().chain(host.map(HeaderValue::to_str));
    let read = texts.map(|text| {
        let whole = text.ok()?;
        Some(Name { host: host_of(whole)?.to_owned(), whole: whole.to_owned() })
    });
    let names: Option<Vec<Name>> = read.collect();
    names.ok_or("the 'host' header is not valid: send HOST, HOST:PORT or [IPV6]:PORT")
}

/// Whether a server with this listen address may be called by this name: a loopback name, its own address, the machine's name,
/// or one of `--allowed-hosts`.
pub fn is_own(host: &str, listen: IpAddr, allowed_hosts: &[String]) -> bool {
    let host = host.trim_end_matches('.').to_ascii_lowercase();
    let permitted = |allowed: &String| match allowed.strip_prefix('*') {
        Some(below) => host.ends_with(below) && host.len() > below.len(),
        None => *allowed == host,
    };
    host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
        || host == "localhost"
        || host == listen.to_string()
        || (!host.is_empty() && MACHINE.as_deref() == Some(host.as_str()))
        || allowed_hosts.iter().any(permitted)
}

/// The machine's own host name is accepted, because an attacker's DNS server does not answer for it.
static MACHINE: LazyLock<Option<String>> = LazyLock::new(|| {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    Some(name.trim().to_ascii_lowercase()).filter(|name| !name.is_empty() && !name.contains('.'))
});

/// Returns the host of `host`, `host:port`, `[v6]` or `[v6]:port`, without brackets; None for anything else.
fn host_of(authority: &str) -> Option<&str> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, after) = rest.split_once(']')?;
            host.parse::<Ipv6Addr>().ok()?;
            (host, if after.is_empty() { "" } else { after.strip_prefix(':')? })
        }
        None => authority.split_once(':').unwrap_or((authority, "")),
    };
    let of_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~%!$&'()*+,;=".contains(&byte);
    let is_name = authority.starts_with('[') || host.bytes().all(of_name);
    let is_port = port.is_empty() || (port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok());
    (is_name && is_port).then_some(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_a_name_or_an_address_perhaps_with_a_port() {
        for (whole, host) in [
            ("localhost", "localhost"),
            ("my_box.lan:8080", "my_box.lan"),
            ("127.0.0.1:", "127.0.0.1"),
            ("[::1]", "::1"),
            ("[fd00::1]:80", "fd00::1"),
            ("", ""),
        ] {
            assert_eq!(host_of(whole), Some(host), "{whole}");
        }
        for broken in [
            "[::1",
            "[::1]80",
            "[x]:1",
            "::1",
            "localhost:abc",
            "localhost:99999",
            "localhost:+1",
            "a b",
            "u@localhost",
        ] {
            assert_eq!(host_of(broken), None, "{broken}");
        }
    }
}
