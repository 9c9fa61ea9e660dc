//! The settings of rollout servers, which sample completions in place of the worker's own engine.

use serde_json::{Value, json};
use utoipa::PartialSchema;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ArrayBuilder, Schema};

use super::DefaultValue::{Flag, Number, Whole};
use super::{Kind, Range, Section, Setting, variant_names};
use crate::spec::plan::{CorrectionMode, RolloutPlan};
use crate::spec::schema::{closed, described, enumeration, string};

/// Default of the largest importance weight (TRL's `vllm_importance_sampling_clip_max`).
pub(in crate::spec) const MAX_WEIGHT: f64 = 3.0;

pub(in crate::spec) static ROLLOUT: Section = Section::new(
    "rollout",
    "Rollout servers",
    "Servers that sample the completions. Without this section, the worker samples with the engine that trains.",
    &[
        Setting::new("engine", Kind::Own { read: read_engine, schema: engine, says: "`own` or `vllm`" })
            .required("give \"vllm\", or leave out rollout: the worker then samples itself")
            .doc("The engine that samples: `own` (the worker itself, as without this section) or `vllm`."),
        Setting::new(
            "servers",
            Kind::Part { schema: servers, says: "a list of `{url, api_key, path_map: {from, to}}`" },
        )
        .doc("The servers, each with the same base model.")
        .label("Servers, as JSON"),
        Setting::flag("colocate")
            .doc("Whether the worker starts one server itself, on its own device.")
            .default(Flag(false)),
        Setting::number("memory_share", Range::above(0.0).below(1.0)).default(Number(0.3)),
        Setting::new("correction", Kind::Part { schema: correction, says: "`{mode, max, min}`" })
            .label("Correction, as JSON"),
        Setting::whole("max_concurrency", 1, 4096).default(Whole(32)),
        Setting::whole("timeout_s", 1, 604_800)
            .doc("Seconds without any usable server after which the job pauses; it resumes when a server is back.")
            .default(Whole(600)),
    ],
)
.of_plan(RolloutPlan::schema)
.optional();

fn read_engine(field: &crate::spec::reader::Field<'_>) -> Option<Value> {
    field.one_of(&["own", "vllm"]).map(|engine| json!(engine))
}

fn engine() -> RefOr<Schema> {
    enumeration("", &["own", "vllm"])
}

fn servers() -> RefOr<Schema> {
    let map = closed(&["from", "to"])
        .property("from", string("The folder of adapters as the worker sees it."))
        .property("to", string("The same folder as the server sees it."))
        .description(Some("Where the server sees the worker's folder of adapters; absent = at the same path."))
        .build();
    let server = closed(&["url"])
        .property("url", string("Address of the server, without `/v1`."))
        .property("api_key", string("The server's API key (write-only: it is never shown again)."))
        .property("path_map", map)
        .build();
    ArrayBuilder::new().items(server).max_items(Some(64)).build().into()
}

fn correction() -> RefOr<Schema> {
    let number = |text: &str| described(f64::schema(), text);
    closed(&[])
        .property("mode", enumeration("The form of the importance weight.", &variant_names::<CorrectionMode>()))
        .property("max", number("Largest importance weight; default 3."))
        .property("min", number("Smallest importance weight; absent = no lower limit."))
        .description(Some("How training corrects for log-probs of the servers that differ from the model's."))
        .build()
        .into()
}
