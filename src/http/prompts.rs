//! The prompts of a job: loads the datasets that the job refers to.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;

use serde_json::{Map, Value, json};

use super::AppState;
use super::auth::Caller;
use super::dataset_downloads::{Conversion, Fetched, fetch, not_stored};
use super::dataset_sources::{Files, convert_files, stored};
use super::error::{Code, Problem, shortened};
use super::named_models::UseOfHub;
use crate::dataset::{Recipe, Summary};
use crate::files::StagedDone;
use crate::id::DatasetId;
use crate::spec::{DatasetFacts, DatasetSource, FieldError, MappedSource, MixedSource, SourceFacts, SourcePlan};
use crate::store::{DatasetDownloadRow, DatasetRow, StoreError};

/// A dataset of the job, wherever its rows are stored.
pub(super) struct Prompts {
    /// JSON pointer to the dataset in the job.
    pub(super) at: String,
    /// Where the rows are stored.
    pub(super) source: Source,
    pub(super) facts: DatasetFacts,
    /// The JSON pointers to hub datasets that were renamed, with the new names.
    pub(super) renamed: Vec<(String, String)>,
}

pub(super) enum Source {
    /// A stored dataset: the path of its file of rows.
    Stored(PathBuf),
    /// Records inside the job.
    Records(Vec<Value>),
    /// Rows that were uploaded with the job or converted from files, in a staged file, with the origin of these files.
    Uploaded(Summary, StagedDone, Option<Value>),
    /// The rows of several datasets, one after another.
    Several(Vec<Source>),
    /// Rows that are still downloaded from the hub; the id under which they will be stored.
    Downloading(DatasetId),
}

/// The field of a job that names a dataset, and how plain text prompts are treated without a mapping.
pub(super) struct Place {
    pub(super) at: String,
    pub(super) chat_default: bool,
    /// Whether each row must have an answer, as in a warm-up.
    pub(super) answers: bool,
    /// Whether a long download from the hub is started, or only its facts are needed.
    pub(super) use_of_hub: UseOfHub,
}

impl Place {
    pub(super) fn new(at: &str, chat_default: bool, use_of_hub: UseOfHub) -> Self {
        Self { at: at.to_owned(), chat_default, answers: false, use_of_hub }
    }
}

/// A dataset row, as its JSON text or parsed.
enum Row<'r> {
    Text(&'r str),
    Read(&'r Value),
}

impl Row<'_> {
    fn read(self) -> std::io::Result<Map<String, Value>> {
        match self {
            Row::Text(text) => Ok(serde_json::from_str(text)?),
            Row::Read(value) => Ok(value.as_object().cloned().unwrap_or_default()),
        }
    }
}

impl Source {
    /// Calls `visit` with each row until it returns false. Returns true if all rows were visited. Blocking.
    fn each_row(&self, visit: &mut dyn FnMut(Row<'_>) -> std::io::Result<bool>) -> std::io::Result<bool> {
        let path = match self {
            Source::Records(records) => {
                for record in records {
                    if !visit(Row::Read(record))? {
                        return Ok(false);
                    }
                }
                return Ok(true);
            }
            Source::Several(sources) => {
                for source in sources {
                    if !source.each_row(visit)? {
                        return Ok(false);
                    }
                }
                return Ok(true);
            }
            Source::Downloading(_) => return Ok(true),
            Source::Stored(path) => path,
            Source::Uploaded(_, staged, _) => staged.path(),
        };
        for line in BufReader::new(std::fs::File::open(path)?).lines() {
            if !visit(Row::Text(&line?))? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Writes all rows to a file in canonical form. Blocking.
    pub(super) fn write(&self, out: &mut dyn std::io::Write) -> std::io::Result<()> {
        let all = self.each_row(&mut |row| {
            match row {
                Row::Text(text) => writeln!(out, "{text}")?,
                Row::Read(value) => writeln!(out, "{value}")?,
            }
            Ok(true)
        });
        all.map(drop)
    }

    /// Returns the origin of the rows (hub repository, commit, files), as stored with a dataset.
    pub(super) fn origin(&self) -> Option<Value> {
        match self {
            Source::Uploaded(_, _, origin) => origin.clone(),
            Source::Stored(path) => Some(json!({"dataset": path.file_stem()?.to_str()?})),
            Source::Records(_) | Source::Downloading(_) => None,
            Source::Several(sources) => {
                Some(json!({"sources": sources.iter().map(Source::origin).collect::<Vec<_>>()}))
            }
        }
    }
}

impl Prompts {
    /// Wraps rows that were uploaded with the job.
    pub(super) fn of_upload(summary: Summary, staged: StagedDone) -> Self {
        Self::of_file("/dataset", summary, staged, None)
    }

    pub(super) fn of_file(at: &str, summary: Summary, staged: StagedDone, origin: Option<Value>) -> Self {
        let (num_rows, columns) = (summary.num_rows, summary.columns.clone());
        let facts = DatasetFacts::of_file(DatasetId::new(), staged.sha256.to_string(), num_rows, columns);
        let renamed = renamed_in(at, origin.as_ref());
        Self { at: at.to_owned(), source: Source::Uploaded(summary, staged, origin), facts, renamed }
    }

    /// Finds the dataset that a field of the job names, or prepares its rows. Inline records are moved out of the job. A
    /// missing or invalid dataset is an error of the job.
    pub(super) async fn find(
        state: &AppState,
        caller: &Caller,
        source: Option<&mut DatasetSource>,
        place: &Place,
        errors: &mut Vec<FieldError>,
    ) -> Result<Option<Self>, Problem> {
        match source {
            Some(DatasetSource::Mixed(sources)) => Self::of_sources(state, caller, sources, place, errors).await,
            Some(source) => Self::of_one(state, caller, source, place, errors).await,
            None => Ok(None),
        }
    }

    async fn of_one(
        state: &AppState,
        caller: &Caller,
        source: &mut DatasetSource,
        place: &Place,
        errors: &mut Vec<FieldError>,
    ) -> Result<Option<Self>, Problem> {
        match source {
            DatasetSource::Hub(hub) => {
                let Place { chat_default, answers, use_of_hub, at: _ } = *place;
                let conversion = Conversion { recipe: hub.recipe(), chat_default, answers };
                match fetch(state, caller, (None, hub), &conversion, use_of_hub).await {
                    Ok(Fetched::Stored(row)) => Ok(Some(Self::of_row(state, place, *row))),
                    Ok(Fetched::Downloading(row)) => Ok(Some(Self::pending(place, &row, hub.limit))),
                    Ok(Fetched::Files(files)) => {
                        Self::of_files(state, Ok(*files), conversion.recipe, place, errors).await
                    }
                    Err(problem) => Self::of_files(state, Err(problem), conversion.recipe, place, errors).await,
                }
            }
            DatasetSource::Mapped(mapped) => {
                let MappedSource { source, recipe } = &mut **mapped;
                let rows = match source {
                    DatasetSource::Records(records) => Some(Self::of_records(records, place)),
                    DatasetSource::Id(id) => Self::stored(state, caller, *id, place, errors).await?,
                    _ => None,
                };
                let Some(rows) = rows else { return Ok(None) };
                if rows.facts.is_pending {
                    return Ok(Some(rows)); // The rows are mapped once they are stored.
                }
                let files = files_of(state, rows).await;
                Self::of_files(state, files, recipe.clone(), place, errors).await
            }
            DatasetSource::Records(records) => Ok(Some(Self::of_records(records, place))),
            DatasetSource::Id(id) => Self::stored(state, caller, *id, place, errors).await,
            DatasetSource::Joined(id, sources) => {
                let Some(prompts) = Self::stored(state, caller, *id, place, errors).await? else { return Ok(None) };
                let rows: u64 = sources.iter().map(|source| source.num_rows).sum();
                if rows != prompts.facts.num_rows {
                    let detail = format!(
                        "the dataset's sources have {rows} rows together, but the dataset that was built from them has {}",
                        prompts.facts.num_rows
                    );
                    errors.push(FieldError::new(format!("{}/sources", place.at), "invalid_value", detail));
                    return Ok(None);
                }
                let source = |plan: &SourcePlan| SourceFacts { plan: plan.clone(), columns: None };
                let sources = sources.iter().map(source).collect();
                Ok(Some(Self { facts: DatasetFacts { sources, ..prompts.facts }, ..prompts }))
            }
            // A list of several datasets cannot contain another list.
            DatasetSource::Mixed(_) => Ok(None),
        }
    }

    fn of_records(records: &mut Vec<Value>, place: &Place) -> Self {
        let facts = DatasetFacts::of_records(records);
        // The list in the job is emptied but not removed, because it still shows that the rows were sent inline.
        Self { at: place.at.clone(), source: Source::Records(std::mem::take(records)), facts, renamed: Vec::new() }
    }

    /// Maps the rows of files, or reports why they cannot be read or mapped.
    pub(super) async fn of_files(
        state: &AppState,
        files: Result<Files, Problem>,
        recipe: Recipe,
        place: &Place,
        errors: &mut Vec<FieldError>,
    ) -> Result<Option<Self>, Problem> {
        let made = match files {
            Ok(files) => convert_files(state, files, recipe, (place.chat_default, place.answers)).await,
            Err(problem) => Err(problem),
        };
        match made {
            Ok((summary, staged, origin)) => Ok(Some(Self::of_file(&place.at, summary, staged, Some(origin)))),
            Err(problem) if problem.code().status().is_client_error() || problem.code() == Code::HubUnreachable => {
                errors.push(FieldError::new(&*place.at, problem.code().as_str(), problem.detail()));
                Ok(None)
            }
            Err(problem) => Err(problem),
        }
    }

    async fn stored(
        state: &AppState,
        caller: &Caller,
        id: DatasetId,
        place: &Place,
        errors: &mut Vec<FieldError>,
    ) -> Result<Option<Self>, Problem> {
        match state.store.dataset_get(id).await {
            Ok(row) if caller.may_see(&row.owner) => return Ok(Some(Self::of_row(state, place, row))),
            Ok(_) | Err(StoreError::NotFound { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        let at = format!("{}/id", place.at);
        let download = state.store.dataset_download_get(id).await?;
        match download.filter(|row| caller.may_see(&row.owner)) {
            Some(row) if row.state == "downloading" => Ok(Some(Self::pending(place, &row, None))),
            Some(row) => {
                errors.push(FieldError::new(at, "dataset_download_failed", not_stored(&row)));
                Ok(None)
            }
            None => {
                errors.push(unknown_dataset(&at, &id.to_string()));
                Ok(None)
            }
        }
    }

    fn of_row(state: &AppState, place: &Place, row: DatasetRow) -> Self {
        let DatasetRow { id, sha256, num_rows, columns, .. } = row;
        let facts = DatasetFacts::of_file(id, sha256, num_rows, columns);
        Self { at: place.at.clone(), source: Source::Stored(state.files.dataset(id)), facts, renamed: Vec::new() }
    }

    /// Describes rows that are still downloaded, of which at most `limit` will be kept.
    fn pending(place: &Place, row: &DatasetDownloadRow, limit: Option<u64>) -> Self {
        let facts = DatasetFacts::pending(row.id, row.bytes_total, limit);
        let renamed = renamed_in(&place.at, Some(&row.origin));
        Self { at: place.at.clone(), source: Source::Downloading(row.id), facts, renamed }
    }

    /// Concatenates the rows of several datasets.
    async fn of_sources(
        state: &AppState,
        caller: &Caller,
        sources: &mut [MixedSource],
        place: &Place,
        errors: &mut Vec<FieldError>,
    ) -> Result<Option<Self>, Problem> {
        let (mut found, mut renamed) = (Vec::with_capacity(sources.len()), Vec::new());
        for (index, mixed) in sources.iter_mut().enumerate() {
            let Some(source) = &mut mixed.source else { continue };
            let place = Place { at: format!("{}/{index}", place.at), ..*place };
            // After an error the other datasets are still read, so that the errors of all are reported together.
            let Some(prompts) = Self::of_one(state, caller, source, &place, errors).await? else { continue };
            renamed.extend(prompts.renamed.iter().cloned());
            let num_rows = prompts.facts.num_rows;
            let weight = mixed.weight.unwrap_or(num_rows as f64);
            found.push((SourcePlan { name: mixed.name.clone(), num_rows, weight }, prompts));
        }
        if found.len() < sources.len() {
            return Ok(None);
        }
        let (facts, sources) =
            found.into_iter().map(|(plan, Self { source, facts, .. })| ((plan, facts), source)).unzip();
        Ok(Some(Self {
            at: place.at.clone(),
            source: Source::Several(sources),
            facts: DatasetFacts::of_sources(facts),
            renamed,
        }))
    }

    /// Returns the rows with these numbers (ascending), together with their numbers. Blocking.
    pub(super) fn rows(&self, numbers: &[u64]) -> std::io::Result<Vec<(u64, Map<String, Value>)>> {
        let mut wanted = numbers.iter().copied().peekable();
        let (mut rows, mut number) = (Vec::with_capacity(numbers.len()), 0);
        self.source.each_row(&mut |row| {
            if wanted.next_if_eq(&number).is_some() {
                rows.push((number, row.read()?));
            }
            number += 1;
            Ok(wanted.peek().is_some())
        })?;
        Ok(rows)
    }

    /// Calls `visit` with each row and its number until it returns false. Blocking.
    pub(super) fn each_row(&self, mut visit: impl FnMut(u64, Map<String, Value>) -> bool) -> std::io::Result<()> {
        let mut number = 0;
        let all = self.source.each_row(&mut |row| {
            let continues = visit(number, row.read()?);
            number += 1;
            Ok(continues)
        });
        all.map(drop)
    }

    /// Calls `visit` with each prompt and its row number until it returns false. Blocking.
    pub(super) fn each_prompt(&self, mut visit: impl FnMut(u64, &Value) -> bool) -> std::io::Result<()> {
        let mut number = 0;
        let all = self.source.each_row(&mut |row| {
            let continues = match row {
                Row::Read(value) => visit(number, value.get("prompt").unwrap_or(&Value::Null)),
                Row::Text(_) => visit(number, row.read()?.get("prompt").unwrap_or(&Value::Null)),
            };
            number += 1;
            Ok(continues)
        });
        all.map(drop)
    }
}

/// Returns the pointer and the new name of a dataset whose origin says that the hub has renamed it.
fn renamed_in(at: &str, origin: Option<&Value>) -> Vec<(String, String)> {
    let name = origin.and_then(|origin| origin.get("renamed_to")?.as_str());
    name.map(|name| (at.to_owned(), name.to_owned())).into_iter().collect()
}

/// Returns rows as a file to which a mapping can be applied.
pub(super) async fn files_of(state: &AppState, rows: Prompts) -> Result<Files, Problem> {
    let origin = rows.source.origin().unwrap_or_else(|| json!({}));
    match rows.source {
        Source::Stored(path) => Ok(stored("the dataset", path, origin, None)),
        source => {
            let mut staged = state.files.stage(u64::MAX).await?;
            let Source::Records(records) = source else {
                return Err(Problem::internal("the rows of several dataset sources cannot be mapped together"));
            };
            for record in &records {
                staged.write(format!("{record}\n").as_bytes()).await?;
            }
            let staged = staged.finish().await?;
            Ok(stored("records", staged.path().to_owned(), origin, Some(staged)))
        }
    }
}

/// Creates the error for a dataset that does not exist.
pub(super) fn unknown_dataset(at: &str, id: &str) -> FieldError {
    let detail = format!("there is no dataset '{}': upload it with POST /datasets", shortened(id));
    FieldError::new(at, "unknown_dataset", detail)
}
