//! Reads the rewards that other systems' endpoints compute.

use super::super::reader::{Field, Reader};
use super::super::{
    HttpTemplatePlan, LabelPlan, OpenaiJudgePlan, OpenrlhfPlan, PairPlan, RewardKind, SlimePlan, TextPlan,
    VllmPoolingPlan,
};
use super::service::{at_path, read_service};
use super::template::SampleTemplate;

/// Default number of samples per request to a model server, which is the default maximum of text-embeddings-inference.
const BATCH: u32 = 32;

pub(super) fn read_openrlhf(reader: &Reader<'_>) -> RewardKind {
    RewardKind::Openrlhf(OpenrlhfPlan {
        service: at_path(read_service(reader, BATCH), "/get_reward"),
        template: read_template(&reader.field("template")),
        label_column: reader.field("label_column").nonempty(200).map(str::to_owned),
    })
}

pub(super) fn read_slime(reader: &Reader<'_>) -> RewardKind {
    RewardKind::Slime(SlimePlan {
        service: read_service(reader, 1),
        label_column: reader.field("label_column").nonempty(200).map(str::to_owned),
        reward_key: reader.field("reward_key").nonempty(200).map(str::to_owned),
    })
}

pub(super) fn read_llamafactory(reader: &Reader<'_>) -> RewardKind {
    RewardKind::Llamafactory(TextPlan {
        service: at_path(read_service(reader, BATCH), "/v1/score/evaluation"),
        model: read_model(reader),
        template: read_template(&reader.field("template")),
        extra_body: read_extra(reader),
    })
}

pub(super) fn read_tei_predict(reader: &Reader<'_>) -> RewardKind {
    RewardKind::TeiPredict(read_label_plan(reader, "/predict"))
}

pub(super) fn read_tei_rerank(reader: &Reader<'_>) -> RewardKind {
    RewardKind::TeiRerank(read_pair_plan(reader, "/rerank"))
}

pub(super) fn read_vllm_classify(reader: &Reader<'_>) -> RewardKind {
    RewardKind::VllmClassify(read_numbered(reader))
}

pub(super) fn read_vllm_score(reader: &Reader<'_>) -> RewardKind {
    RewardKind::VllmScore(read_pair_plan(reader, "/score"))
}

pub(super) fn read_vllm_pooling(reader: &Reader<'_>) -> RewardKind {
    RewardKind::VllmPooling(VllmPoolingPlan {
        service: at_path(read_service(reader, BATCH), "/pooling"),
        model: read_model(reader),
        template: read_template(&reader.field("template")),
        task: reader.field("task").nonempty(100).unwrap_or("classify").to_owned(),
        extra_body: read_extra(reader),
    })
}

pub(super) fn read_sglang_classify(reader: &Reader<'_>) -> RewardKind {
    RewardKind::SglangClassify(read_numbered(reader))
}

pub(super) fn read_hf_text_classification(reader: &Reader<'_>) -> RewardKind {
    RewardKind::HfTextClassification(read_label_plan(reader, "/"))
}

/// Reads labels by number only, because text-embeddings-inference and similar servers name only the most likely label.
fn read_numbered(reader: &Reader<'_>) -> LabelPlan {
    let plan = read_label_plan(reader, "/classify");
    if plan.label.as_ref().is_some_and(|label| label.parse::<usize>().is_err()) {
        let detail = "the label must be given by its number, from 0: the server names only the most likely label";
        reader.field("label").fail("invalid_value", detail);
    }
    plan
}

fn read_label_plan(reader: &Reader<'_>, path: &str) -> LabelPlan {
    LabelPlan {
        service: at_path(read_service(reader, BATCH), path),
        model: read_model(reader),
        template: read_template(&reader.field("template")),
        label: read_label(&reader.field("label")),
        extra_body: read_extra(reader),
    }
}

fn read_pair_plan(reader: &Reader<'_>, path: &str) -> PairPlan {
    PairPlan {
        service: at_path(read_service(reader, BATCH), path),
        model: read_model(reader),
        query: read_template(&reader.field("query")),
        text: read_template(&reader.field("text")),
        extra_body: read_extra(reader),
    }
}

pub(super) fn read_openai_judge(reader: &Reader<'_>) -> RewardKind {
    let finite = |name, default: f64| reader.field(name).number("a finite number", |_| true).unwrap_or(default);
    let mut service = at_path(read_service(reader, 1), "/v1/chat/completions");
    // Clients of the chat/completions API are usually configured with a base URL, so that one is accepted too.
    if let Some(base) = service.url.strip_suffix("/v1").or_else(|| service.url.strip_suffix("/v1/")) {
        service.url = format!("{base}/v1/chat/completions");
    }
    let plan = OpenaiJudgePlan {
        service,
        model: reader
            .required("model", "name the model that judges, as its server knows it")
            .nonempty(500)
            .unwrap_or_default()
            .to_owned(),
        rubric: read_template(
            &reader.required("rubric", "describe what the judge should consider, and what each score means"),
        )
        .unwrap_or_default(),
        min_score: finite("min_score", 0.0),
        max_score: finite("max_score", 10.0),
        votes: reader.field("votes").whole(1..=32).unwrap_or(1),
        temperature: reader.field("temperature").number("between 0 and 2", |v| (0.0..=2.0).contains(&v)).unwrap_or(0.0),
        max_completion_tokens: reader.field("max_completion_tokens").whole(1..=1_000_000).unwrap_or(1_024),
        extra_body: read_extra(reader),
    };
    if plan.min_score >= plan.max_score {
        let detail = format!("max_score must be greater than min_score ({}), not {}", plan.min_score, plan.max_score);
        reader.field("max_score").fail("out_of_range", detail);
    }
    RewardKind::OpenaiJudge(plan)
}

pub(super) fn read_http_template(reader: &Reader<'_>) -> RewardKind {
    let batch = reader.field("batch").bool().unwrap_or(false);
    let body = reader.required("body", "give the body to send, such as {\"text\": \"{{ prompt }}{{ completion }}\"}");
    if let Some(value) = body.value() {
        check_templates(&body, "", value);
    }
    let pointer = reader.required(
        "pointer",
        "give the JSON pointer to the reward in the response, such as \"/score\"; \"\" = the whole response",
    );
    let text = pointer.string(1_000).unwrap_or_default();
    let stars = text.split('/').filter(|part| *part == "*").count();
    if !text.is_empty() && !text.starts_with('/') {
        pointer.fail("invalid_value", "a JSON pointer must begin with '/'");
    } else if stars != usize::from(batch) {
        pointer.fail(
            "invalid_value",
            if batch {
                "with batch the pointer has one '*' in the place of the sample's number: \"/data/*/score\", or \"/*\""
            } else {
                "the pointer may have '*' only with batch: true"
            },
        );
    }
    RewardKind::HttpTemplate(HttpTemplatePlan {
        service: read_service(reader, if batch { BATCH } else { 1 }),
        body: body.value().cloned().unwrap_or_default(),
        pointer: text.to_owned(),
        batch,
    })
}

/// Checks that every string of the body is a valid template.
fn check_templates(field: &Field<'_>, at: &str, value: &serde_json::Value) {
    match value {
        serde_json::Value::String(text) => {
            if let Err(error) = SampleTemplate::new(text) {
                field.fail("invalid_value", format!("the template at '{at}' is not valid: {error}"));
            }
        }
        serde_json::Value::Array(items) => {
            items.iter().enumerate().for_each(|(index, item)| check_templates(field, &format!("{at}/{index}"), item));
        }
        serde_json::Value::Object(fields) => {
            fields.iter().for_each(|(name, item)| check_templates(field, &format!("{at}/{name}"), item));
        }
        serde_json::Value::Null | serde_json::Value::Bool(_) | serde_json::Value::Number(_) => {}
    }
}

/// Reads a template and checks that it compiles.
pub(super) fn read_template(field: &Field<'_>) -> Option<String> {
    let text = field.string(50_000)?;
    if let Err(error) = SampleTemplate::new(text) {
        field.fail("invalid_value", format!("the template is not valid: {error}"));
    }
    Some(text.to_owned())
}

fn read_model(reader: &Reader<'_>) -> Option<String> {
    reader.field("model").nonempty(500).map(str::to_owned)
}

fn read_extra(reader: &Reader<'_>) -> serde_json::Map<String, serde_json::Value> {
    reader.field("extra_body").map().cloned().unwrap_or_default()
}

/// Reads a label's name or number.
fn read_label(field: &Field<'_>) -> Option<String> {
    match field.value()? {
        serde_json::Value::Number(_) => field.whole::<u32>(0..=100_000).map(|index| index.to_string()),
        _ => field.nonempty(200).map(str::to_owned),
    }
}
