//! Which model an id means for a caller. The id of a private model ends with a mark of its owner, so two owners can have the same
//! repository, and neither learns of the other's.

use super::super::AppState;
use super::super::error::{Code, Problem, shortened};
use super::{Actor, Caller};
use crate::digest::Sha256Digest;
use crate::store::{ModelRow, StoreError};

/// The character before an owner's mark. Neither a model's id nor a revision in git contains it.
const MARK: char = '~';
/// Length of an owner's mark, in characters.
const MARK_CHARS: usize = 8;
const MAX_ID_CHARS: usize = 200;

/// Returns the model that an id means for the caller: the model with exactly this id, else the caller's own private model that was
/// downloaded under this id. `None` = the caller may use no such model, whether or not one exists.
///
/// # Errors
/// Fails when the database cannot be read.
pub(crate) async fn find(state: &AppState, caller: &Caller, id: &str) -> Result<Option<ModelRow>, StoreError> {
    let private = marked(id, caller.owner());
    for id in [id, private.as_str()] {
        match state.store.model_get(id).await {
            Ok(row) if caller.may_use_model(&row) => return Ok(Some(row)),
            Ok(_) | Err(StoreError::NotFound { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// Returns the id of a model that the caller's token opens. On a server without keys there is no one to keep it from.
pub(in super::super) fn private_id(id: String, caller: &Caller) -> String {
    match caller.actor() {
        Actor::Anonymous => id,
        Actor::Operator | Actor::Key { .. } => marked(&id, caller.owner()),
    }
}

/// Returns a model's id without the mark of its owner.
pub fn plain_id(id: &str) -> &str {
    id.split_once(MARK).map_or(id, |(plain, _)| plain)
}

fn marked(id: &str, owner: &str) -> String {
    let digest = Sha256Digest::of(format!("owner of a private model: {owner}")).to_string();
    format!("{id}{MARK}{}", digest.get(..MARK_CHARS).unwrap_or_default())
}

/// If the caller may not see the model with this id, the error only says that the id is taken.
pub(in super::super) async fn taken(state: &AppState, caller: &Caller, id: &str, problem: Problem) -> Problem {
    if state.store.model_get(id).await.is_ok_and(|row| caller.may_see(&row.owner)) {
        return problem;
    }
    let detail = format!("the model id '{}' is taken; choose another one", shortened(id));
    Problem::new(Code::Conflict, detail.clone()).item("/id", "taken", detail)
}

/// Checks an id: `org/name`, without characters that a path, a URL or a log could misread.
pub(in super::super) fn check_id(id: &str) -> Result<(), Problem> {
    let part = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
    };
    if id.len() <= MAX_ID_CHARS && id.split('/').all(part) {
        return Ok(());
    }
    let detail = format!(
        "'{}' is not a valid model id: use up to {MAX_ID_CHARS} letters, digits, '.', '_' and '-', in parts joined by '/', such as org/name",
        shortened(id)
    );
    Err(Problem::new(Code::InvalidBody, detail.clone()).item("/id", "invalid", detail))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_depends_on_the_owner_and_comes_off() {
        let (ann, bob) = (marked("org/name@v1", "ann"), marked("org/name@v1", "bob"));
        assert!(ann != bob && ann.len() == "org/name@v1~".len() + MARK_CHARS, "{ann} {bob}");
        assert_eq!((plain_id(&ann), plain_id("org/name")), ("org/name@v1", "org/name"));
    }
}
