//! The OpenAPI document: made from the handlers, finished here.

use utoipa::openapi::{InfoBuilder, OpenApi, OpenApiBuilder};

/// The document without its paths.
pub(super) fn head() -> OpenApi {
    let info = InfoBuilder::new()
        .title("rlood")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some("RLOO training of language models as an HTTP service."));
    OpenApiBuilder::new().info(info).build()
}

/// The document served at `/openapi.json`, printed by `rlood openapi` and committed as `openapi/openapi.json`.
pub fn openapi() -> OpenApi {
    super::routes().split_for_parts().1
}
