//! Translates a plan into the configuration of the runner.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::dataset::image_refs;
use crate::engine::host::PromptRow;
use crate::spec::{ComputeDtype, LoraPlan, OptimizerKind, Plan, QuantType};

/// Time limit of a collective in seconds: a day, because a rank may wait for rewards while another waits for it.
const DDP_TIMEOUT_S: u32 = 86_400;

/// Files and devices that the configuration names besides the plan.
pub(super) struct Setup<'a> {
    /// Directory of the base model.
    pub(super) model_dir: &'a Path,
    /// The dataset's rows, one JSON object per line.
    pub(super) dataset: &'a Path,
    /// Directory in which the trainer writes checkpoints.
    pub(super) output_dir: &'a Path,
    /// The checkpoint to resume from.
    pub(super) resume: Option<&'a Path>,
    /// The settings of DeepSpeed, if the plan uses it.
    pub(super) deepspeed: Option<&'a Path>,
    /// Number of processes that train together.
    pub(super) ranks: usize,
    /// Whether the processes compute on GPUs.
    pub(super) on_gpus: bool,
    /// Number of compute threads of each process.
    pub(super) threads: u32,
    /// Length of the longest prompt, in tokens, with its images; it decides the size of a micro-batch.
    pub(super) longest_prompt: usize,
    /// Whether rows have images.
    pub(super) has_images: bool,
}

/// Returns the configuration of the runner.
pub(super) fn runner_config(plan: &Plan, setup: &Setup<'_>) -> Value {
    json!({
        "version": super::message::PROTOCOL,
        "model_dir": setup.model_dir,
        "dataset": setup.dataset,
        "output_dir": setup.output_dir,
        "resume": setup.resume,
        "threads": setup.threads,
        "images": if setup.has_images { "files" } else { "none" },
        "lora": plan.lora.as_ref().map(lora_config),
        "quantization": quantization(plan),
        "simulate_gpu_ranks": setup.deepspeed.is_some() && !setup.on_gpus,
        "rloo": rloo_config(plan, setup),
    })
}

/// Returns the number of completions per rank and micro-batch, and of micro-batches per optimizer step.
fn micro_batches(plan: &Plan, setup: &Setup<'_>) -> (u64, u64) {
    let completions = u64::from(plan.training.prompts_per_step) * u64::from(plan.rloo.num_generations.get());
    let of_rank = (completions / setup.ranks as u64).max(1);
    let row_tokens = setup.longest_prompt as u64 + u64::from(plan.sampling.max_completion_length);
    let most = (u64::from(plan.training.micro_batch_tokens) / row_tokens.max(1)).clamp(1, of_rank);
    let batch = (1..=most).rev().find(|batch| of_rank.is_multiple_of(*batch)).unwrap_or(1);
    (batch, of_rank / batch)
}

fn rloo_config(plan: &Plan, setup: &Setup<'_>) -> Map<String, Value> {
    let (rloo, sampling, training, optimizer) = (&plan.rloo, &plan.sampling, &plan.training, &plan.optimizer);
    let (batch, accumulation) = micro_batches(plan, setup);
    let is_bf16 = training.dtype == ComputeDtype::Bf16;
    let algorithm = json!({
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        // TRL counts micro-batches here, and the plan counts optimizer steps.
        "steps_per_generation": u64::from(rloo.steps_per_generation) * accumulation,
        "num_generations": rloo.num_generations,
        "num_iterations": rloo.num_iterations,
        "beta": rloo.beta,
        "epsilon": rloo.epsilon,
        "epsilon_high": rloo.epsilon_high,
        "normalize_advantages": rloo.normalize_advantages,
        "mask_truncated_completions": rloo.mask_truncated_completions,
        "max_completion_length": sampling.max_completion_length,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": (sampling.min_p > 0.0).then_some(sampling.min_p),
        "repetition_penalty": sampling.repetition_penalty,
        "chat_template_kwargs": sampling.chat_template_kwargs,
        "max_steps": training.max_steps,
        "seed": training.seed,
        "shuffle_dataset": training.shuffle_dataset,
        "gradient_checkpointing": training.gradient_checkpointing,
        "bf16": is_bf16,
        "model_init_kwargs": { "dtype": if is_bf16 { "bfloat16" } else { "float32" } },
        "learning_rate": optimizer.learning_rate,
        "adam_beta1": optimizer.adam_beta1,
        "adam_beta2": optimizer.adam_beta2,
        "adam_epsilon": optimizer.adam_epsilon,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
        "warmup_steps": optimizer.warmup_steps,
        "lr_scheduler_type": optimizer.lr_scheduler_type,
        "optim": match optimizer.kind {
            OptimizerKind::Adamw => "adamw_torch",
            OptimizerKind::Adamw8bit => "adamw_bnb_8bit",
        },
    });
    let surroundings = json!({
        // The shims for DeepSpeed on the CPU need the code path of GPUs.
        "use_cpu": !setup.on_gpus && setup.deepspeed.is_none(),
        "ddp_backend": (setup.ranks > 1 && !setup.on_gpus).then_some("gloo"),
        "ddp_timeout": DDP_TIMEOUT_S,
        "deepspeed": setup.deepspeed,
        "dataloader_pin_memory": setup.on_gpus,
        // The worker decides when to save.
        "save_strategy": "no",
        "eval_strategy": "no",
        "logging_steps": 1,
        "logging_nan_inf_filter": false,
        // Otherwise a collective is called only by the ranks whose batch has an image, and the others wait forever.
        "log_multimodal": false,
        "report_to": [],
        "disable_tqdm": true,
        "remove_unused_columns": false,
    });
    let mut config = Map::new();
    for part in [algorithm, surroundings] {
        let Value::Object(part) = part else { continue };
        config.extend(part.into_iter().filter(|(_, value)| !value.is_null()));
    }
    config
}

fn lora_config(lora: &LoraPlan) -> Value {
    json!({
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": lora.target_modules,
        "use_rslora": lora.use_rslora,
        "rank_pattern": lora.rank_pattern,
        "alpha_pattern": lora.alpha_pattern,
    })
}

fn quantization(plan: &Plan) -> Option<Value> {
    if plan.runtime.load_in_8bit {
        return Some(json!({ "load_in_8bit": true }));
    }
    let four_bit = plan.training.four_bit()?;
    let quant_type = match four_bit.quant_type {
        QuantType::Nf4 => "nf4",
        QuantType::Fp4 => "fp4",
    };
    Some(json!({
        "load_in_4bit": true,
        "bnb_4bit_quant_type": quant_type,
        "bnb_4bit_use_double_quant": four_bit.is_nested,
        "bnb_4bit_compute_dtype": if plan.training.dtype == ComputeDtype::Bf16 { "bfloat16" } else { "float32" },
    }))
}

/// Returns the settings of DeepSpeed; `None` if the plan does not use it. transformers fills in the values `auto`.
pub(super) fn deepspeed_config(plan: &Plan) -> Option<Value> {
    let stage = plan.runtime.zero_stage?;
    let mut zero = json!({ "stage": stage });
    if stage == 3 {
        zero["stage3_gather_16bit_weights_on_model_save"] = json!(true);
    }
    if plan.runtime.offload {
        zero["offload_optimizer"] = json!({ "device": "cpu" });
        if stage == 3 {
            zero["offload_param"] = json!({ "device": "cpu" });
        }
    }
    Some(json!({
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": true,
        "zero_force_ds_cpu_optimizer": false,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": { "enabled": "auto" },
    }))
}

/// Returns the dataset of the runner: the prompts with their row numbers, one JSON object per line. Columns for rewards stay here.
/// With images each row has the paths of its own, possibly none: TRL does not understand a row without the column.
pub(super) fn dataset_lines(rows: &[PromptRow], images: Option<&Path>) -> String {
    let line = |(row, prompt): (usize, &PromptRow)| {
        let mut line = json!({ "prompt": prompt.prompt, "rlood_row": row });
        if let Some(dir) = images {
            let paths = image_refs(&prompt.columns).into_iter().map(|image| dir.join(image.sha256.to_string()));
            line["images"] = json!(paths.collect::<Vec<_>>());
        }
        format!("{line}\n")
    };
    rows.iter().enumerate().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::trl::tests::plan;

    fn setup(ranks: usize, longest_prompt: usize) -> Setup<'static> {
        Setup {
            model_dir: Path::new("/model"),
            dataset: Path::new("/rows"),
            output_dir: Path::new("/out"),
            resume: None,
            deepspeed: None,
            ranks,
            on_gpus: false,
            threads: 1,
            longest_prompt,
            has_images: false,
        }
    }

    #[test]
    fn ranks_and_micro_batches_share_the_completions_of_a_step() {
        let mut plan = plan(1);
        plan.training.prompts_per_step = 6;
        plan.rloo.steps_per_generation = 3;
        // A step has 12 completions of at most 4 tokens.
        for (ranks, micro_batch_tokens, batch, accumulation) in
            [(1, 4096, 12, 1), (1, 40, 4, 3), (2, 40, 3, 2), (4, 1, 1, 3), (3, 50, 4, 1), (2, 50, 3, 2)]
        {
            plan.training.micro_batch_tokens = micro_batch_tokens;
            let config = rloo_config(&plan, &setup(ranks, 6));
            assert_eq!(config["per_device_train_batch_size"], batch, "{ranks} ranks, {micro_batch_tokens} tokens");
            assert_eq!(config["gradient_accumulation_steps"], accumulation);
            assert_eq!(config["steps_per_generation"], 3 * accumulation, "TRL counts micro-batches");
        }
    }

    #[test]
    fn the_surroundings_are_those_of_the_device() {
        let plan = plan(2);
        let on_cpu = runner_config(&plan, &setup(2, 1));
        assert_eq!((&on_cpu["rloo"]["use_cpu"], &on_cpu["rloo"]["ddp_backend"]), (&json!(true), &json!("gloo")));
        assert!(on_cpu["rloo"].get("min_p").is_none(), "TRL takes 0 for a filter");
        let on_gpus = runner_config(&plan, &Setup { on_gpus: true, ..setup(2, 1) });
        assert_eq!((&on_gpus["rloo"]["use_cpu"], on_gpus["rloo"].get("ddp_backend")), (&json!(false), None));
        assert_eq!(on_gpus["rloo"]["log_multimodal"], json!(false));
        assert_eq!(
            runner_config(&plan, &setup(1, 1))["rloo"].get("ddp_backend"),
            None,
            "it would wait for other ranks"
        );
    }

    #[test]
    fn quantization_and_deepspeed_come_from_the_plan() {
        let mut plan = plan(2);
        assert_eq!((quantization(&plan), deepspeed_config(&plan)), (None, None));
        plan.training.load_in_4bit = true;
        assert_eq!(quantization(&plan).unwrap()["bnb_4bit_quant_type"], "nf4");
        plan.runtime.load_in_8bit = true;
        assert_eq!(quantization(&plan).unwrap(), json!({"load_in_8bit": true}));
        (plan.runtime.zero_stage, plan.runtime.offload) = (Some(2), true);
        let config = deepspeed_config(&plan).unwrap();
        assert_eq!(config["zero_optimization"], json!({"stage": 2, "offload_optimizer": {"device": "cpu"}}));
        plan.runtime.zero_stage = Some(3);
        assert_eq!(deepspeed_config(&plan).unwrap()["zero_optimization"]["offload_param"]["device"], "cpu");
    }
}
