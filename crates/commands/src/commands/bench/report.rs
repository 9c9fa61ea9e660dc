//! Reports the figures of all parts of the benchmark: a table on standard output, JSON in a file.

use serde_json::{Map, Value, json};

use super::decode::{BusyFigures, DecodeFigures};
use super::kernels::{DECODE_ROWS, KernelFigures, TRAINING_ROWS};
use super::limits::{GpuLimits, Limits, ProcessorLimits};
use super::mismatch::MismatchFigures;
use super::profile::{KernelTime, ProfileFigures};
use super::requests::RequestFigures;
use super::serving::ServingFigures;
use super::shape::Weights;
use super::step::{StepFigures, StepTimes};
use super::training::TrainingFigures;
use super::{BenchError, four_bit, io, value_bytes};
use crate::config::BenchArgs;
use crate::modelcard::ModelCard;

/// The report: the figures measured so far.
pub(super) struct Report<'a> {
    args: &'a BenchArgs,
    card: &'a ModelCard,
    pub limits: Option<Limits>,
    pub kernels: Option<KernelFigures>,
    pub decode: Option<DecodeFigures>,
    pub training: Option<TrainingFigures>,
    pub step: Option<StepFigures>,
    pub requests: Option<RequestFigures>,
    pub mismatch: Option<MismatchFigures>,
    pub busy: Option<BusyFigures>,
    pub serving: Option<ServingFigures>,
}

impl<'a> Report<'a> {
    pub fn new(args: &'a BenchArgs, card: &'a ModelCard) -> Self {
        Self {
            args,
            card,
            limits: None,
            kernels: None,
            decode: None,
            training: None,
            step: None,
            requests: None,
            mismatch: None,
            busy: None,
            serving: None,
        }
    }

    /// Prints the settings of the measurement.
    pub fn print_head(&self) {
        let (args, config) = (self.args, &self.card.config);
        let name = if args.model.is_some() { "model" } else { &args.shape };
        println!(
            "{name}: {:.1}M parameters, {} layers of {} ({} + {} heads of {}, MLP {}), vocabulary {}, {}",
            self.card.num_parameters as f64 / 1e6,
            config.num_hidden_layers,
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.intermediate_size,
            config.vocab_size,
            args.dtype.as_str(),
        );
        println!(
            "{} prompts × {} completions, {} + {} tokens, LoRA r {} on all linear layers, beta {}",
            args.prompts, args.generations, args.prompt_len, args.completion, args.lora_r, args.beta,
        );
    }

    pub fn print_limits(&self) {
        let rate = |name: &str, rate: f64, unit: &str| println!("  {name:<42} {rate:>10.0} {unit}");
        match &self.limits {
            None => {}
            Some(Limits::Processor(limits)) => {
                println!("\nlimits ({}, {} threads)", limits.isa, limits.threads);
                println!("  {:<42} {:>10.1} GB/s", "sequential read of 1 GiB", limits.read_gb_s);
                rate("multiply-adds, f32", limits.fma_gflop_s, "GFLOP/s");
                if let Some(amx) = limits.amx_gflop_s {
                    rate("tile products, bf16", amx, "GFLOP/s");
                }
                if let Some(pairs) = limits.avx512_bf16_gflop_s {
                    rate("multiply-adds of pairs, bf16 (AVX512-BF16)", pairs, "GFLOP/s");
                }
            }
            Some(Limits::Gpu(limits)) => {
                println!("\nlimits ({}, {}, {} MiB)", limits.device, limits.name, limits.memory_bytes >> 20);
                let copied = format!("copy of {} MiB, read and written", limits.copy_bytes >> 20);
                println!("  {copied:<42} {:>10.1} GB/s", limits.copy_gb_s);
                for (name, peak) in [("bf16", limits.bf16), ("f32", limits.f32)] {
                    let Some(peak) = peak else { continue };
                    rate(&format!("product of {name} matrices of side {}", peak.n), peak.gflop_s, "GFLOP/s");
                }
            }
        }
    }

    pub fn print_kernels(&self) {
        let Some(kernels) = &self.kernels else { return };
        let rows = DECODE_ROWS.map(|rows| format!("M={rows} GB/s"));
        let training = [format!("M={TRAINING_ROWS} GFLOP/s"), "dX GFLOP/s".to_owned()];
        println!(
            "\n{:<28}{:>11}{:>11}{:>11}{:>16}{:>12}",
            "matrix products", rows[0], rows[1], rows[2], training[0], training[1]
        );
        for product in &kernels.products {
            let name = format!("{} [{}, {}]", product.name, product.n, product.k);
            let decode: String = product.gb_s.iter().map(|rate| format!("{rate:>11.1}")).collect();
            println!("  {name:<26}{decode}{:>16.0}{:>12.0}", product.forward_gflop_s, product.backward_gflop_s);
        }
        let decode: String = kernels.decode_gb_s.iter().map(|rate| format!("{rate:>11.1}")).collect();
        println!("  {:<26}{decode}{:>16.0}  (forward + dX by FLOPs, without head)", "all", kernels.gemm_tflop_s * 1e3);
        if let Some(read) = self.read_gb_s() {
            let shares: String =
                kernels.decode_gb_s.iter().map(|rate| format!("{:>10.0}%", 100.0 * rate / read)).collect();
            let peak = self
                .peak_gflop_s()
                .map_or(String::new(), |peak| format!("{:>15.0}%", 100.0 * kernels.gemm_tflop_s * 1e3 / peak));
            println!("  {:<26}{shares}{peak}", "of the limit");
        }
        let (attention, head) = (&kernels.attention, &kernels.head);
        println!(
            "  attention of a layer: step {:.2} ms forward, {:.2} ms backward; decode {:.3} ms",
            attention.forward_s * 1e3,
            attention.backward_s * 1e3,
            attention.decode_s * 1e3,
        );
        println!(
            "  output head at {} positions: log-probs {:.1} ms ({:.0} GFLOP/s), with dX {:.1} ms ({:.0}); sampling {:.2} ms ({:.1} GB/s)",
            head.rows,
            head.score_s * 1e3,
            head.score_gflop_s,
            head.trained_s * 1e3,
            head.trained_gflop_s,
            head.choose_s * 1e3,
            head.choose_gb_s,
        );
    }

    pub fn print_decode(&self) {
        let Some(decode) = &self.decode else { return };
        println!(
            "\n{:<28}{:>12}{:>14}{:>12}{:>10}{:>10}{:>10}",
            "decode", "tok/s", "pure tok/s", "prefill ms", "step ms", "GB/s", "of limit"
        );
        for batch in &decode.batches {
            let name = format!("{} × {}, {} tokens", batch.prompts, batch.generations, batch.completion);
            let share = self.read_gb_s().map_or(String::new(), |read| format!("{:.0}%", 100.0 * batch.gb_s / read));
            println!(
                "  {name:<26}{:>12.1}{:>14.1}{:>12.1}{:>10.2}{:>10.1}{share:>10}",
                batch.tok_s,
                batch.pure_tok_s,
                batch.prefill_s * 1e3,
                batch.decode_step_s * 1e3,
                batch.gb_s,
            );
        }
        if let Some(base) = decode.base {
            println!(
                "  base model: linear layers {:.1} MiB, {:.3} of bf16; embedding and head {:.1} MiB; together {:.3} of the estimate",
                base.linear_mib, base.linear_of_bf16, base.others_mib, base.of_estimate
            );
        }
        print_peak(decode.peak_mib, decode.device_peak_mib, None);
        print_profile(decode.profile.as_ref());
    }

    pub fn print_training(&self) {
        let Some(training) = &self.training else { return };
        println!("\ntraining ({} tokens, {} without repeated prompts)", training.tokens, training.shared_tokens);
        let share = self
            .peak_gflop_s()
            .map_or(String::new(), |peak| format!(", {:.0} % of the peak", 100.0 * training.gflop_s / peak));
        println!(
            "  {:<26}{:>12.1} tok/s {:>10.3} s {:>10.0} GFLOP/s (nothing recomputed counted{share})",
            "forward + backward", training.tok_s, training.seconds, training.gflop_s
        );
        if let (Some(tok_s), Some(seconds)) = (training.score_tok_s, training.score_seconds) {
            println!("  {:<26}{tok_s:>12.1} tok/s {seconds:>10.3} s", "log-probs");
        }
        print_peak(training.peak_mib, training.device_peak_mib, training.estimate_mib);
        print_profile(training.profile.as_ref());
    }

    pub fn print_step(&self) {
        let Some(step) = &self.step else { return };
        println!(
            "\n{:<12}{:>10}{:>10}{:>10}{:>10}{:>10}{:>15}{:>13}",
            "RLOO step", "s", "generate", "reward", "reference", "train", "decode tok/s", "train tok/s"
        );
        for (name, times) in [("fastest", &step.fastest), ("median", &step.median)] {
            println!(
                "  {name:<10}{:>10.4}{:>10.4}{:>10.4}{:>10.4}{:>10.4}{:>15.1}{:>13.1}",
                times.step_s,
                times.generate_s,
                times.reward_s,
                times.reference_s,
                times.train_s,
                times.decode_tok_s,
                times.train_tok_s,
            );
        }
        println!("  {} steps; loaded in {:.1} s", step.steps, step.load_s);
        print_peak(step.peak_mib, step.device_peak_mib, Some(step.estimate_mib));
    }

    pub fn print_requests(&self) {
        let Some(requests) = &self.requests else { return };
        println!(
            "\n{} concurrent requests, {} + {} tokens: {:.1} tok/s, {:.2} s (median {:.2} s)",
            requests.requests,
            requests.prompt_tokens,
            requests.completion_tokens,
            requests.tok_s,
            requests.seconds,
            requests.median_seconds,
        );
        print_peak(requests.peak_mib, requests.device_peak_mib, None);
    }

    pub fn print_mismatch(&self) {
        let Some(mismatch) = &self.mismatch else { return };
        println!(
            "\nlog-probs, sampled against trained: {} of {} tokens differ, by {:.3e} on average and {:.3e} at most, k3 {:.3e}",
            mismatch.unequal_tokens, mismatch.tokens, mismatch.mean, mismatch.max, mismatch.k3,
        );
    }

    pub fn print_busy(&self) {
        let Some(busy) = &self.busy else { return };
        println!(
            "\ndecode next to a busy process: {:.1} tok/s, {:.1} alone: {:.2}",
            busy.busy_tok_s, busy.idle_tok_s, busy.ratio
        );
    }

    pub fn print_serving(&self) {
        let Some(serving) = &self.serving else { return };
        println!(
            "\n{} clients at once, {} tokens each: {:.1} tok/s without HTTP; over /v1 {:.1} ({:.2}), as streams {:.1} ({:.2})",
            serving.clients,
            serving.tokens,
            serving.decode_tok_s,
            serving.whole_tok_s,
            serving.whole_ratio,
            serving.stream_tok_s,
            serving.stream_ratio
        );
        println!(
            "first token after {:.1} ms (95th percentile); prefill and 3 steps take {:.1} ms",
            serving.first_token_p95_s * 1e3,
            serving.prefill_and_3_steps_s * 1e3
        );
    }

    fn read_gb_s(&self) -> Option<f64> {
        self.limits.as_ref().map(Limits::memory_gb_s)
    }

    /// Returns the measured limit of matrix products in the chosen precision.
    fn peak_gflop_s(&self) -> Option<f64> {
        self.limits.as_ref().and_then(|limits| limits.peak_gflop_s(self.args.dtype))
    }

    /// Writes the figures measured so far to the file given by the user, replacing its contents.
    pub fn write(&self) -> Result<(), BenchError> {
        let Some(path) = &self.args.json else { return Ok(()) };
        let failed = |doing: &str| io(format!("{doing} {}", path.display()));
        let mut new = path.clone().into_os_string();
        new.push(".new");
        std::fs::write(&new, format!("{:#}\n", self.json())).map_err(failed("write"))?;
        std::fs::rename(&new, path).map_err(failed("replace"))
    }

    /// Returns the JSON report: the main figures at the top level, all details below.
    pub fn json(&self) -> Value {
        let (args, config) = (self.args, &self.card.config);
        let mut all = Map::new();
        all.insert("rlood".into(), json!(env!("CARGO_PKG_VERSION")));
        let headline = [
            ("step_s", self.step_times(|times| times.step_s)),
            ("decode_tok_s", self.decode_tok_s()),
            ("train_tok_s", self.train_tok_s()),
            ("peak_mib", self.peak_mib()),
            ("device_peak_mib", self.device_peak_mib()),
            ("read_gb_s", self.processor(|limits| Some(limits.read_gb_s))),
            ("copy_gb_s", self.gpu(|limits| Some(limits.copy_gb_s))),
            ("bf16_gflop_s", self.gpu(|limits| limits.bf16.map(|peak| peak.gflop_s))),
            ("gemm_tflop_s", self.kernels.as_ref().map(|kernels| kernels.gemm_tflop_s)),
            ("fma_gflop_s", self.processor(|limits| Some(limits.fma_gflop_s))),
            ("amx_gflop_s", self.processor(|limits| limits.amx_gflop_s)),
            ("avx512_bf16_gflop_s", self.processor(|limits| limits.avx512_bf16_gflop_s)),
            ("busy_ratio", self.busy.as_ref().map(|busy| busy.ratio)),
        ];
        all.extend(headline.into_iter().filter_map(|(name, value)| Some((name.to_owned(), json!(value?)))));
        let weights = Weights::of(config, args.lora_r);
        all.insert(
            "model".into(),
            json!({
                "shape": if args.model.is_some() { Value::Null } else { json!(args.shape) },
                "num_parameters": self.card.num_parameters,
                "adapter_parameters": weights.lora,
                "hidden_size": config.hidden_size,
                "num_hidden_layers": config.num_hidden_layers,
                "num_attention_heads": config.num_attention_heads,
                "num_key_value_heads": config.num_key_value_heads,
                "head_dim": config.head_dim,
                "intermediate_size": config.intermediate_size,
                "vocab_size": config.vocab_size,
                "decode_bytes_per_step": weights.bytes_per_step(value_bytes(args.dtype), four_bit(args)),
            }),
        );
        all.insert(
            "settings".into(),
            json!({
                "device": args.device.to_string(),
                "prompts": args.prompts,
                "generations": args.generations,
                "prompt_len": args.prompt_len,
                "completion": args.completion,
                "dtype": args.dtype.as_str(),
                "beta": args.beta,
                "lora_r": args.lora_r,
                "steps": args.steps,
                "gradient_checkpointing": args.gradient_checkpointing,
                "micro_batch_tokens": args.micro_batch_tokens,
            }),
        );
        let parts = [
            ("limits", json!(self.limits)),
            ("kernels", json!(self.kernels)),
            ("decode", json!(self.decode)),
            ("training", json!(self.training)),
            ("step", json!(self.step)),
            ("requests", json!(self.requests)),
            ("mismatch", json!(self.mismatch)),
            ("busy", json!(self.busy)),
            ("serving", json!(self.serving)),
        ];
        all.extend(
            parts
                .into_iter()
                .filter(|(_, figures)| !figures.is_null())
                .map(|(name, figures)| (name.to_owned(), figures)),
        );
        Value::Object(all)
    }

    fn processor(&self, of: impl Fn(&ProcessorLimits) -> Option<f64>) -> Option<f64> {
        self.limits.as_ref().and_then(Limits::processor).and_then(of)
    }

    fn gpu(&self, of: impl Fn(&GpuLimits) -> Option<f64>) -> Option<f64> {
        self.limits.as_ref().and_then(Limits::gpu).and_then(of)
    }

    fn step_times(&self, of: impl Fn(&StepTimes) -> f64) -> Option<f64> {
        self.step.as_ref().map(|step| of(&step.fastest))
    }

    /// Speed of whole steps if measured, otherwise of generation alone, otherwise of the requests.
    fn decode_tok_s(&self) -> Option<f64> {
        let alone = || self.decode.as_ref().and_then(|decode| decode.batches.last()).map(|batch| batch.tok_s);
        let requests = || self.requests.as_ref().map(|requests| requests.tok_s);
        self.step_times(|times| times.decode_tok_s).or_else(alone).or_else(requests)
    }

    /// Speed of whole steps if measured, otherwise of training alone.
    fn train_tok_s(&self) -> Option<f64> {
        self.step_times(|times| times.train_tok_s).or_else(|| self.training.as_ref().map(|training| training.tok_s))
    }

    /// Peak memory of whole steps if measured, otherwise the largest of the parts.
    fn peak_mib(&self) -> Option<f64> {
        let decode = self.decode.as_ref().map(|decode| decode.peak_mib);
        let training = self.training.as_ref().map(|training| training.peak_mib);
        let requests = self.requests.as_ref().map(|requests| requests.peak_mib);
        let parts = || decode.into_iter().chain(training).chain(requests).reduce(f64::max);
        self.step.as_ref().map(|step| step.peak_mib).or_else(parts)
    }

    /// Peak device memory of whole steps if measured, otherwise the largest of the parts.
    fn device_peak_mib(&self) -> Option<f64> {
        let decode = self.decode.as_ref().and_then(|decode| decode.device_peak_mib);
        let training = self.training.as_ref().and_then(|training| training.device_peak_mib);
        let requests = self.requests.as_ref().and_then(|requests| requests.device_peak_mib);
        let parts = || decode.into_iter().chain(training).chain(requests).reduce(f64::max);
        self.step.as_ref().and_then(|step| step.device_peak_mib).or_else(parts)
    }
}

fn print_peak(peak_mib: f64, device_peak_mib: Option<f64>, estimate_mib: Option<f64>) {
    let device = device_peak_mib.map_or(String::new(), |mib| format!(", {mib:.0} MiB of the device's"));
    let estimate = estimate_mib.map_or(String::new(), |mib| format!("; the server's estimate is {mib:.0} MiB"));
    println!("  {:<26}{peak_mib:>12.0} MiB{device}{estimate}", "peak memory");
}

fn print_profile(profile: Option<&ProfileFigures>) {
    let Some(profile) = profile else { return };
    println!(
        "  {} launches of {} kernels: {:.1} ms of {:.1} ms by the wall, without graphs",
        profile.launches,
        profile.different,
        profile.kernels_s * 1e3,
        profile.wall_s * 1e3,
    );
    for kernel in &profile.kernels {
        let KernelTime { name, count, seconds, share } = kernel;
        println!("    {name:<32}{count:>9} ×{:>12.3} ms{:>7.1} %", seconds * 1e3, 100.0 * share);
    }
}
