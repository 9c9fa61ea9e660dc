use rlood_hub::{HubError, Repo, RepoKind, Token};
use serde_json::json;

use super::fake::{COMMIT, Faults, OLD_DATASET, OLD_MODEL, model, start};

pub fn tiny() -> Repo {
    Repo::parse(RepoKind::Model, "fake/tiny").unwrap()
}

#[tokio::test]
async fn a_plan_names_the_commit_and_the_files_that_a_model_needs() {
    let running = start(model(), Faults::default()).await;
    let plan = running.client().plan_model(&tiny()).await.unwrap();
    assert_eq!(plan.commit, COMMIT);
    let paths: Vec<&str> = plan.files.iter().map(|file| file.path.as_str()).collect();
    assert_eq!(
        paths,
        [
            "config.json",
            "model.safetensors.index.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "additional_chat_templates/tool.jinja",
            "tokenizer.json",
        ]
    );
    assert_eq!(plan.total_bytes(), plan.files.iter().map(|file| file.size_bytes).sum::<u64>());
    assert!(plan.total_bytes() > 400_000);
    assert_eq!(plan.config["model_type"], "qwen3");
}

#[tokio::test]
async fn checkpoints_in_block_fp8_and_in_four_bits_can_be_downloaded() {
    for quantization in [
        json!({"quant_method": "fp8", "weight_block_size": [128, 128]}),
        json!({"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4"}),
    ] {
        let mut files = model();
        let config = json!({"model_type": "qwen3", "quantization_config": quantization});
        files.insert("config.json".to_owned(), config.to_string().into_bytes());
        let running = start(files, Faults::default()).await;
        running.client().plan_model(&tiny()).await.unwrap();
    }
}

#[tokio::test]
async fn what_cannot_be_trained_is_refused_with_what_would_work() {
    let without = |names: &[&str]| {
        let mut files = model();
        files.retain(|path, _| !names.iter().any(|name| path.contains(name)));
        files
    };
    let quantization_problem = |config: serde_json::Value| {
        let mut files = model();
        files.insert("config.json".to_owned(), config.to_string().into_bytes());
        files
    };
    let mut adapter = without(&["config.json"]);
    adapter.insert("adapter_config.json".to_owned(), b"{}".to_vec());
    let mut gguf = without(&["config.json", "safetensors", ".bin", ".pth"]);
    gguf.insert("model-Q4_K_M.gguf".to_owned(), vec![0; 4]);
    for (files, expected) in [
        (without(&["safetensors"]), "pickles"),
        (without(&["safetensors", ".bin", ".pth"]), "neither model.safetensors nor"),
        (without(&["00002-of"]), "lists \"model-00002-of-00002.safetensors\""),
        (without(&["config.json"]), "no config.json"),
        (adapter, "an adapter"),
        (gguf, "GGUF"),
        (quantization_problem(json!({"quantization_config": {"quant_method": "bitsandbytes"}})), "(bitsandbytes)"),
        (quantization_problem(json!({"quantization_config": {"quant_method": "gptq"}})), "(gptq)"),
        (quantization_problem(json!({"quantization": {"bits": 4, "group_size": 64}})), "MLX"),
    ] {
        let running = start(files, Faults::default()).await;
        let error = running.client().plan_model(&tiny()).await.unwrap_err();
        assert!(matches!(error, HubError::Unusable { .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    }
}

#[tokio::test]
async fn each_refusal_of_the_hub_is_one_sentence_with_what_to_do() {
    let running = start(model(), Faults { gated: Some("hf_right"), ..Faults::default() }).await;
    let hub = running.client();
    let plan =
        async |hub: &rlood_hub::Hub, repo: &str| hub.plan_model(&Repo::parse(RepoKind::Model, repo).unwrap()).await;
    let error = plan(&hub, "fake/tiny").await.unwrap_err().to_string();
    assert!(
        error.contains("accept its license at") && error.contains("/fake/tiny") && error.contains("provide a token"),
        "{error}"
    );
    let error = plan(&hub.with_token(Token::new("hf_wrong")), "fake/tiny").await.unwrap_err().to_string();
    assert!(error.contains("accept its license") && !error.contains("hf_wrong"), "{error}");
    assert!(plan(&hub.with_token(Token::new("hf_right")), "fake/tiny").await.is_ok());

    let error = plan(&hub, "fake/other").await.unwrap_err().to_string();
    assert!(error.contains("no model fake/other, or it is private") && error.contains("provide a token"), "{error}");
    let error = plan(&hub.with_token(Token::new("hf_right")), "fake/other").await.unwrap_err().to_string();
    assert!(error.contains("the token's permissions"), "{error}");
    let error = plan(&hub, "fake/tiny@nope").await.unwrap_err().to_string();
    assert!(error.contains("no revision \"nope\""), "{error}");
}

#[tokio::test]
async fn an_id_of_the_other_kind_is_named_with_where_to_give_it() {
    let running = start(model(), Faults::default()).await;
    for hub in [running.client(), running.client().with_token(Token::new("hf_right"))] {
        let info =
            async |kind: RepoKind, id: &str| hub.info(&Repo::parse(kind, id).unwrap()).await.unwrap_err().to_string();
        let error = info(RepoKind::Model, "fake/rows").await;
        assert!(error.starts_with("fake/rows is a dataset, not a model: give a model here"), "{error}");
        let error = info(RepoKind::Dataset, "fake/tiny").await;
        assert!(error.starts_with("fake/tiny is a model, not a dataset: give a dataset here"), "{error}");
        let before = running.seen().len();
        let error = info(RepoKind::Dataset, "fake/other").await;
        assert!(error.contains("no dataset fake/other, or it is private"), "{error}");
        assert_eq!(running.seen().len() - before, 2, "the other kind is asked once");
    }
}

#[tokio::test]
async fn a_renamed_repository_is_read_and_its_new_name_told() {
    let running = start(model(), Faults::default()).await;
    let hub = running.client();
    let plan = hub.plan_model(&Repo::parse(RepoKind::Model, OLD_MODEL).unwrap()).await.unwrap();
    assert_eq!((plan.repo.id(), plan.renamed_to.as_deref()), (OLD_MODEL, Some("fake/tiny")));
    let info = hub.info(&Repo::parse(RepoKind::Dataset, OLD_DATASET).unwrap()).await.unwrap();
    assert_eq!(info.renamed_to.as_deref(), Some("fake/rows"));
    assert_eq!(hub.plan_model(&tiny()).await.unwrap().renamed_to, None);
}

#[tokio::test]
async fn a_file_name_that_leaves_the_folder_is_refused() {
    let mut files = model();
    files.insert("../x".to_owned(), vec![0]);
    let running = start(files, Faults::default()).await;
    let error = running.client().plan_model(&tiny()).await.unwrap_err();
    assert!(matches!(error, HubError::BadPath { .. }), "{error}");
}

#[tokio::test]
async fn offline_mode_sends_no_request() {
    let running = start(model(), Faults::default()).await;
    let policy = rlood_types::outgoing::OutgoingPolicy::parse(&["loopback"]).unwrap();
    let mut settings = rlood_hub::HubSettings::new(&running.url, policy.clone()).unwrap();
    settings.offline = true;
    let client = rlood_rewards::http_client::restricted_client_builder(&policy).build().unwrap();
    let error = rlood_hub::Hub::new(client, settings).plan_model(&tiny()).await.unwrap_err();
    assert!(matches!(error, HubError::Offline { .. }), "{error}");
    assert!(running.seen().is_empty());
}

#[tokio::test]
async fn weights_in_git_itself_are_in_the_outline_as_a_whole() {
    let mut files = model();
    let shard = vec![7; 500];
    files.insert("model-00002-of-00002.safetensors".to_owned(), shard.clone());
    files.insert("model-00001-of-00002.safetensors".to_owned(), shard.clone());
    let running = start(files, Faults::default()).await;
    let client = running.client();
    let plan = client.plan_model(&tiny()).await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let outline = dir.path().join("outline");
    client.outline(&plan, &dir.path().join("parts"), &outline).await.unwrap();
    assert_eq!(std::fs::read(outline.join("model-00002-of-00002.safetensors")).unwrap(), shard);
}
