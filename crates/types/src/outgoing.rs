//! The policy for outgoing requests: which addresses they may reach. This module sends nothing.
//!
//! A user writes the URLs in a job, but the server sends the requests. Without a check, a user could reach addresses that only the
//! server can (a metadata service, a machine on the private network). Everything that does not need DNS is checked when a job is
//! submitted; `rlood_rewards::http_client` checks every resolved address again when it connects.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use url::Url;

/// The word that permits loopback addresses in a list of permitted addresses.
pub const LOOPBACK: &str = "loopback";

/// The addresses that outgoing requests may reach: public addresses, and those that the operator permits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OutgoingPolicy {
    nets: Vec<Net>,
    hosts: Vec<String>,
    loopback: bool,
}

/// Why a URL or an address is rejected, or why an entry of the list is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OutgoingError {
    /// The text is not a URL. The error does not repeat it, because it may contain a password.
    #[error("not a URL such as https://host/path")]
    NotAUrl,
    /// The scheme is neither http nor https.
    #[error("the scheme '{0}' is not supported: use http or https")]
    Scheme(String),
    /// The URL contains `user:password@`.
    #[error("a URL must not contain a user name or password: put credentials into the reward's headers")]
    Credentials,
    /// The address is not one of the permitted ones.
    #[error(
        "{host} has the {kind} address {address}, which this server must not reach; \
         the operator can permit it with --allow-outgoing {address}"
    )]
    Refused {
        /// Host as written in the URL.
        host: String,
        /// Address that the host is or resolves to.
        address: IpAddr,
        /// Kind of address: loopback, private, ….
        kind: &'static str,
    },
    /// An entry of the list is invalid.
    #[error("'{0}' is neither a host name, an address, a CIDR block (10.0.0.0/8), nor the word 'loopback'")]
    Entry(String),
}

impl OutgoingPolicy {
    /// Parses a list of CIDR blocks, addresses, host names and the word `loopback`. A permitted host may have any address.
    pub fn parse<S: AsRef<str>>(list: &[S]) -> Result<Self, OutgoingError> {
        let mut policy = Self::default();
        for entry in list {
            let entry = entry.as_ref().trim().to_ascii_lowercase();
            if entry.is_empty() {
                continue;
            }
            if entry == LOOPBACK {
                policy.loopback = true;
            } else if let Some(net) = Net::parse(&entry) {
                policy.nets.push(net);
            } else if is_host_name(&entry) {
                policy.hosts.push(entry.trim_end_matches('.').to_owned());
            } else {
                return Err(OutgoingError::Entry(entry));
            }
        }
        Ok(policy)
    }

    /// Checks everything about a URL that does not need DNS.
    pub fn check_url(&self, url: &str) -> Result<Url, OutgoingError> {
        let parsed = Url::parse(url).map_err(|_| OutgoingError::NotAUrl)?;
        if !matches!(parsed.scheme(), "http" | "https") {
            return Err(OutgoingError::Scheme(parsed.scheme().to_owned()));
        }
        if !parsed.username().is_empty() || parsed.password().is_some() {
            return Err(OutgoingError::Credentials);
        }
        let Some(host) = parsed.host_str() else {
            return Err(OutgoingError::NotAUrl);
        };
        // The URL standard has already normalized 127.1, 0x7f000001 and similar spellings to plain addresses.
        if let Ok(address) = host.trim_start_matches('[').trim_end_matches(']').parse() {
            self.check_address(host, address)?;
        }
        Ok(parsed)
    }

    /// Checks one address that `host` is or resolves to.
    pub fn check_address(&self, host: &str, address: IpAddr) -> Result<(), OutgoingError> {
        let Some(kind) = special_kind(address) else { return Ok(()) };
        let permitted = (kind == LOOPBACK && self.loopback)
            || self.nets.iter().any(|net| net.contains(address))
            || self.hosts.iter().any(|permitted| permitted == &host.trim_end_matches('.').to_ascii_lowercase());
        if permitted { Ok(()) } else { Err(OutgoingError::Refused { host: host.to_owned(), address, kind }) }
    }
}

/// A block of IP addresses in CIDR notation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Net {
    address: IpAddr,
    prefix: u8,
}

impl Net {
    /// Parses an address or a CIDR block such as `10.0.0.0/8`.
    pub fn parse(text: &str) -> Option<Self> {
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address.parse().ok()?, Some(prefix.parse().ok()?)),
            None => (text.trim_start_matches('[').trim_end_matches(']').parse().ok()?, None),
        };
        let bits = if matches!(address, IpAddr::V4(_)) { 32 } else { 128 };
        let prefix = prefix.unwrap_or(bits);
        (prefix <= bits).then_some(Self { address, prefix })
    }

    /// Whether the block contains an address.
    pub fn contains(self, other: IpAddr) -> bool {
        match (self.address, other) {
            (IpAddr::V4(net), IpAddr::V4(other)) => {
                let shift = 32 - u32::from(self.prefix);
                (u64::from(net.to_bits()) >> shift) == (u64::from(other.to_bits()) >> shift)
            }
            (IpAddr::V6(net), IpAddr::V6(other)) => {
                let shift = 128 - u32::from(self.prefix);
                shift == 128 || (net.to_bits() >> shift) == (other.to_bits() >> shift)
            }
            (IpAddr::V4(_), IpAddr::V6(_)) | (IpAddr::V6(_), IpAddr::V4(_)) => false,
        }
    }
}

fn is_host_name(text: &str) -> bool {
    let valid =
        |label: &str| !label.is_empty() && label.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_');
    let text = text.trim_end_matches('.');
    // The last label of a name is never a number: 10.0.0 and 1.2.3.4.5 are mistyped addresses.
    text.split('.').all(valid) && !text.rsplit('.').next().is_some_and(|last| last.chars().all(|c| c.is_ascii_digit()))
}

/// Returns the kind of a special-purpose address (IANA registries); `None` = public.
fn special_kind(address: IpAddr) -> Option<&'static str> {
    match address {
        IpAddr::V4(address) => special_v4(address),
        IpAddr::V6(address) => special_v6(address),
    }
}

fn special_v4(address: Ipv4Addr) -> Option<&'static str> {
    Some(match address.octets() {
        [127, ..] => LOOPBACK,
        [0, ..] => "unspecified",
        [10, ..] | [172, 16..=31, ..] | [192, 168, ..] => "private",
        [100, 64..=127, ..] => "carrier-grade NAT",
        [169, 254, ..] => "link-local (metadata)",
        [168, 63, 129, 16] => "cloud metadata",
        [192, 0, 0, _] => "reserved",
        [192, 0, 2, _] | [198, 51, 100, _] | [203, 0, 113, _] => "documentation",
        [192, 88, 99, _] => "6to4 relay",
        [198, 18..=19, ..] => "benchmarking",
        [224..=239, ..] => "multicast",
        [240..=255, ..] => "reserved",
        _ => return None,
    })
}

fn special_v6(address: Ipv6Addr) -> Option<&'static str> {
    Some(match address.segments() {
        [0, 0, 0, 0, 0, 0, 0, 1] => LOOPBACK,
        [0, 0, 0, 0, 0, 0, 0, 0] => "unspecified",
        [0, 0, 0, 0, 0, 0xffff, ..] | [0, 0, 0, 0, 0xffff, 0, ..] => "IPv4-mapped",
        [0x64, 0xff9b, ..] => "NAT64",
        [0x2001, 0, ..] => "Teredo",
        [0x2001, 0x0001..=0x01ff, ..] => "reserved",
        [0x2001, 0xdb8, ..] | [0x3fff, 0..=0xfff, ..] => "documentation",
        [0x2002, ..] => "6to4",
        [0xfc00..=0xfdff, ..] => "private",
        [0xfe80..=0xfebf, ..] => "link-local",
        [0xfec0..=0xfeff, ..] => "site-local",
        [0xff00..=0xffff, ..] => "multicast",
        [0x2000..=0x3fff, ..] => return None,
        _ => "reserved",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_special_address_is_refused_however_it_is_written() {
        let policy = OutgoingPolicy::default();
        for (url, kind) in [
            ("http://127.0.0.1/", "loopback"),
            ("http://127.255.255.254:8080/x", "loopback"),
            ("http://127.1/", "loopback"),
            ("http://2130706433/", "loopback"),
            ("http://0x7f000001/", "loopback"),
            ("http://0177.0.0.1/", "loopback"),
            ("http://[::1]/", "loopback"),
            ("http://0.0.0.0/", "unspecified"),
            ("http://0/", "unspecified"),
            ("http://[::]/", "unspecified"),
            ("http://10.1.2.3/", "private"),
            ("http://172.16.0.1/", "private"),
            ("http://172.31.255.255/", "private"),
            ("http://192.168.0.1/", "private"),
            ("http://100.64.0.1/", "carrier-grade NAT"),
            ("http://100.100.100.200/", "carrier-grade NAT"),
            ("http://169.254.169.254/latest/meta-data/", "link-local (metadata)"),
            ("http://168.63.129.16/", "cloud metadata"),
            ("http://192.0.0.192/", "reserved"),
            ("http://192.0.2.1/", "documentation"),
            ("http://198.18.0.1/", "benchmarking"),
            ("http://224.0.0.1/", "multicast"),
            ("http://255.255.255.255/", "reserved"),
            ("http://[::ffff:127.0.0.1]/", "IPv4-mapped"),
            ("http://[::ffff:10.0.0.1]/", "IPv4-mapped"),
            ("http://[::ffff:a9fe:a9fe]/", "IPv4-mapped"),
            ("http://[::ffff:0:127.0.0.1]/", "IPv4-mapped"),
            ("http://[::127.0.0.1]/", "reserved"),
            ("http://[64:ff9b::7f00:1]/", "NAT64"),
            ("http://[64:ff9b:1::a00:1]/", "NAT64"),
            ("http://[2001:0:4136:e378:8000:63bf:3fff:fdd2]/", "Teredo"),
            ("http://[2002:7f00:1::]/", "6to4"),
            ("http://[2001:db8::1]/", "documentation"),
            ("http://[100::1]/", "reserved"),
            ("http://[fd00:ec2::254]/", "private"),
            ("http://[fe80::1]/", "link-local"),
            ("http://[fec0::1]/", "site-local"),
            ("http://[ff02::1]/", "multicast"),
        ] {
            match policy.check_url(url) {
                Err(OutgoingError::Refused { kind: found, .. }) => assert_eq!(found, kind, "{url}"),
                other => panic!("{url}: {other:?}"),
            }
        }
    }

    #[test]
    fn public_addresses_and_names_pass() {
        for url in
            ["https://1.1.1.1/", "http://[2606:4700:4700::1111]/", "https://rm.example/score", "http://172.32.0.1/"]
        {
            assert!(OutgoingPolicy::default().check_url(url).is_ok(), "{url}");
        }
    }

    #[test]
    fn only_addresses_that_the_operator_permits_pass() {
        let policy =
            OutgoingPolicy::parse(&["loopback", "10.0.0.0/8", "fd00::/16", "reward.internal", "192.168.1.7"]).unwrap();
        for url in
            ["http://127.0.0.1:9/", "http://[::1]/", "http://10.9.8.7/", "http://[fd00:1::2]/", "http://192.168.1.7/"]
        {
            assert!(policy.check_url(url).is_ok(), "{url}");
        }
        for url in ["http://192.168.1.8/", "http://169.254.169.254/", "http://[::ffff:10.0.0.1]/", "http://[fd01::1]/"]
        {
            assert!(policy.check_url(url).is_err(), "{url}");
        }
        let private = IpAddr::from([192, 168, 3, 3]);
        assert!(policy.check_address("Reward.Internal.", private).is_ok());
        assert!(policy.check_address("other.internal", private).is_err());
        let all = OutgoingPolicy::parse(&["0.0.0.0/0", "::/0"]).unwrap();
        assert!(all.check_url("http://10.0.0.1/").is_ok() && all.check_url("http://[::1]/").is_ok());
    }

    #[test]
    fn urls_with_credentials_or_another_scheme_are_refused() {
        let policy = OutgoingPolicy::default();
        assert_eq!(policy.check_url("https://user:pass@rm.example/"), Err(OutgoingError::Credentials));
        assert_eq!(policy.check_url("https://user@rm.example/"), Err(OutgoingError::Credentials));
        assert_eq!(policy.check_url("ftp://rm.example/"), Err(OutgoingError::Scheme("ftp".into())));
        assert!(matches!(policy.check_url("rm.example/score"), Err(OutgoingError::NotAUrl)));
    }

    #[test]
    fn a_refused_url_is_not_repeated() {
        for url in ["http://u:CANARY@exa mple/", "http://u:CANARY@rm.example/", "u:CANARY@rm.example/x", "CANARY"] {
            let said = OutgoingPolicy::default().check_url(url).unwrap_err().to_string();
            assert!(!said.contains("CANARY"), "{said}");
        }
    }

    #[test]
    fn a_list_entry_that_is_nothing_is_refused() {
        for entry in ["10.0.0.0/33", "10.0.0", "http://x/", "a b", "::/129"] {
            assert_eq!(OutgoingPolicy::parse(&[entry]), Err(OutgoingError::Entry(entry.into())), "{entry}");
        }
        assert_eq!(OutgoingPolicy::parse(&["", " "]), Ok(OutgoingPolicy::default()));
    }
}
