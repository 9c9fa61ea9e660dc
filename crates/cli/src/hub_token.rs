//! Finds the user's token of the model hub where huggingface_hub finds it.

use std::path::PathBuf;

/// Returns the token of `HF_TOKEN`, else of the file that `hf auth login` writes: `HF_TOKEN_PATH`, else `token` in `HF_HOME`, in
/// `$XDG_CACHE_HOME/huggingface` or in `~/.cache/huggingface`. `variable` returns the value of an environment variable:
/// [`std::env::var`], except in tests. The second value names where the token was found.
pub fn user_token(variable: impl Fn(&str) -> Option<String>) -> Option<(String, String)> {
    let set = |name: &str| variable(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
    if let Some(token) = set("HF_TOKEN") {
        return Some((token, "HF_TOKEN".to_owned()));
    }
    let cache = || Some(PathBuf::from(set("HOME")?).join(".cache"));
    let home = || {
        set("HF_HOME")
            .map(PathBuf::from)
            .or_else(|| Some(set("XDG_CACHE_HOME").map(PathBuf::from).or_else(cache)?.join("huggingface")))
    };
    let path = set("HF_TOKEN_PATH").map(PathBuf::from).or_else(|| Some(home()?.join("token")))?;
    let token = std::fs::read_to_string(&path).ok()?;
    Some(token.trim().to_owned()).filter(|token| !token.is_empty()).map(|token| (token, path.display().to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(pairs: &[(&str, &str)]) -> Option<String> {
        let value = |asked: &str| pairs.iter().find(|(name, _)| *name == asked).map(|(_, value)| (*value).to_owned());
        user_token(value).map(|(token, _)| token)
    }

    #[test]
    fn the_token_is_found_in_the_order_of_the_python_client() {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &str| dir.path().join(path).to_str().unwrap().to_owned();
        std::fs::create_dir_all(at(".cache/huggingface")).unwrap();
        std::fs::write(at(".cache/huggingface/token"), "hf_home\n").unwrap();
        std::fs::write(at("named"), "hf_named").unwrap();
        std::fs::write(at("token"), "hf_set").unwrap();
        let (home, named) = (at(""), at("named"));
        assert_eq!(found(&[("HF_TOKEN", " hf_variable "), ("HOME", &home)]).as_deref(), Some("hf_variable"));
        assert_eq!(found(&[("HF_TOKEN_PATH", &named), ("HOME", &home)]).as_deref(), Some("hf_named"));
        assert_eq!(found(&[("HF_HOME", &home), ("HOME", "/")]).as_deref(), Some("hf_set"));
        assert_eq!(found(&[("HF_TOKEN", " "), ("HOME", &home)]).as_deref(), Some("hf_home"));
        assert_eq!(found(&[("HOME", &named)]), None);
    }
}
