//! Rewards of type `python`: checks that the server allows them to the caller, and finds the file in the allowed folders.

use std::io::Read;
use std::path::{Path, PathBuf};

use super::AppState;
use super::auth::{Actor, Caller, keys_are_on};
use super::error::{Code, Problem, shortened};
use crate::config::PythonRewards;
use crate::digest::Sha256Digest;
use crate::id::JobId;
use crate::spec::{FieldError, JobSpec, Plan, PythonPlan, RewardKind, RewardPlan};
use crate::store::StoreError;
use crate::store::background::spawn_blocking;

/// Maximum size of a Python file, in bytes.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// The word that stands for `RLOOD_API_KEY` in `--python-rewards-keys`.
const OPERATOR: &str = "operator";

/// Resolves the files of a job's Python rewards: their plans then contain the absolute path and its SHA-256.
pub(super) async fn resolve(
    state: &AppState,
    caller: &Caller,
    spec: &mut JobSpec,
    errors: &mut Vec<FieldError>,
) -> Result<(), Problem> {
    let own = spec.rewards.iter_mut().enumerate().map(|(index, reward)| (format!("/rewards/{index}"), reward));
    let (eval, guard) = match &mut spec.eval {
        Some(eval) => (eval.rewards.as_mut(), eval.guard.as_mut().and_then(|guard| guard.rewards.as_mut())),
        None => (None, None),
    };
    let eval = eval.into_iter().flatten().enumerate();
    let eval = eval.map(|(index, reward)| (format!("/eval/rewards/{index}"), reward));
    let guard = guard.into_iter().flatten().enumerate();
    let guard = guard.map(|(index, reward)| (format!("/eval/guard/rewards/{index}"), reward));
    for (at, reward) in own.chain(eval).chain(guard) {
        errors.extend(resolve_one(state, caller, reward, &at).await?);
    }
    Ok(())
}

/// Resolves the file of one reward; other types stay unchanged. `at` is the JSON pointer to the reward in the request.
pub(super) async fn resolve_one(
    state: &AppState,
    caller: &Caller,
    reward: &mut RewardPlan,
    at: &str,
) -> Result<Option<FieldError>, Problem> {
    let RewardKind::Python(plan) = &mut reward.kind else { return Ok(None) };
    if let Some(detail) = refusal(state, caller).await? {
        return Ok(Some(FieldError::new(format!("{at}/type"), "python_rewards_off", detail)));
    }
    if plan.file.is_empty() {
        return Ok(None); // The parser of the job reports it.
    }
    let (permitted, given) = (state.config.python_rewards.clone(), plan.file.clone());
    let found = spawn_blocking(move || find(&permitted, &given)).await.map_err(Problem::internal)?;
    match found {
        Ok((path, sha256)) => {
            (plan.file, plan.sha256) = (path, Some(sha256));
            Ok(None)
        }
        Err((code, detail)) => Ok(Some(FieldError::new(format!("{at}/file"), code, detail))),
    }
}

/// Returns why the caller may not use Python rewards; `None` if the caller may.
async fn refusal(state: &AppState, caller: &Caller) -> Result<Option<String>, Problem> {
    let PythonRewards { folders, keys } = &state.config.python_rewards;
    if folders.is_empty() {
        let detail = "this server does not run Python functions: its operator can allow the files of a folder with --python-rewards DIR \
                      (RLOOD_PYTHON_REWARDS); or serve the function with `rlood reward serve` and name that address in a webhook";
        return Ok(Some(detail.to_owned()));
    }
    let (name, id) = match caller.actor() {
        Actor::Anonymous if !keys_are_on(state).await? => return Ok(None),
        // This arm is reached only by a browser session whose key was removed.
        Actor::Anonymous => (String::new(), "NAME".to_owned()),
        Actor::Operator => (OPERATOR.to_owned(), OPERATOR.to_owned()),
        // `operator` in the list stands for RLOOD_API_KEY only, not for a database key with this name.
        Actor::Key { id, name } if name == OPERATOR => (String::new(), id.to_string()),
        Actor::Key { id, name } => (name.clone(), id.to_string()),
    };
    if keys.iter().any(|key| *key == name || *key == id) {
        return Ok(None);
    }
    Ok(Some(format!(
        "the key '{}' may not run Python functions: the operator can allow it with --python-rewards-keys {id}",
        shortened(if name.is_empty() { &id } else { &name })
    )))
}

/// Checks that the caller may have the Python rewards of a job run again: by resuming or retrying it, or by a verdict on it.
///
/// # Errors
/// Fails when the caller may not use Python rewards, or the job's own permission has ended.
pub(super) async fn check_plan(state: &AppState, caller: &Caller, job: JobId, plan: &Plan) -> Result<(), Problem> {
    let Some(reward) = python_plans(plan).next() else { return Ok(()) };
    let refused = match refusal(state, caller).await? {
        None => without_owner(state, job, reward).await?.map(|refused| refused.detail),
        refused => refused,
    };
    refused.map_or(Ok(()), |detail| Err(Problem::new(Code::Forbidden, detail)))
}

/// Why the Python rewards of an accepted job must no longer run.
pub(super) struct Withdrawn {
    pub(super) detail: String,
    /// Advice on how to run the job.
    pub(super) suggestion: &'static str,
}

/// Returns why an accepted job must no longer run: the operator has since restricted the Python rewards.
pub(super) async fn withdrawn(state: &AppState, job: JobId, plan: &Plan) -> Result<Option<Withdrawn>, StoreError> {
    let permitted = &state.config.python_rewards;
    if let Some(reward) = python_plans(plan).find(|plan| !permitted.holds(Path::new(&plan.file))) {
        let detail = format!("{} is no longer in a folder of --python-rewards", named(reward));
        let suggestion = "ask the operator to start the server with --python-rewards and the folder of the reward's file, then retry the job";
        return Ok(Some(Withdrawn { detail, suggestion }));
    }
    match python_plans(plan).next() {
        Some(reward) => without_owner(state, job, reward).await,
        None => Ok(None),
    }
}

/// Returns why the functions of a job without an owner must not run. Such a job was submitted without a key, before the first key
/// existed, or with `RLOOD_API_KEY`; once keys are required, the operator's name permits both.
async fn without_owner(state: &AppState, job: JobId, reward: &PythonPlan) -> Result<Option<Withdrawn>, StoreError> {
    let is_permitted = state.config.python_rewards.keys.iter().any(|key| key == OPERATOR);
    if is_permitted || !keys_are_on(state).await? {
        return Ok(None);
    }
    let owner = state.store.job_owner(job).await?.unwrap_or_default();
    Ok(owner.is_empty().then(|| Withdrawn {
        detail: format!(
            "{} may not run: the job was submitted without a key, and the server requires keys now, of which --python-rewards-keys names those that may run Python functions",
            named(reward)
        ),
        suggestion: "submit the job again with a key that --python-rewards-keys names, or ask the operator to add operator to --python-rewards-keys, then retry the job",
    }))
}

/// Returns a reward's function and file, without the folder, for a message.
fn named(reward: &PythonPlan) -> String {
    let file = Path::new(&reward.file).file_name().unwrap_or_default().to_string_lossy();
    format!("the reward '{}' of {file}", reward.function)
}

fn python_plans(plan: &Plan) -> impl Iterator<Item = &PythonPlan> {
    plan.rewards_by_secret_name().filter_map(|(_, reward)| match &reward.kind {
        RewardKind::Python(plan) => Some(plan),
        _ => None,
    })
}

/// Returns the absolute path of a file and the SHA-256 of its bytes. Blocking.
fn find(permitted: &PythonRewards, given: &str) -> Result<(String, String), (&'static str, String)> {
    // The error is the same whether or not the file exists outside the allowed folders, so that it reveals nothing about the
    // machine.
    let nowhere = || {
        let detail = format!("the file '{}' was not found in the folders of --python-rewards", shortened(given));
        ("unknown_file", detail)
    };
    let candidates: Vec<PathBuf> = match Path::new(given) {
        path if path.is_absolute() => vec![path.to_owned()],
        path => permitted.folders.iter().map(|folder| folder.join(path)).collect(),
    };
    let canonical = candidates.iter().filter_map(|path| path.canonicalize().ok());
    let path = canonical.filter(|path| permitted.holds(path)).find(|path| path.is_file()).ok_or_else(nowhere)?;
    let unreadable =
        |error: std::io::Error| ("unknown_file", format!("'{}' cannot be read: {error}", shortened(given)));
    let mut bytes = Vec::new();
    let file = std::fs::File::open(&path).map_err(unreadable)?;
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        let detail = format!(
            "'{}' is larger than {} MiB, the maximum for a Python file",
            shortened(given),
            MAX_FILE_BYTES >> 20
        );
        return Err(("too_large", detail));
    }
    let Some(text) = path.to_str() else {
        return Err(("invalid_value", format!("the path of '{}' is not UTF-8: rename it", shortened(given))));
    };
    Ok((text.to_owned(), Sha256Digest::of(&bytes).to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_found_in_the_folders_only() {
        let scratch = tempfile::tempdir().unwrap();
        let root = scratch.path().canonicalize().unwrap();
        let (first, second, outside) = (root.join("first"), root.join("second"), root.join("outside"));
        for folder in [&first, &second, &outside] {
            std::fs::create_dir(folder).unwrap();
        }
        std::fs::write(second.join("rewards.py"), "x = 1\n").unwrap();
        std::fs::write(outside.join("secret.py"), "").unwrap();
        std::os::unix::fs::symlink(outside.join("secret.py"), first.join("link.py")).unwrap();
        let permitted = PythonRewards { folders: vec![first.clone(), second.clone()], keys: Vec::new() };
        let path = second.join("rewards.py").to_str().unwrap().to_owned();
        let found = find(&permitted, "rewards.py").unwrap();
        assert_eq!(found, (path.clone(), Sha256Digest::of("x = 1\n").to_string()));
        assert_eq!(find(&permitted, &path).unwrap(), found);
        for hidden in
            ["../outside/secret.py", "link.py", "nowhere.py", outside.join("secret.py").to_str().unwrap(), "."]
        {
            let (code, detail) = find(&permitted, hidden).unwrap_err();
            assert_eq!(code, "unknown_file", "{hidden}");
            assert!(detail.contains("--python-rewards"), "{detail}");
        }
    }
}
