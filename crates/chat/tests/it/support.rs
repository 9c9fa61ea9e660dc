//! Tokenizers and templates of the fixtures.

use std::path::PathBuf;

use rlood_model_files::text::Text;
use serde_json::Value;

/// A file of the fixtures of chats.
pub(crate) fn file(name: &str) -> PathBuf {
    rlood_test_support::fixture("chat").join(name)
}

/// The JSON in a file of the fixtures of chats.
pub(crate) fn json(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(file(name)).unwrap()).unwrap()
}

/// The source of a template of the fixtures.
pub(crate) fn template(name: &str) -> String {
    std::fs::read_to_string(file("templates").join(format!("{name}.jinja"))).unwrap()
}

/// The tokenizer of a family with this template.
pub(crate) fn text(family: &str, template: &str) -> Text {
    changed_text(family, template, |_| {})
}

/// The tokenizer of a family with this template, after a change of tokenizer.json.
pub(crate) fn changed_text(family: &str, template: &str, change: impl FnOnce(&mut Value)) -> Text {
    let dir = tempfile::tempdir().unwrap();
    let mut tokenizer = json(&format!("{family}/tokenizer.json"));
    change(&mut tokenizer);
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    for name in ["tokenizer_config.json", "generation_config.json"] {
        std::fs::copy(file(family).join(name), dir.path().join(name)).unwrap();
    }
    // A model of a family without a decoder here, with one weight: only its texts matter.
    let config = r#"{"model_type": "texts", "vocab_size": 1000, "max_position_embeddings": 4096}"#;
    std::fs::write(dir.path().join("config.json"), config).unwrap();
    let header = r#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    let weights = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0; 4]].concat();
    std::fs::write(dir.path().join("model.safetensors"), weights).unwrap();
    std::fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    Text::load(dir.path()).unwrap()
}
