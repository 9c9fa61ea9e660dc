//! TRL keys that need no translation: keys without a counterpart because nothing here depends on them, and keys that request
//! something unsupported. The list covers `RLOOConfig` of TRL 1.16 with `TrainingArguments` of transformers 5, `ModelConfig` and
//! the script arguments, and keys of older releases that users still have.

use serde_json::Value;

/// A group of keys with the same explanation.
pub(super) struct Entry {
    pub keys: &'static [&'static str],
    /// The explanation for the user.
    pub reason: &'static str,
}

/// Keys that request something unsupported unless they have one of these values (JSON). Null, false, "" and empty lists and objects
/// always count as off.
pub(super) struct Refused {
    pub keys: &'static [&'static str],
    /// Additional values, as JSON, that count as off.
    pub off: &'static [&'static str],
    pub reason: &'static str,
}

impl Refused {
    /// Whether the key requests nothing unsupported with this value.
    pub(super) fn is_off(&self, value: &Value) -> bool {
        let listed = |off: &&str| {
            serde_json::from_str::<Value>(off).is_ok_and(|off| match (off.as_f64(), value.as_f64()) {
                (Some(off), Some(value)) => off == value,
                _ => off == *value,
            })
        };
        is_off_value(value) || self.off.iter().any(listed)
    }
}

/// Whether the value is null, false (also as a word), "" or an empty list or object.
pub(super) fn is_off_value(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => {
            text.is_empty() || ["none", "no", "off", "false"].iter().any(|off| text.eq_ignore_ascii_case(off))
        }
        Value::Array(items) => items.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::Bool(true) | Value::Number(_) => false,
    }
}

/// Keys for things that the service does in its own way, or not at all, without affecting the weights.
pub(super) const IGNORED: &[Entry] = &[
    Entry {
        keys: &[
            "logging_steps",
            "logging_strategy",
            "logging_first_step",
            "logging_dir",
            "logging_nan_inf_filter",
            "log_on_each_node",
            "log_level",
            "log_level_replica",
            "log_completions",
            "log_multimodal",
            "log_unique_prompts",
            "num_completions_to_print",
            "wandb_log_unique_prompts",
            "report_to",
            "project",
            "trackio_space_id",
            "trackio_bucket_id",
            "trackio_static_space_id",
            "disable_tqdm",
            "include_num_input_tokens_seen",
            "include_tokens_per_second",
            "skip_memory_metrics",
            "include_for_metrics",
            "include_inputs_for_metrics",
            "batch_eval_metrics",
            "debug",
        ],
        reason: "every step's metrics and every completion are kept: read /jobs/{id}/metrics and /jobs/{id}/samples",
    },
    Entry {
        keys: &["output_dir", "overwrite_output_dir", "save_on_each_node", "save_safetensors"],
        reason: "checkpoints are kept by the server and downloaded from /jobs/{id}/checkpoints; files are safetensors",
    },
    Entry {
        keys: &[
            "save_only_model",
            "enable_jit_checkpoint",
            "ignore_data_skip",
            "restore_callback_states_from_checkpoint",
        ],
        reason: "a checkpoint always holds everything that a job needs to resume exactly",
    },
    Entry {
        keys: &["do_train", "do_eval", "do_predict"],
        reason: "a job always trains, and it evaluates if it has the section eval",
    },
    Entry {
        keys: &[
            "per_device_eval_batch_size",
            "per_gpu_eval_batch_size",
            "eval_accumulation_steps",
            "prediction_loss_only",
        ],
        reason: "the worker chooses the evaluation batches itself",
    },
    Entry {
        keys: &[
            "eval_do_concat_batches",
            "eval_use_gather_object",
            "label_names",
            "label_smoothing_factor",
            "length_column_name",
            "train_sampling_strategy",
            "group_by_length",
            "past_index",
        ],
        reason: "RLOO uses this key neither here nor in TRL",
    },
    Entry { keys: &["remove_unused_columns"], reason: "every column of the dataset is sent to the rewards" },
    Entry {
        keys: &[
            "gradient_checkpointing",
            "gradient_checkpointing_kwargs",
            "activation_checkpointing",
            "activation_checkpointing_kwargs",
            "torch_compile",
            "torch_compile_backend",
            "torch_compile_mode",
            "torchdynamo",
            "torch_empty_cache_steps",
            "use_liger_kernel",
            "liger_kernel_config",
            "use_cache",
            "cache_implementation",
            "attn_implementation",
            "pad_to_multiple_of",
            "use_transformers_continuous_batching",
            "transformers_continuous_batching_config",
            "use_transformers_paged",
            "jit_mode_eval",
            "use_ipex",
        ],
        reason: "this affects only speed and memory: the worker has its own kernels and recomputes activations if memory requires it",
    },
    Entry {
        keys: &["tf32", "bf16_full_eval", "fp16_full_eval", "half_precision_backend", "fp16_backend", "fp16_opt_level"],
        reason: "the precision of a whole job is training.dtype; evaluation samples with the same kernels",
    },
    Entry {
        keys: &[
            "ddp_find_unused_parameters",
            "ddp_bucket_cap_mb",
            "ddp_broadcast_buffers",
            "ddp_static_graph",
            "ddp_backend",
            "ddp_timeout",
            "ds3_gather_for_generation",
            "local_rank",
            "accelerator_config",
            "average_tokens_across_devices",
            "use_cpu",
            "no_cuda",
            "use_mps_device",
            "tpu_num_cores",
            "tpu_metrics_debug",
            "mp_parameters",
            "ray_scope",
            "split_batches",
            "dispatch_batches",
        ],
        reason: "one worker drives one device; which one is the server's --devices",
    },
    Entry {
        keys: &[
            "dataloader_drop_last",
            "dataloader_num_workers",
            "dataloader_pin_memory",
            "dataloader_persistent_workers",
            "dataloader_prefetch_factor",
            "dataloader_multiprocessing_context",
            "dataloader_in_order",
        ],
        reason: "prompts are read by the worker itself; an incomplete last block is left out, as in TRL",
    },
    Entry { keys: &["data_seed"], reason: "the order of prompts follows seed, in TRL's RLOO too" },
    Entry { keys: &["full_determinism"], reason: "the same seed on the same machine always gives the same run" },
    Entry {
        keys: &["trust_remote_code"],
        reason: "no code of a model is ever run: its architecture is built in, or the model is refused",
    },
    Entry {
        keys: &[
            "dataset_config",
            "dataset_train_split",
            "dataset_test_split",
            "dataset_streaming",
            "ignore_bias_buffers",
        ],
        reason: "a dataset is uploaded once, as its rows: POST /datasets",
    },
    Entry {
        keys: &[
            "hub_token",
            "hub_private_repo",
            "hub_model_id",
            "hub_strategy",
            "hub_always_push",
            "hub_revision",
            "push_to_hub_model_id",
            "push_to_hub_organization",
            "push_to_hub_token",
        ],
        reason: "the server uploads nothing: download the adapter from /jobs/{id}/adapter",
    },
    Entry {
        keys: &["bnb_4bit_quant_storage", "bnb_4bit_compute_dtype"],
        reason: "4-bit codes are stored as bytes, and training.dtype is the precision of the products",
    },
];

pub(super) const NO_QUANTIZATION: &str = "of the quantized base models only bitsandbytes' 4 bits (nf4, fp4) and 8 bits are supported: use load_in_4bit or load_in_8bit, or register the unquantized model";
const ONE_DEVICE: &str = "rlood's own engine trains on one device: remove this key; for several devices use runtime \"trl\" with resources.devices, and runtime.zero_stage to divide the weights";

/// Keys that request something unsupported.
pub(super) const REFUSED: &[Refused] = &[
    Refused { keys: &["use_qlora"], off: &[], reason: NO_QUANTIZATION },
    Refused {
        keys: &["fsdp", "fsdp_config", "parallelism_config"],
        off: &["{\"min_num_params\":0,\"xla\":false,\"xla_fsdp_v2\":false,\"xla_fsdp_grad_ckpt\":false}"],
        reason: ONE_DEVICE,
    },
    Refused { keys: &["fsdp_min_num_params"], off: &["0"], reason: ONE_DEVICE },
    Refused { keys: &["fsdp_transformer_layer_cls_to_wrap"], off: &[], reason: ONE_DEVICE },
    Refused {
        keys: &["sync_ref_model"],
        off: &[],
        reason: "the reference model does not change during a run: remove this key, and use a lower rloo.beta; to move the reference, start a new job from the adapter with warm_start {checkpoint, reference: \"initial\"}",
    },
    Refused {
        keys: &["router_aux_loss_coef"],
        off: &["0"],
        reason: "mixture-of-experts models are not supported, so there is no router to balance: remove this key",
    },
    Refused {
        keys: &["neftune_noise_alpha"],
        off: &["0"],
        reason: "noise on embeddings is not supported: remove this key",
    },
    Refused {
        keys: &["push_to_hub"],
        off: &[],
        reason: "nothing is uploaded by the server: download the adapter from /jobs/{id}/adapter and push it yourself",
    },
    Refused {
        keys: &["resume_from_checkpoint"],
        off: &[],
        reason: "a checkpoint of TRL cannot be resumed: POST /jobs/{id}/resume resumes a job of this server, warm_start starts from an adapter",
    },
    Refused {
        keys: &["eval_delay"],
        off: &["0"],
        reason: "evaluation begins at eval.every_steps, or before the start: remove this key",
    },
    Refused {
        keys: &["optim_args"],
        off: &[],
        reason: "AdamW's settings are optimizer.adam_beta1, adam_beta2, adam_epsilon, weight_decay",
    },
    Refused {
        keys: &["optim_target_modules"],
        off: &[],
        reason: "lora.target_modules selects the layers that are trained",
    },
    Refused { keys: &["adafactor"], off: &[], reason: "the optimizer is AdamW: remove this key" },
    Refused {
        keys: &["max_prompt_length"],
        off: &[],
        reason: "prompts are never truncated, as in TRL since 1.0: shorten the ones that the validation reports, and remove this key",
    },
    Refused {
        keys: &["lora_target_parameters", "lora_modules_to_save", "use_dora"],
        off: &[],
        reason: "only plain LoRA on the linear layers is supported: remove this key",
    },
    Refused {
        keys: &["lora_task_type"],
        off: &["\"CAUSAL_LM\""],
        reason: "the task is always CAUSAL_LM: remove this key",
    },
    Refused {
        keys: &["model_revision"],
        off: &["\"main\""],
        reason: "a registered model is a directory with one revision: register that revision's files under a separate id",
    },
    Refused {
        keys: &["reward_model_name_or_path", "reward_model_path", "reward_model"],
        off: &[],
        reason: "give it as a reward: {\"type\": \"reward_model\", \"model\": …} of a registered sequence-classification model (POST /models)",
    },
    Refused {
        keys: &["dataset_mixture", "datasets"],
        off: &[],
        reason: "a job has one dataset: upload the mixed rows with POST /datasets and give dataset {\"id\": \"ds_…\"}",
    },
    Refused {
        keys: &["loss_type", "scale_rewards", "importance_sampling_level"],
        off: &[],
        reason: "this is a key of GRPOConfig, not of RLOOConfig: use rloo.estimator and rloo.loss",
    },
];

/// Prefix of vLLM's keys. Settings of GRPO and other trainers that TRL's RLOO does not have are explained in `foreign`.
pub(super) const VLLM_PREFIX: &str = "vllm_";

/// Keys that the translation reads and that belong to no setting. Together with those of the settings and of the tables above, they
/// are candidates for "did you mean".
pub(super) const READ: &[&str] = &[
    "reward_weights",
    "load_best_model_at_end",
    "run_name",
    "disable_dropout",
    "model_init_kwargs",
    "auto_find_batch_size",
    "use_peft",
    "peft_config",
    "lora_config",
    "model_name_or_path",
    "dataset_name",
    "dtype",
    "torch_dtype",
    "world_size",
    "num_processes",
    "load_in_8bit",
    "deepspeed",
    "use_vllm",
    "vllm_mode",
    "vllm_server_base_url",
    "vllm_gpu_memory_utilization",
];
