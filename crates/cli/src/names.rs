//! Resolves the names of jobs and checkpoints on the command line. A job is named by its id, the beginning of its id,
//! its name, or `@last` (the last submitted one). A checkpoint is named by its id, or by a job followed by `@120` (the
//! step), `@last` or `@best`.

use rlood_client::Which;
use rlood_types::id::{CheckpointId, JobId};
use serde_json::Value;

use crate::context::Context;
use crate::error::CliError;
use crate::listing::Listing;
use crate::output::{clean, format_age, shown};
use crate::profiles;

/// Minimum number of characters after `job_` in an abbreviated job id.
const MIN_PREFIX: usize = 6;
/// Maximum number of jobs that an error message lists when several jobs have the same name.
const MAX_SHOWN_JOBS: usize = 20;
const LAST: &str = "@last";

/// Finds the job that a command-line argument names.
///
/// # Errors
/// Returns `NotFound` when no job matches, and `Usage` with the candidates when several match.
pub async fn job(context: &Context, word: &str) -> Result<JobId, CliError> {
    if word == LAST {
        let last = profiles::last_job(&context.target.name())?;
        return last
            .parse()
            .map_err(|_| CliError::NotFound(format!("@last: the saved '{}' is not a job id", clean(&last))));
    }
    if let Ok(id) = word.parse() {
        return Ok(id);
    }
    let prefix_length = word.strip_prefix(JobId::PREFIX).map(|rest| rest.chars().count());
    let jobs = context.client.raw_get(&["jobs"]);
    let mut found = Listing::read(jobs.clone().query("name", word), 0).await?.items;
    if prefix_length.is_some_and(|length| length >= MIN_PREFIX) {
        let begin_so = Listing::read(jobs.query("id_prefix", word.to_ascii_lowercase()), 0).await?.items;
        found.extend(begin_so.into_iter().filter(|job| job["name"].as_str() != Some(word)));
    }
    match found.as_slice() {
        [] => Err(match prefix_length {
            Some(length) if length < MIN_PREFIX => CliError::Usage(format!(
                "'{}' is too short for an abbreviated id: at least {MIN_PREFIX} characters after {} are required",
                clean(word),
                JobId::PREFIX
            )),
            _ => CliError::NotFound(format!(
                "job '{}' not found: use an id, at least {MIN_PREFIX} characters of one after {}, a name, or @last; `rlood list` lists the jobs",
                clean(word),
                JobId::PREFIX
            )),
        }),
        [job] => id_of(job),
        several => {
            let mut text = format!("{1} jobs match '{0}'; use the id of one of them:", clean(word), several.len());
            for job in several.iter().take(MAX_SHOWN_JOBS) {
                let (id, state) = (shown(&job["id"]), shown(&job["state"]));
                text.push_str(&format!(
                    "\n  {id}  {state}  submitted {}  {}",
                    format_age(&job["created_at"]),
                    shown(&job["name"])
                ));
            }
            if several.len() > MAX_SHOWN_JOBS {
                text.push_str(&format!("\n  and {} more", several.len() - MAX_SHOWN_JOBS));
            }
            Err(CliError::Usage(text))
        }
    }
}

/// Finds several jobs; a job that is named twice is returned once.
///
/// # Errors
/// Fails for the same reasons as [`job`].
pub async fn jobs(context: &Context, words: &[String]) -> Result<Vec<JobId>, CliError> {
    let mut ids = Vec::with_capacity(words.len());
    for word in words {
        let id = job(context, word).await?;
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    Ok(ids)
}

fn id_of(job: &Value) -> Result<JobId, CliError> {
    let id = job["id"].as_str().and_then(|id| id.parse().ok());
    id.ok_or_else(|| {
        CliError::Failed(
            "the server listed a job without a valid id; the server may have a different version of rlood".to_owned(),
        )
    })
}

/// A parsed command-line argument that names a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CheckpointName {
    /// A checkpoint, named by its id.
    Id(CheckpointId),
    /// A job, and the selection of one of its checkpoints.
    OfJob(String, Pick),
}

/// Selects one checkpoint of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pick {
    /// The job's best checkpoint by evaluation if there is one, else the newest.
    Result,
    /// The newest or the best checkpoint.
    Which(Which),
    /// The checkpoint after this number of optimizer steps.
    Step(u64),
}

impl CheckpointName {
    /// Parses the name of a checkpoint: `ckpt_…`, `JOB`, `JOB@120`, `JOB@last` or `JOB@best`.
    ///
    /// # Errors
    /// Fails when the text after `@` is not a step, `last` or `best`.
    pub fn parse(word: &str) -> Result<Self, CliError> {
        if let Ok(id) = word.parse() {
            return Ok(CheckpointName::Id(id));
        }
        // The last `@` separates job and checkpoint, because a job's name may contain one; `@last` alone is a job.
        let Some((job, pick)) = word.rsplit_once('@').filter(|(job, _)| !job.is_empty()) else {
            return Ok(CheckpointName::OfJob(word.to_owned(), Pick::Result));
        };
        let pick = match pick {
            "last" => Pick::Which(Which::Last),
            "best" => Pick::Which(Which::Best),
            step => match step.parse() {
                Ok(step) => Pick::Step(step),
                Err(_) => {
                    let word = clean(word);
                    return Err(CliError::Usage(format!(
                        "'{word}' is not a checkpoint: the job must be followed by a step such as @120, @last or @best"
                    )));
                }
            },
        };
        Ok(CheckpointName::OfJob(job.to_owned(), pick))
    }
}

/// Finds the checkpoint that a command-line argument names.
///
/// # Errors
/// Fails when the checkpoint does not exist, or the job is unknown or ambiguous.
pub async fn checkpoint(context: &Context, word: &str) -> Result<rlood_client::Checkpoint, CliError> {
    let (job, pick) = match CheckpointName::parse(word)? {
        CheckpointName::Id(id) => return Ok(context.client.get_checkpoint(id).await?),
        CheckpointName::OfJob(job, pick) => (job, pick),
    };
    let id = self::job(context, &job).await?;
    let checkpoints = context.client.list_checkpoints(id).collect().await?;
    let best = || checkpoints.iter().find(|checkpoint| checkpoint.best);
    let found = match pick {
        Pick::Result => {
            let job = context.client.raw_get(&["jobs", &id.to_string()]).send().await?.value;
            let of_ending = job["ending"]["checkpoint"]["id"].as_str();
            match (&job["ending"], of_ending) {
                (Value::Null, _) => best().or(checkpoints.first()),
                // If an alert ended a job early, the job names the checkpoint that is its result; later checkpoints are not used.
                (_, of_ending) => {
                    checkpoints.iter().find(|checkpoint| Some(checkpoint.id.to_string().as_str()) == of_ending)
                }
            }
        }
        Pick::Which(Which::Last) => checkpoints.first(),
        Pick::Which(Which::Best) => best(),
        Pick::Step(step) => checkpoints.iter().find(|checkpoint| checkpoint.step == step),
    };
    found.cloned().ok_or_else(|| {
        let steps: Vec<String> = checkpoints.iter().map(|checkpoint| checkpoint.step.to_string()).collect();
        CliError::NotFound(match (pick, steps.is_empty()) {
            (_, true) => format!("{id} has no checkpoint yet; `rlood watch {id}` shows its progress"),
            (Pick::Which(Which::Best), false) => {
                format!(
                    "{id} has no best checkpoint, because it has no evaluation: use @last, or one of the steps {}",
                    steps.join(", ")
                )
            }
            (Pick::Result, false) => format!(
                "no checkpoint from before the alert that ended {id} is kept: use @last, or one of the steps {}",
                steps.join(", ")
            ),
            (_, false) => format!("{id} has no such checkpoint; its checkpoints are at the steps {}", steps.join(", ")),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_is_an_id_or_a_job_with_a_step() {
        let of = |job: &str, pick| CheckpointName::OfJob(job.to_owned(), pick);
        for (word, expected) in [
            ("job_x", of("job_x", Pick::Result)),
            ("@last", of("@last", Pick::Result)),
            ("@last@best", of("@last", Pick::Which(Which::Best))),
            ("my run@120", of("my run", Pick::Step(120))),
            ("a@b@last", of("a@b", Pick::Which(Which::Last))),
        ] {
            assert_eq!(CheckpointName::parse(word).unwrap(), expected, "{word}");
        }
        let id = CheckpointId::new();
        assert_eq!(CheckpointName::parse(&id.to_string()).unwrap(), CheckpointName::Id(id));
        for bad in ["job_x@", "job_x@first", "job_x@-1"] {
            assert!(CheckpointName::parse(bad).unwrap_err().to_string().contains("@best"), "{bad}");
        }
    }
}
