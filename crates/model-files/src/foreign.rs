//! Models whose architecture rlood's own engine does not have. Another runtime can train them, so that only what the queue and the rewards
//! need is read.

use std::path::Path;

use serde_json::Value;

use super::families::is_known;
use super::text::TokenizerInfo;
use super::weights::{self, INDEX, WeightFiles, weight_files};
use super::{
    MAX_CONFIG_BYTES, ModelCardError, ModelFile, OTHER_FILES, TensorDtype, TensorLocation, read_json, token_ids,
};

/// Files, besides those of every model, that another runtime reads.
const MORE_FILES: [&str; 6] = [
    "added_tokens.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
];

/// Metadata of a model that rlood's own engine cannot run.
#[derive(Clone, Debug)]
pub struct ForeignCard {
    /// The value of `model_type` in config.json.
    pub model_type: String,
    /// The model's files, sorted by name.
    pub files: Vec<ModelFile>,
    /// The ids of all tokens that end a completion; may be empty, as the runtime knows more of the model.
    pub eos_token_ids: Vec<u32>,
    /// Length of the longest supported sequence, in tokens.
    pub max_position_embeddings: usize,
    /// Number of weights in the files.
    pub num_parameters: u64,
    /// Number of hidden layers; 0 if config.json does not say it.
    pub num_hidden_layers: usize,
    /// Width of the residual stream; 0 if config.json does not say it.
    pub hidden_size: usize,
    /// Number of rows of the embedding; 0 if config.json does not say it.
    pub vocab_size: usize,
    /// The number format in which most weights are stored.
    pub precision: Option<TensorDtype>,
    /// The model's chat template, as Jinja source.
    pub chat_template: Option<String>,
    /// Whether the model reads images besides text.
    pub reads_images: bool,
}

impl ForeignCard {
    /// Reads a model directory whose `model_type` is not one of rlood's families; `None` if it is one of them, or config.json has none.
    ///
    /// # Errors
    /// Fails if a file is missing or damaged, or if the model needs code of its own.
    pub fn read(dir: &Path) -> Result<Option<Self>, ModelCardError> {
        const CONFIG: &str = "config.json";
        let config = read_json(dir, CONFIG, MAX_CONFIG_BYTES)?;
        let Some(model_type) = config.get("model_type").and_then(Value::as_str) else { return Ok(None) };
        if is_known(model_type) {
            return Ok(None);
        }
        if config.get("auto_map").is_some() {
            let detail = "auto_map names code of the model, which is never run; use a model that transformers knows";
            return Err(ModelCardError::new(CONFIG, detail));
        }
        let text = config.get("text_config").unwrap_or(&Value::Null);
        let size = |key: &str| {
            let value = config.get(key).or_else(|| text.get(key)).and_then(Value::as_u64);
            value.and_then(|value| usize::try_from(value).ok())
        };
        let vocab_size = size("vocab_size").unwrap_or(0);
        let Some(max_position_embeddings) = size("max_position_embeddings") else {
            let detail =
                "max_position_embeddings is missing, also in text_config; set it to the longest sequence in tokens";
            return Err(ModelCardError::new(CONFIG, detail));
        };
        let tokenizer = TokenizerInfo::read(dir)?;
        let (weights, mut names) = read_weights(dir)?;
        names.extend(OTHER_FILES.iter().chain(&MORE_FILES).map(|name| (*name).to_owned()));
        names.push(CONFIG.to_owned());
        names.sort();
        names.dedup();
        let sized = names.into_iter().filter_map(|name| {
            let size_bytes = std::fs::metadata(dir.join(&name)).ok()?.len();
            Some(ModelFile { name, size_bytes })
        });
        let generation = "generation_config.json";
        let mut eos_token_ids = match dir.join(generation).exists() && vocab_size > 0 {
            true => token_ids(generation, &read_json(dir, generation, MAX_CONFIG_BYTES)?, vocab_size)?,
            false => Vec::new(),
        };
        eos_token_ids.extend(tokenizer.eos_token_id.filter(|id| !eos_token_ids.contains(id)));
        Ok(Some(Self {
            model_type: model_type.to_owned(),
            files: sized.collect(),
            eos_token_ids,
            max_position_embeddings,
            num_parameters: weights.iter().map(|tensor| tensor.num_elements() as u64).sum(),
            num_hidden_layers: size("num_hidden_layers").unwrap_or(0),
            hidden_size: size("hidden_size").unwrap_or(0),
            vocab_size,
            precision: weights::precision(&weights),
            chat_template: tokenizer.chat_template,
            reads_images: config.get("vision_config").is_some_and(Value::is_object),
        }))
    }
}

/// Reads the headers of all weight files. Returns the tensors, and the names of the files.
fn read_weights(dir: &Path) -> Result<(Vec<TensorLocation>, Vec<String>), ModelCardError> {
    let mut names = match weight_files(dir)? {
        WeightFiles::Single(name) => vec![name],
        WeightFiles::Sharded(files) => {
            let mut names: Vec<String> = files.into_values().collect();
            names.push(INDEX.to_owned());
            names
        }
    };
    names.sort();
    names.dedup();
    let mut tensors = Vec::new();
    for name in names.iter().filter(|name| *name != INDEX) {
        tensors.extend(weights::read_header(dir, name)?.tensors.into_values());
    }
    Ok((tensors, names))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Copies a fixture and changes its config.json.
    fn model(change: impl FnOnce(&mut Value)) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(rlood_test_support::fixture("parity/qwen3")).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
            }
        }
        let path = dir.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        change(&mut config);
        std::fs::write(path, config.to_string()).unwrap();
        dir
    }

    #[test]
    fn a_model_of_another_architecture_is_described_as_far_as_a_queue_needs_it() {
        let known = crate::read(&rlood_test_support::fixture("parity/qwen3")).unwrap();
        let dir = model(|config| config["model_type"] = json!("newest_5"));
        assert!(crate::read(dir.path()).is_err());
        let card = ForeignCard::read(dir.path()).unwrap().unwrap();
        assert_eq!(card.model_type, "newest_5");
        assert_eq!(
            (card.num_parameters, card.max_position_embeddings),
            (known.num_parameters, known.max_position_embeddings)
        );
        assert_eq!(
            (card.chat_template.is_some(), card.eos_token_ids),
            (known.chat_template.is_some(), known.eos_token_ids)
        );
        let names = |files: &[ModelFile]| files.iter().map(|file| file.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&card.files), names(&known.files));
        assert_eq!(crate::files_of(dir.path()).unwrap(), card.files);
    }

    #[test]
    fn a_known_architecture_and_code_of_a_model_are_not_read_as_another_one() {
        assert!(ForeignCard::read(&rlood_test_support::fixture("parity/qwen3")).unwrap().is_none());
        let with_code = model(|config| {
            config["model_type"] = json!("newest_5");
            config["auto_map"] = json!({"AutoModelForCausalLM": "modeling.Model"});
        });
        assert!(ForeignCard::read(with_code.path()).unwrap_err().to_string().contains("never run"));
        // The error of a damaged model of a known family is that of the family.
        let damaged = model(|config| config["hidden_size"] = json!("wide"));
        assert!(ForeignCard::read(damaged.path()).unwrap().is_none());
        assert!(crate::files_of(damaged.path()).unwrap_err().to_string().contains("hidden_size"));
    }
}
