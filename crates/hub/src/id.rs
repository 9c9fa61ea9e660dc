//! The kind, the id and the revision of a Hub repository.

use std::fmt;

/// Kind of a repository. Models and datasets have separate names on the Hub.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepoKind {
    /// A repository of a model.
    Model,
    /// A repository of a dataset.
    Dataset,
}

impl RepoKind {
    /// Returns the repository kind as in the paths of the Hub's API: `models` or `datasets`.
    pub(crate) fn plural(self) -> &'static str {
        match self {
            RepoKind::Model => "models",
            RepoKind::Dataset => "datasets",
        }
    }

    /// Returns the other kind.
    pub(crate) fn other(self) -> RepoKind {
        match self {
            RepoKind::Model => RepoKind::Dataset,
            RepoKind::Dataset => RepoKind::Model,
        }
    }

    /// Returns the repository kind as shown in messages: model or dataset.
    pub(crate) fn noun(self) -> &'static str {
        match self {
            RepoKind::Model => "model",
            RepoKind::Dataset => "dataset",
        }
    }
}

/// A repository of the Hub at a revision: `org/name`, `name`, `org/name@revision`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repo {
    /// Kind of the repository: model or dataset.
    pub kind: RepoKind,
    /// `org/name`, or only `name` for a few old repositories.
    id: String,
    /// The revision: a branch, a tag, a commit, or a pull request such as `refs/pr/7`.
    revision: String,
}

/// Error for a text that is not the name of a Hub repository.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a repository of the hub is given as org/name or org/name@revision: {0}")]
pub struct InvalidRepo(String);

/// Maximum length of a repository name, as on the Hub.
const MAX_ID: usize = 96;
const MAX_REVISION: usize = 255;

impl Repo {
    /// Parses a repository name `org/name[@revision]`. The default revision is `main`.
    ///
    /// # Errors
    /// Fails when the name is too long or has characters that the Hub does not allow.
    pub fn parse(kind: RepoKind, text: &str) -> Result<Repo, InvalidRepo> {
        let (id, revision) = text.split_once('@').unwrap_or((text, "main"));
        Repo::new(kind, id, revision)
    }

    /// Creates a repository from its id and revision.
    ///
    /// # Errors
    /// Fails for the same reasons as [`Repo::parse`].
    pub fn new(kind: RepoKind, id: &str, revision: &str) -> Result<Repo, InvalidRepo> {
        let refuse = |why: String| Err(InvalidRepo(why));
        if id.len() > MAX_ID {
            return refuse(format!("the name has {} characters; the maximum is {MAX_ID}", id.len()));
        }
        let names: Vec<&str> = id.split('/').collect();
        if names.len() > 2 {
            return refuse("the name has more than one '/'".to_owned());
        }
        for name in names {
            let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            let ends = name.starts_with(['-', '.']) || name.ends_with(['-', '.']);
            if name.is_empty() || !name.chars().all(fits) || ends || name.contains("--") || name.contains("..") {
                return refuse(format!(
                    "{:?} is not a valid name: must consist of letters, digits, and - _ . between them",
                    name.chars().take(100).collect::<String>()
                ));
            }
        }
        let spelled = |c: char| c.is_ascii_graphic() && !matches!(c, '\\' | '?' | '#' | '%');
        let parts = revision.split('/').all(|part| !part.is_empty() && part != "." && part != "..");
        if revision.len() > MAX_REVISION || !revision.chars().all(spelled) || !parts {
            return refuse("the revision is not a branch, tag or commit".to_owned());
        }
        Ok(Repo { kind, id: id.to_owned(), revision: revision.to_owned() })
    }

    /// Returns the repository's id, `org/name`.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns the branch, tag or commit as requested.
    pub fn revision(&self) -> &str {
        &self.revision
    }
}

impl fmt::Display for Repo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.revision.as_str() {
            "main" => f.write_str(&self.id),
            revision => write!(f, "{}@{revision}", self.id),
        }
    }
}

/// Returns whether a path in a repository is safe as a path on this machine: relative, without empty parts and `..`, and
/// without characters that other systems interpret differently.
pub(crate) fn is_safe_path(path: &str) -> bool {
    let part = |part: &str| {
        !part.is_empty()
            && part != "."
            && part != ".."
            && part.len() <= 255
            && !part.contains(|c: char| c == '\\' || c.is_control())
    };
    path.len() <= 1024 && path.split('/').all(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_with_their_revision() {
        let repo = Repo::parse(RepoKind::Model, "Qwen/Qwen3-0.6B@refs/pr/7").unwrap();
        assert_eq!((repo.id(), repo.revision()), ("Qwen/Qwen3-0.6B", "refs/pr/7"));
        assert_eq!(repo.to_string(), "Qwen/Qwen3-0.6B@refs/pr/7");
        let repo = Repo::parse(RepoKind::Model, "gpt2").unwrap();
        assert_eq!((repo.id(), repo.revision(), repo.to_string().as_str()), ("gpt2", "main", "gpt2"));
    }

    #[test]
    fn invalid_names_are_rejected() {
        for text in [
            "", "/", "a/", "/b", "a/b/c", "../x", "a/..", "a b/c", "a/b@", "a/b@../x", "a/b@x?y", "ä/b", "-a/b",
            "a--b/c",
        ] {
            assert!(Repo::parse(RepoKind::Model, text).is_err(), "{text}");
        }
        assert!(Repo::parse(RepoKind::Model, &"a".repeat(97)).is_err());
    }

    #[test]
    fn paths_stay_below_their_folder() {
        for path in ["config.json", "additional_chat_templates/tool.jinja", "a b.json"] {
            assert!(is_safe_path(path), "{path}");
        }
        for path in ["", "/etc/passwd", "../x", "a/../x", "a//b", "./a", "a\\b", "a\0b", &"a".repeat(256)] {
            assert!(!is_safe_path(path), "{path}");
        }
    }
}
