//! Typed identifiers: a prefix and a ULID, so that ids sort by creation time and types cannot be confused.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The error for a text that is not an id of the expected type.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{given}' is not a {kind} id: expected '{prefix}' followed by 26 letters and digits")]
pub struct IdError {
    given: String,
    kind: &'static str,
    prefix: &'static str,
}

macro_rules! id_type {
    ($(#[$doc:meta])* $name:ident, $kind:literal, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(ulid::Ulid);

        impl $name {
            /// Prefix of every id of this type.
            pub const PREFIX: &'static str = $prefix;

            /// Creates a new id. It sorts after every id created earlier on this machine (to the millisecond).
            #[expect(clippy::new_without_default, reason = "every call returns a different id, so there is no default value")]
            pub fn new() -> Self {
                Self(ulid::Ulid::generate())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}{}", $prefix, self.0.to_string().to_lowercase())
            }
        }

        impl FromStr for $name {
            type Err = IdError;
            fn from_str(text: &str) -> Result<Self, IdError> {
                text.strip_prefix($prefix)
                    .filter(|rest| rest.len() == 26)
                    .and_then(|rest| rest.to_uppercase().parse().ok())
                    .map(Self)
                    .ok_or_else(|| IdError { given: text.chars().take(64).collect(), kind: $kind, prefix: $prefix })
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
            }
        }

        impl utoipa::PartialSchema for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
                utoipa::openapi::ObjectBuilder::new()
                    .schema_type(utoipa::openapi::schema::Type::String)
                    .examples([serde_json::json!(concat!($prefix, "01jd0000000000000000000000"))])
                    .build()
                    .into()
            }
        }

        impl utoipa::ToSchema for $name {}
    };
}

id_type!(/// A training job.
    JobId, "job", "job_");
id_type!(/// An uploaded, immutable dataset.
    DatasetId, "dataset", "ds_");
id_type!(/// A published checkpoint of a job.
    CheckpointId, "checkpoint", "ckpt_");
id_type!(/// A PEFT adapter that was uploaded, or comes from the hub.
    AdapterId, "adapter", "adp_");
id_type!(/// A comparison of a checkpoint with its base model.
    VerdictId, "verdict", "vrd_");
id_type!(/// An export of a checkpoint: its weights in another form.
    ExportId, "export", "exp_");
id_type!(/// A push of a checkpoint to a model hub.
    PushId, "push", "psh_");
id_type!(/// A running worker process.
    WorkerId, "worker", "wrk_");
id_type!(/// An API key; not its secret text, which begins with `rld_`.
    KeyId, "key", "key_");
id_type!(/// A subscription to lifecycle messages.
    WebhookId, "webhook", "whk_");
id_type!(/// One request to a reward service; constant over its retries.
    RewardRequestId, "reward request", "rwr_");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_survives_text_and_sorts_by_time() {
        let first = JobId::new();
        assert_eq!(first.to_string().parse::<JobId>(), Ok(first));
        std::thread::sleep(std::time::Duration::from_millis(2));
        assert!(first < JobId::new());
    }

    #[test]
    fn an_id_of_another_type_is_refused() {
        let error = DatasetId::new().to_string().parse::<JobId>().unwrap_err();
        assert!(error.to_string().contains("'job_'"), "{error}");
    }
}
