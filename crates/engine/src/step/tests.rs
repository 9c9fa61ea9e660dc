//! Log-probs recorded at sampling, in runs that treat their sampler as exact whatever the backend.

use std::collections::HashMap;
use std::path::PathBuf;

use rlood_types::rollout::{Generated, RewardValue, RolloutId, SampledGroup, Score, Segment};
use serde_json::{Map, json};

use crate::error::EngineError;
use crate::event::{Event, Metrics, SamplePhase};
use crate::host::{Host, PromptRow, RunEnd, SavedCheckpoint, ScoreRequest, StepTrace, StopReason, TrainInput};
use crate::protocol::JournalEntry;
use crate::run::Run;
use crate::spec::{self, Plan};

/// Two prompts with two completions per step; blocks of two slices, each trained twice.
fn plan(beta: f64) -> Plan {
    let records: Vec<_> = rows().into_iter().map(|row| json!({ "prompt": row.prompt })).collect();
    let document = json!({
        "model": "tiny",
        "dataset": {"records": records},
        "rewards": [{"type": "regex", "pattern": "x", "name": "r"}],
        "rloo": {"num_generations": 2, "num_iterations": 2, "steps_per_generation": 2, "beta": beta},
        "sampling": {"max_completion_length": 6, "temperature": 0.8},
        "lora": {"r": 4, "alpha": 8, "target_modules": ["q_proj", "down_proj"]},
        "optimizer": {"learning_rate": 0.01},
        "training": {"prompts_per_step": 2, "max_steps": 8},
        "checkpoints": {"every_steps": 1},
    });
    let (spec, errors) = spec::JobSpec::read(document.clone());
    assert!(errors.is_empty(), "{errors:?}");
    let model = spec::ModelFacts {
        id: "tiny".into(),
        sha256: String::new(),
        max_position_embeddings: 64,
        num_parameters: 1,
        size_bytes: 1,
        has_chat_template: false,
        removes_reasoning: false,
        shape: None,
        modules: Vec::new(),
        beyond_gpu: None,
        foreign: None,
        reads_images: false,
    };
    let context = spec::Context {
        model: Some(model),
        dataset: Some(spec::DatasetFacts::of_records(&records)),
        ..spec::Context::default()
    };
    spec::resolve(&spec, &context).unwrap().plan
}

/// Prompts made of the fixture's words.
fn rows() -> Vec<PromptRow> {
    let prompts = ["w0 w1 w2", "w5 w6", "w7 w8 w9 w10", "w3", "w11 w12", "w13 w14 w15", "w16 w17", "w18"];
    prompts.into_iter().map(|prompt| PromptRow { prompt: json!(prompt), columns: Map::new() }).collect()
}

/// Old and new log-probs, and the parameters after the update.
type Trace = (Vec<Vec<f32>>, Vec<Vec<f32>>, Vec<f32>);

/// A host that keeps everything; its journal is the serialized JSON.
struct Machine {
    beta: f64,
    dir: tempfile::TempDir,
    /// Directories of checkpoints, by step.
    saved: Vec<PathBuf>,
    journal: HashMap<RolloutId, String>,
    /// Whether the journal comes from a version that did not record log-probs.
    old_journal: bool,
    traces: Vec<(u64, Trace)>,
    metrics: Vec<(u64, Metrics)>,
    /// The step before whose scoring the process is lost.
    lost_at: Option<u64>,
}

impl Machine {
    fn new() -> Self {
        Self {
            beta: 0.05,
            dir: tempfile::tempdir().unwrap(),
            saved: Vec::new(),
            journal: HashMap::new(),
            old_journal: false,
            traces: Vec::new(),
            metrics: Vec::new(),
            lost_at: None,
        }
    }

    fn run(&mut self, exact: bool, resume: Option<PathBuf>) -> Result<(), RunEnd> {
        let (plan, scratch) = (plan(self.beta), tempfile::tempdir().unwrap());
        let input = TrainInput {
            plan: &plan,
            model_dir: &rlood_test_support::fixture("golden/qwen2_onpolicy"),
            model_name: "tiny",
            rows: rows(),
            eval_rows: Vec::new(),
            warm_up_rows: Vec::new(),
            judged_keys: Vec::new(),
            resume,
            initial_adapter: None,
            scratch_dir: scratch.path(),
            device: "cpu",
            backend: None,
        };
        let mut run = Run::load(input, self)?;
        run.model.samples_exactly = exact;
        crate::all_steps(&mut run)
    }

    fn groups(&self, id: RolloutId) -> Option<Vec<SampledGroup>> {
        match serde_json::from_str(self.journal.get(&id)?).unwrap() {
            JournalEntry::Rollout { groups, .. } => Some(groups),
            other => panic!("{other:?}"),
        }
    }

    /// The recorded log-probs of a slice of the block that begins with `first_step`.
    fn recorded(&self, first_step: u64, slice: usize) -> Vec<Vec<f32>> {
        let groups = self.groups(RolloutId::train(first_step)).expect("sampled");
        let completions = groups.into_iter().flat_map(|group| group.completions);
        let recorded = |completion: Generated| completion.segments.logps().expect("recorded").into_owned();
        completions.skip(slice * 4).take(4).map(recorded).collect()
    }

    fn trace(&self, step: u64) -> &Trace {
        &self.traces.iter().find(|(at, _)| *at == step).expect("the step").1
    }
}

impl Host for Machine {
    fn score(&mut self, request: &ScoreRequest<'_>) -> Result<Vec<Score>, RunEnd> {
        if self.lost_at == Some(request.id.step) {
            return Err(RunEnd::Stopped(StopReason::LeaseLost));
        }
        let number = |text: &str| RewardValue::Number(f64::from(text.bytes().map(u32::from).sum::<u32>() % 7));
        Ok(request.samples.iter().map(|sample| Score { values: vec![number(&sample.completion)] }).collect())
    }

    fn event(&mut self, event: Event) -> Result<(), RunEnd> {
        if let Event::Step { step, kind: SamplePhase::Train, mut metrics } = event {
            // Duration of the passes without gradient; 0 = there was no such pass.
            let passes = metrics.get("step_time/reference").copied().flatten().unwrap_or(0.0);
            let machine = ["step_time", "tokens_per_second", "memory"];
            metrics.retain(|name, _| !machine.iter().any(|prefix| name.starts_with(prefix)));
            metrics.insert("passes".into(), Some(f64::from(u8::from(passes > 0.0))));
            self.metrics.push((step, metrics));
        }
        Ok(())
    }

    fn saved(&mut self, checkpoint: &SavedCheckpoint<'_>) -> Result<(), RunEnd> {
        let dir = self.dir.path().join(checkpoint.step.to_string());
        std::fs::create_dir(&dir).unwrap();
        for file in checkpoint.files {
            std::fs::copy(checkpoint.dir.join(&file.name), dir.join(&file.name)).unwrap();
        }
        self.saved.push(dir);
        Ok(())
    }

    fn stop(&self) -> Option<StopReason> {
        None
    }

    fn recorded(&mut self, id: RolloutId) -> Result<Option<Vec<SampledGroup>>, RunEnd> {
        let mut groups = self.groups(id);
        if self.old_journal {
            let completions = groups.iter_mut().flatten().flat_map(|group| &mut group.completions);
            completions.for_each(|completion| completion.segments.forget_logps());
        }
        Ok(groups)
    }

    fn sampled(&mut self, rollout: RolloutId, groups: &[SampledGroup]) -> Result<(), RunEnd> {
        let entry = JournalEntry::Rollout { rollout, groups: groups.to_vec(), samplers: Vec::new() };
        self.journal.insert(rollout, serde_json::to_string(&entry).unwrap());
        Ok(())
    }

    fn observe(&mut self, trace: &StepTrace<'_>) {
        let logps =
            (trace.old_logps.to_vec(), trace.new_logps.to_vec(), trace.parameters.values().unwrap().into_owned());
        self.traces.push((trace.step, logps));
    }
}

#[test]
fn recorded_log_probs_are_the_old_ones_where_the_sampler_is_exact() {
    let mut exact = Machine::new();
    exact.run(true, None).unwrap();
    for step in 1..=8 {
        // Steps 1 to 4 train slices 0, 1, 0, 1 of the first block.
        let first = step - (step - 1) % 4;
        assert_eq!(exact.trace(step).0, exact.recorded(first, ((step - 1) % 2) as usize), "step {step}");
    }
    let mut padded = Machine::new();
    padded.run(false, None).unwrap();
    // Otherwise the old log-probs come from the training kernels.
    assert_eq!(padded.trace(1).0, padded.trace(1).1);
    for (ours, theirs) in exact.trace(1).0.concat().iter().zip(padded.trace(1).0.concat()) {
        assert!((ours - theirs).abs() < 1e-5, "{ours} and {theirs}");
    }
    let difference = |machine: &Machine| machine.metrics[0].1["sampling/sampling_logp_difference/max"].unwrap();
    let by_hand = |machine: &Machine| -> f64 {
        let pairs = machine.recorded(1, 0).concat().into_iter().zip(machine.trace(1).1.concat());
        pairs.map(|(sampled, trained)| (f64::from(sampled) - f64::from(trained)).abs()).fold(0.0, f64::max)
    };
    for machine in [&exact, &padded] {
        assert_eq!(difference(machine), by_hand(machine));
    }
}

#[test]
fn recorded_log_probs_need_no_pass() {
    // Without a reference there is no such pass at all.
    for (exact, beta, passes) in [(true, 0.0, 0.0), (false, 0.0, 1.0), (true, 0.05, 1.0)] {
        let mut machine = Machine { beta, ..Machine::new() };
        machine.run(exact, None).unwrap();
        assert_eq!(machine.metrics[0].1["passes"], Some(passes), "exact: {exact}, beta {beta}");
    }
}

#[test]
fn an_old_journal_without_log_probs_falls_back_to_the_training_kernels() {
    let mut whole = Machine::new();
    whole.run(false, None).unwrap();
    let journal = whole.journal.clone();
    let mut machine = Machine { journal, old_journal: true, ..Machine::new() };
    machine.run(true, None).unwrap();
    assert_eq!(machine.traces, whole.traces);
    assert!(machine.metrics.iter().all(|(_, metrics)| !metrics.contains_key("sampling/sampling_logp_difference/max")));
}

#[test]
fn recorded_log_probs_survive_checkpoints_and_the_journal() {
    let mut whole = Machine::new();
    whole.run(true, None).unwrap();
    assert_ne!(whole.trace(3).0, whole.trace(3).1, "the second use of a slice is off-policy");
    // Resume from every checkpoint; three of four are inside a block.
    for (done, saved) in whole.saved[..7].iter().enumerate() {
        let mut rest = Machine::new();
        rest.run(true, Some(saved.clone())).unwrap();
        assert_eq!(rest.traces, whole.traces[done + 1..], "resumed after step {}", done + 1);
        assert_eq!(rest.metrics, whole.metrics[done + 1..], "resumed after step {}", done + 1);
    }
    // The process is lost between sampling and scoring: the next attempt finds completions and
    // log-probs in the journal.
    for step in [1, 5] {
        let mut machine = Machine { lost_at: Some(step), ..Machine::new() };
        assert!(matches!(machine.run(true, None), Err(RunEnd::Stopped(StopReason::LeaseLost))));
        machine.lost_at = None;
        let resume = machine.saved.last().cloned();
        assert_eq!(resume.is_some(), step > 1);
        machine.run(true, resume).unwrap();
        assert_eq!(machine.traces, whole.traces, "lost in step {step}");
        assert_eq!(machine.metrics, whole.metrics, "lost in step {step}");
    }
}

#[test]
fn a_trajectory_that_is_no_completion_is_refused_before_it_is_scored() {
    let mut machine = Machine::new();
    machine.run(true, None).unwrap();
    let id = RolloutId::train(1);
    let mut groups = machine.groups(id).expect("sampled");
    groups[0].completions[0].segments.0.push(Segment::Context { ids: vec![5] });
    let entry = JournalEntry::Rollout { rollout: id, groups, samplers: Vec::new() };
    let journal = HashMap::from([(id, serde_json::to_string(&entry).unwrap())]);
    let refused = Machine { journal, ..Machine::new() }.run(true, None);
    assert!(matches!(&refused, Err(RunEnd::Failed(EngineError::Trajectory(_)))), "{refused:?}");
}
