//! Flags of `rlood keys`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use crate::id::KeyId;
use crate::scopes::Scope;

/// Flags of `rlood keys`.
#[derive(Debug, Clone, Args)]
pub struct KeysArgs {
    /// The action to perform.
    #[command(subcommand)]
    pub action: KeysAction,

    /// Work directly on this data directory of a server, which may be running, instead of its API. RLOOD_DATA_DIR has the same
    /// effect unless a flag names a server. Default: the API of the server that RLOOD_SERVER or a
    /// profile names, otherwise ./rlood-data.
    #[arg(long, global = true, value_name = "DIR", conflicts_with_all = ["server", "key", "profile"])]
    pub data_dir: Option<PathBuf>,

    /// Flags for the server and the output.
    #[command(flatten)]
    pub common: rlood_cli::Common,
}

/// Where `rlood keys` manages API keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeysPlace {
    /// Directly in the database of this data directory.
    DataDir(PathBuf),
    /// Over the API of a server.
    Api,
}

impl KeysArgs {
    /// Returns where to manage keys: the data directory of the flag or of `RLOOD_DATA_DIR`, or the API of the server that a
    /// variable or a profile names.
    ///
    /// # Errors
    /// Fails when the profile file cannot be read.
    pub fn place(&self) -> Result<KeysPlace, rlood_cli::CliError> {
        let variable = || std::env::var_os("RLOOD_DATA_DIR").filter(|dir| !dir.is_empty()).map(PathBuf::from);
        match &self.data_dir {
            Some(dir) => Ok(KeysPlace::DataDir(dir.clone())),
            None if self.common.has_flag() => Ok(KeysPlace::Api),
            None => match variable() {
                Some(dir) => Ok(KeysPlace::DataDir(dir)),
                None if self.common.names_a_server()? => Ok(KeysPlace::Api),
                None => Ok(KeysPlace::DataDir("rlood-data".into())),
            },
        }
    }
}

/// The actions of `rlood keys`.
#[derive(Debug, Clone, Subcommand)]
pub enum KeysAction {
    /// Create a key and print it to standard output, where it is shown only once. From the first key on, every request needs a key.
    Create(CreateKeyArgs),
    /// List the keys, newest first, without the keys themselves.
    List,
    /// Revoke a key and end every session opened with it, immediately.
    Revoke {
        /// The key's id, key_…, as `rlood keys list` shows it.
        id: KeyId,
    },
}

#[derive(Debug, Clone, Args)]
pub struct CreateKeyArgs {
    /// Display name of the key.
    #[arg(long, default_value = "unnamed", value_name = "NAME")]
    pub name: String,

    /// Scopes, comma-separated: read, submit (read and change), admin (everything, for all owners), worker (only claim jobs).
    #[arg(long, alias = "scope", value_delimiter = ',', required = true, value_name = "SCOPE,…")]
    pub scopes: Vec<Scope>,

    /// Owner whose jobs, datasets and models the key sees. Keys with one owner share them. Default: an owner of its own.
    #[arg(long, value_name = "OWNER")]
    pub owner: Option<String>,

    /// Lifetime of the key: 12h, 90d. Default: no expiry.
    #[arg(long, value_parser = parse_life, value_name = "TIME")]
    pub expires: Option<Life>,
}

/// A duration in whole seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Life {
    pub seconds: i64,
}

pub(super) fn parse_life(text: &str) -> Result<Life, String> {
    let refused = || format!("'{text}' is not a duration: use the form 3600s, 90m, 12h or 90d, at most ten years");
    let (number, unit) = text.split_at(text.len() - text.chars().last().map_or(0, char::len_utf8));
    let each = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86_400,
        _ => return Err(refused()),
    };
    let number: i64 = number.parse().map_err(|_| refused())?;
    let seconds = number.checked_mul(each).filter(|seconds| (1..=316_224_000).contains(seconds)).ok_or_else(refused)?;
    Ok(Life { seconds })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_span_is_a_number_and_a_unit() {
        assert_eq!(parse_life("90d").unwrap().seconds, 90 * 86_400);
        assert_eq!(parse_life("15s").unwrap().seconds, 15);
        for bad in ["", "d", "5", "0d", "-1h", "1.5h", "99999d", "5ü"] {
            assert!(parse_life(bad).is_err(), "{bad}");
        }
    }
}
