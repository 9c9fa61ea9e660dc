//! The settings of the LoRA adapter.

use serde_json::Value;
use utoipa::PartialSchema;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{Array, OneOfBuilder, Schema};

use super::DefaultValue::{Flag, Number, Whole, Words};
use super::{Form, Kind, Range, Resume, Section, Setting, Trl};
use crate::spec::plan::LoraPlan;
use crate::spec::reader::Field;
use crate::spec::schema::enumeration;

/// The projections that most models have, in the order of the plan.
pub(in crate::spec) const ALL_LINEAR: [&str; 7] =
    ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
/// The projections that can have an adapter. Some models (Phi-3, Granite 4) store several as one; the last five are those of
/// The Gated DeltaNet layers of Qwen3.5.
const PROJECTIONS: [&str; 16] = [
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "qkv_proj",
    "gate_up_proj",
    "input_linear",
    "output_linear",
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_b",
    "in_proj_a",
    "out_proj",
];

// TRL's defaults are those of trl.ModelConfig (1.16) and of peft.LoraConfig (0.21).
pub(in crate::spec) static LORA: Section = Section::new(
    "lora",
    "Adapter",
    "The LoRA adapter.",
    &[
        Setting::whole("r", 1, 4096)
            .hint("the adapter's rank; 16 is usual")
            .default(Whole(16))
            .trl(Trl::Adapter(Form::Plain, ("lora_r", Whole(16)), ("r", Whole(8))))
            .resume(Resume::Fixed)
            .label("Adapter rank")
            .prominent(8),
        Setting::number("alpha", Range::above(0.0))
            .default(Number(32.0))
            .trl(Trl::Adapter(Form::Plain, ("lora_alpha", Whole(32)), ("lora_alpha", Whole(8))))
            .resume(Resume::Fixed),
        Setting::number("dropout", Range::at_least(0.0).noting("0 = off").below(1.0))
            .default(Number(0.0))
            .trl(Trl::Adapter(Form::Number, ("lora_dropout", Number(0.05)), ("lora_dropout", Number(0.0))))
            .resume(Resume::Fixed),
        Setting::new(
            "target_modules",
            Kind::Own {
                read: read_target_modules,
                schema: target_modules,
                says: "\"all-linear\", or a list of projections",
            },
        )
        .doc("Projections that get an adapter.")
        .default(Words(&ALL_LINEAR))
        .trl(Trl::Adapter(
            Form::Modules,
            ("lora_target_modules", Words(&["q_proj", "v_proj"])),
            ("target_modules", Words(&["q_proj", "v_proj"])),
        ))
        .resume(Resume::Fixed),
        Setting::flag("use_rslora")
            .default(Flag(false))
            .trl(Trl::Adapter(Form::Flag, ("use_rslora", Flag(false)), ("use_rslora", Flag(false))))
            .resume(Resume::Fixed),
    ],
)
.of_plan(LoraPlan::schema);

fn read_target_modules(field: &Field<'_>) -> Option<Value> {
    if field.value().is_some_and(Value::is_string) {
        field.one_of(&["all-linear"]);
        return None;
    }
    let items = field.items()?;
    if items.is_empty() {
        field.fail("invalid_value", "name at least one module, or \"all-linear\"");
    }
    let chosen: Vec<_> = items.iter().filter_map(|item| item.one_of(&PROJECTIONS)).collect();
    Some(PROJECTIONS.into_iter().filter(|name| chosen.contains(name)).map(Value::from).collect())
}

fn target_modules() -> RefOr<Schema> {
    let list = RefOr::T(Schema::Array(Array::new(enumeration("", &PROJECTIONS))));
    OneOfBuilder::new().item(enumeration("All projections of the model.", &["all-linear"])).item(list).into()
}
