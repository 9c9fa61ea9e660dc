//! Finds the models that a job names: registered ones, and those of the hub, which are registered or only inspected.

use super::AppState;
use super::auth::Caller;
use super::auth::models::find;
use super::error::{Code, Problem, shortened};
use super::models::hub::{self, Inspected};
use crate::hub::{Repo, RepoKind};
use crate::spec::{FieldError, Warning};
use crate::store::ModelRow;

/// Code of the warning, in a validation and in a job's events, that a repository has a new name.
pub(super) const REPOSITORY_RENAMED: &str = "repository_renamed";

/// Finds a registered model, or one on the hub, which is either registered and downloaded, or only inspected. `at` is the JSON pointer
/// to the model's id.
pub(super) async fn find_model(
    state: &AppState,
    caller: &Caller,
    (id, at): (&str, &str),
    use_of_hub: UseOfHub,
    errors: &mut Vec<FieldError>,
) -> Result<Option<ModelRow>, Problem> {
    if id.is_empty() {
        return Ok(None); // The parser of the job reports it.
    }
    match find(state, caller, id).await? {
        Some(row) if row.state == "failed" => {
            let problem = row.problem.as_deref().unwrap_or("the reason of the failure is unknown");
            let detail = format!(
                "the model '{id}' could not be downloaded: {problem}; correct this, then send POST /models again"
            );
            errors.push(FieldError::new(at, "model_download_failed", detail));
            return Ok(None);
        }
        Some(row) => return Ok(Some(row)),
        None => {}
    }
    let repo = Repo::parse(RepoKind::Model, id).ok().filter(|repo| repo.id().contains('/'));
    if let Some(repo) = repo.filter(|_| state.config.hub.may_be_asked()) {
        let found = match use_of_hub {
            UseOfHub::Register => hub::register(state, caller, None, &repo).await.map(|(row, _)| row),
            UseOfHub::Inspect => hub::inspect(state, caller, id.to_owned(), &repo).await.map(Inspected::into_row),
        };
        return match found {
            Ok(row) => Ok(Some(row)),
            Err(problem) if problem.code().status().is_client_error() || problem.code() == Code::HubUnreachable => {
                let detail = format!(
                    "the model '{}' is not registered, and the hub answers: {}",
                    shortened(id),
                    problem.detail()
                );
                errors.push(FieldError::new(at, problem.code().as_str(), detail));
                Ok(None)
            }
            Err(problem) => Err(problem),
        };
    }
    errors.push(unknown_model(state, caller, (id, at)).await?);
    Ok(None)
}

async fn unknown_model(state: &AppState, caller: &Caller, (id, at): (&str, &str)) -> Result<FieldError, Problem> {
    let some = state.store.model_list(caller.sees(), None, 5).await?;
    let known: Vec<_> = some.data.iter().map(|row| row.id.as_str()).collect();
    let known = if known.is_empty() {
        "no model is registered on this server".to_owned()
    } else {
        format!("registered: {}", known.join(", "))
    };
    let detail = format!(
        "the model '{}' is not registered ({known}): register it with POST /models {{\"id\": \"org/name\", \"source\": \"/path/to/directory\"}}",
        shortened(id)
    );
    Ok(FieldError::new(at, "unknown_model", detail))
}

/// How to handle a model that exists only on the hub.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum UseOfHub {
    /// Register and download it.
    Register,
    /// Inspect it and store nothing.
    Inspect,
}

/// The warning that the hub has renamed a repository.
pub(super) fn renamed(at: &str, name: &str) -> Warning {
    let detail = format!("the hub has renamed this repository to '{name}': use that name from now on");
    Warning { pointer: at.to_owned(), code: REPOSITORY_RENAMED.to_owned(), detail }
}
