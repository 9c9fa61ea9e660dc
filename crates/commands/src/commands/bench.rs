//! `rlood bench`: measures the engine's speed on this machine, and compares it with the machine's limits.
//!
//! Every part runs in its own process, so that its memory peak is measured separately, and loads the model as a job would:
//!
//! | part | measures |
//! |---|---|
//! | [`limits`] | sequential reads, multiply-adds |
//! | [`kernels`] | matrix products and attention at the model's sizes |
//! | [`decode`] | generation by batch size, alone or next to a busy process |
//! | [`training`] | forward and backward passes, log-probs without gradient |
//! | [`step`] | whole steps of [`crate::engine::train`], with a cheap reward |
//! | [`requests`] | generation of given lengths, as inference servers are benchmarked |
//! | [`serving`] | generation over `/v1`, beside the same without HTTP |
//! | [`mismatch`] | differences between the sampler's log-probs and those of the training forward pass |
//!
//! On a GPU the limits are the device's, and the CPU kernels are left out. The weights are random ([`random_model`]); speed does
//! not depend on their values.

pub mod decode;
mod job;
pub mod kernels;
pub mod limits;
pub mod mismatch;
pub mod profile;
pub mod random_model;
mod report;
pub mod requests;
pub mod serving;
pub mod shape;
pub mod step;
mod timing;
pub mod training;

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use serde::Serialize;
use serde::de::DeserializeOwned;

use self::report::Report;
use self::serving::StartServer;
use self::shape::{Shape, Weights};
use crate::config::{BenchArgs, BenchPart, Device, Precision, machine_threads};
use crate::engine::error::EngineError;
use crate::engine::random::{Key, Stream};
use crate::modelcard::{self, ModelCard, ModelCardError};
use crate::spec::{ComputeDtype, FourBitPlan};

/// The engine's thread needs a large stack for recursion over long sequences. Only pages that are touched use memory.
const ENGINE_STACK_BYTES: usize = 512 * 1024 * 1024;

/// Why a measurement failed.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The value of `--shape` is invalid.
    #[error("{0}")]
    Shape(String),
    /// The model directory cannot be used.
    #[error("the model cannot be used")]
    Model(#[from] ModelCardError),
    /// The engine returned an error.
    #[error("the training engine failed")]
    Engine(#[from] EngineError),
    /// The job that the flags describe is invalid.
    #[error("the job of the benchmark cannot run: {0}")]
    Job(String),
    /// An operation on files or processes failed.
    #[error("cannot {doing}")]
    Io {
        /// The operation that failed.
        doing: String,
        /// Error of the underlying operation.
        #[source]
        source: std::io::Error,
    },
    /// The process that measures one part reported no valid figures.
    #[error("the part '{part}' of the benchmark failed: {detail}")]
    Part {
        /// Name of the part of the benchmark.
        part: &'static str,
        /// Exit status of the measuring process, or why its output is invalid.
        detail: String,
    },
}

fn io(doing: impl Into<String>) -> impl FnOnce(std::io::Error) -> BenchError {
    let doing = doing.into();
    move |source| BenchError::Io { doing, source }
}

/// `rlood bench`: measures, prints a table, and writes JSON if requested. `start` starts the server of the serving part.
///
/// # Errors
/// Fails when the shape or the model cannot be used, the engine fails, or a file cannot be written.
pub fn run(args: &BenchArgs, start: StartServer) -> Result<ExitCode, BenchError> {
    if args.child {
        return measure_part(args, start);
    }
    let temporary = tempfile::tempdir().map_err(io("create a temporary directory for the benchmark"))?;
    let model_dir = match (&args.model, &args.save_model) {
        (Some(given), _) => given.clone(),
        (None, Some(kept)) => make_model(args, kept)?,
        (None, None) => make_model(args, temporary.path())?,
    };
    let card = modelcard::read(&model_dir)?;
    let mut report = Report::new(args, &card);
    report.print_head();
    measure(args, BenchPart::Limits, &model_dir, &mut report, |report, figures| report.limits = Some(figures))?;
    report.print_limits();
    let wanted = |part| match args.only {
        Some(only) => only == part,
        None => usual(part, args.device),
    };
    if wanted(BenchPart::Kernels) {
        measure(args, BenchPart::Kernels, &model_dir, &mut report, |report, figures| report.kernels = Some(figures))?;
        report.print_kernels();
    }
    if wanted(BenchPart::Decode) {
        measure(args, BenchPart::Decode, &model_dir, &mut report, |report, figures| report.decode = Some(figures))?;
        report.print_decode();
    }
    if wanted(BenchPart::Training) {
        measure(args, BenchPart::Training, &model_dir, &mut report, |report, figures| report.training = Some(figures))?;
        report.print_training();
    }
    if wanted(BenchPart::Step) {
        measure(args, BenchPart::Step, &model_dir, &mut report, |report, figures| report.step = Some(figures))?;
        report.print_step();
    }
    if wanted(BenchPart::Requests) {
        measure(args, BenchPart::Requests, &model_dir, &mut report, |report, figures| report.requests = Some(figures))?;
        report.print_requests();
    }
    if wanted(BenchPart::Mismatch) {
        measure(args, BenchPart::Mismatch, &model_dir, &mut report, |report, figures| report.mismatch = Some(figures))?;
        report.print_mismatch();
    }
    if wanted(BenchPart::Serving) {
        measure(args, BenchPart::Serving, &model_dir, &mut report, |report, figures| report.serving = Some(figures))?;
        report.print_serving();
    }
    if wanted(BenchPart::Busy) {
        measure(args, BenchPart::Busy, &model_dir, &mut report, |report, figures| report.busy = Some(figures))?;
        report.print_busy();
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether a part of the benchmark is measured by default.
fn usual(part: BenchPart, device: Device) -> bool {
    match part {
        BenchPart::Limits | BenchPart::Decode | BenchPart::Training | BenchPart::Step => true,
        BenchPart::Kernels => device == Device::Cpu,
        BenchPart::Requests | BenchPart::Mismatch | BenchPart::Busy | BenchPart::Serving => false,
    }
}

/// Writes the random model, and returns its directory.
fn make_model(args: &BenchArgs, dir: &Path) -> Result<PathBuf, BenchError> {
    let shape = Shape::parse(&args.shape, (args.prompt_len + args.completion) as usize)?;
    std::fs::create_dir_all(dir).map_err(io(format!("create {}", dir.display())))?;
    random_model::write(dir, &shape, args.dtype)?;
    Ok(dir.to_owned())
}

/// Measures one part of the benchmark in a process of its own, and updates the JSON file after each new figure.
fn measure<T: DeserializeOwned>(
    args: &BenchArgs,
    part: BenchPart,
    model_dir: &Path,
    report: &mut Report<'_>,
    keep: impl Fn(&mut Report<'_>, T),
) -> Result<(), BenchError> {
    let failed = |detail: String| BenchError::Part { part: part.as_str(), detail };
    let mut command = command_of(args, part, model_dir)?;
    let mut child =
        command.stdout(Stdio::piped()).spawn().map_err(io("start a process that measures a part of the benchmark"))?;
    // Why the last line of the measuring process is not valid JSON; before the first line, that the process printed nothing.
    let mut unreadable = Some("the measuring process printed nothing".to_owned());
    for line in child.stdout.take().into_iter().flat_map(|stdout| BufReader::new(stdout).lines()) {
        let line = line.map_err(io("read the output of the process that runs the benchmark"))?;
        unreadable = match serde_json::from_str(&line) {
            Ok(figures) => {
                keep(report, figures);
                report.write()?;
                None
            }
            Err(error) => Some(error.to_string()),
        };
    }
    let status = child.wait().map_err(io("wait for a measuring process"))?;
    match unreadable {
        _ if !status.success() => Err(failed(status.to_string())),
        Some(detail) => Err(failed(detail)),
        None => Ok(()),
    }
}

/// Builds the command of the process that measures a part.
fn command_of(args: &BenchArgs, part: BenchPart, model_dir: &Path) -> Result<Command, BenchError> {
    let program = std::env::current_exe().map_err(io("find the path of the rlood executable"))?;
    let mut command = Command::new(program);
    command.arg("bench").arg("--child").arg("--only").arg(part.as_str()).arg("--model").arg(model_dir);
    let numbers = [
        ("--prompts", args.prompts),
        ("--generations", args.generations),
        ("--prompt-len", args.prompt_len),
        ("--completion", args.completion),
        ("--steps", args.steps),
        ("--lora-r", args.lora_r),
        ("--threads", threads(args)),
    ];
    for (flag, number) in numbers {
        command.arg(flag).arg(number.to_string());
    }
    command.arg("--beta").arg(args.beta.to_string()).arg("--dtype").arg(args.dtype.as_str());
    command.arg("--device").arg(args.device.to_string());
    if let Some(format) = args.load_in_4bit {
        command.arg("--load-in-4bit").arg(format.as_str());
    }
    if args.gradient_checkpointing {
        command.arg("--gradient-checkpointing");
    }
    if let Some(tokens) = args.micro_batch_tokens {
        command.arg("--micro-batch-tokens").arg(tokens.to_string());
    }
    if let Some(requests) = &args.requests {
        command.arg("--requests").arg(requests);
    }
    if args.profile {
        command.arg("--profile");
    }
    if args.only != Some(BenchPart::Limits) {
        command.arg("--brief");
    }
    Ok(command)
}

/// Number of compute threads of every part.
fn threads(args: &BenchArgs) -> u32 {
    args.threads.unwrap_or_else(machine_threads)
}

/// Measures one part and prints its figures; runs in a process of its own.
fn measure_part(args: &BenchArgs, start: StartServer) -> Result<ExitCode, BenchError> {
    let figures = std::thread::scope(|scope| {
        let worker = std::thread::Builder::new().name("engine".to_owned()).stack_size(ENGINE_STACK_BYTES);
        let worker = worker.spawn_scoped(scope, || figures_of_part(args, start)).map_err(io("start a thread"))?;
        worker.join().map_err(|_| BenchError::Part { part: "thread", detail: "it panicked".to_owned() })?
    })?;
    println!("{figures}");
    Ok(ExitCode::SUCCESS)
}

fn figures_of_part(args: &BenchArgs, start: StartServer) -> Result<String, BenchError> {
    let part = args.only.unwrap_or(BenchPart::Limits);
    if part == BenchPart::Limits {
        return json(&limits::measure(args.device, threads(args) as usize, args.brief.then_some(args.dtype))?);
    }
    let setting = Setting::of(args)?;
    match part {
        BenchPart::Limits | BenchPart::Kernels if args.device != Device::Cpu => Err(BenchError::Job(format!(
            "the benchmark's part `kernels` measures only the CPU's kernels, not {}",
            args.device
        ))),
        BenchPart::Limits | BenchPart::Kernels => json(&kernels::measure(&setting)?),
        BenchPart::Decode => json(&decode::measure(&setting)?),
        BenchPart::Busy => json(&decode::beside_a_busy_process(&setting)?),
        BenchPart::Training => json(&training::measure(&setting)?),
        BenchPart::Step => json(&step::measure(&setting)?),
        BenchPart::Requests => json(&requests::measure(&setting)?),
        BenchPart::Serving => json(&serving::measure(&setting, start)?),
        BenchPart::Mismatch => json(&mismatch::measure(&setting)?),
    }
}

fn json(figures: &impl Serialize) -> Result<String, BenchError> {
    serde_json::to_string(figures).map_err(|error| BenchError::Part { part: "figures", detail: error.to_string() })
}

/// The settings with which a part of the benchmark is measured.
pub struct Setting<'a> {
    /// The flags of `rlood bench`.
    pub args: &'a BenchArgs,
    /// Directory of the model.
    pub model_dir: PathBuf,
    /// Properties of the model.
    pub card: ModelCard,
    /// Number of weights, by kind.
    pub weights: Weights,
}

impl<'a> Setting<'a> {
    fn of(args: &'a BenchArgs) -> Result<Setting<'a>, BenchError> {
        let model_dir = args.model.clone().unwrap_or_default();
        let card = modelcard::read(&model_dir)?;
        let weights = Weights::of(&card.config, args.lora_r);
        Ok(Setting { args, model_dir, card, weights })
    }

    /// Prints the current figures as one line for the parent process.
    ///
    /// # Errors
    /// Fails when the parent process no longer reads standard output.
    pub fn report_figures(&self, figures: &impl Serialize) -> Result<(), BenchError> {
        let mut out = std::io::stdout().lock();
        let line = json(figures)?;
        writeln!(out, "{line}").and_then(|()| out.flush()).map_err(io("print the measured figures"))
    }

    /// Returns the precision of matrices (`--dtype`) as the engine's type.
    pub fn dtype(&self) -> ComputeDtype {
        match self.args.dtype {
            Precision::Bf16 => ComputeDtype::Bf16,
            Precision::F32 => ComputeDtype::F32,
        }
    }

    /// Returns how linear layers are quantized when the model is loaded.
    pub fn four_bit(&self) -> Option<FourBitPlan> {
        four_bit(self.args)
    }

    /// Bytes per weight in the form that matrix products read.
    pub fn value_bytes(&self) -> u64 {
        value_bytes(self.args.dtype)
    }

    /// Number of compute threads.
    pub fn threads(&self) -> usize {
        threads(self.args) as usize
    }

    /// Returns `count` random token ids, none of them the end of sequence; each `sequence` number gives other ids.
    pub fn tokens(&self, sequence: u64, count: usize) -> Vec<u32> {
        let key = Key::new(0, Stream::Probe).with(sequence);
        let last = self.card.config.vocab_size as u64 - 1;
        (0..count as u64).map(|position| key.with(position).below(last) as u32).collect()
    }

    /// Returns the prompts of one step as tokens.
    pub fn prompts(&self, count: usize) -> Vec<Vec<u32>> {
        (0..count as u64).map(|prompt| self.tokens(prompt, self.args.prompt_len as usize)).collect()
    }
}

fn four_bit(args: &BenchArgs) -> Option<FourBitPlan> {
    let (quant_type, is_nested) = args.load_in_4bit?.quantization();
    Some(FourBitPlan { quant_type, is_nested })
}

fn value_bytes(dtype: Precision) -> u64 {
    match dtype {
        Precision::Bf16 => 2,
        Precision::F32 => 4,
    }
}
