//! Limits how often an address may send an invalid key.
//!
//! Invalid keys use up tokens of a bucket: 20, and one more every 6 s. While its bucket is empty, an address gets 429 for keys that
//! it has not used successfully before. Other addresses, and its own valid keys, are not affected. A key that was refused before
//! can use only the upper half: a script with an old key does not prevent others behind the same address from signing in.
//!
//! The local machine is not limited: its users have other ways to attack, and a local proxy that is not listed in
//! `--trusted-proxies` would make all clients share one address.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::{ConnectInfo, FromRequestParts};
use axum::http::request::Parts;
use axum::http::{Extensions, HeaderMap};
use sha2::{Digest, Sha256};

use super::AppState;
use super::error::{Code, Problem};
use crate::outgoing::Net;

/// Size of an address's token bucket: maximum number of invalid keys in quick succession.
const BURST: f64 = 20.0;
/// The lower half of the bucket, which keys that were refused before cannot use.
const RESERVED: f64 = 10.0;
/// Interval at which one token is added to the bucket.
const REFILL_INTERVAL: Duration = Duration::from_secs(6);
/// Maximum number of addresses to remember. Beyond it the least recently seen one is dropped.
const MAX_ADDRESSES: usize = 4096;
/// Maximum number of keys to remember per address.
const MAX_KEYS: usize = 16;
/// Minimum interval between two log entries about the same address.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
const X_FORWARDED_FOR: &str = "x-forwarded-for";

/// Address of a client; None if the request did not come from a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Client(pub Option<IpAddr>);

impl Client {
    /// Returns the address of the socket's peer, or of the client that a trusted proxy names.
    pub(super) fn of(state: &AppState, headers: &HeaderMap, extensions: &Extensions) -> Self {
        let peer = extensions.get::<ConnectInfo<SocketAddr>>().map(|info| info.0.ip().to_canonical());
        Self(peer.map(|peer| named_by(&state.config.edge.trusted_proxies, peer, headers)))
    }

    /// Returns the key of the bucket: an IPv4 address, or the network of an IPv6 address.
    pub(super) fn network(self) -> Option<IpAddr> {
        self.0.map(network)
    }
}

impl FromRequestParts<AppState> for Client {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, Problem> {
        Ok(Client::of(state, &parts.headers, &parts.extensions))
    }
}

/// Returns the last address in X-Forwarded-For that is not a trusted proxy: a client can forge everything before it.
fn named_by(proxies: &[Net], peer: IpAddr, headers: &HeaderMap) -> IpAddr {
    let is_proxy = |address: IpAddr| proxies.iter().any(|net| net.contains(address));
    let mut client = peer;
    let given = headers.get_all(X_FORWARDED_FOR).iter().rev();
    let mut words = given.flat_map(|value| value.to_str().unwrap_or("?").rsplit(','));
    while is_proxy(client) {
        let Some(next) = words.next().and_then(|word| address_of(word.trim())) else { break };
        client = next;
    }
    client
}

fn address_of(word: &str) -> Option<IpAddr> {
    let bare = word.trim_start_matches('[').trim_end_matches(']');
    let address = bare.parse().or_else(|_| word.parse::<SocketAddr>().map(|address| address.ip()));
    address.ok().map(|address: IpAddr| address.to_canonical())
}

/// The token buckets of addresses that recently sent invalid keys.
#[derive(Debug, Default)]
pub struct Failures {
    addresses: Mutex<HashMap<IpAddr, Bucket>>,
}

impl Failures {
    /// Checks the limit of an address before its key, token or cookie is verified: 429 after too many invalid ones. Call
    /// `record` with the result afterwards.
    pub(super) fn admit(&self, client: Client, credential: &str) -> Result<(), Problem> {
        self.admit_at(client, credential, Instant::now()).map_err(|seconds| {
            let detail = format!("too many invalid keys from your address: try again in {seconds} s");
            Problem::new(Code::TooManyRequests, detail).retry_after(seconds)
        })
    }

    /// Records whether the credential was valid.
    pub(super) fn record(&self, client: Client, credential: &str, is_valid: bool) {
        self.record_at(client, credential, is_valid, Instant::now());
    }

    fn admit_at(&self, client: Client, credential: &str, now: Instant) -> Result<(), u64> {
        self.of(client, now, |address, bucket| bucket.admit(address, mark(credential), now)).unwrap_or(Ok(()))
    }

    fn record_at(&self, client: Client, credential: &str, is_valid: bool, now: Instant) {
        self.of(client, now, |_, bucket| bucket.record(mark(credential), is_valid));
    }

    fn of<T>(&self, client: Client, now: Instant, then: impl FnOnce(IpAddr, &mut Bucket) -> T) -> Option<T> {
        let address = client.0.filter(|address| !address.is_loopback()).map(network)?;
        let mut addresses = self.addresses.lock().unwrap_or_else(PoisonError::into_inner);
        if addresses.len() >= MAX_ADDRESSES && !addresses.contains_key(&address) {
            let longest_away = addresses.iter().min_by_key(|(_, bucket)| bucket.at).map(|(address, _)| *address);
            longest_away.and_then(|address| addresses.remove(&address));
        }
        let bucket = addresses.entry(address).or_insert_with(|| Bucket::full(now));
        bucket.refill(now);
        Some(then(address, bucket))
    }
}

/// Groups IPv6 clients by networks of 64 bits, which usually belong to one client.
fn network(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => address,
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX))),
    }
}

/// Returns the first eight bytes of the credential's digest, enough to recognize it.
fn mark(credential: &str) -> u64 {
    Sha256::digest(credential).iter().take(8).fold(0, |mark, byte| (mark << 8) | u64::from(*byte))
}

#[derive(Debug)]
struct Bucket {
    left: f64,
    at: Instant,
    logged_at: Option<Instant>,
    good: Marks,
    wrong: Marks,
    /// Keys whose verification is in progress; each is counted once, however many requests carry it.
    open: Marks,
}

impl Bucket {
    fn full(now: Instant) -> Self {
        Self {
            left: BURST,
            at: now,
            logged_at: None,
            good: Marks::default(),
            wrong: Marks::default(),
            open: Marks::default(),
        }
    }

    fn refill(&mut self, now: Instant) {
        let more = now.saturating_duration_since(self.at).as_secs_f64() / REFILL_INTERVAL.as_secs_f64();
        (self.left, self.at) = ((self.left + more).min(BURST), now);
    }

    /// Takes a token for a key that is about to be verified; returns the seconds to wait if the bucket is empty. Concurrent
    /// requests with the same new key count once.
    fn admit(&mut self, address: IpAddr, mark: u64, now: Instant) -> Result<(), u64> {
        if self.good.has(mark) || self.open.has(mark) {
            return Ok(());
        }
        let needed = if self.wrong.has(mark) { RESERVED + 1.0 } else { 1.0 };
        if self.left < needed {
            if self.logged_at.is_none_or(|logged_at| now.saturating_duration_since(logged_at) >= LOG_INTERVAL) {
                self.logged_at = Some(now);
                tracing::warn!(%address, "too many invalid keys from an address: refusing further ones for now");
            }
            return Err(((needed - self.left) * REFILL_INTERVAL.as_secs_f64()).ceil().max(1.0) as u64);
        }
        self.left -= 1.0;
        self.open.add(mark);
        Ok(())
    }

    fn record(&mut self, mark: u64, is_valid: bool) {
        let paid = self.open.take(mark);
        if is_valid {
            if paid {
                self.left = (self.left + 1.0).min(BURST);
            }
            self.wrong.take(mark);
            self.good.add(mark);
        } else {
            if !paid {
                self.left = (self.left - 1.0).max(0.0);
            }
            self.good.take(mark);
            self.wrong.add(mark);
        }
    }
}

/// The most recently seen keys of an address, by digest.
#[derive(Debug, Default)]
struct Marks {
    kept: [Option<u64>; MAX_KEYS],
    next: usize,
}

impl Marks {
    fn has(&self, mark: u64) -> bool {
        self.kept.contains(&Some(mark))
    }

    fn add(&mut self, mark: u64) {
        if !self.has(mark) {
            self.kept[self.next] = Some(mark);
            self.next = (self.next + 1) % MAX_KEYS;
        }
    }

    fn take(&mut self, mark: u64) -> bool {
        let found = self.kept.iter_mut().find(|kept| **kept == Some(mark));
        found.is_some_and(|kept| kept.take().is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Client {
        Client(Some(text.parse().unwrap()))
    }

    /// Sends an invalid key, as an attacker who guesses.
    fn guess(failures: &Failures, client: Client, key: &str, now: Instant) -> Result<(), u64> {
        failures.admit_at(client, key, now)?;
        failures.record_at(client, key, false, now);
        Ok(())
    }

    #[test]
    fn guesses_run_out_for_one_address_and_come_back_with_time() {
        let (failures, now) = (Failures::default(), Instant::now());
        let taken = (0..100).take_while(|n| guess(&failures, at("192.0.2.1"), &format!("k{n}"), now).is_ok()).count();
        assert_eq!(taken, 20);
        assert_eq!(guess(&failures, at("192.0.2.1"), "another", now), Err(6));
        // A valid key that the address did not use before is refused too: otherwise further guesses could find it.
        assert_eq!(failures.admit_at(at("192.0.2.1"), "right", now), Err(6));
        assert_eq!(failures.admit_at(at("::ffff:192.0.2.1").map(IpAddr::to_canonical), "right", now), Err(6));
        assert_eq!(failures.admit_at(at("192.0.2.2"), "right", now), Ok(()));
        let later = now + Duration::from_secs(60);
        let taken = (0..100).take_while(|n| guess(&failures, at("192.0.2.1"), &format!("l{n}"), later).is_ok()).count();
        assert_eq!(taken, 10);
    }

    impl Client {
        fn map(self, of: impl Fn(&IpAddr) -> IpAddr) -> Client {
            Client(self.0.as_ref().map(of))
        }
    }

    #[test]
    fn a_good_key_goes_on_where_it_was_seen_and_costs_nothing() {
        let (failures, now, client) = (Failures::default(), Instant::now(), at("192.0.2.1"));
        for _ in 0..100 {
            // Many concurrent requests with one key, before the key is known to be valid.
            failures.admit_at(client, "good", now).unwrap();
        }
        failures.record_at(client, "good", true, now);
        let taken = (0..100).take_while(|n| guess(&failures, client, &format!("k{n}"), now).is_ok()).count();
        assert_eq!(taken, 20);
        assert_eq!(failures.admit_at(client, "good", now), Ok(()));
        // The known key is exempt until it is refused, for example because it was revoked.
        failures.record_at(client, "good", false, now);
        assert!(failures.admit_at(client, "good", now).is_err());
    }

    #[test]
    fn one_old_key_spends_half_and_a_new_one_still_signs_in() {
        let (failures, now, client) = (Failures::default(), Instant::now(), at("192.0.2.1"));
        let taken = (0..100).take_while(|_| guess(&failures, client, "old", now).is_ok()).count();
        assert_eq!((taken, failures.admit_at(client, "old", now)), (10, Err(6)));
        assert_eq!(failures.admit_at(client, "new", now), Ok(()));
    }

    #[test]
    fn loopback_is_free_and_a_network_is_one_address() {
        let (failures, now) = (Failures::default(), Instant::now());
        for n in 0..100 {
            for client in [at("127.0.0.1"), at("127.8.8.8"), at("::1"), Client(None)] {
                assert_eq!(guess(&failures, client, &format!("k{n}"), now), Ok(()));
            }
        }
        let taken =
            (0..100).take_while(|n| guess(&failures, at(&format!("2001:db8::{n}")), &format!("k{n}"), now).is_ok());
        assert_eq!(taken.count(), 20);
        assert_eq!(failures.admit_at(at("2001:db8:0:1::1"), "k", now), Ok(()));
    }

    #[test]
    fn a_million_addresses_take_no_more_room_than_4096() {
        let (failures, now) = (Failures::default(), Instant::now());
        guess(&failures, at("10.0.0.0"), "k", now).unwrap();
        for n in 1..20_000_u32 {
            let client = Client(Some(IpAddr::V4((0x0a00_0000 + n).into())));
            guess(&failures, client, "k", now + Duration::from_millis(n.into())).unwrap();
        }
        let addresses = failures.addresses.lock().unwrap();
        assert_eq!(addresses.len(), MAX_ADDRESSES);
        assert!(!addresses.contains_key(&"10.0.0.0".parse().unwrap()));
    }

    #[test]
    fn only_a_trusted_proxy_says_who_called_it() {
        let proxies = [Net::parse("127.0.0.1").unwrap(), Net::parse("10.0.0.0/8").unwrap()];
        let mut headers = HeaderMap::new();
        let named = |headers: &HeaderMap, peer: &str| named_by(&proxies, peer.parse().unwrap(), headers).to_string();
        assert_eq!(named(&headers, "127.0.0.1"), "127.0.0.1");
        headers.append(X_FORWARDED_FOR, "1.1.1.1, 192.0.2.7".parse().unwrap());
        headers.append(X_FORWARDED_FOR, "10.1.1.1".parse().unwrap());
        assert_eq!(named(&headers, "127.0.0.1"), "192.0.2.7");
        assert_eq!(named(&headers, "198.51.100.1"), "198.51.100.1");
        headers.append(X_FORWARDED_FOR, "[2001:db8::1]:443".parse().unwrap());
        assert_eq!(named(&headers, "10.0.0.1"), "2001:db8::1");
        headers.append(X_FORWARDED_FOR, "unknown".parse().unwrap());
        assert_eq!(named(&headers, "10.0.0.1"), "10.0.0.1");
    }
}
