//! The client and its settings.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use reqwest::Url;
use reqwest::header::HeaderValue;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use crate::error::Error;
use crate::retry::Retry;

/// For a connection to be made.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// For a whole answer of a call that is neither a transfer nor a stream.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The longest time in which no byte of a transfer or of a stream of events arrives. A quiet stream says something every 15 s.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);

/// A client of one server. Cheap to clone; clones share their connections.
#[derive(Debug, Clone)]
pub struct Client {
    pub(crate) inner: Arc<Inner>,
    /// Of the next requests that create or move something; `None` = each makes its own.
    pub(crate) idempotency_key: Option<String>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) http: reqwest::Client,
    pub(crate) base: Url,
    pub(crate) authorization: Option<HeaderValue>,
    pub(crate) retry: Retry,
    pub(crate) timeout: Duration,
    pub(crate) stall_timeout: Duration,
}

/// The settings of a [`Client`].
#[derive(Debug)]
pub struct ClientBuilder {
    server: String,
    api_key: Option<String>,
    retry: Retry,
    timeout: Duration,
    stall_timeout: Duration,
    with_proxy: bool,
    root_certificates: Vec<u8>,
}

impl Client {
    /// A client of the server at this address, `http://127.0.0.1:8080` say, with the default settings and without a key.
    ///
    /// # Errors
    /// When the address is not one of http or https.
    pub fn new(server: &str) -> Result<Client, Error> {
        Client::builder(server).build()
    }

    /// A client of the server at this address, with settings.
    pub fn builder(server: &str) -> ClientBuilder {
        ClientBuilder {
            server: server.to_owned(),
            api_key: None,
            retry: Retry::default(),
            timeout: TIMEOUT,
            stall_timeout: STALL_TIMEOUT,
            with_proxy: true,
            root_certificates: Vec::new(),
        }
    }

    /// The server's address, without a slash at its end.
    pub fn server(&self) -> &str {
        self.inner.base.as_str().trim_end_matches('/')
    }

    /// The same client, whose requests that create or move something carry this `Idempotency-Key` instead of a new one each:
    /// a caller that keeps the key may repeat its request after a crash of its own, for 24 hours. One key is for one request
    /// of each route.
    #[must_use]
    pub fn with_idempotency_key(&self, key: impl Into<String>) -> Client {
        Client { inner: self.inner.clone(), idempotency_key: Some(key.into()) }
    }
}

impl ClientBuilder {
    /// The API key that every request shows.
    #[must_use]
    pub fn api_key(self, key: impl Into<String>) -> Self {
        Self { api_key: Some(key.into()), ..self }
    }

    /// How often and when a failed call is tried again.
    #[must_use]
    pub fn retry(self, retry: Retry) -> Self {
        Self { retry, ..self }
    }

    /// The time limit of a try of a call that is neither a transfer nor a stream; 60 s by default. Calls that ask the server to
    /// wait or to compute add that to it.
    #[must_use]
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// The longest time in which no byte of a transfer or of a stream of events arrives; 60 s by default.
    #[must_use]
    pub fn stall_timeout(self, stall_timeout: Duration) -> Self {
        Self { stall_timeout, ..self }
    }

    /// Ignores the proxies that the environment names.
    #[must_use]
    pub fn no_proxy(self) -> Self {
        Self { with_proxy: false, ..self }
    }

    /// Trusts these certificates (PEM) beside the system's: those of a company's own authority.
    #[must_use]
    pub fn root_certificates(self, pem: impl Into<Vec<u8>>) -> Self {
        Self { root_certificates: pem.into(), ..self }
    }

    /// The client.
    ///
    /// # Errors
    /// When the address is not one of http or https, a certificate cannot be read, or the key cannot stand in a header.
    pub fn build(self) -> Result<Client, Error> {
        let Self { server, api_key, retry, timeout, stall_timeout, with_proxy, root_certificates } = self;
        let base = Url::parse(&server).map_err(|error| Error::Settings(format!("'{server}' is not a URL: {error}")))?;
        if !matches!(base.scheme(), "http" | "https") || base.cannot_be_a_base() {
            return Err(Error::Settings(format!("'{server}' is neither http:// nor https://")));
        }
        let authorization = api_key.map(|key| {
            let mut value = HeaderValue::try_from(format!("Bearer {key}"))
                .map_err(|_| Error::Settings("the API key has characters that no header may have".to_owned()))?;
            value.set_sensitive(true);
            Ok(value)
        });
        let mut builder = reqwest::Client::builder()
            .user_agent(concat!("rlood-client/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(CONNECT_TIMEOUT)
            .redirect(reqwest::redirect::Policy::none())
            .referer(false)
            .tls_backend_preconfigured(tls_config(&root_certificates)?);
        // Ends a connection whose peer reads slowly, as a server does that has much to read; the limits here see that better.
        #[cfg(target_os = "linux")]
        {
            builder = builder.tcp_user_timeout(None);
        }
        if !with_proxy {
            builder = builder.no_proxy();
        }
        let http = builder.build().map_err(|error| Error::Settings(format!("no HTTP client can be made: {error}")))?;
        let inner = Inner { http, base, authorization: authorization.transpose()?, retry, timeout, stall_timeout };
        Ok(Client { inner: Arc::new(inner), idempotency_key: None })
    }
}

/// The system's certificates, and those of `pem`. On a machine without any, plain http works (reqwest's own verifier would refuse to
/// build a client).
fn tls_config(pem: &[u8]) -> Result<rustls::ClientConfig, Error> {
    static SYSTEM: OnceLock<rustls::RootCertStore> = OnceLock::new();
    let system = SYSTEM.get_or_init(|| {
        let mut roots = rustls::RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        roots
    });
    let mut roots = system.clone();
    let refused = |why: String| Error::Settings(format!("the certificates of the authority cannot be used: {why}"));
    let mut found = 0;
    for certificate in CertificateDer::pem_slice_iter(pem) {
        let certificate = certificate.map_err(|error| refused(error.to_string()))?;
        roots.add(certificate).map_err(|error| refused(error.to_string()))?;
        found += 1;
    }
    if found == 0 && !pem.is_empty() {
        return Err(refused("there is none in PEM form (-----BEGIN CERTIFICATE-----)".to_owned()));
    }
    Ok(rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("ring's provider supports the default protocol versions")
        .with_root_certificates(roots)
        .with_no_client_auth())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_or_a_key_that_cannot_be_used_says_so() {
        for server in ["", "127.0.0.1:8080", "ftp://host", "mailto:a@b"] {
            let error = Client::new(server).unwrap_err().to_string();
            assert!(error.contains(&format!("'{server}'")), "{error}");
        }
        let error = Client::builder("http://host").api_key("rld_\nsecret").build().unwrap_err().to_string();
        assert!(error.contains("API key") && !error.contains("secret"), "{error}");
        for pem in ["no certificate", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"] {
            let error = Client::builder("https://host").root_certificates(pem).build().unwrap_err().to_string();
            assert!(error.contains("certificates of the authority"), "{error}");
        }
        let client = Client::builder("http://host/below/").api_key("rld_secret").build().unwrap();
        assert_eq!(client.server(), "http://host/below");
        assert!(!format!("{client:?}").contains("rld_secret"), "{client:?}");
    }
}
