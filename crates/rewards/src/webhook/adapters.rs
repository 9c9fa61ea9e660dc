//! Adapters for reward endpoints of other systems. Each file implements the published format of one system and handles its
//! pitfalls. Delivery of requests is the same for all (`webhook`).

use serde_json::{Map, Value, json};

use super::answer::{Answer, Found, name, number};
use super::dialect::Dialect;
use crate::SampleError;
use crate::rollout::RewardSample;
use crate::secret_filter::Preserved;
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

/// Returns the request and answer format (dialect) of a reward that is another system's endpoint.
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
        _ => return Err("a built-in reward is not a service".to_owned()),
    })
}

/// Renders the text that a reward model scores: by the user's template, else the prompt followed by the completion.
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
    SampleError {
        code: "template_failed".to_owned(),
        message: format!("the template cannot be rendered for this row: {why}"),
    }
}

/// Renders the query and the text that a reranker scores: by the user's templates, else the last user message (or the
/// prompt) and the completion.
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

/// Returns the value of the dataset row in a column; `Null` if the plan names no column.
fn label_of(sample: &RewardSample, column: Option<&str>) -> Result<Value, SampleError> {
    let Some(column) = column else { return Ok(Value::Null) };
    sample.columns.get(column).cloned().ok_or_else(|| SampleError {
        code: "column_missing".to_owned(),
        message: format!("this row has no column '{column}'"),
    })
}

/// Builds a request body from the adapter's fields, the model's name if the plan has one, and the user's extra
/// fields, which take precedence.
fn body(mut fields: Value, model: Option<&str>, extra: &Map<String, Value>) -> String {
    if let Value::Object(object) = &mut fields {
        if let Some(model) = model {
            object.insert("model".to_owned(), model.into());
        }
        object.extend(extra.iter().map(|(name, value)| (name.clone(), value.clone())));
    }
    fields.to_string()
}

/// Returns a JSON value of a service's answer as a list, or an error that names the value.
fn list<'a>(value: &'a Value, what: &str) -> Result<&'a Vec<Value>, String> {
    value.as_array().ok_or_else(|| format!("{what} is {}, not a list", name(value)))
}

/// Returns the list in the field `field` of a service's answer.
fn list_in<'a>(value: &'a Value, field: &str) -> Result<&'a Vec<Value>, String> {
    let inside = value.get(field).ok_or_else(|| format!("the answer has no '{field}'"))?;
    list(inside, &format!("'{field}'"))
}

fn check_length(found: usize, samples: usize) -> Result<(), String> {
    if found == samples { Ok(()) } else { Err(format!("the answer has {found} scores for {samples} samples")) }
}

/// Sorts the answer's entries by their `index` into the order of the request. Servers sort them by score, or answer in the order
/// in which they finish.
fn by_index(entries: &[Value], samples: usize) -> Result<Vec<&Value>, String> {
    check_length(entries.len(), samples)?;
    let mut places: Vec<Option<&Value>> = vec![None; samples];
    for entry in entries {
        let index = entry.get("index").and_then(Value::as_u64).and_then(|index| usize::try_from(index).ok());
        let index = index.ok_or("an entry of the answer has no 'index'")?;
        let place = places
            .get_mut(index)
            .ok_or_else(|| format!("the answer has the index {index}, but only {samples} samples were sent"))?;
        if place.replace(entry).is_some() {
            return Err(format!("the answer has the index {index} twice"));
        }
    }
    // There are as many entries as samples and no index occurs twice, so every sample has an entry.
    Ok(places.into_iter().flatten().collect())
}

/// Returns the score of the reward's label from a list `[{label, score}, …]` in any order. The other labels' scores become metrics.
fn label_score(entries: &Value, wanted: Option<&str>) -> Found {
    let Some(entries) = entries.as_array() else {
        return Found::Invalid(format!("the labels in the answer are {}, not a list", name(entries)));
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
            Some(wanted) => format!("the answer has no label '{wanted}'; its labels are: {known}"),
            None => format!("the model has the labels {known}; set 'label' to the one whose score is the reward"),
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

/// Returns the label names that [`label_score`] accepts for the reward's label.
fn label_names(wanted: Option<&str>) -> Preserved {
    let numbered = wanted.and_then(|wanted| wanted.parse::<u32>().ok()).map(|number| format!("LABEL_{number}"));
    Preserved { words: wanted.map(str::to_owned).into_iter().chain(numbered).collect(), ..Preserved::default() }
}

/// Adds a remark when a model with one label scores several samples with exactly 1.0, which indicates a softmax.
fn detect_softmax(answer: &mut Answer, labels: usize, advice: &str) {
    let is_one = |found: &Found| matches!(found, Found::Judged(judgement) if judgement.value.number() == Some(1.0));
    if labels == 1 && answer.found.len() > 1 && answer.found.iter().all(is_one) {
        answer.remark = Some(format!(
            "the model has one label and every score is exactly 1.0: the server applies a softmax to the logit; {advice}"
        ));
    }
}
