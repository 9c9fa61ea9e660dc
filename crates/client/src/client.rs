//! The client and its settings.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use reqwest::Url;
use reqwest::header::HeaderValue;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use crate::error::Error;
use crate::retry::Retry;

/// Time limit for establishing a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit of a call that is neither a transfer nor a stream.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum time without a byte in a transfer or a stream of events. A quiet stream sends a comment every 15 s.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);

/// A client of one server. Clones are cheap and share their connections.
#[derive(Debug, Clone)]
pub struct Client {
    pub(crate) inner: Arc<Inner>,
    /// Idempotency key of the next requests that create or change something; `None` = each creates its own.
    pub(crate) idempotency_key: Option<String>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) http: reqwest::Client,
    pub(crate) base: Url,
    pub(crate) authorization: Option<HeaderValue>,
    pub(crate) hub_token: Option<HeaderValue>,
    pub(crate) retry: Retry,
    pub(crate) timeout: Duration,
    pub(crate) stall_timeout: Duration,
}

/// The settings of a [`Client`].
#[derive(Debug)]
pub struct ClientBuilder {
    server: String,
    api_key: Option<String>,
    hub_token: Option<String>,
    retry: Retry,
    timeout: Duration,
    stall_timeout: Duration,
    with_proxy: bool,
    root_certificates: Vec<u8>,
}

impl Client {
    /// Creates a client of the server at this address, such as `http://127.0.0.1:8080`, with the default settings
    /// and without a key.
    ///
    /// # Errors
    /// Fails if the address is not an http or https URL.
    pub fn new(server: &str) -> Result<Client, Error> {
        Client::builder(server).build()
    }

    /// Creates a builder for a client of the server at this address.
    pub fn builder(server: &str) -> ClientBuilder {
        ClientBuilder {
            server: server.to_owned(),
            api_key: None,
            hub_token: None,
            retry: Retry::default(),
            timeout: TIMEOUT,
            stall_timeout: STALL_TIMEOUT,
            with_proxy: true,
            root_certificates: Vec::new(),
        }
    }

    /// Returns the server's address, without a trailing slash.
    pub fn server(&self) -> &str {
        self.inner.base.as_str().trim_end_matches('/')
    }

    /// Returns a client whose requests that create or change something carry this `Idempotency-Key` instead of a new one each. A
    /// caller that stores the key may repeat its request after a crash, for 24 hours. Each key is for one request per route.
    #[must_use]
    pub fn with_idempotency_key(&self, key: impl Into<String>) -> Client {
        Client { inner: self.inner.clone(), idempotency_key: Some(key.into()) }
    }
}

impl ClientBuilder {
    /// Sets the API key that is sent with every request.
    #[must_use]
    pub fn api_key(self, key: impl Into<String>) -> Self {
        Self { api_key: Some(key.into()), ..self }
    }

    /// Sets the Hugging Face token that is sent with every request, for gated and private models and datasets. The server
    /// does not store it.
    #[must_use]
    pub fn hub_token(self, token: impl Into<String>) -> Self {
        Self { hub_token: Some(token.into()), ..self }
    }

    /// Sets how often and when a failed call is retried.
    #[must_use]
    pub fn retry(self, retry: Retry) -> Self {
        Self { retry, ..self }
    }

    /// Sets the time limit of one try of a call that is neither a transfer nor a stream; default: 60 s. Calls that ask the server
    /// to wait or to compute add that time.
    #[must_use]
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Sets the maximum time without a byte in a transfer or a stream of events; default: 60 s.
    #[must_use]
    pub fn stall_timeout(self, stall_timeout: Duration) -> Self {
        Self { stall_timeout, ..self }
    }

    /// Ignores the proxies that the environment names.
    #[must_use]
    pub fn no_proxy(self) -> Self {
        Self { with_proxy: false, ..self }
    }

    /// Trusts these certificates (PEM) in addition to the system's, such as those of a company's own authority.
    #[must_use]
    pub fn root_certificates(self, pem: impl Into<Vec<u8>>) -> Self {
        Self { root_certificates: pem.into(), ..self }
    }

    /// Builds the client from the builder's settings.
    ///
    /// # Errors
    /// Fails if the address is not an http or https URL, a certificate cannot be read, or the key is not valid in a header.
    pub fn build(self) -> Result<Client, Error> {
        let Self { server, api_key, hub_token, retry, timeout, stall_timeout, with_proxy, root_certificates } = self;
        let base = Url::parse(&server)
            .map_err(|error| Error::Settings(format!("the server's address '{server}' is not a URL: {error}")))?;
        if !matches!(base.scheme(), "http" | "https") || base.cannot_be_a_base() {
            return Err(Error::Settings(format!("the server's address '{server}' is neither http:// nor https://")));
        }
        let authorization = api_key.map(|key| secret_header("API key", &format!("Bearer {key}"))).transpose()?;
        let hub_token = hub_token.map(|token| secret_header("Hugging Face token", token.trim())).transpose()?;
        let mut builder = reqwest::Client::builder()
            .user_agent(concat!("rlood-client/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(CONNECT_TIMEOUT)
            .redirect(reqwest::redirect::Policy::none())
            .referer(false)
            .tls_backend_preconfigured(tls_config(&root_certificates)?);
        // TCP_USER_TIMEOUT would end a connection whose peer reads slowly, such as a busy server. The client's own time limits
        // detect a real stall better.
        #[cfg(target_os = "linux")]
        {
            builder = builder.tcp_user_timeout(None);
        }
        if !with_proxy {
            builder = builder.no_proxy();
        }
        let http =
            builder.build().map_err(|error| Error::Settings(format!("the HTTP client cannot be created: {error}")))?;
        let inner = Inner { http, base, authorization, hub_token, retry, timeout, stall_timeout };
        Ok(Client { inner: Arc::new(inner), idempotency_key: None })
    }
}

fn secret_header(noun: &str, text: &str) -> Result<HeaderValue, Error> {
    let mut value = HeaderValue::try_from(text)
        .map_err(|_| Error::Settings(format!("the {noun} has characters that are not allowed in an HTTP header")))?;
    value.set_sensitive(true);
    Ok(value)
}

/// Trusts the system's certificates and those of `pem`. On a machine without certificates, plain http still works (reqwest's own
/// verifier would refuse to build a client).
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
        return Err(refused("no certificate in PEM form was found (-----BEGIN CERTIFICATE-----)".to_owned()));
    }
    Ok(rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("the crypto provider of ring supports the default TLS versions")
        .with_root_certificates(roots)
        .with_no_client_auth())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_address_or_key_is_an_error() {
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
