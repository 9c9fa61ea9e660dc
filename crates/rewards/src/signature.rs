//! Standard Webhooks signatures: `v1,` followed by the base64 HMAC-SHA256 of `id.timestamp.body`.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use subtle::ConstantTimeEq;

/// Maximum difference between a request's timestamp and the receiver's clock, in seconds.
pub const TOLERANCE_S: u64 = 300;
/// Maximum length of an accepted `webhook-id`, in characters.
pub const MAX_ID_CHARS: usize = 256;

/// A key for webhook signatures. Its text form is `whsec_` followed by base64.
#[derive(Clone)]
pub struct Key(Vec<u8>);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(redacted)")
    }
}

/// Error in the text form of a signing key. Never contains the secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// The text form of the key does not begin with `whsec_`.
    #[error("a secret begins with 'whsec_', followed by base64 of 24 to 64 bytes")]
    Prefix,
    /// The text after `whsec_` is not base64.
    #[error("the text after 'whsec_' is not base64")]
    Base64,
    /// The key is too short or too long.
    #[error("the text after 'whsec_' must be base64 of 24 to 64 bytes")]
    Length,
}

/// Reason why a signed request is rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Rejected {
    /// The header `webhook-id` is missing, too long, or contains characters other than visible ASCII.
    #[error("webhook-id is missing or not 1 to {MAX_ID_CHARS} visible ASCII characters")]
    Id,
    /// The header `webhook-timestamp` is missing or not a number of seconds.
    #[error("webhook-timestamp is missing or not a number of seconds")]
    Timestamp,
    /// The timestamp differs from this machine's clock by more than five minutes.
    #[error("webhook-timestamp is more than {TOLERANCE_S} s away from this clock")]
    Stale,
    /// The header `webhook-signature` is missing or contains no `v1` signature.
    #[error("webhook-signature is missing or holds no v1 signature")]
    Form,
    /// None of the signatures in the header matches the request.
    #[error("no signature in webhook-signature matches")]
    Signature,
}

impl Key {
    /// Parses the text form of a signing key, `whsec_…`.
    pub fn parse(secret: &str) -> Result<Self, KeyError> {
        let text = secret.strip_prefix("whsec_").ok_or(KeyError::Prefix)?;
        let bytes = STANDARD.decode(text).map_err(|_| KeyError::Base64)?;
        if (24..=64).contains(&bytes.len()) { Ok(Self(bytes)) } else { Err(KeyError::Length) }
    }

    /// Generates a new signing key in its text form, with random numbers of the operating system.
    pub fn generate() -> std::io::Result<String> {
        let mut bytes = [0; 32];
        rustls::crypto::ring::default_provider()
            .secure_random
            .fill(&mut bytes)
            .map_err(|_| std::io::Error::other("the operating system's random number generator failed"))?;
        Ok(format!("whsec_{}", STANDARD.encode(bytes)))
    }

    /// Returns the value of the header `webhook-signature` for a request; `timestamp` is in seconds since 1970.
    pub fn sign(&self, id: &str, timestamp: u64, body: &[u8]) -> String {
        format!("v1,{}", STANDARD.encode(self.mac(id, timestamp, body)))
    }

    /// Checks the signature headers of a request before its body has arrived: their form, and whether the timestamp
    /// is within the tolerance.
    pub fn check_head(&self, id: &str, timestamp: &str, signatures: &str, now_s: u64) -> Result<(), Rejected> {
        if !(1..=MAX_ID_CHARS).contains(&id.len()) || !id.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(Rejected::Id);
        }
        check_timestamp(timestamp, now_s)?;
        let is_mac = |signature: &str| STANDARD.decode(signature).is_ok_and(|mac| mac.len() == MAC_BYTES);
        let has_form = signatures.split(' ').filter_map(|signature| signature.strip_prefix("v1,")).any(is_mac);
        if has_form { Ok(()) } else { Err(Rejected::Form) }
    }

    /// Verifies a received request. `signatures` is the whole header with signatures separated by spaces, one of which must
    /// match. The comparison takes constant time.
    pub fn verify(&self, id: &str, timestamp: &str, signatures: &str, body: &[u8], now_s: u64) -> Result<(), Rejected> {
        let timestamp = check_timestamp(timestamp, now_s)?;
        let expected = self.mac(id, timestamp, body);
        let matches = signatures.split(' ').filter_map(|signature| signature.strip_prefix("v1,")).any(|signature| {
            STANDARD.decode(signature).is_ok_and(|given| bool::from(given.as_slice().ct_eq(expected.as_slice())))
        });
        if matches { Ok(()) } else { Err(Rejected::Signature) }
    }

    fn mac(&self, id: &str, timestamp: u64, body: &[u8]) -> Vec<u8> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC accepts keys of any length");
        mac.update(format!("{id}.{timestamp}.").as_bytes());
        mac.update(body);
        mac.finalize().into_bytes().to_vec()
    }
}

/// Size of an HMAC-SHA256 in bytes.
const MAC_BYTES: usize = 32;

/// Parses the header `webhook-timestamp` and checks that it differs from the clock by at most the tolerance.
fn check_timestamp(timestamp: &str, now_s: u64) -> Result<u64, Rejected> {
    let timestamp: u64 = timestamp.parse().map_err(|_| Rejected::Timestamp)?;
    if timestamp.abs_diff(now_s) > TOLERANCE_S { Err(Rejected::Stale) } else { Ok(timestamp) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    const ID: &str = "msg_01JD0000000000000000000000";
    const BODY: &[u8] = br#"{"type":"reward.ping","version":"1","id":"msg_01JD0000000000000000000000"}"#;
    const AT: u64 = 1_767_225_600;
    const SIGNATURE: &str = "v1,0EgMwOHD0NH71AcEz1ml4fJ+11KqL6+YVRgdwn7f0Sg=";

    #[test]
    fn the_contracts_test_vector_holds() {
        let key = Key::parse(SECRET).unwrap();
        assert_eq!(key.sign(ID, AT, BODY), SIGNATURE);
        assert_eq!(key.verify(ID, "1767225600", SIGNATURE, BODY, AT + 300), Ok(()));
    }

    #[test]
    fn one_of_several_signatures_is_enough() {
        let key = Key::parse(SECRET).unwrap();
        let rotation = format!("v1,AAAA v2,xyz {SIGNATURE}");
        assert_eq!(key.verify(ID, "1767225600", &rotation, BODY, AT), Ok(()));
    }

    #[test]
    fn another_body_id_time_or_key_is_refused() {
        let key = Key::parse(SECRET).unwrap();
        assert_eq!(key.verify(ID, "1767225600", SIGNATURE, b"{}", AT), Err(Rejected::Signature));
        assert_eq!(key.verify("msg_2", "1767225600", SIGNATURE, BODY, AT), Err(Rejected::Signature));
        assert_eq!(key.verify(ID, "1767225601", SIGNATURE, BODY, AT), Err(Rejected::Signature));
        assert_eq!(key.verify(ID, "1767225600", SIGNATURE, BODY, AT + 301), Err(Rejected::Stale));
        assert_eq!(key.verify(ID, "1767225600", SIGNATURE, BODY, AT - 301), Err(Rejected::Stale));
        assert_eq!(key.verify(ID, "soon", SIGNATURE, BODY, AT), Err(Rejected::Timestamp));
        assert_eq!(key.verify(ID, "1767225600", "", BODY, AT), Err(Rejected::Signature));
        let other = Key::parse(&Key::generate().unwrap()).unwrap();
        assert_eq!(other.verify(ID, "1767225600", SIGNATURE, BODY, AT), Err(Rejected::Signature));
    }

    #[test]
    fn an_invalid_secret_is_rejected_without_repeating_it() {
        assert_eq!(Key::parse("secret").unwrap_err(), KeyError::Prefix);
        assert_eq!(Key::parse("whsec_???").unwrap_err(), KeyError::Base64);
        assert_eq!(Key::parse("whsec_AAEC").unwrap_err(), KeyError::Length);
        assert!(!format!("{:?}", Key::parse(SECRET).unwrap()).contains("AAEC"));
    }
}
