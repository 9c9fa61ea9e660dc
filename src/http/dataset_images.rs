//! Routes of images: clients read those of a dataset, reward services those of the samples that they score.

use std::io::Read;

use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, Method, header};
use axum::response::Response;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::callbacks;
use super::dataset_downloads::stored;
use super::download::{Download, RangeHeaders, send_file};
use super::error::{Code, Problem, ProblemBody};
use super::extract::{Path, Query};
use crate::dataset::ImageFormat;
use crate::digest::Sha256Digest;
use crate::id::{DatasetId, JobId};
use crate::store::background::spawn_blocking;
use crate::store::clock_ms;

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(get_image)).routes(routes!(get_reward_image))
}

/// Get an image of a dataset.
///
/// The rows of the dataset name it by its SHA-256.
#[utoipa::path(method(get, head), path = "/datasets/{id}/images/{sha256}", tag = "Datasets", operation_id = "get_image",
    params(("id" = DatasetId, Path, description = "The dataset"), ("sha256" = String, Path, description = "SHA-256 of the image, in hex"), RangeHeaders),
    responses(
        (status = 200, description = "The image", body = String, content_type = "image/*"),
        (status = 206, description = "The requested range of bytes", body = String, content_type = "image/*"),
        (status = 304, description = "Not modified: the client's copy is current"),
        (status = 416, description = "The requested range is outside the image", body = ProblemBody),
    ))]
async fn get_image(
    State(state): State<AppState>,
    Path((id, sha256)): Path<(DatasetId, String)>,
    method: Method,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let dataset = stored(&state, id).await?.id;
    send_image(&state, dataset, &sha256, &method, &headers).await
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct Permit {
    /// End of the URL's validity, Unix time in seconds.
    expires: i64,
    /// Token for this image and this time.
    token: String,
}

/// Get an image of a sample that is scored
///
/// For reward services: the URL, with its token, is in the `images` of a reward request's samples. It is valid for a week
/// and needs no key.
#[utoipa::path(method(get, head), path = "/reward-images/{job}/{sha256}", tag = "Reward contract", operation_id = "get_reward_image", security(()),
    params(("job" = JobId, Path, description = "The job"), ("sha256" = String, Path, description = "SHA-256 of the image, in hex"), Permit),
    responses(
        (status = 200, description = "The image", body = String, content_type = "image/*"),
        (status = 404, description = "There is no such image, or the token is not for it", body = ProblemBody),
        (status = 410, description = "The URL has expired", body = ProblemBody),
    ))]
async fn get_reward_image(
    State(state): State<AppState>,
    Path((job, sha256)): Path<(JobId, String)>,
    Query(Permit { expires, token }): Query<Permit>,
    method: Method,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let expected = callbacks::terms(&state).await?.image_token(&job.to_string(), &sha256, expires);
    if !super::auth::is_equal(&token, &expected) {
        return Err(Problem::not_found("image", &sha256));
    }
    if expires < clock_ms() / 1000 {
        return Err(Problem::new(Code::Gone, "the URL of the image has expired: a new reward request has a new one"));
    }
    let plan = state.store.job_get(job).await?.plan()?;
    send_image(&state, plan.dataset.id, &sha256, &method, &headers).await
}

/// Sends an image with the media type of its bytes. Its name is its hash, so that a copy never changes.
pub(super) async fn send_image(
    state: &AppState,
    dataset: DatasetId,
    sha256: &str,
    method: &Method,
    headers: &HeaderMap,
) -> Result<Response, Problem> {
    let missing = || Problem::not_found("image of this dataset", sha256);
    let digest: Sha256Digest = sha256.parse().map_err(|_| missing())?;
    let path = state.files.dataset_image(dataset, digest);
    let read = {
        let path = path.clone();
        spawn_blocking(move || {
            let mut start = Vec::new();
            let file = std::fs::File::open(&path)?;
            let size_bytes = file.metadata()?.len();
            file.take(16).read_to_end(&mut start)?;
            Ok::<_, std::io::Error>((size_bytes, ImageFormat::of(&start)))
        })
    };
    let (size_bytes, format) = match read.await.map_err(Problem::internal)? {
        Ok((size_bytes, Some(format))) => (size_bytes, format),
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(Problem::internal(error)),
        Ok((_, None)) | Err(_) => return Err(missing()),
    };
    let file = Download { path, name: digest.to_string(), size_bytes, sha256: digest };
    let mut response = send_file(method, headers, &file).await?;
    let fields = [
        (header::CONTENT_TYPE, format.media_type()),
        (header::CACHE_CONTROL, "private, max-age=31536000, immutable"),
        (header::CONTENT_DISPOSITION, "inline"),
        (header::CONTENT_SECURITY_POLICY, "default-src 'none'; frame-ancestors 'none'; sandbox"),
    ];
    for (name, value) in fields {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    Ok(response)
}
