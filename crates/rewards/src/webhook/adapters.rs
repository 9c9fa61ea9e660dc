//! Other people's endpoints, spoken as they are. Each file is one system's dialect, after its published shapes and with its
//! traps; how requests are delivered is the same for all (`webhook`).

use serde_json::{Map, Value, json};

use super::answer::{Answer, Found, name, number};
use super::dialect::Dialect;
use crate::SampleError;
use crate::hidden::Legible;
use crate::sample::RewardSample;
use crate::spec::{RewardKind, SampleTemplate};

mod hf_text_classification;
mod http_template;
mod llamafactory;
mod openai_judge;
mod openrlhf;
mod sglang_classify;
mod slime;
mod tei_predict;
mod tei_rerank;
mod vllm_classify;
mod vllm_pooling;
mod vllm_score;

/// The dialect of a reward that is another system's endpoint.
pub(super) fn dialect(kind: &RewardKind) -> Result<Box<dyn Dialect>, String> {
    Ok(match kind {
        RewardKind::Openrlhf(plan) => Box::new(openrlhf::Openrlhf::new(plan)?),
        RewardKind::Slime(plan) => Box::new(slime::Slime::new(plan)),
        RewardKind::Llamafactory(plan) => Box::new(llamafactory::Llamafactory::new(plan)?),
        RewardKind::TeiPredict(plan) => Box::new(tei_predict::TeiPredict::new(plan)?),
        RewardKind::TeiRerank(plan) => Box::new(tei_rerank::TeiRerank::new(plan)?),
        RewardKind::VllmClassify(plan) => Box::new(vllm_classify::VllmClassify::new(plan)?),
        RewardKind::VllmScore(plan) => Box::new(vllm_score::VllmScore::new(plan)?),
        RewardKind::VllmPooling(plan) => Box::new(vllm_pooling::VllmPooling::new(plan)?),
        RewardKind::SglangClassify(plan) => Box::new(sglang_classify::SglangClassify::new(plan)?),
        RewardKind::HfTextClassification(plan) => Box::new(hf_text_classification::HfTextClassification::new(plan)?),
        RewardKind::OpenaiJudge(plan) => Box::new(openai_judge::OpenaiJudge::new(plan)?),
        RewardKind::HttpTemplate(plan) => Box::new(http_template::HttpTemplate::new(plan)?),
        RewardKind::Webhook(_) | RewardKind::Python(_) => return Err("contract v1 is not an adapter".to_owned()),
        _ => return Err("a built-in reward is not asked over HTTP".to_owned()),
    })
}

/// A text made of a sample: by a template, or the prompt and the completion as the policy saw them.
struct Text(Option<SampleTemplate>);

impl Text {
    fn new(template: Option<&str>) -> Result<Self, String> {
        Ok(Self(template.map(SampleTemplate::new).transpose()?))
    }

    fn of(&self, sample: &RewardSample) -> Result<String, SampleError> {
        let Some(template) = &self.0 else { return Ok(format!("{}{}", sample.prompt, sample.completion)) };
        template.render(&SampleTemplate::variables(sample)).map_err(template_failed)
    }
}

fn template_failed(why: String) -> SampleError {
    SampleError { code: "template_failed".to_owned(), message: format!("the template does not fit this row: {why}") }
}

/// A query and a text made of a sample: by templates, or the last user message (else the prompt) and the completion.
struct Pair {
    query: SampleTemplate,
    text: SampleTemplate,
}

impl Pair {
    fn new(query: Option<&str>, text: Option<&str>) -> Result<Self, String> {
        Ok(Self {
            query: SampleTemplate::new(query.unwrap_or("{{ question }}"))?,
            text: SampleTemplate::new(text.unwrap_or("{{ completion }}"))?,
        })
    }

    fn of(&self, sample: &RewardSample) -> Result<Value, SampleError> {
        let variables = SampleTemplate::variables(sample);
        let query = self.query.render(&variables).map_err(template_failed)?;
        let text = self.text.render(&variables).map_err(template_failed)?;
        Ok(json!({"query": query, "text": text}))
    }
}

/// The row's own value of a column; `Null` without a column.
fn label_of(sample: &RewardSample, column: Option<&str>) -> Result<Value, SampleError> {
    let Some(column) = column else { return Ok(Value::Null) };
    sample.columns.get(column).cloned().ok_or_else(|| SampleError {
        code: "column_missing".to_owned(),
        message: format!("this row has no column '{column}'"),
    })
}

/// A body, with the model's name where there is one, and with what the user adds; the user's word counts.
fn body(mut fields: Value, model: Option<&str>, extra: &Map<String, Value>) -> String {
    if let Value::Object(object) = &mut fields {
        if let Some(model) = model {
            object.insert("model".to_owned(), model.into());
        }
        object.extend(extra.iter().map(|(name, value)| (name.clone(), value.clone())));
    }
    fields.to_string()
}

/// A list inside an answer.
fn list<'a>(value: &'a Value, what: &str) -> Result<&'a Vec<Value>, String> {
    value.as_array().ok_or_else(|| format!("{what} is {}, not a list", name(value)))
}

/// The list `field` of an object.
fn list_in<'a>(value: &'a Value, field: &str) -> Result<&'a Vec<Value>, String> {
    let inside = value.get(field).ok_or_else(|| format!("the answer has no '{field}'"))?;
    list(inside, &format!("'{field}'"))
}

fn same_length(found: usize, samples: usize) -> Result<(), String> {
    if found == samples { Ok(()) } else { Err(format!("{found} scores for {samples} samples")) }
}

/// Puts entries in the order of the request by their `index`: servers sort, or answer as they finish.
fn by_index(entries: &[Value], samples: usize) -> Result<Vec<&Value>, String> {
    same_length(entries.len(), samples)?;
    let mut places: Vec<Option<&Value>> = vec![None; samples];
    for entry in entries {
        let index = entry.get("index").and_then(Value::as_u64).and_then(|index| usize::try_from(index).ok());
        let index = index.ok_or("an entry has no 'index'")?;
        let place = places.get_mut(index).ok_or_else(|| format!("index {index} for {samples} samples"))?;
        if place.replace(entry).is_some() {
            return Err(format!("index {index} twice"));
        }
    }
    // As many entries as places, and none twice.
    Ok(places.into_iter().flatten().collect())
}

/// The score of one label in `[{label, score}, …]`, whatever their order; the others become metrics.
fn labelled(entries: &Value, wanted: Option<&str>) -> Found {
    let Some(entries) = entries.as_array() else {
        return Found::Invalid(format!("the labels are {}, not a list", name(entries)));
    };
    let label_of = |entry: &Value| entry.get("label").and_then(Value::as_str).map(str::to_owned);
    let numbered = |wanted: &str| wanted.parse::<u32>().ok().map(|number| format!("LABEL_{number}"));
    let chosen = match wanted {
        None if entries.len() == 1 => entries.first(),
        None => None,
        Some(wanted) => entries
            .iter()
            .find(|entry| label_of(entry).is_some_and(|label| label == wanted || Some(label) == numbered(wanted))),
    };
    let Some(chosen) = chosen else {
        let known: Vec<String> = entries.iter().filter_map(label_of).collect();
        let known = known.join(", ");
        return Found::Invalid(match wanted {
            Some(wanted) => format!("there is no label '{wanted}', only: {known}"),
            None => format!("the model has the labels {known}: say in 'label' whose score is the reward;"),
        });
    };
    let mut found = number(chosen.get("score").unwrap_or(&Value::Null));
    if let Found::Judged(judgement) = &mut found {
        for entry in entries.iter().filter(|entry| !std::ptr::eq(*entry, chosen)) {
            if let (Some(label), Some(score)) = (label_of(entry), entry.get("score")) {
                judgement.metrics.insert(label, score.clone());
            }
        }
    }
    found
}

/// The names under which [`labelled`] finds that label.
fn names_of_label(wanted: Option<&str>) -> Legible {
    let numbered = wanted.and_then(|wanted| wanted.parse::<u32>().ok()).map(|number| format!("LABEL_{number}"));
    Legible { words: wanted.map(str::to_owned).into_iter().chain(numbered).collect(), ..Legible::default() }
}

/// Says so when a model with one label gives 1.0 to all of several samples: it was put through a softmax.
fn suspect_softmax(answer: &mut Answer, labels: usize, advice: &str) {
    let is_one = |found: &Found| matches!(found, Found::Judged(judgement) if judgement.value.number() == Some(1.0));
    if labels == 1 && answer.found.len() > 1 && answer.found.iter().all(is_one) {
        answer.remark = Some(format!(
            "the model has one label and every score is exactly 1.0: the server puts the logit through a softmax; {advice}"
        ));
    }
}
