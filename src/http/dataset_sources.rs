//! Rows from files: uploads that are compressed or mapped, and hub datasets. Each conversion runs on its own thread.

use std::collections::HashSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::body::Bytes;
use futures::stream;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::AppState;
use super::auth::Caller;
use super::dataset_ranges::ranged;
use super::error::{Code, Problem, shortened};
use super::models::hub::{self, client};
use super::rows::{WRITE_BYTES, check_disk, read_rows, rejected};
use super::staged_images::StagedImages;
use super::storage::check_limit;
use crate::data::{CannotChoose, Chosen, NOT_FETCHED, Options, Preview, Source, choose, convert, preview};
use crate::dataset::{Format, Reader, Recipe, Rejected, Summary};
use crate::error_text::with_causes;
use crate::files::StagedDone;
use crate::hub::{
    Cached, FileHash, Hub, HubError, Progress, Repo, RepoFile, RepoInfo, RepoKind, RepoPlan, find_snapshot,
};
use crate::spec::HubDataset;
use crate::storage::StorageKind;
use crate::store::background::spawn_blocking;

/// Capacity of the channel from the conversion thread to the task that writes the file, in chunks.
const PIECES: usize = 4;

/// How much of a file a preview reads, in bytes.
pub(super) const PREVIEW_BYTES: u64 = 8 << 20;

/// Source files of a dataset.
pub(super) struct Files {
    /// The sources, in order.
    pub(super) sources: Vec<Source>,
    /// Format of the files given by the request's media type; None if the media type is generic.
    pub(super) format: Option<Format>,
    /// Origin of the files, stored with the dataset.
    pub(super) origin: Value,
    /// The uploaded file, kept until it was read.
    pub(super) staged: Option<StagedDone>,
    /// Where the images of rows are stored; None = rows with images are refused.
    pub(super) images: Option<StagedImages>,
    /// The hub dataset to download if the hub does not serve byte ranges for a preview.
    whole: Option<Box<Found>>,
}

/// Stops a conversion thread when its request is dropped.
struct CancelOnDrop(Arc<AtomicBool>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The writer to which a conversion thread writes converted rows, chunk by chunk.
struct Pipe(mpsc::Sender<Vec<u8>>);

impl std::io::Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.blocking_send(bytes.to_vec()).map_err(|_| std::io::ErrorKind::BrokenPipe)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Converts files to the canonical rows of a dataset.
pub(super) async fn convert_files(
    state: &AppState,
    files: Files,
    recipe: Recipe,
    (chat_default, answers): (bool, bool),
) -> Result<(Summary, StagedDone, Value), Problem> {
    check_disk(state)?;
    let Files { sources, format, mut origin, staged: raw, images, whole: _ } = files;
    if let Some(origin) = origin.as_object_mut() {
        origin.insert("recipe".to_owned(), serde_json::to_value(&recipe).map_err(Problem::internal)?);
        origin.insert("chat_default".to_owned(), chat_default.into());
    }
    let cancel = CancelOnDrop(Arc::default());
    let (sender, mut pieces) = mpsc::channel(PIECES);
    let (cancelled, max_bytes) = (cancel.0.clone(), state.dataset_limit_bytes);
    let sink = images.as_ref().map(|images| images.images().clone());
    let work = spawn_blocking(move || {
        let options =
            Options { format, chat_default, answers, max_bytes, cancelled: &cancelled, images: sink.as_ref() };
        let converted = convert(&sources, &recipe, &options, &mut Pipe(sender));
        drop(raw);
        converted
    });
    // No size limit for the writer, because the conversion enforces it with a better error message.
    let mut out = state.files.stage(u64::MAX).await?;
    let mut written = 0;
    while let Some(piece) = pieces.recv().await {
        check_disk(state)?;
        written += piece.len() as u64;
        check_limit(state, StorageKind::Datasets, written).await?;
        out.write(&piece).await?;
    }
    let converted = work.await.map_err(Problem::internal)?.map_err(rejected)?;
    let mut staged = out.finish().await?;
    if let Some(images) = images {
        let about;
        (staged, about) = images.finish(state, staged).await?;
        if let (Some(origin), Some(about)) = (origin.as_object_mut(), about) {
            origin.insert("images".to_owned(), about);
        }
    }
    Ok((converted.summary, staged, origin))
}

/// Checks and stores the rows that a conversion thread writes. Errors name the `file`, if its name is known.
pub(super) async fn written(
    state: &AppState,
    reader: Reader,
    file: Option<&str>,
    write: impl FnOnce(&mut dyn std::io::Write) -> std::io::Result<()> + Send + 'static,
) -> Result<(Summary, StagedDone), Problem> {
    let (sender, pieces) = mpsc::channel(PIECES);
    let work = spawn_blocking(move || {
        let mut out = std::io::BufWriter::with_capacity(WRITE_BYTES, Pipe(sender));
        write(&mut out)?;
        out.flush()
    });
    let pieces = stream::unfold(pieces, |mut pieces| async move {
        let piece = pieces.recv().await?;
        Some((Ok::<_, Problem>(Bytes::from(piece)), pieces))
    });
    let read = read_rows(state, reader, file, Box::pin(pieces), |problem| problem).await;
    // The error of storing rows comes first: after it the conversion thread fails too, but only with a broken pipe.
    let written = work.await.map_err(Problem::internal)?;
    let rows = read?;
    written.map_err(Problem::internal)?;
    Ok(rows)
}

/// Previews the first rows of files.
pub(super) async fn preview_files(
    state: &AppState,
    mut files: Files,
    recipe: Recipe,
    chat_default: bool,
    rows: usize,
) -> Result<Preview, Problem> {
    let whole = files.whole.take();
    let looked = preview_sources(files, recipe.clone(), chat_default, rows).await?;
    match (looked, whole) {
        (Err(refused), Some(whole)) if refused.errors.iter().any(|error| error.code == NOT_FETCHED) => {
            let files = download(state, *whole, &Arc::default()).await.map_err(|error| problem(&error))?;
            preview_sources(files, recipe, chat_default, rows).await?.map_err(rejected)
        }
        (looked, _) => looked.map_err(rejected),
    }
}

async fn preview_sources(
    files: Files,
    recipe: Recipe,
    chat_default: bool,
    rows: usize,
) -> Result<Result<Preview, Rejected>, Problem> {
    let Files { mut sources, format, staged, images, .. } = files;
    // A file of this size was not received to its end, except by chance.
    if staged.as_ref().is_some_and(|staged| staged.size_bytes >= PREVIEW_BYTES) {
        sources = sources.into_iter().map(Source::cut).collect();
    }
    let looked = spawn_blocking(move || {
        let cancelled = AtomicBool::new(false);
        let sink = images.as_ref().map(StagedImages::images);
        let max_bytes = u64::MAX;
        let options = Options { format, chat_default, answers: false, max_bytes, cancelled: &cancelled, images: sink };
        let looked = preview(&sources, &recipe, &options, rows);
        drop(staged);
        looked
    });
    looked.await.map_err(Problem::internal)
}

/// A dataset on the hub that was found but not downloaded.
#[derive(Clone)]
pub(super) struct Found {
    pub(super) hub: Hub,
    pub(super) plan: RepoPlan,
    pub(super) origin: Value,
    /// The operator's local cache of this commit, if the caller may use it. Files may be missing or damaged there.
    pub(super) cached: Option<Cached>,
}

impl Found {
    /// Restores a dataset from the origin that was stored with it. None if the origin is incomplete.
    pub(super) fn of_origin(hub: Hub, cache: Option<&Path>, origin: &Value, is_restricted: bool) -> Option<Self> {
        let commit = origin["commit"].as_str()?.to_owned();
        let repo = Repo::new(RepoKind::Dataset, origin["hub"].as_str()?, &commit).ok()?;
        let file = |file: &Value| {
            let (path, hash) = (file["path"].as_str()?.to_owned(), FileHash::parse(file["hash"].as_str()?)?);
            Some(RepoFile { path, size_bytes: file["bytes"].as_u64()?, hash })
        };
        let files = origin["files"].as_array()?.iter().map(file).collect::<Option<Vec<_>>>()?;
        let cached = cache.and_then(|cache| find_snapshot(cache, &repo));
        let plan = RepoPlan { repo, commit, is_restricted, files, config: Value::Null, renamed_to: None };
        Some(Found { hub, plan, origin: origin.clone(), cached })
    }
}

/// Looks up a dataset on the hub or in the local cache, and chooses its files.
pub(super) async fn find(state: &AppState, caller: &Caller, wanted: &HubDataset) -> Result<Found, Problem> {
    check_disk(state)?;
    let hub = client(state, caller).await?;
    let repo = parse(wanted)?;
    let (repo, info, chosen) = match state.config.hub.environment.offline {
        true => choose_cached(hub::cache(state, caller), repo, wanted).await?,
        false => choose_on_hub(state, &hub, repo, wanted).await?,
    };
    let file = |path: &String| info.files.iter().find(|file| file.path == *path).cloned();
    let files: Vec<RepoFile> = chosen.files.iter().filter_map(file).collect();
    if info.is_restricted
        && let Some(first) = files.first()
    {
        // Files in the cache are served without a request, and they may have been opened by the token of another owner.
        hub.check_access(&repo, &info.commit, first).await.map_err(|error| problem(&error))?;
    }
    let hashes: Vec<Value> = files
        .iter()
        .map(|file| json!({"path": file.path, "hash": file.hash.to_string(), "bytes": file.size_bytes}))
        .collect();
    let origin = json!({"hub": repo.id(), "revision": wanted.revision.as_deref().unwrap_or(repo.revision()), "commit": info.commit,
                        "config": chosen.config, "split": chosen.split, "files": hashes});
    let RepoInfo { commit, is_restricted, is_private: _, files: _, renamed_to } = info;
    let origin = with_name(origin, renamed_to.as_deref());
    let at_commit = Repo::new(RepoKind::Dataset, repo.id(), &commit).map_err(Problem::internal)?;
    let cached = hub::cache(state, caller).and_then(|cache| find_snapshot(cache, &at_commit));
    let plan = RepoPlan { repo, commit, is_restricted, files, config: Value::Null, renamed_to };
    Ok(Found { hub, plan, origin, cached })
}

/// Looks up a dataset on the hub, and chooses the files of its config and split.
async fn choose_on_hub(
    state: &AppState,
    hub: &Hub,
    repo: Repo,
    wanted: &HubDataset,
) -> Result<(Repo, RepoInfo, Chosen), Problem> {
    let info = hub.info(&repo).await.map_err(|error| problem(&error))?;
    let readme = match info.files.iter().find(|file| file.path == "README.md") {
        None => None,
        Some(file) => {
            let bytes = hub.read_file(&repo, &info.commit, file).await.map_err(|error| problem(&error))?;
            Some(String::from_utf8_lossy(&bytes).into_owned())
        }
    };
    match chosen_of(readme.as_deref(), &info, wanted) {
        Ok(chosen) => Ok((repo, info, chosen)),
        Err(error) if error.is_unreadable => converted_branch(state, hub, &repo, wanted, error).await,
        Err(error) => Err(cannot_choose(&repo, &error)),
    }
}

/// Looks up a dataset in the local cache, without a request, and chooses the files of its config and split.
async fn choose_cached(
    cache: Option<&Path>,
    repo: Repo,
    wanted: &HubDataset,
) -> Result<(Repo, RepoInfo, Chosen), Problem> {
    let offline = || problem(&HubError::Offline { repo: repo.to_string() });
    let cached = cache.and_then(|cache| find_snapshot(cache, &repo)).ok_or_else(offline)?;
    let files = cached.files().await.map_err(|error| problem(&error))?;
    let readme = tokio::fs::read(cached.path.join("README.md")).await.ok();
    let readme = readme.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let info = RepoInfo { commit: cached.commit, is_restricted: false, is_private: false, files, renamed_to: None };
    let chosen = chosen_of(readme.as_deref(), &info, wanted).map_err(|error| cannot_choose(&repo, &error))?;
    match missing_shard(&chosen.files) {
        None => Ok((repo, info, chosen)),
        Some(name) => {
            let detail = format!(
                "the local cache has only some files of the split '{}': {name} is missing; download the whole split, or turn \
                 offline mode off",
                chosen.split
            );
            Err(cannot_choose(&repo, &CannotChoose { field: "split", detail, is_unreadable: false }))
        }
    }
}

/// Finds a file that is missing from a set of files such as `train-00000-of-00003.parquet`, by the numbers in their names.
fn missing_shard(paths: &[String]) -> Option<String> {
    let known: HashSet<&str> = paths.iter().map(String::as_str).collect();
    paths.iter().find_map(|path| {
        let (start, rest) = path.rsplit_once("-of-")?;
        let (start, number) = start.rsplit_once('-')?;
        let (count, _extension) = rest.split_once('.')?;
        let (width, _, count) = (number.len(), number.parse::<usize>().ok()?, count.parse::<usize>().ok()?);
        let mut names = (0..count).map(|index| format!("{start}-{index:0width$}-of-{rest}"));
        names.find(|name| !known.contains(name.as_str()))
    })
}

/// Adds a repository's new name to the origin of a dataset, if the hub has renamed it.
fn with_name(mut origin: Value, renamed_to: Option<&str>) -> Value {
    if let Some(name) = renamed_to {
        origin["renamed_to"] = name.into();
    }
    origin
}

/// Downloads the files of a hub dataset. Files of a commit are cached for a day.
pub(super) async fn download(
    state: &AppState,
    Found { hub, plan, origin, cached }: Found,
    progress: &Arc<Progress>,
) -> Result<Files, HubError> {
    let folder = state.downloads.sources(plan.repo.id(), &plan.commit);
    let mut sources = Vec::with_capacity(plan.files.len());
    let mut missing = RepoPlan { files: Vec::new(), ..plan.clone() };
    for file in plan.files {
        let found = match &cached {
            Some(cached) => cached.verified(&file).await?,
            None => None,
        };
        let path = found.unwrap_or_else(|| {
            missing.files.push(file.clone());
            folder.join(&file.path)
        });
        sources.push(Source::file(file.path, path));
    }
    if !missing.files.is_empty() {
        let parts = state.downloads.parts();
        hub.download(&missing, &parts, &folder, progress).await?;
    }
    Ok(Files { sources, format: None, origin, staged: None, images: None, whole: None })
}

/// Fetches enough of a hub dataset for a preview: the beginning of its first file, or the byte ranges of a parquet file
/// that the preview reads.
pub(super) async fn fetch_start(state: &AppState, caller: &Caller, wanted: &HubDataset) -> Result<Files, Problem> {
    let mut found = find(state, caller, wanted).await?;
    found.plan.files.truncate(1);
    let large = found.plan.files.first().filter(|file| file.size_bytes > PREVIEW_BYTES);
    let Some(file) = large.cloned() else {
        return download(state, found, &Arc::default()).await.map_err(|error| problem(&error));
    };
    if let Some(path) = found.cached.as_ref().map(|cached| cached.path.join(&file.path)).filter(|path| path.is_file()) {
        // A preview stores nothing, so the file's hash is not checked here. Only the first rows are read.
        return Ok(Files {
            sources: vec![Source::file(file.path, path)],
            format: None,
            origin: found.origin,
            staged: None,
            images: None,
            whole: None,
        });
    }
    if file.path.ends_with(".parquet") {
        let whole = Some(Box::new(found.clone()));
        let Found { hub, plan, origin, cached: _ } = found;
        return Ok(Files {
            sources: vec![ranged(hub, plan, file)],
            format: None,
            origin,
            staged: None,
            images: None,
            whole,
        });
    }
    let Found { hub, plan, origin, cached: _ } = found;
    let most_bytes = usize::try_from(PREVIEW_BYTES).unwrap_or(usize::MAX);
    let start = hub.read_start(&plan.repo, &plan.commit, &file, most_bytes).await.map_err(|error| problem(&error))?;
    let mut staged = state.files.stage(u64::MAX).await?;
    staged.write(&start).await?;
    let staged = staged.finish().await?;
    let sources = vec![Source::file(file.path, staged.path())];
    Ok(Files { sources, format: None, origin, staged: Some(staged), images: None, whole: None })
}

fn parse(wanted: &HubDataset) -> Result<Repo, Problem> {
    let parsed = match &wanted.revision {
        None => Repo::parse(RepoKind::Dataset, &wanted.hub),
        Some(revision) => Repo::new(RepoKind::Dataset, &wanted.hub, revision),
    };
    parsed.map_err(|error| {
        let detail = error.to_string();
        Problem::new(Code::InvalidBody, detail.clone()).item("/hub", "invalid", detail)
    })
}

fn chosen_of(readme: Option<&str>, info: &RepoInfo, wanted: &HubDataset) -> Result<Chosen, CannotChoose> {
    let paths: Vec<String> = info.files.iter().map(|file| file.path.clone()).collect();
    choose(readme, &paths, wanted.config.as_deref(), wanted.split.as_deref())
}

fn cannot_choose(repo: &Repo, error: &CannotChoose) -> Problem {
    let detail = format!("{repo}: {}", error.detail);
    Problem::new(Code::InvalidDataset, detail.clone()).item(format!("/{}", error.field), "invalid_value", detail)
}

/// Converts a hub error into a problem whose text refers to a dataset, not to a model.
pub(super) fn problem(error: &HubError) -> Problem {
    let problem = hub::problem(error);
    match problem.code() {
        Code::InvalidModel => problem.with_code(Code::InvalidDataset),
        _ => problem,
    }
}

/// Finds the parquet copy that the hub makes of public datasets, for repositories without files in a supported format.
async fn converted_branch(
    state: &AppState,
    hub: &Hub,
    repo: &Repo,
    wanted: &HubDataset,
    unreadable: CannotChoose,
) -> Result<(Repo, RepoInfo, Chosen), Problem> {
    let Some(server) = state.config.hub.datasets_server() else { return Err(cannot_choose(repo, &unreadable)) };
    let listed = hub.converted_files(&server, repo).await;
    let listed = match listed {
        Ok(listed) if !listed.is_empty() => listed,
        Ok(_) => return Err(cannot_choose(repo, &unreadable)),
        Err(error) => {
            tracing::warn!(
                error = with_causes(&error),
                "the files of the hub's converted copy of a dataset cannot be listed"
            );
            return Err(cannot_choose(repo, &unreadable));
        }
    };
    if repo.revision() != "main" {
        let detail = format!(
            "{}; the hub's converted copy exists only of the default revision, not of '{}': omit the revision to use it",
            unreadable.detail,
            repo.revision()
        );
        return Err(cannot_choose(repo, &CannotChoose { field: "revision", detail, ..unreadable }));
    }
    // The grouping of files by config and split that the dataset's README would otherwise describe.
    let mut configs: Vec<(String, Vec<(String, String)>)> = Vec::new();
    for file in &listed {
        let entry = (file.split.clone(), file.path.clone());
        match configs.iter_mut().find(|(config, _)| *config == file.config) {
            Some((_, files)) => files.push(entry),
            None => configs.push((file.config.clone(), vec![entry])),
        }
    }
    let yaml: Vec<Value> = configs
        .iter()
        .map(|(config, files)| {
            let files: Vec<Value> = files.iter().map(|(split, path)| json!({"split": split, "path": path})).collect();
            json!({"config_name": config, "data_files": files})
        })
        .collect();
    let readme = format!("---\n{}\n---\n", json!({"configs": yaml}));
    let branch = Repo::new(RepoKind::Dataset, repo.id(), "refs/convert/parquet").map_err(Problem::internal)?;
    let info = hub.info(&branch).await.map_err(|error| problem(&error))?;
    let chosen = chosen_of(Some(&readme), &info, wanted).map_err(|error| cannot_choose(repo, &error))?;
    Ok((branch, info, chosen))
}

/// Creates the sources for rows in a local file.
pub(super) fn stored(name: &str, path: PathBuf, origin: Value, staged: Option<StagedDone>) -> Files {
    let sources = vec![Source::file(name.to_owned(), path)];
    Files { sources, format: Some(Format::Ndjson), origin, staged, images: None, whole: None }
}

/// Creates the sources for an uploaded file.
pub(super) fn uploaded(name: Option<&str>, format: Option<Format>, staged: StagedDone, images: StagedImages) -> Files {
    let name = name.map_or_else(|| "the upload".to_owned(), |name| shortened(name).to_string());
    let path: PathBuf = staged.path().to_owned();
    let origin = json!({"upload": name, "sha256": staged.sha256.to_string()});
    Files {
        sources: vec![Source::file(name, path)],
        format,
        origin,
        staged: Some(staged),
        images: Some(images),
        whole: None,
    }
}
