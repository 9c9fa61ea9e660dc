//! HTTP client that enforces the outgoing address policy ([`crate::outgoing`]). Every address is checked after DNS resolution,
//! the connection goes to the address that was checked, and redirects and proxies are not followed.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures::future::{BoxFuture, FutureExt};
use reqwest::dns::{Addrs, Name, Resolve, Resolving};

use crate::outgoing::{OutgoingError, OutgoingPolicy};

/// Resolves a host name to its addresses; the port is ignored.
pub type Lookup = Arc<dyn Fn(String) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> + Send + Sync>;

/// Returns a builder of HTTP clients that connect only to addresses that the policy permits: no redirects, no proxy, addresses
/// pinned after the check. Literal IP addresses are not resolved: pass every URL to [`OutgoingPolicy::check_url`] first.
pub fn restricted_client_builder(policy: &OutgoingPolicy) -> reqwest::ClientBuilder {
    let system = |name: String| async move { Ok(tokio::net::lookup_host((name, 0)).await?.collect()) }.boxed();
    restricted_client_builder_with(policy, Arc::new(system))
}

/// Like [`restricted_client_builder`], with another DNS resolver.
pub fn restricted_client_builder_with(policy: &OutgoingPolicy, lookup: Lookup) -> reqwest::ClientBuilder {
    let resolver = Resolver { policy: policy.clone(), lookup };
    client_builder().redirect(reqwest::redirect::Policy::none()).referer(false).dns_resolver(resolver)
}

/// Creates an HTTP client for addresses that the policy permits. With a proxy, all requests go to the proxy, which the operator
/// chose and which resolves names itself. The policy then applies only in [`OutgoingPolicy::check_url`].
///
/// # Errors
/// Fails when the proxy's URL cannot be used.
pub fn restricted_client(policy: &OutgoingPolicy, proxy: Option<&reqwest::Url>) -> reqwest::Result<reqwest::Client> {
    let Some(proxy) = proxy else { return restricted_client_builder(policy).build() };
    let builder = client_builder().redirect(reqwest::redirect::Policy::none()).referer(false);
    builder.proxy(reqwest::Proxy::all(proxy.clone())?).build()
}

/// Returns a builder of HTTP clients with rlood's TLS settings (ring, the system's certificates) and without a proxy from the
/// environment. Requests to addresses that users give must use [`restricted_client_builder`] instead.
pub fn client_builder() -> reqwest::ClientBuilder {
    reqwest::Client::builder()
        .no_proxy()
        .user_agent(concat!("rlood/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(Duration::from_secs(10))
        .tls_backend_preconfigured(tls_config())
}

/// Returns the TLS settings. On a machine without CA certificates, http works and https fails with a clear reason; reqwest's own
/// verifier would refuse to build any client there.
pub fn tls_config() -> rustls::ClientConfig {
    static CONFIG: OnceLock<rustls::ClientConfig> = OnceLock::new();
    CONFIG
        .get_or_init(|| {
            let mut roots = rustls::RootCertStore::empty();
            let found = rustls_native_certs::load_native_certs();
            roots.add_parsable_certificates(found.certs);
            if roots.is_empty() {
                tracing::warn!(
                    "no CA certificates on this machine: https requests will fail; install ca-certificates or set SSL_CERT_FILE"
                );
            }
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            rustls::ClientConfig::builder_with_provider(provider)
                .with_safe_default_protocol_versions()
                .expect("ring's provider supports the default protocol versions")
                .with_root_certificates(roots)
                .with_no_client_auth()
        })
        .clone()
}

/// Returns the address policy's error that an HTTP client's error contains, if there is one.
pub fn refusal(error: &reqwest::Error) -> Option<&OutgoingError> {
    let mut source: Option<&(dyn std::error::Error + 'static)> = std::error::Error::source(error);
    while let Some(inner) = source {
        if let Some(refused) = inner.downcast_ref::<OutgoingError>() {
            return Some(refused);
        }
        source = inner.source();
    }
    None
}

struct Resolver {
    policy: OutgoingPolicy,
    lookup: Lookup,
}

impl Resolve for Resolver {
    fn resolve(&self, name: Name) -> Resolving {
        let policy = self.policy.clone();
        let found = (self.lookup)(name.as_str().to_owned());
        Box::pin(async move {
            let host = name.as_str();
            let mut permitted: Vec<SocketAddr> = Vec::new();
            let mut refused = None;
            for address in found.await? {
                match policy.check_address(host, address.ip()) {
                    Ok(()) => permitted.push(address),
                    Err(error) => refused = Some(error),
                }
            }
            match refused {
                Some(error) if permitted.is_empty() => Err(error.into()),
                _ => Ok(Box::new(permitted.into_iter()) as Addrs),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_name_that_resolves_to_a_refused_address_is_not_reached() {
        let error = restricted_client_builder(&OutgoingPolicy::default())
            .build()
            .unwrap()
            .get("http://localhost:1/")
            .send()
            .await;
        let error = error.unwrap_err();
        assert!(matches!(refusal(&error), Some(OutgoingError::Refused { kind: "loopback", .. })), "{error:?}");
    }
}
