//! Errors in OpenAI's form. Every problem under `/v1` becomes one, also those of authentication and of unknown routes.

use axum::body::{Body, to_bytes};
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;

use crate::http::error::IsProblem;
use crate::openai::{OpenAiError, OpenAiErrorBody};

/// Tells openai-python whether to send the same request again.
const X_SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");
/// Maximum size of a problem document, in bytes.
const MAX_PROBLEM_BYTES: usize = 1 << 20;

/// The parts of a problem document that an OpenAI client sees.
#[derive(Deserialize)]
struct ProblemDocument {
    detail: String,
    code: String,
    #[serde(default)]
    retryable: bool,
    #[serde(default)]
    errors: Vec<Item>,
}

#[derive(Deserialize)]
struct Item {
    pointer: String,
    code: String,
    detail: String,
}

/// Whether errors of this path have OpenAI's form.
pub(in super::super) fn is_openai(path: &str) -> bool {
    path == "/v1"
        || path.starts_with("/v1/")
        || path.starts_with("/serve/")
        || matches!(path, "/tokenize" | "/detokenize" | "/tokenizer_info")
}

/// Translates a problem document to OpenAI's form; leaves other responses unchanged.
pub(in super::super) async fn translated(response: Response) -> Response {
    if response.extensions().get::<IsProblem>().is_none() {
        return response;
    }
    let (mut parts, body) = response.into_parts();
    let bytes = to_bytes(body, MAX_PROBLEM_BYTES).await.unwrap_or_default();
    let Ok(problem) = serde_json::from_slice::<ProblemDocument>(&bytes) else {
        return Response::from_parts(parts, Body::from(bytes));
    };
    if parts.status == StatusCode::UNPROCESSABLE_ENTITY {
        parts.status = StatusCode::BAD_REQUEST;
    }
    let retry = if problem.retryable { "true" } else { "false" };
    let error = of_problem(parts.status, problem);
    let mut translated = (parts.status, axum::Json(error)).into_response();
    parts.headers.remove(header::CONTENT_TYPE);
    parts.headers.remove(header::CONTENT_LENGTH);
    translated.headers_mut().extend(parts.headers);
    translated.headers_mut().insert(X_SHOULD_RETRY, HeaderValue::from_static(retry));
    translated.extensions_mut().insert(IsProblem);
    translated
}

fn of_problem(status: StatusCode, problem: ProblemDocument) -> OpenAiError {
    let ProblemDocument { detail, code, errors, .. } = problem;
    let first = errors.into_iter().next();
    let param = first.as_ref().map(|item| item.pointer.trim_start_matches('/').replace('/', "."));
    let (kind, known) = match status {
        StatusCode::UNAUTHORIZED => ("invalid_request_error", Some("invalid_api_key")),
        StatusCode::FORBIDDEN => ("permission_error", None),
        StatusCode::TOO_MANY_REQUESTS => ("rate_limit_error", Some("rate_limit_exceeded")),
        status if status.is_server_error() => ("server_error", None),
        _ => ("invalid_request_error", None),
    };
    let (message, of_item) = match first {
        Some(item) => (item.detail, Some(item.code)),
        None => (detail, None),
    };
    let code = known.map(str::to_owned).or(of_item).unwrap_or(code);
    OpenAiError { error: OpenAiErrorBody { message, kind, param: param.filter(|param| !param.is_empty()), code } }
}

/// The error of a stream that has begun; openai-python raises it as `APIError`.
pub(super) fn in_stream(message: &str) -> OpenAiError {
    let body = OpenAiErrorBody {
        message: message.to_owned(),
        kind: "server_error",
        param: None,
        code: "generation_failed".to_owned(),
    };
    OpenAiError { error: body }
}
