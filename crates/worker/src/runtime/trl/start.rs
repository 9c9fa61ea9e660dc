//! Prepares a run: reads the prompts, writes the runner's files, starts the ranks.

use std::path::Path;

use serde_json::Value;

use super::checkpoint;
use super::config::{Setup, dataset_lines, deepspeed_config, runner_config};
use super::drive::{Driver, Training};
use super::environment::Environment;
use super::failure::not_started;
use super::ranks::{Launch, Ranks};
use super::state::TrlHost;
use crate::dataset::{ImageRef, image_refs};
use crate::engine::error::EngineError;
use crate::engine::host::{RunEnd, TrainInput};
use crate::engine::prompts::{self, TokenizedPrompt};
use crate::engine::text::Text;
use crate::event::{Event, Phase};

/// Folder of the attempt's directory in which the images of rows are, each under its SHA-256.
pub const IMAGES_DIR: &str = "images";

/// Runs a plan until its last step, which is saved; until the host requests a stop; or until the run fails.
///
/// A pause takes effect at the end of a generation block. All other stops kill the ranks at once.
///
/// # Errors
/// Says why the run ended before its last step.
pub fn train(
    input: TrainInput<'_>,
    environment: &Environment,
    threads: u32,
    host: &mut dyn TrlHost,
) -> Result<(), RunEnd> {
    let plan = input.plan;
    host.event(Event::Phase { phase: Phase::Loading, step: 0 })?;
    let count = plan.resources.devices as usize;
    let text = Text::load(input.model_dir).map_err(EngineError::from)?;
    let dir = input.scratch_dir.join("trl");
    let output_dir = dir.join("out");
    create_dir(&output_dir)?;
    let dataset = dir.join("dataset.ndjson");
    let images = input.rows.iter().any(|row| !image_refs(&row.columns).is_empty());
    let images = images.then(|| input.scratch_dir.join(IMAGES_DIR));
    write(&dataset, dataset_lines(&input.rows, images.as_deref()).as_bytes())?;
    let context = context_tokens(input.model_dir);
    let prompts = prompts::tokenize(&text, input.rows, &plan.sampling, context)?;
    let resumed = input.resume.as_deref().map(|resume| checkpoint::restore(resume, plan, count)).transpose()?;
    let (steps_done, doctor) = resumed.unwrap_or_default();
    let deepspeed = match deepspeed_config(plan) {
        Some(config) => {
            let path = dir.join("deepspeed.json");
            write(&path, config.to_string().as_bytes())?;
            Some(path)
        }
        None => None,
    };
    let threads = (threads / plan.resources.devices.max(1)).max(1);
    let config = runner_config(
        plan,
        &Setup {
            model_dir: input.model_dir,
            dataset: &dataset,
            output_dir: &output_dir,
            resume: input.resume.as_deref(),
            deepspeed: deepspeed.as_deref(),
            ranks: count,
            on_gpus: !environment.gpus.is_empty(),
            threads,
            longest_prompt: prompts.iter().map(|prompt| prompt.ids.len() + image_tokens(prompt)).max().unwrap_or(0),
            has_images: images.is_some(),
        },
    );
    if let Some(stop) = host.stop() {
        return Err(RunEnd::Stopped(stop));
    }
    let launch = Launch { environment, dir: &dir, config: &config, ranks: count, threads };
    let ranks = Ranks::start(&launch).map_err(|source| not_started(environment, &source))?;
    Driver::new(
        host,
        Training {
            plan,
            environment,
            text: &text,
            prompts: &prompts,
            output_dir,
            model_name: input.model_name,
            steps_done,
            doctor,
        },
        ranks,
    )
    .run()
}

/// Returns about how many tokens the images of a prompt take: one for each 28 × 28 pixels, as in Qwen2.5-VL. Other models scale images
/// to a size of their own.
fn image_tokens(prompt: &TokenizedPrompt) -> usize {
    let pixels = |image: ImageRef| u64::from(image.width) * u64::from(image.height);
    let tokens: u64 = image_refs(&prompt.columns).into_iter().map(|image| pixels(image) / (28 * 28)).sum();
    usize::try_from(tokens).unwrap_or(usize::MAX)
}

/// Returns the number of tokens that the model reads, from its config.json; no limit if that does not say it.
fn context_tokens(model_dir: &Path) -> usize {
    let config = std::fs::read(model_dir.join("config.json")).ok();
    let config: Value = config.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
    let of = |config: &Value| config["max_position_embeddings"].as_u64();
    let tokens = of(&config).or_else(|| of(&config["text_config"]));
    tokens.map_or(usize::MAX, |tokens| usize::try_from(tokens).unwrap_or(usize::MAX))
}

fn create_dir(path: &Path) -> Result<(), EngineError> {
    std::fs::create_dir_all(path).map_err(|source| EngineError::Io { path: path.to_owned(), source })
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), EngineError> {
    std::fs::write(path, bytes).map_err(|source| EngineError::Io { path: path.to_owned(), source })
}
