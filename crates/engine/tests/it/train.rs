//! The training loop, driven by a small host.
//!
//! Longer than other files: it contains the host besides the tests that drive it.

use std::num::NonZeroU32;

use std::cell::Cell;
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use rlood_engine::backend::BackendKind;
use rlood_engine::error::EngineError;
use rlood_engine::host::{
    Host, PromptRow, Rollout, RolloutCompletion, RolloutGroup, RolloutId, RunEnd, SavedCheckpoint, Score, ScoreRequest,
    StepTrace, StopReason, TrainInput,
};
use rlood_engine::model::Policy;
use rlood_types::event::{Event, FinishReason, Metrics, Phase, Sample, SamplePhase};
use rlood_types::rollout::{RewardSample, RewardValue, Segments};
use rlood_types::spec::{
    Arithmetic, CheckpointPlan, Combine, ComputeDtype, DatasetPlan, DoctorPlan, Estimator, EvalPlan, KlEstimator, KlIn,
    LengthPlan, LoraPlan, Loss, LrSchedulerType, MICRO_BATCH_TOKENS, ModelPlan, OptimizerKind, OptimizerPlan, Plan,
    PromptKey, QuantType, RewardKind, RewardNormalization, RewardPlan, RlooPlan, SamplingPlan, Totals, TrainingPlan,
};
use serde_json::{Map, json};

/// A model with two layers and 64 words.
pub fn model_dir() -> PathBuf {
    rlood_test_support::fixture("golden/qwen2_onpolicy")
}

/// Eight prompts made of that model's words.
pub fn rows() -> Vec<PromptRow> {
    let prompts = ["w0 w1 w2", "w5 w6", "w7 w8 w9 w10", "w3", "w11 w12", "w13 w14 w15", "w16 w17", "w18"];
    prompts.into_iter().map(|prompt| PromptRow { prompt: json!(prompt), columns: Map::new() }).collect()
}

/// Two prompts with two completions per step, one step per block, KL on; the host decides the scores.
#[expect(clippy::too_many_lines, reason = "one literal: every setting of a plan")]
pub fn plan() -> Plan {
    let dataset = DatasetPlan::new(rlood_types::id::DatasetId::new(), "data".into(), 8);
    Plan {
        name: None,
        model: ModelPlan { id: "tiny".into(), sha256: "model".into() },
        dataset,
        eval: None,
        rewards: vec![reward("score")],
        reward_models: Default::default(),
        rloo: RlooPlan {
            num_generations: NonZeroU32::new(2).unwrap(),
            beta: 0.05,
            epsilon: 0.2,
            epsilon_high: 0.2,
            num_iterations: 1,
            steps_per_generation: 1,
            normalize_advantages: false,
            reward_clip_range: None,
            mask_truncated_completions: false,
            combine: Combine::Renormalize,
            estimator: Estimator::Rloo,
            loss: Loss::Sequence,
            kl_in: KlIn::Reward,
            kl_estimator: KlEstimator::K1,
            drop_tied_groups: false,
            soft_overlong: None,
            length_penalty: 0.0,
            min_informative_groups: 0,
            max_refills: 4,
            reward_normalization: RewardNormalization::None,
            overlap: false,
        },
        sampling: SamplingPlan {
            max_completion_length: 6,
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            stop: Vec::new(),
            chat_template_kwargs: Map::new(),
        },
        rollout: None,
        environment: None,
        lora: Some(LoraPlan {
            target_modules: ["q_proj", "v_proj", "down_proj"].map(String::from).to_vec(),
            ..LoraPlan::all_linear(4, 8.0)
        }),
        warm_start: None,
        warm_up: None,
        optimizer: OptimizerPlan {
            kind: OptimizerKind::Adamw,
            learning_rate: 0.01,
            adam_beta1: 0.9,
            adam_beta2: 0.999,
            adam_epsilon: 1e-8,
            weight_decay: 0.0,
            max_grad_norm: 1.0,
            lr_scheduler_type: LrSchedulerType::Constant,
            warmup_steps: 0,
        },
        training: TrainingPlan {
            load_in_4bit: false,
            bnb_4bit_quant_type: QuantType::Nf4,
            use_bnb_nested_quant: false,
            gradient_checkpointing: false,
            prompts_per_step: 2,
            max_steps: 3,
            seed: 42,
            shuffle_dataset: true,
            dtype: ComputeDtype::F32,
            micro_batch_tokens: MICRO_BATCH_TOKENS,
            max_attempts: None,
        },
        checkpoints: CheckpointPlan { every_steps: 100, keep_last: 1, keep_best: 0, ..CheckpointPlan::default() },
        certificate: None,
        early_stopping: None,
        doctor: DoctorPlan::default(),
        runtime: Default::default(),
        resources: Default::default(),
        metadata: BTreeMap::new(),
        totals: Totals {
            optimizer_steps: 3,
            completions_per_step: 4,
            prompts_per_block: 2,
            generation_blocks: 3,
            completions: 12,
            greedy_completions: 0,
            max_refill_completions: 0,
            epochs: 0.75,
            dropped_rows_per_epoch: 0,
            max_completion_tokens: 72,
        },
        arithmetic: Arithmetic::LATEST,
    }
}

/// A reward with weight 1; the host decides its values.
pub fn reward(name: &str) -> RewardPlan {
    let kind = RewardKind::Length(LengthPlan {
        min_words: 1,
        max_words: 2,
        sentence_bonus: 0.0,
        unit: rlood_types::spec::LengthUnit::Words,
        soft_margin: 0,
        below: -0.5,
        above: 0.0,
    });
    RewardPlan {
        name: name.into(),
        weight: 1.0,
        required: true,
        max_abs_reward: None,
        blank_reference: None,
        applies_to: None,
        kind,
    }
}

/// A checkpoint, copied before the engine removed it.
pub struct Saved {
    pub step: u64,
    pub last: bool,
    pub dir: PathBuf,
}

impl Saved {
    pub fn adapter(&self) -> Vec<u8> {
        std::fs::read(self.dir.join("adapter_model.safetensors")).expect("an adapter")
    }
}

/// A copy of a step's internals.
pub struct Trace {
    pub step: u64,
    pub rows: Vec<u64>,
    pub old_logps: Vec<Vec<f32>>,
    pub ref_logps: Vec<Vec<f32>>,
    pub new_logps: Vec<Vec<f32>>,
    pub advantages: Vec<f64>,
    pub gradient: Vec<f32>,
    pub parameters: Vec<f32>,
    pub parameter_info: Vec<rlood_engine::lora::ParameterInfo>,
}

type Scorer = Box<dyn FnMut(&RewardSample) -> RewardValue>;

/// A host that scores with a function, keeps everything, and stops where requested.
pub struct TestHost {
    pub score: Scorer,
    recorded: Box<dyn FnMut(u64) -> Option<Rollout>>,
    stop_at: Option<(Phase, u64, u32, StopReason)>,
    pub events: Vec<Event>,
    pub saved: Vec<Saved>,
    pub traces: Vec<Trace>,
    /// All requests to the rewards.
    pub requests: Vec<(RolloutId, Vec<RewardSample>)>,
    at: (Phase, u64),
    polls: Cell<u32>,
    stopped: Cell<bool>,
    kept: tempfile::TempDir,
}

impl Default for TestHost {
    fn default() -> Self {
        Self {
            score: Box::new(|sample| {
                let bytes: u64 = sample.completion.bytes().map(u64::from).sum();
                RewardValue::Number((bytes % 7) as f64 / 7.0)
            }),
            recorded: Box::new(|_| None),
            stop_at: None,
            events: Vec::new(),
            saved: Vec::new(),
            traces: Vec::new(),
            requests: Vec::new(),
            at: (Phase::Loading, 0),
            polls: Cell::new(0),
            stopped: Cell::new(false),
            kept: tempfile::tempdir().expect("a directory"),
        }
    }
}

impl Host for TestHost {
    fn score(&mut self, request: &ScoreRequest<'_>) -> Result<Vec<Score>, RunEnd> {
        if let Some(stop) = self.stop() {
            return Err(RunEnd::Stopped(stop));
        }
        self.requests.push((request.id, request.samples.to_vec()));
        let scores = request.samples.iter().map(|sample| Score { values: vec![(self.score)(sample)] });
        Ok(scores.collect())
    }

    fn event(&mut self, event: Event) -> Result<(), RunEnd> {
        if let Event::Phase { phase, step } = event {
            if self.at != (phase, step) {
                self.polls.set(0);
            }
            self.at = (phase, step);
        }
        self.events.push(event);
        Ok(())
    }

    fn saved(&mut self, checkpoint: &SavedCheckpoint<'_>) -> Result<(), RunEnd> {
        let dir = self.kept.path().join(format!("{}-{}", checkpoint.step, self.saved.len()));
        std::fs::create_dir(&dir).expect("a directory");
        for file in checkpoint.files {
            std::fs::copy(checkpoint.dir.join(&file.name), dir.join(&file.name)).expect("a copy");
        }
        self.saved.push(Saved { step: checkpoint.step, last: checkpoint.last, dir });
        Ok(())
    }

    fn stop(&self) -> Option<StopReason> {
        let (phase, step, poll, stop) = self.stop_at.as_ref()?;
        if self.at == (*phase, *step) {
            self.polls.set(self.polls.get() + 1);
            if self.polls.get() >= *poll {
                self.stopped.set(true);
            }
        }
        self.stopped.get().then(|| stop.clone())
    }

    fn rollout(&mut self, step: u64) -> Option<Rollout> {
        (self.recorded)(step)
    }

    fn observe(&mut self, trace: &StepTrace<'_>) {
        self.traces.push(Trace {
            step: trace.step,
            rows: trace.rows.to_vec(),
            old_logps: trace.old_logps.to_vec(),
            ref_logps: trace.ref_logps.to_vec(),
            new_logps: trace.new_logps.to_vec(),
            advantages: trace.advantages.to_vec(),
            gradient: trace.gradient.values().unwrap().into_owned(),
            parameters: trace.parameters.values().unwrap().into_owned(),
            parameter_info: trace.parameter_info.to_vec(),
        });
    }
}

impl TestHost {
    /// Creates a host that returns recorded rollouts, so that nothing is sampled.
    pub fn with_rollouts(recorded: impl FnMut(u64) -> Option<Rollout> + 'static) -> Self {
        Self { recorded: Box::new(recorded), ..Self::default() }
    }

    /// Creates a host that scores with this function.
    pub fn scoring(score: impl FnMut(&RewardSample) -> RewardValue + 'static) -> Self {
        Self { score: Box::new(score), ..Self::default() }
    }

    /// Creates a host that stops at the n-th poll (from 1) in a phase that began after `step` steps.
    pub fn stopping_at(phase: Phase, step: u64, poll: u32, stop: StopReason) -> Self {
        Self { stop_at: Some((phase, step, poll, stop)), ..Self::default() }
    }

    pub fn metrics(&self, kind: SamplePhase) -> Vec<(u64, Metrics)> {
        let steps = self.events.iter().filter_map(|event| match event {
            Event::Step { step, kind: of, metrics } if *of == kind => Some((*step, metrics.clone())),
            _ => None,
        });
        steps.collect()
    }

    /// The metrics without values that depend on the machine.
    pub fn comparable_metrics(&self) -> Vec<(u64, Metrics)> {
        self.metrics(SamplePhase::Train).into_iter().map(|(step, metrics)| (step, comparable(metrics))).collect()
    }

    pub fn samples(&self) -> Vec<Sample> {
        let samples = self.events.iter().filter_map(|event| match event {
            Event::Samples { samples } => Some(samples.clone()),
            _ => None,
        });
        samples.flatten().collect()
    }

    pub fn warnings(&self) -> Vec<String> {
        let warnings = self.events.iter().filter_map(|event| match event {
            Event::Warning { code, .. } => Some(code.clone()),
            _ => None,
        });
        warnings.collect()
    }
}

/// Removes the metrics that depend on the machine.
pub fn comparable(mut metrics: Metrics) -> Metrics {
    let of_machine = ["step_time", "eval_step_time", "tokens_per_second", "memory"];
    metrics.retain(|name, _| !of_machine.iter().any(|prefix| name.starts_with(prefix)));
    metrics
}

/// The starting point of a run.
#[derive(Default)]
pub struct Start {
    pub resume: Option<PathBuf>,
    pub initial_adapter: Option<PathBuf>,
    pub eval_rows: Vec<PromptRow>,
    pub warm_up_rows: Vec<PromptRow>,
    pub judged_keys: Vec<PromptKey>,
    pub backend: Option<BackendKind>,
}

/// Runs the plan; returns why the run was stopped, or None if it completed all steps.
pub fn train(
    plan: &Plan,
    rows: Vec<PromptRow>,
    start: Start,
    host: &mut dyn Host,
) -> Result<Option<StopReason>, EngineError> {
    train_model(&model_dir(), plan, rows, start, host)
}

pub fn train_model(
    model_dir: &Path,
    plan: &Plan,
    rows: Vec<PromptRow>,
    start: Start,
    host: &mut dyn Host,
) -> Result<Option<StopReason>, EngineError> {
    let scratch = tempfile::tempdir().expect("a directory");
    let input = TrainInput {
        plan,
        model_dir,
        model_name: "tiny",
        rows,
        eval_rows: start.eval_rows,
        warm_up_rows: start.warm_up_rows,
        judged_keys: start.judged_keys,
        resume: start.resume,
        initial_adapter: start.initial_adapter,
        scratch_dir: scratch.path(),
        device: "cpu",
        backend: start.backend,
    };
    let outcome = match rlood_engine::train(input, host) {
        Ok(()) => Ok(None),
        Err(RunEnd::Stopped(reason)) => Ok(Some(reason)),
        Err(RunEnd::Failed(error)) => Err(error),
        Err(end @ RunEnd::Panicked) => panic!("{end}"),
    };
    let left: Vec<_> = std::fs::read_dir(scratch.path()).expect("the directory").collect();
    assert!(left.is_empty(), "the scratch directory is left empty: {left:?}");
    outcome
}

pub fn run(plan: &Plan, host: &mut TestHost) {
    assert_eq!(train(plan, rows(), Start::default(), host).expect("trains"), None);
}

pub fn value(metrics: &[(u64, Metrics)], step: u64, name: &str) -> f64 {
    let (_, metrics) = metrics.iter().find(|(at, _)| *at == step).expect("the step's metrics");
    metrics.get(name).copied().flatten().unwrap_or_else(|| panic!("{name} of step {step}"))
}

#[test]
fn a_run_reports_every_step_and_saves_the_last() {
    let mut host = TestHost::default();
    run(&plan(), &mut host);
    let metrics = host.metrics(SamplePhase::Train);
    assert_eq!(metrics.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [1, 2, 3]);
    assert_eq!(host.samples().len(), 12);
    assert_eq!(host.saved.iter().map(|saved| (saved.step, saved.last)).collect::<Vec<_>>(), [(3, true)]);
    rlood_engine::checkpoint::verify(&host.saved[0].dir).expect("verifies");
    for name in [
        "loss",
        "grad_norm",
        "learning_rate",
        "num_tokens",
        "epoch",
        "entropy",
        "reward",
        "reward_std",
        "rewards/score/mean",
        "rewards/score/std",
        "rewards/score/missing_fraction",
        "frac_reward_zero_std",
        "frac_reward_zero_std_pre_kl",
        "kl",
        "kl_sequence",
        "kl_k3",
        "clip_ratio/region_mean",
        "advantage_std",
        "completions/mean_length",
        "completions/clipped_ratio",
        "step_time",
        "step_time/generate",
        "step_time/reward",
        "step_time/reference",
        "step_time/train",
        "step_time/checkpoint",
        "tokens_per_second/rollout",
        "tokens_per_second/train",
        "sampling/log_ratio_max",
        "sampling/sampling_logp_difference/mean",
        "sampling/sampling_logp_difference/max",
    ] {
        value(&metrics, 2, name);
    }
    let tokens: u32 = host.samples().iter().map(|sample| sample.num_tokens).sum();
    assert!(value(&metrics, 3, "num_tokens") > f64::from(tokens));
    // Eight rows in blocks of two: each epoch visits every row once.
    let rows: HashSet<String> = host.samples().into_iter().map(|sample| sample.prompt_id).collect();
    assert_eq!(rows.len(), 6);
}

#[test]
fn the_reference_kl_is_exactly_zero_at_the_first_step() {
    let mut host = TestHost::default();
    run(&plan(), &mut host);
    let metrics = host.metrics(SamplePhase::Train);
    for name in ["kl", "kl_sequence", "kl_k3"] {
        assert_eq!(value(&metrics, 1, name), 0.0, "{name}");
    }
    assert_eq!(host.traces[0].old_logps, host.traces[0].ref_logps);
    assert_ne!(value(&metrics, 2, "kl_k3"), 0.0);
}

#[test]
fn the_first_ratio_of_a_block_is_exactly_one() {
    let mut plan = plan();
    plan.rloo.num_iterations = 2;
    plan.rloo.steps_per_generation = 2;
    plan.training.max_steps = 8;
    let mut host = TestHost::default();
    run(&plan, &mut host);
    let metrics = host.metrics(SamplePhase::Train);
    let exact = Policy::load(&model_dir(), BackendKind::Cpu).expect("loads").samples_exactly();
    for step in [1, 5] {
        assert_eq!(value(&metrics, step, "sampling/log_ratio_max"), 0.0, "step {step}");
        let difference = value(&metrics, step, "sampling/sampling_logp_difference/max");
        assert!(difference <= if exact { 0.0 } else { 1e-5 }, "step {step}: {difference}");
        assert!(value(&metrics, step, "sampling/sampling_logp_difference/mean") <= difference);
    }
    assert!(!metrics[1].1.contains_key("sampling/sampling_logp_difference/max"), "only where a block is new");
    assert_eq!(host.traces[4].old_logps, host.traces[4].new_logps);
    // The later uses of a block are off-policy.
    assert_ne!(host.traces[2].old_logps, host.traces[2].new_logps);
}

#[test]
fn a_reused_rollout_reports_no_reward() {
    let mut plan = plan();
    plan.rloo.num_iterations = 2;
    plan.training.max_steps = 4;
    let mut host = TestHost::default();
    run(&plan, &mut host);
    for (step, metrics) in host.metrics(SamplePhase::Train) {
        let new = step % 2 == 1;
        for name in ["reward", "kl", "completions/mean_length", "frac_reward_zero_std", "advantage_std"] {
            assert_eq!(metrics.contains_key(name), new, "{name} at step {step}");
        }
        assert!(metrics.contains_key("loss") && metrics.contains_key("clip_ratio/region_mean"));
    }
    assert_eq!(host.samples().len(), 8);
}

#[test]
fn skipping_the_old_pass_changes_nothing() {
    // Two iterations force the separate pass; their first step must equal the first step of a run without it.
    let (mut once, mut twice) = (TestHost::default(), TestHost::default());
    let mut plan = plan();
    run(&plan, &mut once);
    plan.rloo.num_iterations = 2;
    run(&plan, &mut twice);
    assert_eq!(once.traces[0].gradient, twice.traces[0].gradient);
    assert_eq!(once.traces[0].old_logps, twice.traces[0].old_logps);
    assert_eq!(once.traces[0].advantages, twice.traces[0].advantages);
}

#[test]
fn beta_zero_needs_no_reference() {
    let mut plan = plan();
    plan.rloo.beta = 0.0;
    let mut host = TestHost::default();
    run(&plan, &mut host);
    assert!(host.traces.iter().all(|trace| trace.ref_logps.is_empty()));
    assert!(!host.metrics(SamplePhase::Train)[1].1.contains_key("kl"));
    assert!(host.samples().iter().all(|sample| sample.kl.is_none() && sample.advantage.is_some()));
}

/// Two prompts with two completions each that reached the length limit; rewards 0 and 1.
fn truncated_rollout(_step: u64) -> Option<Rollout> {
    let completion = |reward: f64| RolloutCompletion {
        segments: Segments::of_completion(vec![10, 11, 12], None),
        finish_reason: FinishReason::Length,
        score: Score { values: vec![RewardValue::Number(reward)] },
        episode: None,
    };
    let group = |row: u64| RolloutGroup {
        row,
        prompt_ids: vec![3, 4],
        completions: vec![completion(0.0), completion(1.0)],
        greedy: None,
    };
    Some(Rollout { groups: vec![group(0), group(1)], ..Rollout::default() })
}

#[test]
fn all_truncated_and_masked_changes_no_weight() {
    let mut plan = plan();
    let mut unmasked = TestHost::with_rollouts(truncated_rollout);
    run(&plan, &mut unmasked);
    plan.rloo.mask_truncated_completions = true;
    let mut masked = TestHost::with_rollouts(truncated_rollout);
    run(&plan, &mut masked);
    let mut policy = Policy::load(&model_dir(), BackendKind::Cpu).expect("the model");
    policy.add_lora(plan.lora.as_ref().expect("lora"), plan.training.seed).expect("an adapter");
    let initial = policy.parameter_values().expect("values");
    assert_eq!(masked.traces[2].parameters, initial);
    assert_ne!(unmasked.traces[2].parameters, initial);
    assert!(masked.traces.iter().all(|trace| trace.gradient.iter().all(|entry| *entry == 0.0)));
    // Masked completions still count in the baseline.
    assert_eq!(masked.traces[0].advantages, [-1.0, 1.0, -1.0, 1.0]);
}

#[test]
fn a_missing_reward_masks_only_itself() {
    let mut plan = plan();
    plan.rloo.num_generations = NonZeroU32::new(4).unwrap();
    plan.rloo.beta = 0.0;
    plan.training.max_steps = 1;
    let mut calls = 0;
    let mut host = TestHost {
        score: Box::new(move |_| {
            calls += 1;
            match calls {
                1 => RewardValue::Number(1.0),
                2 => RewardValue::Number(3.0),
                3 => RewardValue::Number(2.0),
                4 => RewardValue::Missing,
                _ => RewardValue::Number(f64::from(calls)),
            }
        }),
        ..TestHost::default()
    };
    run(&plan, &mut host);
    assert_eq!(host.traces[0].advantages[..4], [-1.5, 1.5, 0.0, 0.0]);
    let samples = host.samples();
    assert_eq!((samples[3].reward, samples[3].rewards["score"]), (None, None));
    assert_eq!(value(&host.metrics(SamplePhase::Train), 1, "rewards/score/missing_fraction"), 1.0 / 8.0);
}

#[test]
fn a_rollout_without_any_reward_warns_and_trains_nothing() {
    let mut plan = plan();
    plan.rloo.beta = 0.0;
    plan.training.max_steps = 2;
    let mut calls = 0;
    let mut host = TestHost {
        // The second rollout has four completions too.
        score: Box::new(move |_| {
            calls += 1;
            if calls <= 4 { RewardValue::NotApplicable } else { RewardValue::Number(f64::from(calls)) }
        }),
        ..TestHost::default()
    };
    run(&plan, &mut host);
    assert_eq!(host.samples().iter().filter(|sample| sample.reward.is_none()).count(), 4);
    assert_eq!(host.warnings().iter().filter(|code| *code == "nothing_scorable").count(), 1);
    assert_eq!(value(&host.metrics(SamplePhase::Train), 1, "grad_norm"), 0.0);
    assert!(value(&host.metrics(SamplePhase::Train), 2, "grad_norm") > 0.0);
}

#[test]
fn updates_that_are_not_finite_are_skipped_and_three_end_the_run() {
    let mut plan = plan();
    plan.rloo.beta = 0.0;
    plan.training.max_steps = 10;
    plan.checkpoints.every_steps = 1;
    // 1e300 is a finite number, but the resulting gradient does not fit into f32.
    let mut host = TestHost::default();
    let mut calls = 0;
    host.score = Box::new(move |_| {
        calls += 1;
        RewardValue::Number(if calls > 8 && calls % 2 == 0 { 1e300 } else { f64::from(calls) })
    });
    let error = train(&plan, rows(), Start::default(), &mut host).expect_err("diverges");
    assert!(matches!(error, EngineError::Diverged { updates: 3, step: 5 }), "{error:?}");
    assert_eq!(host.warnings(), ["non_finite"; 3]);
    assert_eq!(host.events.last(), Some(&Event::Diverged { first_step: 3, step: 5 }));
    // Weights whose loss is not finite are not saved.
    assert_eq!(host.saved.iter().map(|saved| saved.step).collect::<Vec<_>>(), [1, 2]);
    let metrics = host.metrics(SamplePhase::Train);
    assert_eq!(metrics.len(), 5);
    assert_eq!(value(&metrics, 5, "skipped_updates"), 3.0);
    assert_eq!(metrics[4].1["grad_norm"], None);
    assert_eq!(host.traces[1].parameters, host.traces[4].parameters);
}

#[test]
fn a_base_model_with_nan_weights_is_a_failure_that_names_the_tensor() {
    let dir = tempfile::tempdir().expect("a directory");
    for entry in std::fs::read_dir(model_dir()).expect("lists").flatten() {
        if entry.path().is_file() {
            std::fs::copy(entry.path(), dir.path().join(entry.file_name())).expect("copies");
        }
    }
    let path = dir.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).expect("reads");
    let end = bytes.len();
    // A value with all bits set is NaN in every float format.
    bytes[end - 4..].fill(0xff);
    std::fs::write(&path, bytes).expect("writes");
    let mut plan = plan();
    plan.training.max_steps = 1;
    let input = TrainInput {
        plan: &plan,
        model_dir: dir.path(),
        model_name: "tiny",
        rows: rows(),
        eval_rows: Vec::new(),
        warm_up_rows: Vec::new(),
        judged_keys: Vec::new(),
        resume: None,
        initial_adapter: None,
        scratch_dir: dir.path(),
        device: "cpu",
        backend: None,
    };
    let end = rlood_engine::train(input, &mut TestHost::default());
    let Err(RunEnd::Failed(error)) = end else { panic!("it cannot be trained: {end:?}") };
    assert!(matches!(&error, EngineError::ModelNotFinite { what } if what.contains("tensor ")), "{error:?}");
    assert_eq!(error.class(), rlood_engine::error::FailureClass::User);
}

#[test]
fn evaluations_come_before_the_start_every_n_steps_and_after_the_last() {
    let mut plan = plan();
    let dataset = plan.dataset.clone();
    plan.eval = Some(EvalPlan::of_dataset(dataset, 2));
    let mut host = TestHost::default();
    let start = Start { eval_rows: rows()[..3].to_vec(), ..Start::default() };
    train(&plan, rows(), start, &mut host).expect("trains");
    let metrics = host.metrics(SamplePhase::Eval);
    assert_eq!(metrics.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [0, 2, 3]);
    assert!(metrics.iter().all(|(_, metrics)| metrics.keys().all(|name| name.starts_with("eval_"))));
    value(&metrics, 0, "eval_reward");
    // Before the first step the policy equals the reference; afterwards it does not.
    assert!(plan.rloo.beta > 0.0);
    for name in ["eval_kl", "eval_kl_sequence", "eval_kl_k3"] {
        assert_eq!(value(&metrics, 0, name), 0.0, "{name}");
        assert_ne!(value(&metrics, 3, name), 0.0, "{name}");
    }
    assert!(metrics.iter().all(|(step, _)| value(&metrics, *step, "eval_entropy") > 0.0));
    let samples: Vec<Sample> = host.samples().into_iter().filter(|s| s.phase == SamplePhase::Eval).collect();
    assert_eq!(samples.len(), 9);
    assert!(samples.iter().all(|sample| sample.advantage.is_none() && sample.reward.is_some()));
    // Each prompt has one completion, so the mean of the samples' k1 sums equals the metric.
    let last: Vec<f64> = samples.iter().filter(|sample| sample.step == 3).filter_map(|sample| sample.kl).collect();
    assert_eq!(last.len(), 3);
    assert!((last.iter().sum::<f64>() / 3.0 - value(&metrics, 3, "eval_kl_sequence")).abs() < 1e-9);

    plan.rloo.beta = 0.0;
    let mut host = TestHost::default();
    let start = Start { eval_rows: rows()[..3].to_vec(), ..Start::default() };
    train(&plan, rows(), start, &mut host).expect("trains");
    assert!(host.metrics(SamplePhase::Eval).iter().all(|(_, metrics)| !metrics.contains_key("eval_kl")));
}

#[test]
fn prompts_that_leave_no_room_are_a_user_failure_with_counts() {
    let mut plan = plan();
    plan.sampling.max_completion_length = 253;
    let error = train(&plan, rows(), Start::default(), &mut TestHost::default()).expect_err("too long");
    let expected = "1 of 8 prompts are longer than 3 tokens";
    assert!(matches!(&error, EngineError::Prompts(message) if message.starts_with(expected)), "{error}");
}

#[test]
fn a_dataset_smaller_than_one_block_is_refused() {
    let mut plan = plan();
    plan.training.prompts_per_step = 9;
    let error = train(&plan, rows(), Start::default(), &mut TestHost::default()).expect_err("too small");
    assert!(matches!(&error, EngineError::Prompts(message) if message.contains("8 prompts")), "{error}");
}

#[test]
fn a_warm_start_goes_on_from_the_given_adapter() {
    let mut first = TestHost::default();
    run(&plan(), &mut first);
    let start = Start { initial_adapter: Some(first.saved[0].dir.clone()), ..Start::default() };
    let mut second = TestHost::default();
    train(&plan(), rows(), start, &mut second).expect("trains");
    // The reference is the base model, so the first KL is not zero.
    assert_ne!(value(&second.metrics(SamplePhase::Train), 1, "kl_k3"), 0.0);
    let mut plan = plan();
    plan.lora.as_mut().expect("lora").r = 2;
    let start = Start { initial_adapter: Some(first.saved[0].dir.clone()), ..Start::default() };
    let error = train(&plan, rows(), start, &mut TestHost::default()).expect_err("another rank");
    assert!(matches!(error, EngineError::Adapter(_)), "{error}");
}
