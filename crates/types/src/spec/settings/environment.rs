//! The settings of a job's environment.

use serde_json::{Value, json};
use utoipa::PartialSchema;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{AdditionalProperties, ObjectBuilder, Schema, Type};

use super::DefaultValue::{Variant, Whole};
use super::{Kind, Section, Setting, variant_names};
use crate::spec::plan::{EnvironmentPlan, EpisodeReturn, OnParseError};
use crate::spec::reader::Field;
use crate::spec::schema::{enumeration, string};

/// Names of the parsers of tool calls; `auto` = by the model's chat template.
const PARSERS: [&str; 9] = ["auto", "qwen", "hermes", "qwen3_coder", "llama3", "mistral", "gemma", "phi", "none"];

pub(in crate::spec) static ENVIRONMENT: Section = Section::new(
    "environment",
    "Environment",
    "A server that plays episodes of several turns with the model, or the limits of a job with `tools`. Without both, a completion is one turn.",
    &[
        Setting::new("type", Kind::Own { read: read_kind, schema: kind, says: "`http`, `openenv` or `tools`" })
            .doc("The protocol of the server: `http`, rlood's own contract, version 1; `openenv`, an OpenEnv server over its WebSocket. In a job with `tools` it is `tools`.")
            .default(Variant("http")),
        Setting::new("url", Kind::Part { schema: url, says: "an http or https address" })
            .doc("Address of the server, http or https. A job with `tools` has none."),
        Setting::new("name", Kind::Text(64))
            .doc("Name of the environment, which its requests carry; default: environment."),
        Setting::new("secret", Kind::Part { schema: secret, says: "`whsec_…`" })
            .doc("Secret that signs the requests (write-only: it is never shown again)."),
        Setting::new("previous_secret", Kind::Part { schema: secret, says: "`whsec_…`" })
            .doc("The secret before, while it is replaced (write-only)."),
        Setting::new("headers", Kind::Part { schema: headers, says: "an object of texts" })
            .doc("Headers that are sent with every request (write-only)."),
        Setting::new("params", Kind::Part { schema: params, says: "an object" }).label("Parameters, as JSON"),
        Setting::whole("max_turns", 1, 1000).default(Whole(8)),
        Setting::whole("max_episode_tokens", 1, 1_048_576).default(Whole(4096)),
        Setting::whole("max_observation_tokens", 16, 1_048_576).default(Whole(1024)),
        Setting::variant("return", variant_names::<EpisodeReturn>).default(Variant("sum")),
        Setting::new("tool_parser", Kind::Own { read: read_parser, schema: parser, says: "a name" })
            .default(Variant("auto")),
        Setting::variant("on_parse_error", variant_names::<OnParseError>).default(Variant("reply")),
        Setting::whole("max_parse_errors", 1, 100).default(Whole(2)),
        Setting::whole("max_restarts", 0, 100).default(Whole(1)),
        Setting::whole("max_open_episodes", 1, 65_536)
            .doc("Maximum number of episodes that are open at a time; default: all episodes of a rollout. Set it to the number of sessions that the server allows."),
        Setting::whole("max_concurrency", 1, 256).doc("Maximum number of requests at a time.").default(Whole(32)),
        Setting::whole("timeout_ms", 1, 86_400_000)
            .doc("Time limit of one try, in milliseconds; with `tools` the default is that of deadline_ms.")
            .default(Whole(30_000)),
        Setting::whole("deadline_ms", 1, 604_800_000)
            .doc("Time limit of an answer including all tries, in milliseconds.")
            .default(Whole(600_000)),
        Setting::whole("max_tries", 1, 100)
            .doc("Tries in a row for transport errors and the statuses 408, 425, 429 and 5xx, before the waits grow. With `tools` the default is 3, and a call that still fails leaves its episode without a reward.")
            .default(Whole(5)),
        Setting::whole("max_invalid_tries", 1, 100)
            .doc("Number of answers to one request that may be invalid.")
            .default(Whole(2)),
        Setting::whole("max_outage_s", 1, 604_800)
            .doc("Seconds without an answer after which the job pauses; it resumes when the server is back.")
            .default(Whole(600)),
    ],
)
.of_plan(EnvironmentPlan::schema)
.optional();

/// Names of the protocols.
const KINDS: [&str; 3] = ["http", "openenv", "tools"];

fn read_kind(field: &Field<'_>) -> Option<Value> {
    let known = [("ors", "ORS servers"), ("nemo_gym", "NeMo Gym servers")];
    if let Some((_, what)) =
        field.value().and_then(Value::as_str).and_then(|kind| known.iter().find(|(name, _)| *name == kind))
    {
        let remedy = "use type http, with rlood's own contract, or openenv";
        field.fail("unsupported", format!("{what} are not supported yet; {remedy}"));
        return None;
    }
    field.one_of(&KINDS).map(|kind| json!(kind))
}

fn kind() -> RefOr<Schema> {
    enumeration("", &KINDS)
}

fn read_parser(field: &Field<'_>) -> Option<Value> {
    field.one_of(&PARSERS).map(|name| json!(name))
}

fn parser() -> RefOr<Schema> {
    enumeration("", &PARSERS)
}

fn url() -> RefOr<Schema> {
    string("Address of the server.")
}

fn secret() -> RefOr<Schema> {
    string("`whsec_` followed by 24 to 64 random bytes in base64.")
}

fn headers() -> RefOr<Schema> {
    let texts = AdditionalProperties::RefOr(string("Value of the header."));
    ObjectBuilder::new().schema_type(Type::Object).additional_properties(Some(texts)).build().into()
}

fn params() -> RefOr<Schema> {
    ObjectBuilder::new()
        .schema_type(Type::Object)
        .additional_properties(Some(AdditionalProperties::<Schema>::FreeForm(true)))
        .build()
        .into()
}
