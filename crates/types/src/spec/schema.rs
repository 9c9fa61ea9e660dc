//! The schema of a submitted job. Its sections come from the tables of `settings`, its rewards from the plan's types. Most fields
//! are optional, and unknown fields are rejected.
//!
//! Longer than 500 lines: the parts of a job are described in one place, as they refer to each other.

use serde_json::{Map, Value, json};
use utoipa::openapi::schema::{
    AdditionalProperties, AnyOf, Array, ObjectBuilder, OneOfBuilder, Schema, SchemaType, Type,
};
use utoipa::openapi::{Object, Ref, RefOr};
use utoipa::{PartialSchema, ToSchema};

use super::plan::BUILTINS;
use super::settings::{SECTIONS, form_layout, runtime_names};
use super::{
    AnswerPlace, DatasetPlan, EvalPlan, HttpTemplatePlan, HttpToolPlan, JobSpec, LabelPlan, LengthUnit, MAX_ABS_REWARD,
    McpToolsPlan, OpenaiJudgePlan, OpenrlhfPlan, OptimizerPlan, PairPlan, Plan, PythonPlan, RewardModelPlan, RlooPlan,
    ServicePlan, SimilarityMetric, SlimePlan, StringOperation, TextPlan, VllmPoolingPlan, WarmUpPlan, WebhookPlan,
};

/// Name of a reward's schema in the OpenAPI document.
const REWARD: &str = "RewardSpec";
/// Names of the schemas of tools in the OpenAPI document.
const MCP_TOOLS: &str = "McpToolsSpec";
const HTTP_TOOL: &str = "HttpToolSpec";

/// The schema of a job as clients write it. It describes what [`JobSpec::read`] accepts.
#[derive(Debug)]
pub struct JobDocument;

impl PartialSchema for JobDocument {
    fn schema() -> RefOr<Schema> {
        let job = SECTIONS.into_iter().fold(closed(&["model", "dataset", "rewards"]), |job, section| {
            let schema = match section.name {
                "lora" => or_null(
                    object(section.schema()),
                    "The LoRA adapter; null = full fine-tuning: every weight is trained.",
                ),
                "runtime" => OneOfBuilder::new()
                    .item(object(section.schema()))
                    .item(enumeration("The name of the runtime alone.", &runtime_names()))
                    .description(Some(section.doc))
                    .into(),
                _ => object(section.schema()),
            };
            job.property(section.name, schema)
        });
        job.property("name", string("Display name: 1 to 200 characters, without control characters."))
            .property("model", string("Id of a registered model."))
            .property("dataset", dataset("The training prompts."))
            .property("rewards", rewards())
            .property("tools", tools())
            .property("metadata", texts("The client's own labels."))
            .property("priority", integer("Priority in the queue; jobs with a higher number run first.", json!(0)))
            .examples([json!({"model": "org/name", "dataset": {"records": [{"prompt": "…"}]}, "rewards": [{"type": "length"}]})])
            .description(Some("A job. Everything but model, dataset and rewards has a default."))
            .extensions(Some(form_layout()))
            .build()
            .into()
    }
}

impl ToSchema for JobDocument {
    fn name() -> std::borrow::Cow<'static, str> {
        "JobSpec".into()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        schemas.extend(reward_schemas());
        RlooPlan::schemas(schemas);
        OptimizerPlan::schemas(schemas);
        WebhookPlan::schemas(schemas);
        schemas.extend([(MCP_TOOLS.to_owned(), mcp_tools()), (HTTP_TOOL.to_owned(), http_tool())]);
        for (name, schema) in [
            ("Combine", super::Combine::schema()),
            ("Estimator", super::Estimator::schema()),
            ("KlEstimator", super::KlEstimator::schema()),
            ("KlIn", super::KlIn::schema()),
            ("Loss", super::Loss::schema()),
            ("RewardNormalization", super::RewardNormalization::schema()),
            ("LrSchedulerType", super::LrSchedulerType::schema()),
            ("OnInvalid", super::OnInvalid::schema()),
            ("AnswerPlace", AnswerPlace::schema()),
            ("LengthUnit", LengthUnit::schema()),
            ("SimilarityMetric", SimilarityMetric::schema()),
            ("StringOperation", StringOperation::schema()),
        ] {
            schemas.push((name.to_owned(), schema));
        }
    }
}

/// The schema of a job that is validated but not submitted. It allows any JSON, because errors in the job are part of the response.
#[derive(Debug)]
pub struct DraftDocument;

impl PartialSchema for DraftDocument {
    fn schema() -> RefOr<Schema> {
        let anything = ObjectBuilder::new()
            .schema_type(SchemaType::AnyValue)
            .description(Some("Any other JSON is accepted too; the response lists its errors."))
            .build();
        Schema::AnyOf(AnyOf { items: vec![Ref::from_schema_name("JobSpec").into(), anything.into()], ..AnyOf::new() })
            .into()
    }
}

impl ToSchema for DraftDocument {
    fn name() -> std::borrow::Cow<'static, str> {
        "JobDraft".into()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        schemas.push((JobDocument::name().into_owned(), JobDocument::schema()));
        JobDocument::schemas(schemas);
    }
}

/// The schema of the plan of a job that is only validated. A dataset that is not stored yet has neither id nor hash.
#[derive(Debug)]
pub struct DraftPlan;

impl PartialSchema for DraftPlan {
    fn schema() -> RefOr<Schema> {
        let id =
            or_null(Ref::from_schema_name("DatasetId").into(), "Id of the dataset; null when it is not stored yet.");
        let sha256 = or_null(
            string(""),
            "SHA-256 of the canonical rows, in lower-case hex; null when the dataset is not stored yet.",
        );
        let dataset = with_property(DatasetPlan::schema(), "id", id);
        let dataset = object(with_property(object(dataset), "sha256", sha256));
        let eval = object(with_property(EvalPlan::schema(), "dataset", dataset.clone()));
        let warm_up = object(with_property(WarmUpPlan::schema(), "dataset", dataset.clone()));
        let mut plan = with_property(Plan::schema(), "dataset", dataset);
        let text = "Supervised steps before the first RLOO step; null = no warm-up.";
        plan.properties.insert("warm_up".to_owned(), or_null(warm_up, text));
        plan.properties.insert("eval".to_owned(), or_null(eval, "Evaluation settings; null = no evaluation."));
        plan.description = Some(
            "The plan of a job that has not been submitted. Like `Plan`, except that a dataset may not be stored yet."
                .to_owned(),
        );
        plan.into()
    }
}

impl ToSchema for DraftPlan {
    fn name() -> std::borrow::Cow<'static, str> {
        "PlanDraft".into()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        Plan::schemas(schemas);
    }
}

/// The schema of the `spec` field of a form, whose dataset is in another field.
#[derive(Debug)]
pub struct FormDocument;

impl PartialSchema for FormDocument {
    fn schema() -> RefOr<Schema> {
        let mut job = into_object(JobDocument::schema());
        job.properties.retain(|name, _| name != "dataset");
        job.required.retain(|name| name != "dataset");
        job.examples = vec![json!({"model": "org/name", "rewards": [{"type": "length"}]})];
        job.description = Some("A job whose dataset is in another field of the form.".to_owned());
        job.into()
    }
}

impl ToSchema for FormDocument {
    fn name() -> std::borrow::Cow<'static, str> {
        "FormJobSpec".into()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        JobDocument::schemas(schemas);
    }
}

fn or_null(schema: RefOr<Schema>, text: &str) -> RefOr<Schema> {
    OneOfBuilder::new().item(schema).item(plain(Type::Null, "")).description(Some(text)).into()
}

pub(super) fn dataset(text: &str) -> RefOr<Schema> {
    let display_name = string("Display name of the dataset that is stored from `hub` or `records`; null = none.");
    let one = [("name", display_name), ("sources", joined())];
    let one = source(format!("{text} Give one of `id`, `records` and `hub`."), &one);
    let name = string(
        "Name of the source, unique in the list; metrics are `sources/{name}/…`. Default: the repository's name, with `-` and its configuration, split, owner or a number where that is not unique; without a repository, the position in the list.",
    );
    let weight = number(
        "Weight of the source. Its share of the prompts is its weight divided by the sum of all weights; default: its number of rows.",
    );
    let several = source("One of several sources.".to_owned(), &[("name", name), ("weight", weight)]);
    let several = Array::new(several);
    OneOfBuilder::new()
        .item(one)
        .item(RefOr::T(Schema::Array(several)))
        .description(Some(format!("{text} One dataset, or a list of several that are mixed.")))
        .into()
}

fn source(text: String, more: &[(&str, RefOr<Schema>)]) -> RefOr<Schema> {
    let rows = Array::new(
        ObjectBuilder::new()
            .description(Some("A row: `prompt` (a string or chat messages) and columns for the rewards."))
            .build(),
    );
    let source = closed(&[])
        .property("id", string("Id of an uploaded dataset."))
        .property("records", RefOr::T(Schema::Array(rows)))
        .property("hub", string("Dataset on the Hugging Face Hub: `org/name`, or `org/name@revision`."))
        .property("revision", string("Branch, tag or commit; default: `main`."))
        .property(
            "config",
            string("Configuration (subset); default: the default configuration, or the only one. Otherwise required."),
        )
        .property("split", string("Split; default: `train`, or the only split."))
        .property("map", Ref::from_schema_name("DatasetMap"))
        .property(
            "limit",
            plain(Type::Integer, "Maximum number of rows: the first ones, or with `seed` a random sample."),
        )
        .property("seed", plain(Type::Integer, "Seed of the random sample."))
        .description(Some(text));
    let source = more.iter().cloned().fold(source, |source, (name, schema)| source.property(name, schema));
    source.build().into()
}

/// Returns the schema of sources as they appear in a plan.
fn joined() -> RefOr<Schema> {
    let mut sources = Array::new(Ref::from_schema_name("SourcePlan"));
    sources.description = Some("With `id`: the sources of the dataset's rows, one after another.".to_owned());
    RefOr::T(Schema::Array(sources))
}

pub(super) fn rewards() -> RefOr<Schema> {
    RefOr::T(Schema::Array(Array::new(Ref::from_schema_name(REWARD))))
}

/// Returns the schema of the list of tools.
fn tools() -> RefOr<Schema> {
    let tool = OneOfBuilder::new()
        .item(Ref::from_schema_name(MCP_TOOLS))
        .item(Ref::from_schema_name(HTTP_TOOL))
        .description(Some("MCP servers and HTTP tools that the model may call in episodes of several turns."));
    let mut tools = Array::new(tool);
    tools.description = Some(
        "Tools without an environment: the job's rewards score the episodes, and the section `environment` has their limits."
            .to_owned(),
    );
    RefOr::T(Schema::Array(tools))
}

fn mcp_tools() -> RefOr<Schema> {
    let mut own = into_object(McpToolsPlan::schema());
    own.required.retain(|name| name != "name");
    let name = "Name of the server in messages, and of its secrets; unique in the job. Default: mcp.";
    own.properties.insert("name".to_owned(), string(name));
    tool("mcp", own)
}

fn http_tool() -> RefOr<Schema> {
    let mut own = into_object(HttpToolPlan::schema());
    own.required.retain(|name| !matches!(name.as_str(), "description" | "parameters"));
    tool("http", own)
}

fn tool(kind: &str, mut object: Object) -> RefOr<Schema> {
    object.additional_properties = Some(Box::new(AdditionalProperties::FreeForm(false)));
    object.required.insert(0, "type".to_owned());
    object.properties.insert("type".to_owned(), enumeration("The kind of the entry.", &[kind]));
    let headers = write_only(texts("Headers that are sent with every request; never shown again."));
    object.properties.insert("headers".to_owned(), headers);
    object.into()
}

/// Returns the schemas of a reward and of each reward type, with their names in the OpenAPI document.
fn reward_schemas() -> Vec<(String, RefOr<Schema>)> {
    let types = reward_types();
    let any = types.iter().fold(OneOfBuilder::new(), |any, reward| any.item(Ref::from_schema_name(reward.title())));
    let any = any.description(Some("A reward. The field `type` selects its kind."));
    let schemas = types.into_iter().map(|reward| (reward.title(), reward_schema(reward)));
    std::iter::once((REWARD.to_owned(), any.into())).chain(schemas).collect()
}

fn reward_schema(RewardType { name: kind, schema, required, mut minimal }: RewardType) -> RefOr<Schema> {
    minimal["type"] = json!(kind);
    let (spec, _) = JobSpec::read(json!({"rewards": [minimal]}));
    let reward = spec.rewards.first();
    let is_service = reward.is_some_and(|reward| reward.kind.service().is_some());
    let defaults = reward.and_then(|reward| serde_json::to_value(reward).ok());
    let mut own = Object::new();
    if is_service {
        own.properties.extend(into_object(ServicePlan::schema()).properties);
    }
    own.description = into_object(schema.clone()).description;
    own.properties.extend(into_object(schema).properties);
    let is_python = kind == "python";
    if is_python {
        // The worker and the server set these fields of a plan, so a job document does not have them.
        own.properties.retain(|name, _| !["url", "sha256"].contains(&name.as_str()));
    }
    own.schema_type = Type::Object.into();
    let mut object = into_object(optional(own.into(), defaults.as_ref(), required));
    for name in required.iter().chain(&["text"]) {
        forget_default(&mut object, name);
    }
    object.required.insert(0, "type".to_owned());
    object.properties.insert("type".to_owned(), enumeration("The reward's type.", &[kind]));
    let default_name = if is_python { "the function" } else { "the type" };
    object
        .properties
        .insert("name".to_owned(), string(&format!("Name of the reward, unique in the job; default: {default_name}.")));
    let weight = number("Weight in the sum of rewards, between -1000000 and 1000000; 0 = logged as a metric only.");
    object.properties.insert("weight".to_owned(), defaulted(weight, json!(1.0)));
    let limit = number("Maximum absolute value. A value further from 0 is invalid, as NaN is.");
    object.properties.insert("max_abs_reward".to_owned(), defaulted(limit, json!(MAX_ABS_REWARD)));
    if reward.is_some_and(|reward| reward.kind.has_reference()) {
        let blank = enumeration(
            "What a row with a blank reference means (null, missing, empty or only whitespace). not_applicable: the reward does not apply to the row. compare: the reference is compared like any text.",
            &["not_applicable", "compare"],
        );
        object.properties.insert("blank_reference".to_owned(), defaulted(blank, json!("not_applicable")));
    }
    let mut sources = Array::new(string(""));
    sources.description = Some(
        "With several dataset sources: names of the sources whose rows this reward judges; default: all.".to_owned(),
    );
    object.properties.insert("applies_to".to_owned(), RefOr::T(Schema::Array(sources)));
    object.properties.insert(
        "required".to_owned(),
        flag(
            "Whether a sample without this reward is unscorable. If false, a missing value counts as not applicable.",
            true,
        ),
    );
    if kind == "webhook" {
        let secret = write_only(string(
            "Signing secret, `whsec_…`; never shown again. Without a secret, requests are not signed.",
        ));
        object.properties.insert("secret".to_owned(), secret);
        let previous = "Previous signing secret during a rotation; requests are signed with both. Never shown again.";
        object.properties.insert("previous_secret".to_owned(), write_only(string(previous)));
    }
    if is_service && !is_python {
        let headers = write_only(texts("Headers that are sent with every request; never shown again."));
        object.properties.insert("headers".to_owned(), headers);
    }
    object.into()
}

/// A reward type: the schema of its plan, its required fields, and an example with only these.
struct RewardType {
    name: &'static str,
    schema: RefOr<Schema>,
    required: &'static [&'static str],
    minimal: Value,
}

impl RewardType {
    /// Returns the schema's name in the OpenAPI document, such as `LengthRewardSpec` for `length`.
    fn title(&self) -> String {
        let word = |word: &str| word[..1].to_uppercase() + &word[1..];
        self.name.split('_').map(word).collect::<String>() + REWARD
    }
}

fn reward_types() -> Vec<RewardType> {
    const AT: &str = "https://rm.example/score";
    let kind = |name, schema, required: &'static [&'static str], minimal: Value| RewardType {
        name,
        schema,
        required,
        minimal,
    };
    let at = |name, schema| kind(name, schema, &["url"], json!({"url": AT}));
    let services = [
        at("webhook", WebhookPlan::schema()),
        at("openrlhf", OpenrlhfPlan::schema()),
        at("slime", SlimePlan::schema()),
        at("llamafactory", TextPlan::schema()),
        at("tei_predict", LabelPlan::schema()),
        at("tei_rerank", PairPlan::schema()),
        at("vllm_classify", LabelPlan::schema()),
        at("vllm_score", PairPlan::schema()),
        at("vllm_pooling", VllmPoolingPlan::schema()),
        at("sglang_classify", LabelPlan::schema()),
        at("hf_text_classification", LabelPlan::schema()),
        kind(
            "openai_judge",
            OpenaiJudgePlan::schema(),
            &["url", "model", "rubric"],
            json!({"url": AT, "model": "m", "rubric": "r"}),
        ),
        kind(
            "http_template",
            HttpTemplatePlan::schema(),
            &["url", "body", "pointer"],
            json!({"url": AT, "body": {}, "pointer": "/score"}),
        ),
    ];
    let builtins =
        BUILTINS.iter().map(|builtin| kind(builtin.name, (builtin.schema)(), builtin.required, (builtin.minimal)()));
    let run_by_workers = [
        kind("reward_model", RewardModelPlan::schema(), &["model"], json!({"model": "org/reward-model"})),
        kind(
            "python",
            PythonPlan::schema(),
            &["file", "function"],
            json!({"file": "rewards.py", "function": "accuracy"}),
        ),
    ];
    services.into_iter().chain(builtins).chain(run_by_workers).collect()
}

/// Returns the plan's schema with every field except `required` optional, defaults filled in, and unknown fields forbidden.
pub(super) fn optional(schema: RefOr<Schema>, defaults: Option<&Value>, required: &[&str]) -> RefOr<Schema> {
    let mut object = into_object(schema);
    object.required = required.iter().map(|&name| name.to_owned()).collect();
    object.additional_properties = Some(Box::new(AdditionalProperties::FreeForm(false)));
    let nothing = Map::new();
    for (name, value) in defaults.and_then(Value::as_object).unwrap_or(&nothing) {
        if let Some(property) = object.properties.get_mut(name).filter(|_| !value.is_null()) {
            *property = defaulted(property.clone(), value.clone());
        }
    }
    object.into()
}

/// Returns the object schema of a plan. For a schema that extends others, it is the part that the schema adds.
pub(super) fn into_object(schema: RefOr<Schema>) -> Object {
    match schema {
        RefOr::T(Schema::Object(object)) => object,
        RefOr::T(Schema::AllOf(all)) => {
            let description = all.description;
            let mut merged = all.items.into_iter().map(into_object).fold(Object::new(), |mut merged, part| {
                merged.properties.extend(part.properties);
                merged
            });
            merged.description = description;
            merged
        }
        RefOr::T(_) | RefOr::Ref(_) => Object::new(),
    }
}

fn object(object: Object) -> RefOr<Schema> {
    object.into()
}

fn with_property(schema: RefOr<Schema>, name: &str, property: RefOr<Schema>) -> Object {
    let mut object = into_object(schema);
    object.properties.insert(name.to_owned(), property);
    object
}

fn forget_default(object: &mut Object, name: &str) {
    if let Some(RefOr::T(Schema::Object(property))) = object.properties.get_mut(name) {
        property.default = None;
    }
}

pub(super) fn defaulted(mut schema: RefOr<Schema>, default: Value) -> RefOr<Schema> {
    match &mut schema {
        RefOr::T(Schema::Object(object)) => object.default = Some(default),
        RefOr::T(Schema::Array(array)) => array.default = Some(default),
        RefOr::T(_) | RefOr::Ref(_) => {}
    }
    schema
}

pub(super) fn described(mut schema: RefOr<Schema>, text: &str) -> RefOr<Schema> {
    let text = Some(text.to_owned());
    match &mut schema {
        RefOr::T(Schema::Object(object)) => object.description = text,
        RefOr::T(Schema::Array(array)) => array.description = text,
        RefOr::T(Schema::OneOf(one_of)) => one_of.description = text,
        RefOr::T(_) | RefOr::Ref(_) => {}
    }
    schema
}

fn write_only(schema: RefOr<Schema>) -> RefOr<Schema> {
    let mut object = into_object(schema);
    object.write_only = Some(true);
    object.into()
}

pub(super) fn closed(required: &[&str]) -> ObjectBuilder {
    let builder = ObjectBuilder::new()
        .schema_type(Type::Object)
        .additional_properties(Some(AdditionalProperties::<Schema>::FreeForm(false)));
    required.iter().fold(builder, |builder, name| builder.required(*name))
}

pub(super) fn plain(kind: Type, text: &str) -> ObjectBuilder {
    let description = (!text.is_empty()).then(|| text.to_owned());
    ObjectBuilder::new().schema_type(kind).description(description)
}

pub(super) fn string(text: &str) -> RefOr<Schema> {
    plain(Type::String, text).into()
}

fn number(text: &str) -> RefOr<Schema> {
    plain(Type::Number, text).into()
}

pub(super) fn integer(text: &str, default: Value) -> RefOr<Schema> {
    plain(Type::Integer, text).default(Some(default)).into()
}

pub(super) fn integer_of(text: &str) -> RefOr<Schema> {
    plain(Type::Integer, text).into()
}

pub(super) fn flag(text: &str, default: bool) -> RefOr<Schema> {
    plain(Type::Boolean, text).default(Some(json!(default))).into()
}

pub(super) fn enumeration<W: AsRef<str>>(text: &str, choices: &[W]) -> RefOr<Schema> {
    plain(Type::String, text).enum_values(Some(choices.iter().map(|word| json!(word.as_ref())))).into()
}

/// Returns a schema that accepts any value.
pub(super) fn any() -> RefOr<Schema> {
    ObjectBuilder::new().schema_type(SchemaType::AnyValue).into()
}

fn texts(text: &str) -> RefOr<Schema> {
    let value = RefOr::T(Schema::Object(plain(Type::String, "").build()));
    plain(Type::Object, text).additional_properties(Some(AdditionalProperties::RefOr(value))).into()
}
