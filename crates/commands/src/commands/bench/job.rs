//! The training job that the benchmark measures, and the server's estimate of its memory.

use std::num::NonZeroU32;

use serde_json::{Map, Value, json};

use super::random_model::word;
use super::{BenchError, Setting};
use crate::config::{Device, FourBit, machine_memory_bytes};
use crate::engine;
use crate::engine::host::PromptRow;
use crate::engine::text::Text;
use crate::spec::footprint::{Footprint, Place, weight_bytes};
use crate::spec::{Context, DatasetFacts, FieldError, JobSpec, ModelFacts, Plan, PromptLengths, resolve};

/// Returns prompts with the requested number of tokens: words of the random model, or decoded tokens of a given one.
pub(super) fn rows(setting: &Setting<'_>, count: usize) -> Result<Vec<PromptRow>, BenchError> {
    let random = setting.tokens(0, 1).first().map(|token| word(*token as usize)).unwrap_or_default();
    let text = Text::load(&setting.model_dir).map_err(engine::error::EngineError::from)?;
    let ours = text.token_to_id(&random).is_some();
    let row = |prompt: Vec<u32>| {
        let text = match ours {
            true => prompt.iter().map(|token| word(*token as usize)).collect::<Vec<_>>().join(" "),
            false => text.decode(&prompt, false).map_err(engine::error::EngineError::from)?,
        };
        Ok(PromptRow { prompt: json!(text), columns: Map::new() })
    };
    setting.prompts(count).into_iter().map(row).collect()
}

/// Returns the resolved settings that the server would derive for the measured job.
pub(super) fn plan(
    setting: &Setting<'_>,
    generations: u32,
    rows: &[PromptRow],
    steps: u64,
) -> Result<Plan, BenchError> {
    let args = setting.args;
    let (quant_type, is_nested) = args.load_in_4bit.map(FourBit::quantization).unwrap_or_default();
    let (spec, errors) = JobSpec::read(json!({
        "model": "bench",
        "dataset": {"id": crate::id::DatasetId::new()},
        "rewards": [{"type": "length", "name": "bench", "min_words": 1, "max_words": 2}],
        "rloo": {"num_generations": generations, "beta": args.beta},
        "sampling": {"max_completion_length": args.completion, "temperature": 1.0},
        "lora": {"r": args.lora_r, "alpha": args.lora_r, "target_modules": "all-linear"},
        "optimizer": {"learning_rate": 1e-4, "lr_scheduler_type": "constant"},
        "training": {"prompts_per_step": args.prompts, "max_steps": steps, "dtype": args.dtype.as_str(),
                     "load_in_4bit": args.load_in_4bit.is_some(), "bnb_4bit_quant_type": quant_type,
                     "use_bnb_nested_quant": is_nested,
                     "gradient_checkpointing": args.gradient_checkpointing.then_some(true),
                     "micro_batch_tokens": args.micro_batch_tokens},
        "checkpoints": {"every_steps": steps},
    }));
    let refused = |errors: Vec<FieldError>| {
        let lines: Vec<String> = errors.iter().map(|error| format!("{}: {}", error.pointer, error.detail)).collect();
        BenchError::Job(lines.join("; "))
    };
    if !errors.is_empty() {
        return Err(refused(errors));
    }
    let card = &setting.card;
    let records: Vec<Value> = rows.iter().map(|row| json!({"prompt": row.prompt})).collect();
    let longest = PromptLengths { longest: u64::from(args.prompt_len), ..PromptLengths::default() };
    let context = Context {
        model: Some(ModelFacts {
            id: "bench".to_owned(),
            sha256: String::new(),
            max_position_embeddings: card.max_position_embeddings as u64,
            num_parameters: card.num_parameters,
            size_bytes: card.files.iter().map(|file| file.size_bytes).sum(),
            has_chat_template: false,
            removes_reasoning: false,
            shape: Some(card.shape()),
            modules: card.config.module_names(),
            beyond_gpu: card.config.beyond_gpu(),
            foreign: None,
            reads_images: false,
        }),
        dataset: Some(DatasetFacts { prompt_lengths: Some(longest), ..DatasetFacts::of_records(&records) }),
        memory_limit_bytes: machine_memory_bytes(),
        places: vec![place(args.device)],
        ..Context::default()
    };
    Ok(resolve(&spec, &context).map_err(refused)?.plan)
}

/// Returns the device kind that the job must be able to run on.
fn place(device: Device) -> Place {
    match device {
        Device::Cpu => Place::Cpu,
        Device::Cuda(ordinal) => Place::Cuda { memory_bytes: engine::gpu::smallest(&[ordinal]).ok() },
    }
}

/// Returns the server's memory estimate for the measured job on its device.
fn footprint(setting: &Setting<'_>, plan: &Plan, micro_batch_tokens: u64) -> Footprint {
    let (card, prompt) = (&setting.card, Some(u64::from(setting.args.prompt_len)));
    let place = place(setting.args.device);
    Footprint::on(place, plan, card.num_parameters, &card.shape(), prompt, micro_batch_tokens)
}

/// Returns the estimated memory of whole training steps, in MiB.
pub(super) fn estimate_mib(setting: &Setting<'_>, plan: &Plan) -> f64 {
    mib(footprint(setting, plan, u64::from(plan.training.micro_batch_tokens)).total)
}

/// Returns the estimated memory in MiB of forward and backward passes alone, without optimizer moments and reference model.
/// Allows one completion per prompt, unlike a job. None if the server would refuse the job.
pub(super) fn estimate_of_training_mib(setting: &Setting<'_>, micro_batch_tokens: u64) -> Option<f64> {
    let args = setting.args;
    let rows = rows(setting, args.prompts as usize).ok()?;
    let mut plan = plan(setting, args.generations.max(2), &rows, 1).ok()?;
    plan.rloo.num_generations = NonZeroU32::new(args.generations).unwrap_or(plan.rloo.num_generations);
    plan.rloo.beta = 0.0;
    plan.training.gradient_checkpointing = args.gradient_checkpointing;
    let needs = footprint(setting, &plan, micro_batch_tokens);
    Some(mib(needs.total - needs.optimizer))
}

/// Returns the server's estimate of the base model's weights in MiB. None if the server would refuse the job.
pub(super) fn estimate_of_base_mib(setting: &Setting<'_>) -> Option<f64> {
    let rows = rows(setting, setting.args.prompts as usize).ok()?;
    let plan = plan(setting, setting.args.generations.max(2), &rows, 1).ok()?;
    Some(mib(weight_bytes(&plan, setting.card.num_parameters, &setting.card.shape())))
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / (1 << 20) as f64
}
