//! Authorization: the scopes of API keys, and the access that each route requires.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A permission of an API key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// View the jobs, datasets and models of the key's owner, and models that are available to everyone.
    Read,
    /// Everything in `read`, and submit, change and delete jobs, datasets and models.
    Submit,
    /// Everything, for every owner, including keys, webhooks and the audit log.
    Admin,
    /// Act as `rlood worker`: claim any job and read its secrets. Nothing else.
    Worker,
}

impl Scope {
    /// All scopes that exist.
    pub const ALL: [Scope; 4] = [Scope::Read, Scope::Submit, Scope::Admin, Scope::Worker];

    /// Returns the scope's name in the API and in the database.
    pub fn as_str(self) -> &'static str {
        match self {
            Scope::Read => "read",
            Scope::Submit => "submit",
            Scope::Admin => "admin",
            Scope::Worker => "worker",
        }
    }

    fn bit(self) -> u8 {
        match self {
            Scope::Read => 1,
            Scope::Submit => 2,
            Scope::Admin => 4,
            Scope::Worker => 8,
        }
    }
}

/// The error for a text that is not the name of a scope.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a scope: use read, submit, admin or worker")]
pub struct ScopeError(String);

impl FromStr for Scope {
    type Err = ScopeError;

    fn from_str(text: &str) -> Result<Self, ScopeError> {
        let text = text.trim();
        let known = Self::ALL.into_iter().find(|scope| scope.as_str() == text);
        known.ok_or_else(|| ScopeError(text.chars().take(40).collect()))
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A set of scopes. `admin` includes `submit`, and `submit` includes `read`; `worker` is independent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scopes(u8);

impl Scopes {
    /// Creates the set of these scopes and the scopes that they include.
    pub fn of(scopes: impl IntoIterator<Item = Scope>) -> Self {
        let mut bits = scopes.into_iter().fold(0, |bits, scope| bits | scope.bit());
        if bits & Scope::Admin.bit() != 0 {
            bits |= Scope::Submit.bit();
        }
        if bits & Scope::Submit.bit() != 0 {
            bits |= Scope::Read.bit();
        }
        Self(bits)
    }

    /// Whether the set includes this scope.
    pub fn has(self, scope: Scope) -> bool {
        self.0 & scope.bit() != 0
    }

    /// Whether the set has no scopes.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Iterates over all scopes of the set.
    pub fn iter(self) -> impl Iterator<Item = Scope> {
        Scope::ALL.into_iter().filter(move |scope| self.has(*scope))
    }
}

impl fmt::Display for Scopes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<&str> = self.iter().map(Scope::as_str).collect();
        f.write_str(&words.join(", "))
    }
}

impl Serialize for Scopes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

impl<'de> Deserialize<'de> for Scopes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Scopes::of(Vec::<Scope>::deserialize(deserializer)?))
    }
}

/// The authorization that a route requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// No credentials: the route shows nothing that belongs to a user, or checks its own credentials.
    Open,
    /// Credentials with this scope.
    Needs(Scope),
}

/// Every route of the OpenAPI document. `tests/it/access.rs` fails for a route that is missing here; the server
/// requires `admin` for it.
const ROUTES: &[(&str, &str, Access)] = {
    use Access::{Needs, Open};
    use Scope::{Admin, Read, Submit};
    &[
        ("GET", "/livez", Open),
        ("GET", "/readyz", Open),
        ("GET", "/openapi.json", Open),
        // Signing in needs no credentials, because the body contains the key. The other methods act on the session of the cookie or
        // key.
        ("POST", "/session", Open),
        ("GET", "/session", Needs(Read)),
        ("DELETE", "/session", Needs(Read)),
        // Reward services and environments send late answers here, each with its own token.
        ("POST", "/reward-callbacks/{id}", Open),
        ("POST", "/environment-callbacks/{id}", Open),
        // Reward services read images here, each with its own token.
        ("GET", "/reward-images/{job}/{sha256}", Open),
        ("GET", "/metrics", Needs(Read)),
        ("GET", "/workers", Needs(Read)),
        ("GET", "/system/storage", Needs(Read)),
        ("GET", "/jobs", Needs(Read)),
        ("POST", "/jobs", Needs(Submit)),
        ("POST", "/jobs/validate", Needs(Submit)),
        ("GET", "/jobs/compare", Needs(Read)),
        ("GET", "/jobs/courses", Needs(Read)),
        ("GET", "/jobs/changes", Needs(Read)),
        ("POST", "/demo", Needs(Submit)),
        ("GET", "/jobs/{id}", Needs(Read)),
        ("PATCH", "/jobs/{id}", Needs(Submit)),
        ("DELETE", "/jobs/{id}", Needs(Submit)),
        ("POST", "/jobs/{id}/cancel", Needs(Submit)),
        ("POST", "/jobs/{id}/pause", Needs(Submit)),
        ("POST", "/jobs/{id}/resume", Needs(Submit)),
        ("POST", "/jobs/{id}/retry", Needs(Submit)),
        ("POST", "/jobs/{id}/fork", Needs(Submit)),
        ("POST", "/jobs/{id}/rescore", Needs(Submit)),
        ("POST", "/jobs/{id}/generate", Needs(Submit)),
        ("GET", "/jobs/{id}/config", Needs(Read)),
        ("GET", "/jobs/{id}/events", Needs(Read)),
        ("GET", "/jobs/{id}/logs", Needs(Read)),
        ("GET", "/jobs/{id}/metrics", Needs(Read)),
        ("GET", "/jobs/{id}/samples", Needs(Read)),
        ("GET", "/jobs/{id}/summary", Needs(Read)),
        ("GET", "/jobs/{id}/alerts", Needs(Read)),
        ("GET", "/jobs/{id}/rewards", Needs(Read)),
        ("GET", "/jobs/{id}/verdict", Needs(Read)),
        ("POST", "/jobs/{id}/verdict", Needs(Submit)),
        ("GET", "/verdicts/{id}", Needs(Read)),
        ("GET", "/verdicts/{id}/rows", Needs(Read)),
        ("POST", "/verdicts/{id}/cancel", Needs(Submit)),
        ("GET", "/jobs/{id}/checkpoints", Needs(Read)),
        ("GET", "/jobs/{id}/adapter", Needs(Read)),
        ("GET", "/jobs/{id}/rollout-adapters/{adapter}/{file}", Needs(Read)),
        ("GET", "/checkpoints/{id}", Needs(Read)),
        ("GET", "/checkpoints/{id}/archive.tar", Needs(Read)),
        ("GET", "/checkpoints/{id}/files/{name}", Needs(Read)),
        ("GET", "/checkpoints/{id}/manifest.json", Needs(Read)),
        ("GET", "/checkpoints/{id}/certificate", Needs(Read)),
        ("GET", "/checkpoints/{id}/exports", Needs(Read)),
        ("POST", "/checkpoints/{id}/exports", Needs(Submit)),
        ("GET", "/exports/{id}", Needs(Read)),
        ("DELETE", "/exports/{id}", Needs(Submit)),
        ("POST", "/exports/{id}/cancel", Needs(Submit)),
        ("GET", "/exports/{id}/archive.tar", Needs(Read)),
        ("GET", "/exports/{id}/files/{name}", Needs(Read)),
        ("GET", "/checkpoints/{id}/pushes", Needs(Read)),
        ("POST", "/checkpoints/{id}/pushes", Needs(Submit)),
        ("GET", "/pushes/{id}", Needs(Read)),
        ("POST", "/pushes/{id}/cancel", Needs(Submit)),
        ("POST", "/checkpoints/{id}/pin", Needs(Submit)),
        ("DELETE", "/checkpoints/{id}/pin", Needs(Submit)),
        ("GET", "/adapters", Needs(Read)),
        ("POST", "/adapters", Needs(Submit)),
        ("GET", "/adapters/{id}", Needs(Read)),
        ("DELETE", "/adapters/{id}", Needs(Submit)),
        ("GET", "/datasets", Needs(Read)),
        ("POST", "/datasets", Needs(Submit)),
        ("POST", "/datasets/preview", Needs(Submit)),
        ("GET", "/datasets/{id}", Needs(Read)),
        ("DELETE", "/datasets/{id}", Needs(Submit)),
        ("GET", "/datasets/{id}/content", Needs(Read)),
        ("GET", "/datasets/{id}/rows", Needs(Read)),
        ("GET", "/datasets/{id}/images/{sha256}", Needs(Read)),
        ("GET", "/models", Needs(Read)),
        ("POST", "/models", Needs(Submit)),
        ("GET", "/models/{id}", Needs(Read)),
        ("DELETE", "/models/{id}", Needs(Submit)),
        ("GET", "/v1/models", Needs(Read)),
        ("GET", "/v1/models/{id}", Needs(Read)),
        ("GET", "/v1/models/{org}/{name}", Needs(Read)),
        ("POST", "/v1/chat/completions", Needs(Submit)),
        ("POST", "/v1/completions", Needs(Submit)),
        ("POST", "/tokenize", Needs(Read)),
        ("POST", "/detokenize", Needs(Read)),
        ("GET", "/tokenizer_info", Needs(Read)),
        ("POST", "/serve/{model}/v1/chat/completions", Needs(Submit)),
        ("POST", "/serve/{model}/v1/completions", Needs(Submit)),
        ("POST", "/serve/{model}/tokenize", Needs(Read)),
        ("POST", "/serve/{model}/detokenize", Needs(Read)),
        ("GET", "/serve/{model}/tokenizer_info", Needs(Read)),
        ("POST", "/rewards/test", Needs(Submit)),
        ("POST", "/environments/test", Needs(Submit)),
        ("GET", "/keys", Needs(Admin)),
        ("POST", "/keys", Needs(Admin)),
        ("GET", "/keys/{id}", Needs(Admin)),
        ("DELETE", "/keys/{id}", Needs(Admin)),
        ("GET", "/audit", Needs(Admin)),
        ("GET", "/webhooks", Needs(Read)),
        ("POST", "/webhooks", Needs(Submit)),
        ("GET", "/webhooks/{id}", Needs(Read)),
        ("PATCH", "/webhooks/{id}", Needs(Submit)),
        ("DELETE", "/webhooks/{id}", Needs(Submit)),
        ("POST", "/webhooks/{id}/secret", Needs(Submit)),
        ("POST", "/webhooks/{id}/test", Needs(Submit)),
        ("GET", "/webhooks/{id}/deliveries", Needs(Read)),
        ("POST", "/webhooks/{id}/deliveries/{delivery}/redeliver", Needs(Submit)),
    ]
};

/// POST routes that change nothing. They are not recorded in the audit log.
const QUESTIONS: &[&str] = &[
    "/jobs/validate",
    "/jobs/{id}/generate",
    "/rewards/test",
    "/environments/test",
    "/v1/chat/completions",
    "/v1/completions",
    "/tokenize",
    "/detokenize",
    "/serve/{model}/v1/chat/completions",
    "/serve/{model}/v1/completions",
    "/serve/{model}/tokenize",
    "/serve/{model}/detokenize",
];

/// Returns the access that a route (a path pattern of the OpenAPI document) requires; `None` = not listed. HEAD counts as GET.
pub fn of_route(method: &str, route: &str) -> Option<Access> {
    let method = if method == "HEAD" { "GET" } else { method };
    ROUTES.iter().find(|(known, path, _)| *known == method && *path == route).map(|(_, _, access)| *access)
}

/// Returns the methods of a route, each with the access that it requires; empty = there is no such route.
pub fn methods_of(route: &str) -> Vec<(&'static str, Access)> {
    ROUTES.iter().filter(|(_, path, _)| *path == route).map(|(method, _, access)| (*method, *access)).collect()
}

/// Whether a request with this method to this route changes stored data, and is therefore recorded in the audit log.
pub fn changes(method: &str, route: &str) -> bool {
    !matches!(method, "GET" | "HEAD" | "OPTIONS" | "TRACE") && !QUESTIONS.contains(&route)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scope_holds_the_lesser_ones() {
        let admin = Scopes::of([Scope::Admin]);
        assert!(admin.has(Scope::Read) && admin.has(Scope::Submit) && !admin.has(Scope::Worker));
        assert!(!Scopes::of([Scope::Read]).has(Scope::Submit));
        assert_eq!(Scopes::of([Scope::Worker]).to_string(), "worker");
        assert_eq!(serde_json::to_string(&Scopes::of([Scope::Submit])).unwrap(), r#"["read","submit"]"#);
        assert!("root".parse::<Scope>().is_err());
    }

    #[test]
    fn no_route_is_listed_twice() {
        let mut seen = std::collections::BTreeSet::new();
        for (method, route, _) in ROUTES {
            assert!(seen.insert((method, route)), "{method} {route}");
        }
        assert_eq!(of_route("HEAD", "/jobs"), Some(Access::Needs(Scope::Read)));
        assert_eq!(of_route("PUT", "/jobs"), None);
    }
}
