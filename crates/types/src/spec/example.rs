//! Plans for use in tests.

use serde_json::Value;

use super::{Context, DatasetFacts, JobSpec, ModelFacts, Plan, resolve};

/// Returns the plan of a document with inline records, for a small model.
pub(crate) fn resolved(document: Value) -> Plan {
    let records = document["dataset"]["records"].as_array().cloned().unwrap_or_default();
    let (spec, errors) = JobSpec::read(document);
    assert!(errors.is_empty(), "{errors:?}");
    let model = ModelFacts { max_position_embeddings: 4096, ..model(false) };
    let context =
        Context { model: Some(model), dataset: Some(DatasetFacts::of_records(&records)), ..Context::default() };
    resolve(&spec, &context).unwrap().plan
}

/// Returns the facts of a small model that reads 32,768 tokens.
pub(crate) fn model(has_chat_template: bool) -> ModelFacts {
    ModelFacts {
        id: "m".into(),
        sha256: String::new(),
        max_position_embeddings: 32_768,
        num_parameters: 1,
        size_bytes: 1,
        has_chat_template,
        removes_reasoning: has_chat_template,
        shape: None,
        modules: Vec::new(),
        beyond_gpu: None,
        foreign: None,
        reads_images: false,
    }
}
