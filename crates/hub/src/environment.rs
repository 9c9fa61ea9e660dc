//! Reads the environment variables of huggingface_hub, so that a machine configured for Python is also configured for rlood.

use std::path::PathBuf;

use crate::http::Token;

/// Default address of the Hub.
pub const PUBLIC_ENDPOINT: &str = "https://huggingface.co";

/// The operator's settings for the Hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubEnvironment {
    /// Address of the Hub, from `HF_ENDPOINT`.
    pub endpoint: String,
    /// Token from `HF_TOKEN`, else from the file that `HF_TOKEN_PATH` names. The file that `hf auth login` writes to `HF_HOME`
    /// is not read unless it is named explicitly: it would give one person's access rights to every user who submits a job.
    pub token: Option<Token>,
    /// Cache folder: `HF_HUB_CACHE`, else `HUGGINGFACE_HUB_CACHE`, else `hub` in `HF_HOME`, else in
    /// `$XDG_CACHE_HOME/huggingface`, else in `~/.cache/huggingface`. `None` if none of these is set.
    pub cache: Option<PathBuf>,
    /// Whether `HF_HUB_OFFLINE` or `TRANSFORMERS_OFFLINE` is 1, on, yes or true.
    pub offline: bool,
}

impl HubEnvironment {
    /// Reads the settings from environment variables. `variable` returns the value of one: [`std::env::var`], except in tests.
    pub fn read(variable: impl Fn(&str) -> Option<String>) -> HubEnvironment {
        let set = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
        let first = |names: &[&str]| names.iter().find_map(|name| set(name));
        let is_on = |name: &str| {
            set(name)
                .is_some_and(|value| matches!(value.trim().to_ascii_lowercase().as_str(), "1" | "on" | "yes" | "true"))
        };
        let from_file = || Token::new(&std::fs::read_to_string(set("HF_TOKEN_PATH")?).ok()?);
        let home = || {
            set("HF_HOME").map(PathBuf::from).or_else(|| {
                let caches = set("XDG_CACHE_HOME").map(PathBuf::from);
                Some(caches.or_else(|| Some(PathBuf::from(set("HOME")?).join(".cache")))?.join("huggingface"))
            })
        };
        HubEnvironment {
            endpoint: set("HF_ENDPOINT").unwrap_or_else(|| PUBLIC_ENDPOINT.to_owned()),
            token: set("HF_TOKEN").and_then(|token| Token::new(&token)).or_else(from_file),
            cache: first(&["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"])
                .map(PathBuf::from)
                .or_else(|| home().map(|home| home.join("hub"))),
            offline: is_on("HF_HUB_OFFLINE") || is_on("TRANSFORMERS_OFFLINE"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> HubEnvironment {
        HubEnvironment::read(|asked| {
            pairs.iter().find(|(name, _)| *name == asked).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn the_variables_are_those_of_the_python_client() {
        let plain = read(&[("HOME", "/home/ann")]);
        assert_eq!(plain.endpoint, "https://huggingface.co");
        assert_eq!(plain.cache, Some("/home/ann/.cache/huggingface/hub".into()));
        assert_eq!((plain.token, plain.offline), (None, false));
        assert_eq!(read(&[("XDG_CACHE_HOME", "/c"), ("HOME", "/h")]).cache, Some("/c/huggingface/hub".into()));
        assert_eq!(read(&[("HF_HOME", "/hf"), ("HOME", "/h")]).cache, Some("/hf/hub".into()));
        assert_eq!(read(&[("HUGGINGFACE_HUB_CACHE", "/old"), ("HF_HOME", "/hf")]).cache, Some("/old".into()));
        assert_eq!(read(&[("HF_HUB_CACHE", "/new"), ("HUGGINGFACE_HUB_CACHE", "/old")]).cache, Some("/new".into()));
        assert_eq!(read(&[]).cache, None);
        for on in ["1", "ON", "Yes", "true"] {
            assert!(read(&[("HF_HUB_OFFLINE", on)]).offline && read(&[("TRANSFORMERS_OFFLINE", on)]).offline);
        }
        assert!(!read(&[("HF_HUB_OFFLINE", "0")]).offline);
        assert_eq!(read(&[("HF_ENDPOINT", "https://mirror.example/hf")]).endpoint, "https://mirror.example/hf");
    }

    #[test]
    fn a_token_comes_from_its_variable_or_the_file_that_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("token");
        std::fs::write(&file, "hf_file\n").unwrap();
        let path = file.to_str().unwrap();
        assert_eq!(read(&[("HF_TOKEN", " hf_variable "), ("HF_TOKEN_PATH", path)]).token, Token::new("hf_variable"));
        assert_eq!(read(&[("HF_TOKEN_PATH", path)]).token, Token::new("hf_file"));
        assert_eq!(read(&[("HF_HOME", dir.path().to_str().unwrap())]).token, None);
    }
}
