//! `POST /jobs` and `POST /jobs/validate`: from a document to a queued job.

mod pending;
pub(super) mod stored;

use axum::extract::multipart::{Field, Multipart};
use axum::extract::{DefaultBodyLimit, FromRequest, Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use self::stored::store_prompts;
use super::AppState;
use super::auth::Caller;
use super::error::{Code, Problem, ProblemBody, shortened};
use super::extract::{Json, Query, expect_document, media_type, parse_document, read_body};
use super::heavy;
use super::idempotency::{Answer, once};
use super::jobs::{JobView, invalid};
use super::lookup::{Prepared, prepare};
use super::named_models::{REPOSITORY_RENAMED, UseOfHub};
use super::prompts::{Prompts, Source, unknown_dataset};
use super::rows::read_rows;
use super::uploads::{bad_form, broken_form, format_of_part};
use super::{preflight, warm_start};
use crate::dataset::{IMAGES, Reader, Summary};
use crate::digest::Sha256Digest;
use crate::files::StagedDone;
use crate::id::{DatasetId, JobId};
use crate::preflight::PreflightReport;
use crate::spec::format::Format as DocumentFormat;
use crate::spec::trl::{self, Remark};
use crate::spec::{
    DatasetPlan, DraftDocument, DraftPlan, Estimate, FieldError, FormDocument, JobDocument, JobSpec, Warning, resolve,
};
use crate::store::{DatasetRow, NewJob, StoreError, clock_ms};

/// Maximum size of the multipart field `spec`, in bytes.
const MAX_SPEC_BYTES: usize = 1024 * 1024;

/// Time limit for parsing a submitted job.
const READ_WITHIN: std::time::Duration = std::time::Duration::from_secs(30);

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(create_job)).routes(routes!(validate_job))
}

/// A job as a multipart form.
#[derive(ToSchema)]
#[expect(dead_code, reason = "only describes the multipart body in the OpenAPI document")]
struct JobForm {
    /// The job without its dataset: JSON, or the format given by the field's content type (application/yaml, application/toml) or
    /// file name (.yaml, .yml, .toml).
    spec: FormDocument,
    /// The rows. The content type of the field or its file name (.ndjson, .jsonl, .csv, .json) determines the format.
    #[schema(value_type = String, format = Binary)]
    dataset: Vec<u8>,
}

/// Submit a training job.
///
/// Send JSON (or YAML or TOML) with inline records or the id of a dataset, or a multipart form with the fields `spec` and
/// `dataset`. All errors are reported together, each with a JSON pointer.
#[utoipa::path(post, path = "/jobs", tag = "Jobs",
    params(("Idempotency-Key" = Option<String>, Header, description = "A repeated request with the same key and body gets the same answer for 24 hours"),
        ("x-hub-token" = Option<String>, Header, description = "A hub token for the downloads of this job; the server does not store it")),
    request_body(description = "The job", content((JobDocument = "application/json"), (JobDocument = "application/yaml"), (String = "application/toml"), (JobForm = "multipart/form-data"))),
    responses(
        (status = 201, description = "Queued", body = JobView, headers(("Location" = String, description = "Its path"))),
        (status = 409, description = "The server is still answering an earlier request with this Idempotency-Key", body = ProblemBody),
        (status = 422, description = "The job is not valid", body = ProblemBody),
    ))]
async fn create_job(State(state): State<AppState>, caller: Caller, mut request: Request) -> Result<Response, Problem> {
    let headers = request.headers().clone();
    if media_type(&headers) == "multipart/form-data" {
        // No body limit here: the form's rows are streamed to disk, and their size is checked there. The field `spec` is
        // limited below.
        DefaultBodyLimit::disable().apply(&mut request);
        let form = Multipart::from_request(request, &()).await.map_err(|error| bad_form(error.body_text()))?;
        let (document, rows) = read_form(&state, form).await?;
        let identity = Sha256Digest::of(format!("{document}{}", rows.1.sha256)).to_string();
        let work = submit(state.clone(), caller.clone(), document, Some(rows));
        return once(&state, &caller, &headers, "POST /jobs", &identity, work).await;
    }
    let (document, identity) = read_document(&headers, request).await?;
    let work = submit(state.clone(), caller.clone(), document, None);
    once(&state, &caller, &headers, "POST /jobs", &identity, work).await
}

async fn read_document(headers: &HeaderMap, request: Request) -> Result<(Value, String), Problem> {
    let format = expect_document(headers)?;
    let bytes = read_body(request).await?;
    Ok((parse_document(&bytes, format)?, Sha256Digest::of(&bytes).to_string()))
}

/// Rows that were uploaded with the job: checked and in canonical form, but not yet stored as a dataset.
type UploadedRows = (Summary, StagedDone);

async fn read_form(state: &AppState, mut form: Multipart) -> Result<(Value, UploadedRows), Problem> {
    let (mut document, mut rows) = (None, None);
    while let Some(part) = form.next_field().await.map_err(broken_form)? {
        match part.name() {
            Some("spec") if document.is_none() => {
                let form = form_of_spec(&part);
                document = Some(parse_document(&read_part(part).await?, form)?);
            }
            Some("dataset") if rows.is_none() => {
                let format = format_of_part(&part)?;
                let file = part.file_name().map(str::to_owned);
                rows = Some(read_rows(state, Reader::new(format), file.as_deref(), part, broken_form).await?);
            }
            Some(name @ ("spec" | "dataset")) => {
                return Err(bad_form(format!("the form field '{name}' occurs twice: send it once")));
            }
            other => {
                let other = shortened(other.unwrap_or(""));
                return Err(bad_form(format!(
                    "the form has the unknown field '{other}': send 'spec' (the job) and 'dataset' (the rows)"
                )));
            }
        }
    }
    let document =
        document.ok_or_else(|| bad_form("the form field 'spec' is required: it contains the job".to_owned()))?;
    let missing = "the field 'dataset' is required; if the spec contains a dataset id or records, send only the spec, as application/json";
    Ok((document, rows.ok_or_else(|| bad_form(missing.to_owned()))?))
}

/// Returns the format of the form field `spec`: from its content type, else from its file name, else JSON.
fn form_of_spec(part: &Field<'_>) -> DocumentFormat {
    let kind = part.content_type().and_then(|kind| kind.split(';').next()).unwrap_or("").trim().to_ascii_lowercase();
    DocumentFormat::of_media_type(&kind).unwrap_or_else(|| {
        match part.file_name().and_then(|name| name.rsplit_once('.')) {
            Some((_, "yaml" | "yml")) => DocumentFormat::Yaml,
            Some((_, "toml")) => DocumentFormat::Toml,
            Some(_) | None => DocumentFormat::Json,
        }
    })
}

async fn read_part(mut part: Field<'_>) -> Result<Vec<u8>, Problem> {
    let mut bytes = Vec::new();
    while let Some(chunk) = part.chunk().await.map_err(broken_form)? {
        bytes.extend_from_slice(&chunk);
        if bytes.len() > MAX_SPEC_BYTES {
            return Err(Problem::new(
                Code::BodyTooLarge,
                format!("the form field 'spec' must be at most {MAX_SPEC_BYTES} bytes"),
            ));
        }
    }
    Ok(bytes)
}

/// Parses a submitted job, which may include compiling schemas, patterns and templates.
pub(super) async fn read_spec(
    state: &AppState,
    caller: &Caller,
    document: Value,
) -> Result<(JobSpec, Vec<FieldError>), Problem> {
    heavy::run(state, caller, READ_WITHIN, move |_| JobSpec::read(document)).await
}

/// Validates the submitted document, stores its data, and queues the job.
pub(super) async fn submit(
    state: AppState,
    caller: Caller,
    mut document: Value,
    rows: Option<UploadedRows>,
) -> Result<Answer, Problem> {
    let mut errors = Vec::new();
    if rows.is_some() {
        errors.extend(put_placeholder(&mut document));
    }
    let (mut spec, spec_errors) = read_spec(&state, &caller, document).await?;
    errors.extend(spec_errors);
    let train = rows.map(|(summary, staged)| Prompts::of_upload(summary, staged));
    let prepared = prepare(&state, &caller, &mut spec, train, UseOfHub::Register).await?;
    let is_pending = prepared.is_pending();
    let Prepared { context, errors: found, warnings, train, eval, warm_up } = prepared;
    errors.extend(found);
    let resolved = resolve(&spec, &context);
    let mut plan = match resolved {
        Ok(resolution) if errors.is_empty() => resolution.plan,
        Ok(_) => return Err(invalid(Code::InvalidSpec, errors)),
        Err(more) => {
            errors.extend(more);
            return Err(invalid(Code::InvalidSpec, errors));
        }
    };
    let (prompts, document) = ((train, eval, warm_up), &mut spec.redacted);
    let waits_for = match is_pending {
        true => pending::name_stored(&state, caller.owner(), prompts, document).await?,
        false => {
            store_prompts(&state, caller.owner(), prompts, document, &mut plan).await?;
            Vec::new()
        }
    };
    let id = JobId::new();
    warm_start::pin_files(&state, id, &plan).await?;
    let (secrets, priority) = (&spec.secrets, spec.priority);
    let new = NewJob { id, spec: &spec.redacted, plan: &plan, secrets, parent: None, priority, owner: caller.owner() };
    let created = state.store.job_create_waiting(new, &waits_for, clock_ms()).await;
    if created.is_err() {
        warm_start::unpin_files(&state, id).await;
    }
    let row = match created {
        Err(StoreError::NotFound { kind: "dataset", id }) => {
            let is = |dataset: &DatasetPlan| dataset.id.to_string() == id;
            let at = match &plan.eval {
                _ if is(&plan.dataset) => "/dataset/id",
                _ if plan.warm_up.as_ref().is_some_and(|warm_up| is(&warm_up.dataset)) => "/warm_up/dataset/id",
                Some(eval) if eval.test_dataset.as_ref().is_some_and(is) => "/eval/test_dataset/id",
                Some(eval) if eval.guard.as_ref().is_some_and(|guard| is(&guard.dataset)) => "/eval/guard/dataset/id",
                Some(_) | None => "/eval/dataset/id",
            };
            return Err(invalid(Code::InvalidSpec, vec![unknown_dataset(at, &id)]));
        }
        created => created?,
    };
    let renamed = warnings.iter().filter(|warning| warning.code == REPOSITORY_RENAMED);
    let renamed: Vec<(&str, String)> =
        renamed.map(|warning| (REPOSITORY_RENAMED, format!("{}: {}", warning.pointer, warning.detail))).collect();
    state.store.job_warn(row.id, &renamed, clock_ms()).await?;
    Answer::new(StatusCode::CREATED, Some(format!("/jobs/{}", row.id)), &JobView::of(&state, row).await?)
}

/// The dataset of a form is a field of its own, so the job in `spec` must not name a dataset.
fn put_placeholder(document: &mut Value) -> Option<FieldError> {
    let object = document.as_object_mut()?;
    if object.get("dataset").is_some_and(|dataset| !dataset.is_null()) {
        let detail = "the form also has a field 'dataset': send the rows in one place only";
        return Some(FieldError::new("/dataset", "conflict", detail));
    }
    object.insert("dataset".to_owned(), json!({"id": DatasetId::new()}));
    None
}

/// Options of a validation.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ValidateQuery {
    /// `trl`: the body is a TRL RLOOConfig to translate.
    from: Option<String>,
    /// Run a preflight of a valid job: sample the base model on some prompts, call the rewards, and time a step. Takes
    /// up to a minute.
    #[serde(default)]
    probe: bool,
    /// Number of prompts to sample, spread over the dataset, 1 to 64. Default: 8.
    #[param(minimum = 1, maximum = 64, example = 8)]
    probe_prompts: Option<u32>,
    /// Time limit in seconds, 1 to 600. Default: 60. The report contains everything measured until then.
    #[param(minimum = 1, maximum = 600, example = 60)]
    probe_timeout_s: Option<u32>,
}

/// The result of a validation.
#[derive(Debug, Serialize, ToSchema)]
pub struct Validation {
    /// Whether the job would be accepted.
    valid: bool,
    /// The resolved plan; null if the job is not valid. Id and hash of a dataset that is not stored yet are null.
    #[schema(value_type = Option<DraftPlan>)]
    plan: Option<Value>,
    /// All errors in the job.
    errors: Vec<FieldError>,
    /// Settings that are allowed but probably a mistake.
    warnings: Vec<Warning>,
    /// Estimated memory and tokens; null if the job is not valid.
    estimate: Option<Estimate>,
    /// Report of the preflight; null if it was not requested or the job is not valid.
    probe: Option<PreflightReport>,
    /// `from=trl`: the translated job. Submit it unchanged once there are no errors. A JobSpec, except for missing fields.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    spec: Option<Value>,
    /// `from=trl`: keys whose effect is not supported. With any of them the job is not valid.
    #[serde(skip_serializing_if = "Option::is_none")]
    unsupported: Option<Vec<Remark>>,
    /// `from=trl`: keys that have no effect here.
    #[serde(skip_serializing_if = "Option::is_none")]
    ignored: Option<Vec<Remark>>,
}

/// Validate a job without submitting it.
///
/// Returns all errors together, the resolved plan, warnings, and an estimate. Nothing is stored.
///
/// With `probe=true` the server also runs a preflight: it samples the base model on some prompts and calls the rewards (their
/// requests have the phase `probe`). `probe` then reports whether the job is worth running, and how long it will take.
///
/// With `from=trl` the body is a TRL run: an RLOOConfig (its keys as TRL writes them, or as YAML), bare or as `{config,
/// peft_config, model, dataset, eval_dataset, rewards, name, metadata}`; `model`, `dataset`, `rewards` and the others may also be
/// next to the keys of a bare one. `peft_config` is a PEFT LoraConfig; it may be inside the config, and TRL's flat `lora_*` keys
/// work as well. The response contains the job as `spec` (missing fields, such as the model, are in `errors` with the code
/// `required`), unsupported keys with a replacement for each, and keys without effect. Pointers refer to the key that was sent if a
/// setting came from one, otherwise into `spec`.
#[utoipa::path(post, path = "/jobs/validate", tag = "Jobs", params(ValidateQuery),
    request_body(description = "The job; with from=trl, a TRL configuration", content((DraftDocument = "application/json"), (DraftDocument = "application/yaml"), (String = "application/toml"))),
    responses(
    (status = 200, description = "The result of the validation, also if the job is not valid", body = Validation),
    (status = 422, description = "The requested kind of check is not supported yet", body = ProblemBody),
    (status = 429, description = "Another preflight is running", body = ProblemBody),
    (status = 501, description = "This server cannot run preflights", body = ProblemBody)))]
async fn validate_job(
    State(state): State<AppState>,
    caller: Caller,
    Query(query): Query<ValidateQuery>,
    request: Request,
) -> Result<Json<Validation>, Problem> {
    let unsupported =
        |name: &str, text: &str| Problem::new(Code::Unsupported, text).item(format!("?{name}"), "unsupported", text);
    if query.from.as_ref().is_some_and(|from| from != "trl") {
        return Err(unsupported("from", "only TRL configurations can be translated: from=trl"));
    }
    let preflight_limits = query.probe.then_some(preflight::Limits::read(query.probe_prompts, query.probe_timeout_s)?);
    let headers = request.headers().clone();
    let (document, _) = read_document(&headers, request).await?;
    if query.from.is_none() {
        return validated(&state, &caller, document, Vec::new(), preflight_limits).await.map(Json);
    }
    translated(&state, &caller, &document, preflight_limits).await.map(Json)
}

/// Validates a submitted document; `errors` are those found before. Runs a preflight of a valid job if requested.
async fn validated(
    state: &AppState,
    caller: &Caller,
    document: Value,
    mut errors: Vec<FieldError>,
    preflight_limits: Option<preflight::Limits>,
) -> Result<Validation, Problem> {
    let (mut spec, found) = read_spec(state, caller, document).await?;
    errors.extend(found);
    let prepared = prepare(state, caller, &mut spec, None, UseOfHub::Inspect).await?;
    // A preflight needs the rows. The warnings say that they are not downloaded.
    let preflight_limits = preflight_limits.filter(|_| !prepared.is_pending());
    errors.extend(prepared.errors);
    let resolved = resolve(&spec, &prepared.context);
    let mut report = None;
    let (plan, warnings, estimate) = match resolved {
        Ok(resolution) if errors.is_empty() => {
            let mut plan = serde_json::to_value(&resolution.plan).map_err(Problem::internal)?;
            let held_out = resolution.plan.eval.as_ref().is_some_and(|eval| eval.fraction.is_some());
            let eval = if held_out { &prepared.train } else { &prepared.eval.eval };
            for (prompts, at) in [
                (&prepared.train, "/dataset"),
                (eval, "/eval/dataset"),
                (&prepared.eval.test, "/eval/test_dataset"),
                (&prepared.eval.guard, "/eval/guard/dataset"),
                (&prepared.warm_up, "/warm_up/dataset"),
            ] {
                let stored = prompts.as_ref().is_some_and(|prompts| matches!(prompts.source, Source::Stored(_)));
                if let Some(dataset) = plan.pointer_mut(at).and_then(Value::as_object_mut).filter(|_| !stored) {
                    dataset.insert("id".to_owned(), Value::Null);
                    dataset.insert("sha256".to_owned(), Value::Null);
                }
            }
            if let (Some(size), Some(train)) = (preflight_limits, prepared.train) {
                report = Some(preflight::run(state, spec, &resolution, train, size).await?);
            }
            let warnings = prepared.warnings.into_iter().chain(resolution.warnings).collect();
            (Some(plan), warnings, Some(resolution.estimate))
        }
        Ok(_) => (None, Vec::new(), None),
        Err(more) => {
            errors.extend(more);
            (None, Vec::new(), None)
        }
    };
    let valid = errors.is_empty();
    let (spec, unsupported, ignored) = (None, None, None);
    Ok(Validation { valid, plan, errors, warnings, estimate, probe: report, spec, unsupported, ignored })
}

/// Translates a TRL run to a job and validates the job.
async fn translated(
    state: &AppState,
    caller: &Caller,
    document: &Value,
    preflight_limits: Option<preflight::Limits>,
) -> Result<Validation, Problem> {
    let dataset = named_dataset(state, caller, document).await?;
    let mut conversion = trl::convert(document, dataset.as_ref().map(|dataset| dataset.num_rows));
    // Images are read by TRL only.
    let has_images = dataset.is_some_and(|dataset| dataset.columns.iter().any(|column| column == IMAGES));
    if has_images && conversion.spec.get("runtime").is_none() {
        conversion.spec["runtime"] = json!({"name": "trl"});
    }
    // Without batch sizes no plan and no preflight: they would show defaults that the user did not choose.
    let complete = conversion.spec.pointer("/training/prompts_per_step").is_some();
    let preflight_limits = preflight_limits.filter(|_| complete && conversion.unsupported.is_empty());
    let mut validation =
        validated(state, caller, conversion.spec.clone(), conversion.errors.clone(), preflight_limits).await?;
    let by_key = |error: FieldError| conversion.at_submitted_key(error);
    let too_small = |error: &FieldError| !complete && error.code == "dataset_too_small";
    validation.errors = validation.errors.into_iter().filter(|error| !too_small(error)).map(by_key).collect();
    if !complete {
        (validation.plan, validation.estimate) = (None, None);
    }
    validation.warnings.splice(0..0, conversion.warnings);
    validation.valid = validation.errors.is_empty() && conversion.unsupported.is_empty();
    validation.spec = Some(conversion.spec);
    validation.unsupported = Some(conversion.unsupported);
    validation.ignored = Some(conversion.ignored);
    Ok(validation)
}

/// Returns the uploaded dataset that a TRL run names; None if it names none, or one that does not exist (reported later).
async fn named_dataset(state: &AppState, caller: &Caller, document: &Value) -> Result<Option<DatasetRow>, Problem> {
    let Some(id) = trl::named_dataset(document).and_then(|id| id.parse().ok()) else { return Ok(None) };
    match state.store.dataset_get(id).await {
        Ok(row) if caller.may_see(&row.owner) => Ok(Some(row)),
        Ok(_) | Err(StoreError::NotFound { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
