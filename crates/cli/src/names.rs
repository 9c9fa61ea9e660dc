//! What a job may be called: its id, the beginning of its id, its name, or `@last`; and a checkpoint: its id, or a job and `@120`,
//! `@last` or `@best`.

use rlood_client::Which;
use rlood_types::id::{CheckpointId, JobId};
use serde_json::Value;

use crate::context::Context;
use crate::error::CliError;
use crate::listing::Listing;
use crate::output::{ago, clean, shown};
use crate::profiles;

/// Fewest characters of an id's beginning, after `job_`.
const MIN_PREFIX: usize = 6;
/// Jobs that are listed when a name is several jobs'.
const SHOWN: usize = 20;
const LAST: &str = "@last";

/// The job that a word of the command line names.
///
/// # Errors
/// `NotFound` when there is none; `Usage` with the candidates when there are several.
pub async fn job(context: &Context, word: &str) -> Result<JobId, CliError> {
    if word == LAST {
        let last = profiles::last_job(&context.target.name())?;
        return last.parse().map_err(|_| CliError::NotFound(format!("@last: '{}' is no job", clean(&last))));
    }
    if let Ok(id) = word.parse() {
        return Ok(id);
    }
    let prefix = word.strip_prefix(JobId::PREFIX).map(|rest| (rest.chars().count(), word.to_ascii_lowercase()));
    let named = |job: &Value| job["name"].as_str() == Some(word);
    let begins = |job: &Value| match (&prefix, job["id"].as_str()) {
        (Some((length, prefix)), Some(id)) => *length >= MIN_PREFIX && id.starts_with(prefix),
        _ => false,
    };
    let listing = Listing::read_where(context.client.raw_get(&["jobs"]), 0, |job| named(job) || begins(job)).await?;
    match listing.items.as_slice() {
        [] => Err(match prefix {
            Some((length, _)) if length < MIN_PREFIX => CliError::Usage(format!(
                "'{}' is too short for the beginning of an id: give at least {MIN_PREFIX} characters after {}",
                clean(word),
                JobId::PREFIX
            )),
            _ => CliError::NotFound(format!(
                "no job is called '{}': give its id, at least {MIN_PREFIX} characters of it after {}, its name, or @last; `rlood list` shows them",
                clean(word),
                JobId::PREFIX
            )),
        }),
        [job] => id_of(job),
        several => {
            let mut text = format!("'{}' is the name of {} jobs; give the id of one:", clean(word), several.len());
            for job in several.iter().take(SHOWN) {
                let (id, state) = (shown(&job["id"]), shown(&job["state"]));
                text.push_str(&format!(
                    "\n  {id}  {state}  submitted {}  {}",
                    ago(&job["created_at"]),
                    shown(&job["name"])
                ));
            }
            if several.len() > SHOWN {
                text.push_str(&format!("\n  and {} more", several.len() - SHOWN));
            }
            Err(CliError::Usage(text))
        }
    }
}

/// Several jobs, each once.
///
/// # Errors
/// As [`job`].
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
        CliError::Failed("the server listed a job without a valid id: its version may be another".to_owned())
    })
}

/// Which checkpoint of which job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CheckpointName {
    /// By its id.
    Id(CheckpointId),
    /// Of a job: the best if one is marked, else the newest; the newest; the best; that of a step.
    OfJob(String, Pick),
}

/// Which checkpoint of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pick {
    /// The best if one is marked, else the newest.
    Result,
    /// The newest or the best.
    Which(Which),
    /// After this many optimizer steps.
    Step(u64),
}

impl CheckpointName {
    /// Reads `ckpt_…`, `JOB`, `JOB@120`, `JOB@last`, `JOB@best`.
    ///
    /// # Errors
    /// When what stands after `@` is none of these.
    pub fn parse(word: &str) -> Result<Self, CliError> {
        if let Ok(id) = word.parse() {
            return Ok(CheckpointName::Id(id));
        }
        // A job called by its own name may have an @ in it, and `@last` is a job.
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
                        "'{word}' names no checkpoint: after the job write @120 for a step, @last or @best"
                    )));
                }
            },
        };
        Ok(CheckpointName::OfJob(job.to_owned(), pick))
    }
}

/// The checkpoint that a word of the command line names.
///
/// # Errors
/// When there is none, or the job cannot be told.
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
                // A job that was ended early says itself what its result is: what came after an alert is none.
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
            (_, true) => format!("{id} has no checkpoint yet: `rlood watch {id}` shows how far it is"),
            (Pick::Which(Which::Best), false) => {
                format!(
                    "{id} has no best checkpoint, since it has no evaluation: use @last, or a step of {}",
                    steps.join(", ")
                )
            }
            (Pick::Result, false) => format!(
                "no checkpoint from before the alert that ended {id} is kept: say @last, or a step of {}",
                steps.join(", ")
            ),
            (_, false) => format!("{id} has no such checkpoint; it has those of the steps {}", steps.join(", ")),
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
