//! Selects the files of a Hub repository that a model needs, and rejects repositories without a usable model.

use futures::future::BoxFuture;
use serde_json::Value;

use crate::error::HubError;
use crate::http::Hub;
use crate::id::{Repo, is_safe_path};
use crate::info::{RepoFile, RepoInfo};

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Files that a model may have besides weights and config. `modules.json` belongs to reward models.
const OPTIONAL_FILES: [&str; 6] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "modules.json",
];

/// Maximum size in bytes of a config or of an index of weights. A larger file is not a valid one.
const MAX_SMALL_FILE_BYTES: u64 = 64 << 20;

/// A planned download: the files of a Hub repository at one commit.
#[derive(Debug, Clone, PartialEq)]
pub struct RepoPlan {
    /// The repository as requested.
    pub repo: Repo,
    /// Commit of the requested revision.
    pub commit: String,
    /// Whether access to the repository requires a token.
    pub is_restricted: bool,
    /// Files to download. For a model, only the files that it needs.
    pub files: Vec<RepoFile>,
    /// `config.json` of a model; else null.
    pub config: Value,
    /// The id under which the Hub has the repository now, if it differs from the requested one; `None` = it is the same.
    pub renamed_to: Option<String>,
}

impl RepoPlan {
    /// Returns the total size in bytes of the files to download.
    pub fn total_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.size_bytes).sum()
    }
}

impl Hub {
    /// Looks up a model on the Hub and selects its files: config, tokenizer, chat templates and safetensors. Pickles and
    /// code are never selected.
    ///
    /// # Errors
    /// Fails like [`Hub::info`], or with `Unusable` when the repository contains no such model.
    pub fn plan_model<'a>(&'a self, repo: &'a Repo) -> BoxFuture<'a, Result<RepoPlan, HubError>> {
        Box::pin(async move {
            let info = self.info(repo).await?;
            let unusable = |why: String| HubError::Unusable { repo: repo.to_string(), why };
            let find = |path: &str| info.files.iter().find(|file| file.path == path);
            let Some(config_file) = find(CONFIG) else { return Err(unusable(without_config(&info))) };
            let config = self.document(repo, &info.commit, config_file).await?;
            if let Some(why) = quantization_problem(&config) {
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
                    return Err(unusable(format!("the repository's {INDEX} lists no weight files")));
                }
                files.push(index.clone());
                for shard in shards {
                    let file = find(shard).ok_or_else(|| {
                        let shown: String = shard.chars().take(200).collect();
                        unusable(format!("the repository's {INDEX} lists {shown:?}, which is not in the repository"))
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
            let others = info
                .files
                .iter()
                .filter(|file| OPTIONAL_FILES.contains(&file.path.as_str()) || is_template(&file.path));
            files.extend(others.cloned());
            let RepoInfo { commit, is_restricted, is_private: _, files: _, renamed_to } = info;
            Ok(RepoPlan { repo: repo.clone(), commit, is_restricted, files, config, renamed_to })
        })
    }

    /// Reads a small file of a Hub repository into memory.
    ///
    /// # Errors
    /// Fails with `Unusable` when the file is larger than 64 MiB, or like [`Hub::info`].
    pub fn read_file<'a>(
        &'a self,
        repo: &'a Repo,
        commit: &'a str,
        file: &'a RepoFile,
    ) -> BoxFuture<'a, Result<Vec<u8>, HubError>> {
        Box::pin(async move {
            if file.size_bytes > MAX_SMALL_FILE_BYTES {
                let why = format!("the repository's {} is too large ({} bytes)", file.path, file.size_bytes);
                return Err(HubError::Unusable { repo: repo.to_string(), why });
            }
            let url = self.file_url(repo, commit, &file.path)?;
            self.read(repo, &url, Some(commit)).await
        })
    }

    async fn document(&self, repo: &Repo, commit: &str, file: &RepoFile) -> Result<Value, HubError> {
        let bytes = self.read_file(repo, commit, file).await?;
        serde_json::from_slice(&bytes).map_err(|error| HubError::Unusable {
            repo: repo.to_string(),
            why: format!("the repository's {} cannot be parsed: {error}", file.path),
        })
    }
}

fn has_suffix(info: &RepoInfo, suffixes: &[&str]) -> bool {
    info.files.iter().any(|file| suffixes.iter().any(|suffix| file.path.ends_with(suffix)))
}

fn without_config(info: &RepoInfo) -> String {
    if info.files.iter().any(|file| file.path == "adapter_config.json") {
        return "the repository contains an adapter: use the model that it was trained on, with the adapter as the warm start"
            .to_owned();
    }
    if has_suffix(info, &[".gguf"]) {
        return "the repository contains only GGUF files: use the repository that they were created from (base_model in its model card)"
            .to_owned();
    }
    "the repository has no config.json, so it is not a model of the transformers library".to_owned()
}

fn without_weights(info: &RepoInfo) -> String {
    if has_suffix(info, &[".bin", ".pth", ".pt", ".ckpt"]) {
        return "its weights are pickles, which can run code when they are loaded; convert them to safetensors, or choose a revision \
                that has them (many have one at refs/pr/1)"
            .to_owned();
    }
    if has_suffix(info, &[".gguf"]) {
        return "the repository contains only GGUF files: use the repository that they were created from (base_model in its model card)"
            .to_owned();
    }
    format!("it has neither {WEIGHTS} nor {INDEX}")
}

/// Returns why quantized weights cannot be trained, and what to use instead.
fn quantization_problem(config: &Value) -> Option<String> {
    if let Some(found) = config["quantization_config"].as_object() {
        let is_four_bit =
            ["load_in_4bit", "_load_in_4bit"].iter().any(|key| found.get(*key) == Some(&Value::Bool(true)));
        let method = found.get("quant_method").and_then(Value::as_str);
        // Block FP8 is expanded when it is loaded; bitsandbytes' 4 bits are used as they are.
        if method == Some("fp8") || (method.is_none_or(|method| method == "bitsandbytes") && is_four_bit) {
            return None;
        }
        let method: String = method.unwrap_or("an unnamed method").chars().take(60).collect();
        return Some(format!(
            "its weights are quantized ({method}), which cannot be trained: choose the unquantized model (base_model in its model \
             card, or the name without -bnb-8bit, -AWQ, -GPTQ), or one in bitsandbytes' 4 bits"
        ));
    }
    let is_mlx = config["quantization"].get("bits").is_some();
    is_mlx.then(|| {
        "its weights are quantized for MLX: choose the unquantized model (base_model in its model card)".to_owned()
    })
}

/// A file of the Hub's Parquet copy of a dataset.
#[derive(Debug, Clone, PartialEq, Eq, serde::Deserialize)]
pub struct ConvertedFile {
    /// Configuration that the file belongs to.
    pub config: String,
    /// Split that the file belongs to.
    pub split: String,
    /// Path of the file on the branch `refs/convert/parquet`.
    #[serde(rename = "url", deserialize_with = "path_of_url")]
    pub path: String,
}

/// Extracts the path from `…/resolve/refs%2Fconvert%2Fparquet/{path}`. The path is taken from the
/// Hub's answer and never constructed.
fn path_of_url<'de, D: serde::Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let url: String = serde::Deserialize::deserialize(from)?;
    let path = url.split_once("/refs%2Fconvert%2Fparquet/").map(|(_, path)| path.to_owned());
    let decoded = path.and_then(|path| {
        let pairs = url::form_urlencoded::parse(path.replace('+', "%2B").as_bytes()).next()?.0.into_owned();
        is_safe_path(&pairs).then_some(pairs)
    });
    decoded.ok_or_else(|| serde::de::Error::custom("a file of the converted copy has an unexpected address"))
}

impl Hub {
    /// Lists the files of the Parquet copy that the Hub's dataset server created for a
    /// dataset, on the branch `refs/convert/parquet`.
    ///
    /// # Errors
    /// Fails for the same reasons as [`Hub::info`].
    pub fn converted_files<'a>(
        &'a self,
        server: &'a url::Url,
        repo: &'a Repo,
    ) -> BoxFuture<'a, Result<Vec<ConvertedFile>, HubError>> {
        Box::pin(async move {
            #[derive(serde::Deserialize)]
            struct Answer {
                parquet_files: Vec<ConvertedFile>,
            }
            let mut url = server.clone();
            url.path_segments_mut()
                .map_err(|()| HubError::NotUnderstood("the address of the dataset server".to_owned()))?
                .pop_if_empty()
                .push("parquet");
            url.query_pairs_mut().append_pair("dataset", repo.id());
            let bytes = self.read(repo, &url, None).await?;
            let answer: Answer = serde_json::from_slice(&bytes)
                .map_err(|error| HubError::NotUnderstood(format!("the list of {repo}'s converted files: {error}")))?;
            Ok(answer.parquet_files)
        })
    }
}
