//! Any JSON API over HTTP: a body whose strings are templates, and a JSON pointer to the reward in the answer.

use serde_json::{Map, Value};

use super::{check_length, template_failed};
use crate::SampleError;
use crate::rollout::RewardSample;
use crate::spec::{HttpTemplatePlan, SampleTemplate};
use crate::webhook::answer::{Answer, Found, name, number, parse};
use crate::webhook::dialect::{Batch, Batching, Dialect};

pub(super) struct HttpTemplate {
    body: Node,
    pointer: String,
    batch: bool,
}

/// The JSON body of a request whose strings are compiled templates.
enum Node {
    Plain(Value),
    Text(Box<SampleTemplate>),
    List(Vec<Node>),
    Object(Vec<(String, Node)>),
}

impl HttpTemplate {
    pub(super) fn new(plan: &HttpTemplatePlan) -> Result<Self, String> {
        Ok(Self { body: Node::new(&plan.body)?, pointer: plan.pointer.clone(), batch: plan.batch })
    }
}

impl Node {
    fn new(value: &Value) -> Result<Self, String> {
        Ok(match value {
            Value::String(text) => Node::Text(Box::new(SampleTemplate::new(text)?)),
            Value::Array(items) => Node::List(items.iter().map(Node::new).collect::<Result<_, _>>()?),
            Value::Object(fields) => {
                let field = |(name, value): (&String, &Value)| Ok::<_, String>((name.clone(), Node::new(value)?));
                Node::Object(fields.iter().map(field).collect::<Result<_, _>>()?)
            }
            plain => Node::Plain(plain.clone()),
        })
    }

    fn value(&self, variables: &minijinja::Value) -> Result<Value, String> {
        Ok(match self {
            Node::Plain(value) => value.clone(),
            Node::Text(template) => template.value(variables)?,
            Node::List(items) => {
                Value::Array(items.iter().map(|item| item.value(variables)).collect::<Result<_, _>>()?)
            }
            Node::Object(fields) => {
                let field = |(name, node): &(String, Node)| Ok::<_, String>((name.clone(), node.value(variables)?));
                Value::Object(fields.iter().map(field).collect::<Result<Map<_, _>, _>>()?)
            }
        })
    }
}

impl Dialect for HttpTemplate {
    fn piece(&self, sample: &RewardSample) -> Result<Value, SampleError> {
        let variables = SampleTemplate::variables(sample);
        if self.batch {
            // The template of a batch gets the variables of all samples as a list; here it is tried with one sample.
            let error = |why: serde_json::Error| template_failed(why.to_string());
            let value = serde_json::to_value(&variables).map_err(error)?;
            let one = SampleTemplate::batch_variables(std::iter::once(SampleTemplate::json_variables(&value)));
            return self.body.value(&one).map_err(template_failed).map(|_| value);
        }
        self.body.value(&variables).map_err(template_failed)
    }

    fn body(&self, batch: &Batch<'_>) -> String {
        if !self.batch {
            return batch.pieces[0].to_string();
        }
        let samples = batch.pieces.iter().map(|piece| SampleTemplate::json_variables(piece));
        // Each sample was rendered alone before. If rendering all samples of the request together fails, the body is null, which
        // the service rejects.
        self.body.value(&SampleTemplate::batch_variables(samples)).unwrap_or_default().to_string()
    }

    fn read(&self, body: &[u8], _: &str, samples: &[&RewardSample]) -> Result<Answer, String> {
        let answer = parse(body)?;
        let Some((before, after)) = self.pointer.split_once("/*").filter(|_| self.batch) else {
            let value = answer.pointer(&self.pointer);
            let value =
                value.ok_or_else(|| format!("the answer has no value at the JSON pointer '{}'", self.pointer))?;
            return Ok(Answer::of(vec![number(value)]));
        };
        let entries =
            answer.pointer(before).ok_or_else(|| format!("the answer has no value at the JSON pointer '{before}'"))?;
        let entries = entries
            .as_array()
            .ok_or_else(|| format!("the answer's value at '{before}' is {}, not a list", name(entries)))?;
        check_length(entries.len(), samples.len())?;
        let reward = |entry: &Value| match entry.pointer(after) {
            Some(value) => number(value),
            None => Found::Invalid(format!("an entry of the answer has no value at the JSON pointer '{after}'")),
        };
        Ok(Answer::of(entries.iter().map(reward).collect()))
    }

    fn batching(&self) -> Batching {
        if self.batch { Batching::Groups } else { Batching::One }
    }
}
