//! Which repository, of which kind, at which revision.

use std::fmt;

/// What a repository holds; the hub keeps the two apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepoKind {
    /// A model.
    Model,
    /// A data set.
    Dataset,
}

impl RepoKind {
    /// As the API's paths say it: `models`, `datasets`.
    pub(crate) fn plural(self) -> &'static str {
        match self {
            RepoKind::Model => "models",
            RepoKind::Dataset => "datasets",
        }
    }

    /// As a sentence says it.
    pub(crate) fn noun(self) -> &'static str {
        match self {
            RepoKind::Model => "model",
            RepoKind::Dataset => "data set",
        }
    }
}

/// A repository of the hub, and which revision of it: `org/name`, `name`, `org/name@revision`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repo {
    /// Model or data set.
    pub kind: RepoKind,
    /// `org/name`, or `name` alone for a few old ones.
    id: String,
    /// A branch, a tag, a commit or `refs/pr/7`.
    revision: String,
}

/// A text names no repository.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected a repository of the hub as org/name or org/name@revision: {0}")]
pub struct InvalidRepo(String);

/// The longest name of a repository (the hub's rule).
const MAX_ID: usize = 96;
const MAX_REVISION: usize = 255;

impl Repo {
    /// Reads `org/name[@revision]`; without a revision it is `main`.
    ///
    /// # Errors
    /// When a name has characters that the hub's names do not have, or is too long.
    pub fn parse(kind: RepoKind, text: &str) -> Result<Repo, InvalidRepo> {
        let (id, revision) = text.split_once('@').unwrap_or((text, "main"));
        Repo::new(kind, id, revision)
    }

    /// The same from its parts.
    ///
    /// # Errors
    /// As [`Repo::parse`].
    pub fn new(kind: RepoKind, id: &str, revision: &str) -> Result<Repo, InvalidRepo> {
        let refuse = |why: String| Err(InvalidRepo(why));
        if id.len() > MAX_ID {
            return refuse(format!("the name has {} characters, {MAX_ID} are the most", id.len()));
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
                    "{:?} is no name on the hub: letters, digits, and - _ . between them",
                    name.chars().take(100).collect::<String>()
                ));
            }
        }
        let spelled = |c: char| c.is_ascii_graphic() && !matches!(c, '\\' | '?' | '#' | '%');
        let parts = revision.split('/').all(|part| !part.is_empty() && part != "." && part != "..");
        if revision.len() > MAX_REVISION || !revision.chars().all(spelled) || !parts {
            return refuse("the revision is no branch, tag or commit".to_owned());
        }
        Ok(Repo { kind, id: id.to_owned(), revision: revision.to_owned() })
    }

    /// `org/name`.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Branch, tag or commit, as it was asked for.
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

/// Whether a path in a repository may become a path on this machine: relative, no empty part, no `..`, nothing that another system
/// reads differently.
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
    fn what_is_no_name_is_refused() {
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
