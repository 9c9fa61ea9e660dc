//! Keys of other trainers. They are rejected by name, with a hint on what to use instead.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use super::settings::SECTIONS;

/// Returns the error code and text for a key that this section does not know.
pub(super) fn advice(key: &str, pointer: &str) -> Option<(&'static str, String)> {
    if let Some((code, text)) = of_another_trainer(key) {
        return Some((code, format!("'{key}': {text}")));
    }
    let home = HOMES.get(key)?;
    (home != pointer).then(|| ("unknown_field", format!("'{key}' does not belong here: give it as {home}")))
}

fn of_another_trainer(key: &str) -> Option<(&'static str, &'static str)> {
    let lower = key.to_ascii_lowercase();
    if let Some((_, code, text)) = KEYS.iter().find(|(keys, _, _)| keys.contains(&lower.as_str())) {
        return Some((code, text));
    }
    PREFIXES.iter().find(|(prefix, _)| lower.starts_with(prefix)).map(|(_, text)| (FOREIGN, *text))
}

const FOREIGN: &str = "foreign_key";
const LATER: &str = "unsupported";

const VALUE_MODEL: &str =
    "RLOO has no value model: the baseline is the mean reward of the other completions of the prompt. Remove this key";
const ADVANTAGE_DISCOUNT: &str = "this key belongs to PPO's generalized advantage estimation; RLOO gives the whole completion one advantage. Remove this key";
const PPO_CLIP: &str = "this key is PPO's name of the policy clip: use rloo.epsilon (and rloo.epsilon_high)";
const ADAPTIVE_KL: &str = "the coefficient of the KL penalty is constant: use rloo.beta";
const PRECISION: &str = "use training.dtype: \"f32\" or \"bf16\"";
const QUANTIZED: &str = "use training.load_in_4bit, training.bnb_4bit_quant_type (nf4, fp4) and training.use_bnb_nested_quant; other quantized base models are not supported";
const ONE_DEVICE: &str = "rlood's own engine trains on one device; for several use runtime \"trl\" with resources.devices, and runtime.zero_stage to divide the weights";
const EIGHT_BITS: &str =
    "use runtime {\"name\": \"trl\", \"load_in_8bit\": true}: only TRL trains on a base model in 8 bits";
const IMAGES_OF_ROWS: &str = "images are part of the dataset's rows: upload them with POST /datasets (images: [{\"file\": …}] and a zip), and use runtime \"trl\"";
const NO_VIDEO: &str = "prompts are text and images: videos cannot be used";
const BATCH: &str = "the size of a batch is its number of prompts: use training.prompts_per_step (completions = prompts_per_step · rloo.num_generations); the worker chooses micro-batches itself";
const SAVING: &str = "use checkpoints {every_steps, every_seconds, keep_last, keep_best, metric_for_best}";
const EARLY: &str = "use early_stopping {metric, patience, min_delta}";
const EVALUATING: &str = "use eval {dataset or fraction, every_steps, before_start, num_generations, temperature}";
const LOGGING: &str = "every step's metrics and every completion are kept: read /jobs/{id}/metrics and /jobs/{id}/samples; remove this key";
const REWARDS: &str = "use rewards: a list of {type, name, weight, …}";

type Entry = (&'static [&'static str], &'static str, &'static str);

const KEYS: &[Entry] = &[
    (
        &[
            "value_model",
            "value_network",
            "value_head",
            "critic",
            "critic_model",
            "vf_coef",
            "value_loss_coef",
            "cliprange_value",
            "vf_clip_param",
            "num_critic_epochs",
            "critic_lr",
        ],
        FOREIGN,
        VALUE_MODEL,
    ),
    (&["gamma", "lam", "lambda", "gae_lambda", "whiten_rewards", "whiten_advantages"], FOREIGN, ADVANTAGE_DISCOUNT),
    (&["cliprange", "clip_range", "clip_ratio", "clip_eps"], FOREIGN, PPO_CLIP),
    (&["init_kl_coef", "adap_kl_ctrl", "target_kl", "kl_penalty", "target", "horizon"], FOREIGN, ADAPTIVE_KL),
    (&["num_ppo_epochs", "ppo_epochs"], FOREIGN, "use rloo.num_iterations: passes over one rollout"),
    (
        &["num_mini_batches", "mini_batch_size", "ppo_mini_batch_size"],
        FOREIGN,
        "use rloo.steps_per_generation: optimizer steps per rollout",
    ),
    (
        &["rloo_k", "num_samples_per_prompt", "n_samples_per_prompt", "group_size", "k"],
        FOREIGN,
        "use rloo.num_generations: completions per prompt",
    ),
    (
        &["token_level_kl"],
        FOREIGN,
        "use rloo.estimator reinforce_pp or reinforce_pp_baseline, whose KL penalty falls token by token, or rloo.kl_in \"loss\"",
    ),
    (
        &["entropy_coef", "ent_coef", "entropy_bonus"],
        FOREIGN,
        "RLOO has no entropy bonus; raise sampling.temperature or rloo.beta against collapse. Remove this key",
    ),
    (
        &["missing_eos_penalty"],
        FOREIGN,
        "completions without an end-of-sequence token get no penalty here; set rloo.mask_truncated_completions or add a length reward. Remove this key",
    ),
    (&["response_length", "max_new_tokens", "max_tokens", "max_length"], FOREIGN, "use sampling.max_completion_length"),
    (
        &["max_prompt_length"],
        FOREIGN,
        "prompts are never truncated; shorten the ones that the validation reports, and remove this key",
    ),
    (
        &["total_episodes", "num_episodes"],
        FOREIGN,
        "use training.max_steps (optimizer steps) or training.num_train_epochs",
    ),
    (&["epochs", "n_epochs", "num_epochs"], FOREIGN, "use training.num_train_epochs, or training.max_steps"),
    (&["steps", "train_steps", "num_steps"], FOREIGN, "use training.max_steps"),
    (
        &[
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "generation_batch_size",
            "train_batch_size",
            "batch_size",
            "local_rollout_forward_batch_size",
            "auto_find_batch_size",
        ],
        FOREIGN,
        BATCH,
    ),
    (
        &["per_device_eval_batch_size", "eval_batch_size"],
        FOREIGN,
        "the worker chooses the batches of an evaluation; remove this key",
    ),
    (&["num_generations_eval"], FOREIGN, "use eval.num_generations"),
    (&["eval_strategy", "evaluation_strategy", "eval_steps", "eval_dataset", "eval_on_start"], FOREIGN, EVALUATING),
    (
        &["save_steps", "save_strategy", "save_total_limit", "save_only_model", "output_dir", "load_best_model_at_end"],
        FOREIGN,
        SAVING,
    ),
    (
        &[
            "logging_steps",
            "logging_dir",
            "logging_strategy",
            "report_to",
            "log_completions",
            "num_completions_to_print",
            "run_name",
        ],
        FOREIGN,
        LOGGING,
    ),
    (&["lora_r", "lora_rank"], FOREIGN, "use lora.r"),
    (&["lora_alpha"], FOREIGN, "use lora.alpha"),
    (&["lora_dropout"], FOREIGN, "use lora.dropout"),
    (&["lora_target_modules"], FOREIGN, "use lora.target_modules"),
    (
        &["peft_config", "use_peft", "peft"],
        FOREIGN,
        "use lora {r, alpha, target_modules, dropout}, or lora: null for full fine-tuning",
    ),
    (
        &[
            "modules_to_save",
            "use_dora",
            "layers_to_transform",
            "layers_pattern",
            "rank_pattern",
            "alpha_pattern",
            "init_lora_weights",
            "bias",
        ],
        LATER,
        "this version trains plain LoRA only; remove this key",
    ),
    (&["optim", "optimizer_type"], FOREIGN, "use optimizer {kind: \"adamw\" or \"adamw_8bit\", learning_rate, …}"),
    (&["adam_8bit", "adamw_8bit"], FOREIGN, "use optimizer.kind: \"adamw_8bit\""),
    (&["lr"], FOREIGN, "use optimizer.learning_rate"),
    (&["betas", "adam_betas"], FOREIGN, "use optimizer.adam_beta1 and optimizer.adam_beta2"),
    (&["warmup_ratio"], FOREIGN, "use optimizer.warmup_steps"),
    (&["grad_clip", "clip_grad_norm", "gradient_clipping"], FOREIGN, "use optimizer.max_grad_norm"),
    (&["lr_scheduler", "scheduler"], FOREIGN, "use optimizer.lr_scheduler_type: constant, linear or cosine"),
    (
        &["gradient_checkpointing_kwargs", "use_gradient_checkpointing"],
        FOREIGN,
        "use training.gradient_checkpointing, or leave it out: by default it depends on the available memory",
    ),
    (
        &[
            "reward_func",
            "reward_funcs",
            "reward_function",
            "reward_functions",
            "reward_model",
            "reward_model_path",
            "reward_fn",
        ],
        FOREIGN,
        REWARDS,
    ),
    (&["reward_weights"], FOREIGN, "give each reward its own weight: rewards[].weight"),
    (
        &["reward_processing_classes", "processing_class", "tokenizer", "tokenizer_name"],
        FOREIGN,
        "the tokenizer comes with the model; remove this key",
    ),
    (
        &["ref_model", "reference_model", "ref_policy"],
        FOREIGN,
        "the reference model is the base model, or the weights that a run starts from: see warm_start.reference; remove this key",
    ),
    (
        &["sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"],
        FOREIGN,
        "the reference model stays the base model; remove this key",
    ),
    (
        &["initial_adapter", "resume_from_checkpoint", "adapter"],
        FOREIGN,
        "use warm_start {checkpoint, reference}; POST /jobs/{id}/resume resumes a paused job, POST /jobs/{id}/fork continues from any checkpoint",
    ),
    (
        &["train_dataset", "dataset_name", "dataset_id"],
        FOREIGN,
        "use dataset {\"id\": \"ds_…\"} or dataset {\"records\": […]}",
    ),
    (
        &["model_name", "model_name_or_path", "model_id", "policy_model", "sft_model_path"],
        FOREIGN,
        "use model: the id of a registered model",
    ),
    (
        &["model_init_kwargs", "trust_remote_code", "attn_implementation"],
        FOREIGN,
        "models are described by their config.json alone; remove this key",
    ),
    (&["bf16", "fp16", "tf32", "torch_dtype", "dtype", "load_in_16bit"], FOREIGN, PRECISION),
    (&["load_in_8bit"], FOREIGN, EIGHT_BITS),
    (&["load_in_4bit", "bnb_4bit_quant_type", "quantization_config", "use_qlora"], FOREIGN, QUANTIZED),
    (
        &[
            "deepspeed",
            "fsdp",
            "fsdp_config",
            "ds3_gather_for_generation",
            "ddp_find_unused_parameters",
            "tensor_parallel_size",
            "world_size",
            "num_gpus",
        ],
        FOREIGN,
        ONE_DEVICE,
    ),
    (
        &["use_transformers_paged", "use_transformers_continuous_batching", "fast_inference", "cache_implementation"],
        FOREIGN,
        "the worker samples with its own kernels, the same as in training; remove this key",
    ),
    (
        &["use_liger_kernel", "use_liger_loss", "torch_compile", "max_seq_length"],
        FOREIGN,
        "the worker has its own kernels and reads the model's limits by itself; remove this key",
    ),
    (&["use_vllm"], FOREIGN, VLLM),
    (&["image", "images", "image_column", "pixel_values"], LATER, IMAGES_OF_ROWS),
    (&["video", "videos"], LATER, NO_VIDEO),
    (
        &["scale_rewards", "loss_type", "importance_sampling_level"],
        FOREIGN,
        "use rloo.estimator (grpo divides by the group's std, dr_grpo does not) and rloo.loss (token_mean, seq_mean_token_mean, dr_grpo, gspo)",
    ),
    (&["early_stopping_patience", "early_stopping_threshold", "early_stop"], FOREIGN, EARLY),
    (&["metric_for_best_model"], FOREIGN, "use checkpoints.metric_for_best"),
    (&["alerts", "on_alerts", "monitors"], FOREIGN, "use doctor {on_alert: note, pause or stop, rules}"),
    (&["validation_split", "eval_split", "test_size", "validation_fraction"], FOREIGN, "use eval {fraction: 0.1}"),
    (&["generation_kwargs"], FOREIGN, "use sampling {temperature, top_p, top_k, min_p, repetition_penalty, stop}"),
    (
        &["api_key", "authorization", "token"],
        FOREIGN,
        "give a reward's credentials as rewards[].headers; they are never shown again",
    ),
];

/// The rollout servers of a job.
const VLLM: &str = "use rollout {\"engine\": \"vllm\", \"servers\": [{\"url\": …}]}, or leave it out: the worker then samples with its own kernels, the same as in training";

const PREFIXES: &[(&str, &str)] = &[
    ("vllm_", VLLM),
    ("bnb_", QUANTIZED),
    ("fsdp_", ONE_DEVICE),
    ("deepspeed_", ONE_DEVICE),
    ("critic_", VALUE_MODEL),
    ("value_", VALUE_MODEL),
    ("vf_", VALUE_MODEL),
];

/// The section of each setting, for sections that every job has. The error for a known key in the wrong section
/// names the right one.
static HOMES: LazyLock<BTreeMap<&'static str, String>> = LazyLock::new(|| {
    let sections = SECTIONS.iter().filter(|section| !section.is_optional);
    let settings = sections.flat_map(|section| section.settings.iter().map(move |setting| (section, setting)));
    settings.map(|(section, setting)| (setting.name, format!("/{}/{}", section.name, setting.name))).collect()
});
