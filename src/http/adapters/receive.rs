//! Receives the files of an adapter: a form, a tar, or the name of a hub repository.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;
use std::time::Instant;

use axum::RequestExt;
use axum::body::Bytes;
use axum::extract::multipart::Multipart;
use axum::extract::{FromRequest, Request};
use flate2::read::MultiGzDecoder;
use futures::{Stream, StreamExt};
use tokio::io::AsyncWriteExt;

use super::super::AppState;
use super::super::auth::Caller;
use super::super::error::{Code, Problem, shortened};
use super::super::extract::{body_problem, media_type};
use super::super::rows::{UPLOAD_DEADLINE, WRITE_BYTES, check_disk};
use super::super::uploads::{bad_form, broken_form, checked_name, short_text};
use super::{FILES, HubAdapter, Sent, fetch};
use crate::files::{FilesError, StagedDir};

/// Maximum size of a JSON request for a hub adapter, in bytes.
const MAX_DOCUMENT_BYTES: usize = 64 * 1024;
/// Maximum size of one adapter file, in bytes.
const MAX_FILE_BYTES: u64 = 64 << 30;

/// Receives the adapter files of a request: as a form, a tar, or the name of a hub repository.
pub(super) async fn receive(
    state: &AppState,
    caller: &Caller,
    name: Option<String>,
    request: Request,
) -> Result<Sent, Problem> {
    check_disk(state)?;
    let name = checked_name(name)?;
    match media_type(request.headers()).as_str() {
        "multipart/form-data" => {
            let form = Multipart::from_request(request, &()).await;
            read_form(state, form.map_err(|error| bad_form(error.body_text()))?, name).await
        }
        "application/json" => {
            let mut document = Vec::new();
            let mut body = request.into_limited_body().into_data_stream();
            while let Some(piece) = body.next().await {
                document.extend_from_slice(&piece.map_err(|error| body_problem(&error))?);
                if document.len() > MAX_DOCUMENT_BYTES {
                    return Err(bad_form(format!(
                        "a request that names an adapter of the hub must be at most {MAX_DOCUMENT_BYTES} bytes"
                    )));
                }
            }
            let wanted: HubAdapter = serde_json::from_slice(&document).map_err(|error| {
                let detail = format!("{error}; send {{\"hub\": \"org/name\"}}, or the files as a form or a tar");
                Problem::new(Code::InvalidBody, detail.clone()).item("", "invalid", detail)
            })?;
            let wanted = HubAdapter { name: checked_name(wanted.name.clone())?.or(name), ..wanted };
            fetch(state, caller, wanted).await
        }
        "application/x-tar" | "application/gzip" | "application/x-gzip" | "application/octet-stream" => {
            let dir = stage(state).await?;
            let tar = dir.path().join("tar");
            let body = request.into_limited_body().into_data_stream();
            write(state, &tar, body, |error| body_problem(&error)).await?;
            Ok(Sent { name, dir: unpack(state, dir).await?, origin: None })
        }
        other => {
            let found = if other.is_empty() { "none".to_owned() } else { format!("'{}'", shortened(other)) };
            let detail = format!(
                "the content type is {found}: send multipart/form-data with the fields {} and {}, application/x-tar, \
                 application/gzip, or application/json",
                FILES[0], FILES[1]
            );
            Err(Problem::new(Code::UnsupportedMediaType, detail))
        }
    }
}

async fn stage(state: &AppState) -> Result<StagedDir, Problem> {
    Ok(state.files.in_background(|files| files.stage_dir()).await?)
}

async fn read_form(state: &AppState, mut form: Multipart, mut name: Option<String>) -> Result<Sent, Problem> {
    let dir = stage(state).await?;
    while let Some(part) = form.next_field().await.map_err(broken_form)? {
        let called = [part.name(), part.file_name()].map(|name| name.unwrap_or("").to_owned());
        if called[0] == "name" {
            name = checked_name(Some(short_text(part).await?))?;
            continue;
        }
        // Which adapter file a form field contains is given by the field's name, otherwise by its file name.
        let Some(file) = FILES.into_iter().find(|file| called.iter().any(|name| name == file)) else {
            let other = shortened(&called[0]);
            return Err(bad_form(format!(
                "unknown field '{other}': send {}, {}, and optionally 'name'",
                FILES[0], FILES[1]
            )));
        };
        let path = dir.path().join(file);
        if path.exists() {
            return Err(bad_form(format!("the field {file} occurs twice: send it once")));
        }
        write(state, &path, part, broken_form).await?;
    }
    if let Some(missing) = FILES.into_iter().find(|file| !dir.path().join(file).exists()) {
        return Err(bad_form(format!(
            "the field {missing} is required: an adapter consists of {} and {}",
            FILES[0], FILES[1]
        )));
    }
    Ok(Sent { name, dir, origin: None })
}

/// Writes the bytes of an upload to a file as they arrive. They are synced to disk when this function returns.
async fn write<E>(
    state: &AppState,
    path: &Path,
    mut pieces: impl Stream<Item = Result<Bytes, E>> + Unpin,
    failed: impl Fn(E) -> Problem,
) -> Result<(), Problem> {
    let mut file = tokio::fs::File::create(path).await.map_err(Problem::internal)?;
    let deadline = Instant::now() + UPLOAD_DEADLINE;
    let (mut unchecked, mut received) = (0, 0);
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(&failed)?;
        if Instant::now() > deadline {
            return Err(Problem::new(Code::RequestTimeout, "the adapter took more than an hour to arrive"));
        }
        unchecked += piece.len();
        received += piece.len() as u64;
        if received > MAX_FILE_BYTES {
            return Err(Problem::new(
                Code::BodyTooLarge,
                format!("a file of an adapter must be at most {MAX_FILE_BYTES} bytes"),
            ));
        }
        if unchecked >= WRITE_BYTES {
            check_disk(state)?;
            unchecked = 0;
        }
        file.write_all(&piece).await.map_err(Problem::internal)?;
    }
    file.sync_all().await.map_err(Problem::internal)
}

/// Extracts the two adapter files from the uploaded tar in a staging directory.
async fn unpack(state: &AppState, dir: StagedDir) -> Result<StagedDir, Problem> {
    let room = state.files.free_bytes()?.saturating_sub(state.config.edge.disk_reserve_bytes);
    let unpacked = state.files.in_background(move |_| {
        let tar = dir.path().join("tar");
        let taken = take(&tar, dir.path(), room);
        let _ = std::fs::remove_file(&tar);
        Ok(taken.map(|()| dir))
    });
    unpacked.await?.map_err(|detail| Problem::new(Code::InvalidAdapter, detail.clone()).item("", "invalid", detail))
}

fn take(tar: &Path, to: &Path, mut room: u64) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("the tar cannot be read: {error}");
    let mut start = [0; 2];
    let known = File::open(tar).and_then(|mut file| file.read(&mut start)).map_err(failed)?;
    let file = BufReader::new(File::open(tar).map_err(failed)?);
    let reader: Box<dyn Read> =
        if start[..known] == [0x1f, 0x8b] { Box::new(MultiGzDecoder::new(file)) } else { Box::new(file) };
    let mut archive = tar::Archive::new(reader);
    for entry in archive.entries().map_err(failed)? {
        let mut entry = entry.map_err(failed)?;
        let path = entry.path().map_err(failed)?.into_owned();
        let Some(name) = FILES.into_iter().find(|name| path.file_name().is_some_and(|file| file == *name)) else {
            continue;
        };
        let target = to.join(name);
        if !entry.header().entry_type().is_file() {
            return Err(format!("{name} in the tar is not a plain file"));
        }
        if target.exists() {
            return Err(format!("the tar contains {name} twice: send one adapter"));
        }
        let size = entry.header().size().map_err(failed)?;
        room = room
            .checked_sub(size)
            .ok_or_else(|| format!("{name} has {size} bytes, more than the server's disk has free"))?;
        let mut file = File::create(&target).map_err(failed)?;
        std::io::copy(&mut entry, &mut file).and_then(|_| file.sync_all()).map_err(failed)?;
    }
    match FILES.into_iter().find(|name| !to.join(name).exists()) {
        None => Ok(()),
        Some(missing) => {
            Err(format!("the tar does not contain {missing}: an adapter consists of {} and {}", FILES[0], FILES[1]))
        }
    }
}

/// Copies an adapter file. Its bytes are synced to disk when this function returns.
pub(super) fn copy(from: &Path, to: &Path) -> Result<(), FilesError> {
    let copied = std::fs::copy(from, to).and_then(|_| File::open(to)?.sync_all());
    copied.map_err(|source| FilesError::Io { doing: "copy a file to", path: to.to_owned(), source })
}
