//! The OpenAPI document: generated from the handlers, completed here with the parts that all operations share.

use utoipa::openapi::path::{Operation, PathItem, Paths};
use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};
use utoipa::openapi::security::{ApiKey, ApiKeyValue, Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};
use utoipa::openapi::tag::TagBuilder;
use utoipa::openapi::{
    ComponentsBuilder, ContentBuilder, InfoBuilder, LicenseBuilder, OpenApi, OpenApiBuilder, Ref, RefOr,
    ResponseBuilder,
};

use super::error::ProblemBody;
use super::{contract, messages};
use crate::scopes::{self, Access, Scope};
use crate::spec::HubDataset;

const BEARER: &str = "bearer";
const SESSION: &str = "session";
const PROBLEM: &str = "Problem";
const OPENAI_ERROR: &str = "OpenAiError";
const DESCRIPTION: &str = "RLOO (REINFORCE Leave-One-Out) training of language models as an HTTP service.\n\n\
    A job needs a model, a dataset and a reward. Errors are `application/problem+json` (RFC 9457): check `code`. \
    Lists are `{data, next}`: send `next` as `after`. Times are RFC 3339 in UTC. \
    Bodies may be sent with `content-encoding: gzip`. `x-request-id` is taken from the request or generated, and returned.\n\n\
    Workers (`rlood worker`) use a separate protocol, which is not in this document; a worker whose protocol version differs from \
    the server's is refused with 409 `protocol_mismatch` and gets no job until it is updated.";
const TAGS: [(&str, &str); 13] = [
    ("Jobs", "Training jobs: submit, monitor, control."),
    ("Datasets", "Prompts and the columns that rewards need; immutable."),
    ("Models", "Directories in Hugging Face's layout that jobs train on."),
    ("Verdicts", "Base model and trained model compared on the same rows."),
    ("Adapters", "Uploaded or downloaded PEFT adapters that jobs start from."),
    ("Artifacts", "Checkpoints and adapters of jobs."),
    (
        "Serving",
        "Base models and checkpoints over the API of OpenAI. Errors are objects `{error: {message, type, param, code}}`.",
    ),
    ("Rewards", "Test a reward before a job depends on it; monitor the rewards of a job."),
    ("System", "Health, metrics, workers, sessions."),
    ("Keys", "API keys and the audit log."),
    ("Webhooks", "Notifications about jobs."),
    ("Reward contract", "Requests to reward services, and their responses."),
    ("Environment contract", "Requests to servers of environments, and their responses."),
];

/// Creates the OpenAPI document before the paths are added.
pub(super) fn head() -> OpenApi {
    let info =
        InfoBuilder::new().title("rlood").version(env!("CARGO_PKG_VERSION")).description(Some(DESCRIPTION)).license(
            Some(LicenseBuilder::new().name("MIT OR Apache-2.0").identifier(Some("MIT OR Apache-2.0")).build()),
        );
    let tags = TAGS.map(|(name, description)| TagBuilder::new().name(name).description(Some(description)).build());
    let problem = ResponseBuilder::new()
        .description("The error as a problem (RFC 9457).")
        .content("application/problem+json", ContentBuilder::new().schema(Some(Ref::from_schema_name(PROBLEM))).build())
        .build();
    let openai_error = ResponseBuilder::new()
        .description("The error in OpenAI's form.")
        .content("application/json", ContentBuilder::new().schema(Some(Ref::from_schema_name(OPENAI_ERROR))).build())
        .build();
    let bearer = Http::builder()
        .scheme(HttpAuthScheme::Bearer)
        .description(Some(
            "An API key: the server's RLOOD_API_KEY, or one created with `rlood keys create` or POST /keys; the required scope is listed \
             with each operation. A server without any key listens on loopback only and needs no header.",
        ))
        .build();
    let session = ApiKeyValue::with_description(
        "rlood_session",
        "The cookie of POST /session; everything but GET also needs 'x-csrf-token'.",
    );
    // No operation names this schema, because bodies with rows have the same content type.
    let components = ComponentsBuilder::new()
        .schema_from::<HubDataset>()
        .schema_from::<ProblemBody>()
        .response(PROBLEM, problem)
        .response(OPENAI_ERROR, openai_error)
        .security_scheme(BEARER, SecurityScheme::Http(bearer))
        .security_scheme(SESSION, SecurityScheme::ApiKey(ApiKey::Cookie(session)));
    OpenApiBuilder::new().info(info).tags(Some(tags)).components(Some(components.build())).build()
}

/// The security requirement of a route: a key or a session with the required scope, or nothing on a server without keys.
fn security(access: Option<Access>) -> Vec<SecurityRequirement> {
    match access {
        Some(Access::Open) => vec![SecurityRequirement::default()],
        None => security(Some(Access::Needs(Scope::Admin))),
        Some(Access::Needs(scope)) => vec![
            SecurityRequirement::new(BEARER, [scope.as_str()]),
            SecurityRequirement::new(SESSION, [scope.as_str()]),
            SecurityRequirement::default(),
        ],
    }
}

/// Returns the document served at `/openapi.json`, printed by `rlood openapi` and committed as `openapi/openapi.json`.
pub fn openapi() -> OpenApi {
    let mut document = super::documented_routes().split_for_parts().1;
    for (path, item) in &mut document.paths.paths {
        // One handler answers GET and HEAD, but operation ids must be unique.
        if let Some(id) = item.head.as_mut().and_then(|operation| operation.operation_id.as_mut()) {
            id.push_str("_head");
        }
        for (method, operation) in operations(item) {
            operation.security = Some(security(scopes::of_route(method, path)));
            for parameter in operation.parameters.iter_mut().flatten() {
                if let RefOr::T(parameter) = parameter
                    && parameter.name.eq_ignore_ascii_case("idempotency-key")
                {
                    parameter.schema = Some(idempotency_key());
                }
            }
            // Every error response of every operation is a problem document, or an error in OpenAI's form. Handlers list the responses
            // that have a specific meaning.
            if super::v1::is_openai(path) {
                let error = RefOr::Ref(Ref::from_response_name(OPENAI_ERROR));
                operation.responses.responses.entry("default".to_owned()).or_insert(error);
                continue;
            }
            let problem = RefOr::Ref(Ref::from_response_name(PROBLEM));
            operation.responses.responses.entry("default".to_owned()).or_insert(problem);
            for (status, response) in &mut operation.responses.responses {
                if let (true, RefOr::T(response)) = (status.starts_with(['4', '5']), response)
                    && let Some(body) = response.content.swap_remove("application/json")
                {
                    response.content.insert("application/problem+json".to_owned(), body);
                }
            }
        }
    }
    let mut webhooks = Paths::new();
    for (paths, components) in [contract::webhooks(), messages::webhooks()] {
        document.merge(OpenApiBuilder::new().components(components).build());
        webhooks.paths.extend(paths.paths);
    }
    document.webhooks = Some(webhooks);
    document
}

/// The schema of the `Idempotency-Key` header, as [`super::idempotency`] accepts it.
fn idempotency_key() -> RefOr<Schema> {
    ObjectBuilder::new()
        .schema_type(Type::String)
        .min_length(Some(1))
        .max_length(Some(255))
        .pattern(Some("^[!-~]+$"))
        .examples([serde_json::json!("0b6d4c9e-5d0e-4f0c-9a53-3f8b8f6f6f10")])
        .build()
        .into()
}

fn operations(item: &mut PathItem) -> impl Iterator<Item = (&'static str, &mut Operation)> {
    let PathItem { get, put, post, delete, options, head, patch, trace, .. } = item;
    let named = [
        ("GET", get),
        ("PUT", put),
        ("POST", post),
        ("DELETE", delete),
        ("OPTIONS", options),
        ("HEAD", head),
        ("PATCH", patch),
        ("TRACE", trace),
    ];
    named.into_iter().filter_map(|(method, operation)| operation.as_mut().map(|operation| (method, operation)))
}
