//! Which files of a repository a model needs, and which repositories hold no model that can be used.

use serde_json::Value;

use crate::error::HubError;
use crate::http::Hub;
use crate::id::{Repo, is_safe_path};
use crate::info::{RepoFile, RepoInfo};

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Beside weights and config, where they are there. `modules.json` is a reward model's.
const OTHERS: [&str; 6] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "modules.json",
];

/// Index files are small; another one is no index.
const MAX_SMALL_BYTES: u64 = 64 << 20;

/// Files of a repository at one commit: what is to be downloaded.
#[derive(Debug, Clone, PartialEq)]
pub struct RepoPlan {
    /// As it was asked for.
    pub repo: Repo,
    /// Which commit that is.
    pub commit: String,
    /// Who may read it is decided by the token.
    pub is_restricted: bool,
    /// Of a model: what it needs, and nothing else of the repository.
    pub files: Vec<RepoFile>,
    /// Of a model: its `config.json`; else null.
    pub config: Value,
}

impl RepoPlan {
    /// Of all files together.
    pub fn total_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.size_bytes).sum()
    }
}

impl Hub {
    /// Looks a model up and chooses its files: config, tokenizer, chat templates, safetensors. Never pickles, never code.
    ///
    /// # Errors
    /// Those of [`Hub::info`], and `Unusable` when the repository holds no such model.
    pub async fn plan_model(&self, repo: &Repo) -> Result<RepoPlan, HubError> {
        let info = self.info(repo).await?;
        let unusable = |why: String| HubError::Unusable { repo: repo.to_string(), why };
        let find = |path: &str| info.files.iter().find(|file| file.path == path);
        let Some(config_file) = find(CONFIG) else { return Err(unusable(without_config(&info))) };
        let config = self.document(repo, &info.commit, config_file).await?;
        if let Some(why) = quantised(&config) {
            return Err(unusable(why));
        }
        let mut files = vec![config_file.clone()];
        if let Some(index) = find(INDEX) {
            let document = self.document(repo, &info.commit, index).await?;
            let mut shards: Vec<&str> = document["weight_map"]
                .as_object()
                .map(|map| map.values().filter_map(Value::as_str).collect())
                .unwrap_or_default();
            shards.sort_unstable();
            shards.dedup();
            if shards.is_empty() {
                return Err(unusable(format!("its {INDEX} names no shards")));
            }
            files.push(index.clone());
            for shard in shards {
                let file = find(shard).ok_or_else(|| {
                    let shown: String = shard.chars().take(200).collect();
                    unusable(format!("its {INDEX} names {shown:?}, which the repository does not hold"))
                })?;
                files.push(file.clone());
            }
        } else {
            files.push(find(WEIGHTS).ok_or_else(|| unusable(without_weights(&info)))?.clone());
        }
        let is_template = |path: &str| {
            path.strip_prefix("additional_chat_templates/")
                .is_some_and(|name| !name.contains('/') && name.ends_with(".jinja"))
        };
        let others = info.files.iter().filter(|file| OTHERS.contains(&file.path.as_str()) || is_template(&file.path));
        files.extend(others.cloned());
        Ok(RepoPlan { repo: repo.clone(), commit: info.commit, is_restricted: info.is_restricted, files, config })
    }

    /// Reads a small file of a repository.
    ///
    /// # Errors
    /// `Unusable` when it has more than 64 MiB; those of [`Hub::info`].
    pub async fn read_file(&self, repo: &Repo, commit: &str, file: &RepoFile) -> Result<Vec<u8>, HubError> {
        if file.size_bytes > MAX_SMALL_BYTES {
            let why = format!("its {} has {} bytes", file.path, file.size_bytes);
            return Err(HubError::Unusable { repo: repo.to_string(), why });
        }
        let url = self.file_url(repo, commit, &file.path)?;
        self.read(repo, &url, Some(commit)).await
    }

    async fn document(&self, repo: &Repo, commit: &str, file: &RepoFile) -> Result<Value, HubError> {
        let bytes = self.read_file(repo, commit, file).await?;
        serde_json::from_slice(&bytes)
            .map_err(|error| HubError::Unusable { repo: repo.to_string(), why: format!("its {}: {error}", file.path) })
    }
}

fn has_suffix(info: &RepoInfo, suffixes: &[&str]) -> bool {
    info.files.iter().any(|file| suffixes.iter().any(|suffix| file.path.ends_with(suffix)))
}

fn without_config(info: &RepoInfo) -> String {
    if info.files.iter().any(|file| file.path == "adapter_config.json") {
        return "it holds an adapter: name the model that it was trained on, and the adapter as the warm start"
            .to_owned();
    }
    if has_suffix(info, &[".gguf"]) {
        return "it holds GGUF files only: name the repository that they were made from (its card's base_model)"
            .to_owned();
    }
    "it has no config.json, so it is no model of the transformers library".to_owned()
}

fn without_weights(info: &RepoInfo) -> String {
    if has_suffix(info, &[".bin", ".pth", ".pt", ".ckpt"]) {
        return "its weights are pickles, which can run code when they are read; convert them to safetensors, or choose a revision \
                that has them (many have one at refs/pr/1)"
            .to_owned();
    }
    if has_suffix(info, &[".gguf"]) {
        return "it holds GGUF files only: name the repository that they were made from (its card's base_model)"
            .to_owned();
    }
    format!("it has neither {WEIGHTS} nor {INDEX}")
}

/// Why quantised weights cannot be trained, and what would work.
fn quantised(config: &Value) -> Option<String> {
    if let Some(method) =
        config["quantization_config"].as_object().map(|it| it.get("quant_method").and_then(Value::as_str))
    {
        let method: String = method.unwrap_or("an unnamed method").chars().take(60).collect();
        return Some(format!(
            "its weights are quantised ({method}), which cannot be trained here yet: choose the unquantised model \
             (its card's base_model, or the name without -bnb-4bit, -FP8, -AWQ, -GPTQ)"
        ));
    }
    let is_mlx = config["quantization"].get("bits").is_some();
    is_mlx.then(|| "its weights are quantised for MLX: choose the unquantised model (its card's base_model)".to_owned())
}

/// A file of the hub's converted copy of a data set.
#[derive(Debug, Clone, PartialEq, Eq, serde::Deserialize)]
pub struct ConvertedFile {
    /// Of which configuration.
    pub config: String,
    /// Of which split.
    pub split: String,
    /// On the branch `refs/convert/parquet`.
    #[serde(rename = "url", deserialize_with = "path_of_url")]
    pub path: String,
}

/// `…/resolve/refs%2Fconvert%2Fparquet/{path}`: taken from the answer, never built.
fn path_of_url<'de, D: serde::Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let url: String = serde::Deserialize::deserialize(from)?;
    let path = url.split_once("/refs%2Fconvert%2Fparquet/").map(|(_, path)| path.to_owned());
    let decoded = path.and_then(|path| {
        let pairs = url::form_urlencoded::parse(path.replace('+', "%2B").as_bytes()).next()?.0.into_owned();
        is_safe_path(&pairs).then_some(pairs)
    });
    decoded.ok_or_else(|| serde::de::Error::custom("a file of the converted copy has an address of another form"))
}

impl Hub {
    /// The files of the copy in parquet that the hub's data set server made of a data set; they lie on `refs/convert/parquet`.
    ///
    /// # Errors
    /// Those of [`Hub::info`].
    pub async fn converted_files(&self, server: &url::Url, repo: &Repo) -> Result<Vec<ConvertedFile>, HubError> {
        #[derive(serde::Deserialize)]
        struct Answer {
            parquet_files: Vec<ConvertedFile>,
        }
        let mut url = server.clone();
        url.path_segments_mut()
            .map_err(|()| HubError::NotUnderstood("the address of the data set server".to_owned()))?
            .pop_if_empty()
            .push("parquet");
        url.query_pairs_mut().append_pair("dataset", repo.id());
        let bytes = self.read(repo, &url, None).await?;
        let answer: Answer = serde_json::from_slice(&bytes)
            .map_err(|error| HubError::NotUnderstood(format!("the list of {repo}'s converted files: {error}")))?;
        Ok(answer.parquet_files)
    }
}
