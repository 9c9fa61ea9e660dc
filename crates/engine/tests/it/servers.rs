//! Completions from rollout servers: the exactness of a server that computes what the engine computes, the importance weights, and
//! what the engine gives its host to check a server.

use std::collections::BTreeMap;

use rlood_engine::backend::BackendKind;
use rlood_engine::certificate::logps;
use rlood_engine::error::EngineError;
use rlood_engine::generate::{GeneratePrompt, GenerateRequest, generate};
use rlood_engine::host::{Generated, Host, RunEnd, SampleRequest, SavedCheckpoint, Score, ScoreRequest, StopReason};
use rlood_engine::mismatch::{ImportanceWeight, Mismatch};
use rlood_engine::model::{Adapter, Policy};
use rlood_engine::random::{Key, Stream};
use rlood_engine::sampling::Sampler;
use rlood_engine::text::Text;
use rlood_types::event::{Event, SamplePhase};
use rlood_types::rollout::{RolloutId, SampledGroup, Segments};
use rlood_types::spec::{CorrectionMode, CorrectionPlan, Estimator, EvalPlan, Plan, RolloutEngine, RolloutPlan};

use crate::train::{Start, TestHost, model_dir, plan, rows, train, value};

pub fn rollout(mode: CorrectionMode) -> RolloutPlan {
    RolloutPlan {
        engine: RolloutEngine::Vllm,
        servers: Vec::new(),
        colocate: false,
        memory_share: 0.3,
        correction: CorrectionPlan { mode, max: 3.0, min: None },
        max_concurrency: 8,
        timeout_s: 60,
    }
}

fn on_servers(plan: Plan, mode: CorrectionMode) -> Plan {
    Plan { rollout: Some(rollout(mode)), ..plan }
}

/// Samples as a rollout server does: with the model and the exported adapter, from seeds. Also checks what the engine exported.
pub fn serve(request: &SampleRequest<'_>) -> Vec<Vec<Generated>> {
    let text = Text::load(&model_dir()).unwrap();
    let mut policy = Policy::load(&model_dir(), BackendKind::Cpu).unwrap();
    let probes: Vec<&[u32]> = request.adapter.probes.iter().map(Vec::as_slice).collect();
    policy.load_lora(request.adapter.dir.path()).unwrap();
    assert!(probes.len() >= 2 && probes.iter().all(|probe| probe.len() >= 8), "{probes:?}");
    assert_eq!(logps(&policy, &probes, Adapter::Off, &|| false).unwrap(), request.adapter.base_logps);
    assert_eq!(logps(&policy, &probes, Adapter::On, &|| false).unwrap(), request.adapter.logps);
    let sampler = Sampler { temperature: request.temperature, ..Sampler::PLAIN };
    let group = |prompt: &rlood_engine::host::SamplePrompt<'_>| {
        assert!(prompt.ids.len() + request.max_completion_length <= request.adapter.max_tokens);
        let generate_request = GenerateRequest {
            prompts: &[GeneratePrompt { row: prompt.row, ids: prompt.ids, given: &[] }],
            num_generations: request.num_generations,
            sampler,
            max_completion_length: request.max_completion_length,
            stop: &[],
            key: Key::new(prompt.seed, Stream::Generate),
            eos_token_ids: request.eos_token_ids,
            adapter: Adapter::On,
            max_rows: 64,
        };
        generate(&policy, &text, &generate_request, &|| false).unwrap().unwrap().remove(0)
    };
    request.prompts.iter().map(group).collect()
}

/// A host whose servers replay groups, or sample themselves; `shift` is added to the log-probs that they report.
#[derive(Default)]
struct Servers {
    host: TestHost,
    sampled: BTreeMap<RolloutId, Vec<SampledGroup>>,
    replays: Option<BTreeMap<RolloutId, Vec<SampledGroup>>>,
    shift: f32,
    requests: usize,
}

impl Host for Servers {
    fn score(&mut self, request: &ScoreRequest<'_>) -> Result<Vec<Score>, RunEnd> {
        self.host.score(request)
    }

    fn event(&mut self, event: Event) -> Result<(), RunEnd> {
        self.host.event(event)
    }

    fn saved(&mut self, checkpoint: &SavedCheckpoint<'_>) -> Result<(), RunEnd> {
        self.host.saved(checkpoint)
    }

    fn stop(&self) -> Option<StopReason> {
        None
    }

    fn sampled(&mut self, id: RolloutId, groups: &[SampledGroup]) -> Result<(), RunEnd> {
        self.sampled.insert(id, groups.to_vec());
        Ok(())
    }

    fn sample(&mut self, request: &SampleRequest<'_>) -> Result<Vec<Vec<Generated>>, RunEnd> {
        self.requests += 1;
        let mut groups = match &self.replays {
            Some(replays) => replays[&request.id].iter().map(|group| group.completions.clone()).collect(),
            None => serve(request),
        };
        for completion in groups.iter_mut().flatten() {
            let known = completion.segments.logps().map(|logps| logps.iter().map(|logp| logp + self.shift).collect());
            completion.segments = Segments::of_completion(completion.segments.ids(), known);
        }
        Ok(groups)
    }
}

impl Servers {
    fn run(&mut self, plan: &Plan) -> Result<(), EngineError> {
        let start = Start { eval_rows: rows()[..3].to_vec(), ..Start::default() };
        train(plan, rows(), start, self).map(|stopped| assert_eq!(stopped, None))
    }

    fn adapter(&self) -> Vec<u8> {
        self.host.saved.last().expect("a checkpoint").adapter()
    }
}

fn plans() -> Vec<Plan> {
    let with = |change: fn(&mut Plan)| {
        let mut plan = plan();
        plan.eval = Some(EvalPlan { temperature: 1.0, ..EvalPlan::of_dataset(plan.dataset.clone(), 2) });
        change(&mut plan);
        plan
    };
    vec![
        with(|_| {}),
        with(|plan| {
            plan.rloo.num_iterations = 2;
            plan.rloo.steps_per_generation = 2;
            plan.rloo.normalize_advantages = true;
            plan.training.max_steps = 8;
        }),
        with(|plan| {
            plan.rloo.overlap = true;
            plan.rloo.estimator = Estimator::Remax;
        }),
    ]
}

#[test]
fn a_server_with_exactly_our_log_probs_gives_the_bytes_of_the_own_sampler() {
    use CorrectionMode::{None, SequenceMask, SequenceTruncate, TokenMask, TokenTruncate};
    for plan in plans() {
        let mut own = Servers::default();
        own.run(&plan).unwrap();
        assert_eq!(own.requests, 0);
        for mode in [SequenceMask, SequenceTruncate, TokenMask, TokenTruncate, None] {
            let mut servers = Servers { replays: Some(own.sampled.clone()), ..Servers::default() };
            servers.run(&on_servers(plan.clone(), mode)).unwrap();
            assert!(servers.requests > 0);
            assert_eq!(servers.adapter(), own.adapter(), "{mode:?}");
            let metrics = servers.host.metrics(SamplePhase::Train);
            assert_eq!(value(&metrics, 1, "sampling/log_ratio_max"), 0.0);
            assert_eq!(value(&metrics, 1, "sampling/mismatch_kl"), 0.0);
            assert_eq!(value(&metrics, 1, "sampling/ess"), 1.0);
            assert_eq!(value(&metrics, 1, "sampling/masked_fraction"), 0.0);
            let [min, mean, max] =
                ["min", "mean", "max"].map(|name| value(&metrics, 1, &format!("sampling/importance_ratio/{name}")));
            assert_eq!([min, mean, max], [1.0; 3]);
        }
    }
}

#[test]
fn a_server_that_loads_the_exported_adapter_and_samples_by_seed_has_no_mismatch() {
    let mut servers = Servers::default();
    servers.run(&on_servers(plans().remove(0), CorrectionMode::None)).unwrap();
    let metrics = servers.host.metrics(SamplePhase::Train);
    for step in 1..=3 {
        assert_eq!(value(&metrics, step, "sampling/log_ratio_max"), 0.0);
        assert_eq!(value(&metrics, step, "sampling/logp_difference/max"), 0.0);
    }
    let mut again = Servers::default();
    again.run(&on_servers(plans().remove(0), CorrectionMode::SequenceMask)).unwrap();
    assert_eq!(again.adapter(), servers.adapter(), "the same seeds, the same completions");
}

#[test]
fn a_mismatch_is_measured_and_changes_the_update_or_fails_the_job() {
    let plan = plans().remove(0);
    let run = |mode, shift| {
        let mut servers = Servers { shift, ..Servers::default() };
        let result = servers.run(&on_servers(plan.clone(), mode));
        (servers, result)
    };
    let (exact, _) = run(CorrectionMode::SequenceTruncate, 0.0);
    let (servers, result) = run(CorrectionMode::SequenceTruncate, -0.05);
    result.unwrap();
    let metrics = servers.host.metrics(SamplePhase::Train);
    assert!((value(&metrics, 1, "sampling/logp_difference/mean") - 0.05).abs() < 1e-6);
    let kl = 0.05f64.exp() - 1.0 - 0.05;
    assert!((value(&metrics, 1, "sampling/mismatch_kl") - kl).abs() < 1e-5);
    assert_eq!(value(&metrics, 1, "sampling/log_ratio_max"), 0.0, "the old log-probs are the engine's own");
    assert_ne!(servers.adapter(), exact.adapter());

    // Without a correction, the job fails after the step whose mismatch is too large.
    let (servers, result) = run(CorrectionMode::None, -0.05);
    let error = result.unwrap_err();
    assert!(matches!(error, EngineError::RolloutMismatch { step: 1, .. }), "{error}");
    assert_eq!(servers.host.metrics(SamplePhase::Train).len(), 1);
    run(CorrectionMode::None, -0.01).1.unwrap();

    // A job with a correction fails only at a mismatch that no correction helps against.
    let (_, result) = run(CorrectionMode::TokenTruncate, -0.6);
    assert!(matches!(result.unwrap_err(), EngineError::RolloutMismatch { step: 1, .. }));
}

#[test]
fn masked_completions_have_no_gradient_and_keep_their_place() {
    // All completions are longer than what a ratio of 3 allows: every weight is 0, so no weight of the adapter changes.
    let plan = plans().remove(0);
    let mut servers = Servers { shift: -0.4, ..Servers::default() };
    let mut masked = on_servers(plan, CorrectionMode::TokenMask);
    masked.rollout.as_mut().unwrap().correction.max = 1.2;
    masked.optimizer.weight_decay = 0.0;
    masked.training.max_steps = 1;
    servers.run(&masked).unwrap();
    let metrics = servers.host.metrics(SamplePhase::Train);
    assert_eq!(value(&metrics, 1, "sampling/masked_fraction"), 1.0);
    assert_eq!(value(&metrics, 1, "grad_norm"), 0.0);
    assert!(value(&metrics, 1, "reward").is_finite());
}

#[test]
fn weights_are_those_of_the_formulas() {
    let correction = |mode, max, min| CorrectionPlan { mode, max, min };
    let old = [-1.0f32, -2.0, -0.5];
    let sampled = [-1.5f32, -1.75, f32::NAN];
    let ratios = [0.5f64.exp(), (-0.25f64).exp(), 1.0];
    let tokens = |mode, max, min| match ImportanceWeight::of(&correction(mode, max, min), &old, &sampled) {
        ImportanceWeight::Tokens(weights) => weights,
        other => panic!("{other:?}"),
    };
    assert_eq!(tokens(CorrectionMode::TokenTruncate, 1.2, Some(0.9)), [1.2, 0.9, 1.0]);
    assert_eq!(tokens(CorrectionMode::TokenMask, 1.2, Some(0.9)), [0.0, 0.0, 1.0]);
    assert_eq!(tokens(CorrectionMode::TokenMask, 3.0, None), ratios);
    let sequence = |mode, max, min| ImportanceWeight::of(&correction(mode, max, min), &old, &sampled).of_token(2);
    let ratio = 0.25f64.exp();
    assert_eq!(sequence(CorrectionMode::SequenceMask, 3.0, None), ratio);
    assert_eq!(sequence(CorrectionMode::SequenceMask, 1.2, None), 0.0);
    assert_eq!(sequence(CorrectionMode::SequenceTruncate, 1.2, None), 1.2);
    assert_eq!(sequence(CorrectionMode::SequenceTruncate, 3.0, Some(1.5)), 1.5);
    assert_eq!(sequence(CorrectionMode::None, 1.0, None), 1.0);

    // Two completions with ratios 1 and 3: the effective share is (1 + 3)² / (2 · (1 + 9)).
    let logps: [&[f32]; 2] = [&[-1.0], &[-1.0]];
    let served: [&[f32]; 2] = [&[-1.0], &[-1.0 - 3.0f32.ln()]];
    let mismatch = Mismatch::of(&correction(CorrectionMode::SequenceMask, 2.0, None), logps.into_iter().zip(served));
    assert!((mismatch.ess - 0.8).abs() < 1e-6, "{mismatch:?}");
    assert_eq!(mismatch.masked_fraction, 0.5);
    assert!((mismatch.ratio_max - 3.0).abs() < 1e-5 && mismatch.ratio_min == 1.0);
    assert!((mismatch.kl - (2.0 - 3.0f64.ln()) / 2.0).abs() < 1e-6);
}
