//! text-embeddings-inference, `/rerank`: `{query, texts, raw_scores: true}` → `[{index, score}]`, sorted by score. A request
//! has one query and therefore one prompt; scores are matched by their index.

use reqwest::Url;
use serde_json::{Map, Value, json};

use super::{Pair, body, by_index, list, tei_predict};
use crate::SampleError;
use crate::rollout::RewardSample;
use crate::spec::PairPlan;
use crate::webhook::answer::{Answer, number, parse};
use crate::webhook::dialect::{Batch, Batching, Dialect, HealthCheck};

pub(super) struct TeiRerank {
    pair: Pair,
    model: Option<String>,
    extra_body: Map<String, Value>,
}

impl TeiRerank {
    pub(super) fn new(plan: &PairPlan) -> Result<Self, String> {
        let pair = Pair::new(plan.query.as_deref(), plan.text.as_deref())?;
        Ok(Self { pair, model: plan.model.clone(), extra_body: plan.extra_body.clone() })
    }
}

impl Dialect for TeiRerank {
    fn piece(&self, sample: &RewardSample) -> Result<Value, SampleError> {
        self.pair.of(sample)
    }

    fn body(&self, batch: &Batch<'_>) -> String {
        let query = &batch.pieces[0]["query"];
        let fields = json!({"query": query, "texts": batch.each("text"), "raw_scores": true, "truncate": true});
        body(fields, self.model.as_deref(), &self.extra_body)
    }

    fn read(&self, body: &[u8], _: &str, samples: &[&RewardSample]) -> Result<Answer, String> {
        let answer = parse(body)?;
        let ranks = by_index(list(&answer, "the answer")?, samples.len())?;
        Ok(Answer::of(ranks.into_iter().map(|rank| number(rank.get("score").unwrap_or(&Value::Null))).collect()))
    }

    fn batching(&self) -> Batching {
        Batching::OnePrompt
    }

    fn is_transient(&self, status: u16) -> bool {
        tei_predict::is_transient(status)
    }

    fn health_check(&self, url: &Url, _: &str) -> HealthCheck {
        tei_predict::health_check(url)
    }
}
