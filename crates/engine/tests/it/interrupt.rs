//! A run whose process is lost at any call to its host, and that resumes from its last checkpoint and journal, must
//! equal an uninterrupted run: the same bytes, metrics and samples, with no completion sampled or scored twice.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};

use rlood_engine::error::EngineError;
use rlood_engine::host::{Generated, Host, RunEnd, SampleRequest, SavedCheckpoint, Score, ScoreRequest, StopReason};
use rlood_types::event::{Event, Metrics, Sample, SamplePhase};
use rlood_types::rollout::{RewardSample, RolloutId, SampledGroup, Segments};
use rlood_types::spec::{
    CorrectionMode, Estimator, EvalPlan, LrSchedulerType, OptimizerKind, Plan, RewardNormalization,
};

use crate::servers;
use crate::train::{Start, TestHost, comparable, plan, rows, train};

/// A checkpoint every third step, so that most interruptions have steps to repeat.
const CHECKPOINT_EVERY: u64 = 3;

/// The plans to test, with their names.
fn runs() -> Vec<(&'static str, Plan)> {
    let with = |change: fn(&mut Plan)| {
        let mut plan = plan();
        plan.training.max_steps = 6;
        plan.checkpoints.every_steps = CHECKPOINT_EVERY;
        plan.eval = Some(EvalPlan { temperature: 1.0, ..EvalPlan::of_dataset(plan.dataset.clone(), 2) });
        change(&mut plan);
        plan
    };
    vec![
        ("one step a block", with(|_| {})),
        (
            "two slices a block, trained twice each",
            with(|plan| {
                plan.rloo.num_iterations = 2;
                plan.rloo.steps_per_generation = 2;
                plan.rloo.normalize_advantages = true;
                plan.optimizer.lr_scheduler_type = LrSchedulerType::Cosine;
                plan.training.max_steps = 10;
            }),
        ),
        (
            "the next block sampled while rewards are outstanding",
            with(|plan| {
                plan.rloo.steps_per_generation = 2;
                plan.rloo.overlap = true;
                plan.rloo.reward_normalization = RewardNormalization::Running;
                plan.training.max_steps = 9;
            }),
        ),
        (
            "moments in 8 bits, dropout",
            with(|plan| {
                plan.rloo.num_iterations = 2;
                plan.optimizer.kind = OptimizerKind::Adamw8bit;
                if let Some(lora) = &mut plan.lora {
                    lora.dropout = 0.2;
                }
            }),
        ),
        (
            "completions of rollout servers, corrected",
            with(|plan| {
                plan.rollout = Some(servers::rollout(CorrectionMode::SequenceTruncate));
                plan.rloo.num_iterations = 2;
                plan.rloo.steps_per_generation = 2;
                plan.training.max_steps = 6;
            }),
        ),
        (
            "the next block sampled on rollout servers while rewards are outstanding",
            with(|plan| {
                plan.rollout = Some(servers::rollout(CorrectionMode::TokenMask));
                plan.rloo.overlap = true;
            }),
        ),
        (
            "greedy baselines, refills, a running normalization",
            with(|plan| {
                plan.rloo.estimator = Estimator::Remax;
                plan.rloo.min_informative_groups = 2;
                plan.rloo.max_refills = 2;
                plan.rloo.reward_normalization = RewardNormalization::Running;
            }),
        ),
    ]
}

/// The state that outlives a process: checkpoints (in `host`), the journal, the rows of metrics and samples.
#[derive(Default)]
struct Machine {
    host: TestHost,
    sampled: BTreeMap<RolloutId, Vec<SampledGroup>>,
    answers: BTreeMap<RolloutId, Vec<Score>>,
    /// All requests to the reward, in order.
    asked: Vec<(RolloutId, Vec<String>)>,
    metrics: BTreeMap<(u64, SamplePhase), Metrics>,
    samples: BTreeMap<(u64, SamplePhase), Vec<Sample>>,
    /// Step of the newest checkpoint.
    saved: Option<u64>,
    /// Number of calls in this process so far, and the call at which the process is lost.
    calls: Cell<usize>,
    lost_at: Option<usize>,
    /// The call at which the user requests a pause.
    pause_at: Option<usize>,
}

impl Machine {
    /// Counts a call. From the fatal call on, nothing that the process does has an effect.
    fn alive(&self) -> Result<(), RunEnd> {
        self.calls.set(self.calls.get() + 1);
        match self.lost_at {
            Some(at) if self.calls.get() >= at => Err(RunEnd::Stopped(StopReason::LeaseLost)),
            _ => Ok(()),
        }
    }

    /// Runs one process from the newest checkpoint, after the server has rewound the job.
    fn attempt(&mut self, plan: &Plan) -> Result<Option<StopReason>, EngineError> {
        let kept = |step: u64| self.saved.is_some_and(|saved| step <= saved);
        self.metrics.retain(|(step, _), _| kept(*step));
        self.samples.retain(|(step, _), _| kept(*step));
        self.calls.set(0);
        let resume = self.saved.and_then(|_| self.host.saved.last()).map(|saved| saved.dir.clone());
        train(plan, rows(), Start { resume, eval_rows: rows()[..3].to_vec(), ..Start::default() }, self)
    }

    /// Reads every file of the last checkpoint.
    fn result(&self) -> BTreeMap<String, Vec<u8>> {
        let dir = &self.host.saved.last().expect("a checkpoint").dir;
        let files = std::fs::read_dir(dir).expect("its files").map(|entry| {
            let entry = entry.expect("a file");
            (entry.file_name().to_string_lossy().into_owned(), std::fs::read(entry.path()).expect("its bytes"))
        });
        files.collect()
    }
}

impl Host for Machine {
    fn score(&mut self, request: &ScoreRequest<'_>) -> Result<Vec<Score>, RunEnd> {
        self.alive()?;
        if let Some(scores) = self.answers.get(&request.id) {
            return Ok(scores.clone());
        }
        let asked = |sample: &RewardSample| format!("{} {}", sample.prompt_id, sample.completion);
        self.asked.push((request.id, request.samples.iter().map(asked).collect()));
        // The process is lost between the answer and the journal, or after the journal was written.
        self.alive()?;
        let scores: Vec<Score> =
            request.samples.iter().map(|sample| Score { values: vec![(self.host.score)(sample)] }).collect();
        self.answers.insert(request.id, scores.clone());
        self.alive()?;
        Ok(scores)
    }

    fn event(&mut self, event: Event) -> Result<(), RunEnd> {
        self.alive()?;
        match event {
            Event::Step { step, kind, metrics } => {
                let before = self.metrics.insert((step, kind), comparable(metrics));
                assert!(before.is_none(), "the row of step {step} ({kind:?}) comes twice");
            }
            Event::Samples { samples } => {
                let key = (samples[0].step, samples[0].phase);
                assert!(self.samples.insert(key, samples).is_none(), "samples of {key:?} come twice");
            }
            Event::Phase { .. }
            | Event::Warning { .. }
            | Event::Alert { .. }
            | Event::AlertCleared { .. }
            | Event::TrainingPhase { .. }
            | Event::Diverged { .. }
            | Event::Reward { .. }
            | Event::EarlyStopping { .. } => {}
        }
        self.alive()
    }

    fn saved(&mut self, checkpoint: &SavedCheckpoint<'_>) -> Result<(), RunEnd> {
        self.alive()?;
        self.host.saved(checkpoint)?;
        self.saved = Some(checkpoint.step);
        let step = checkpoint.step;
        let open = |id: &RolloutId| id.step > step || (id.step == step && id.phase == SamplePhase::Eval);
        self.sampled.retain(|id, _| open(id));
        self.answers.retain(|id, _| open(id));
        self.alive()
    }

    fn stop(&self) -> Option<StopReason> {
        if self.alive().is_err() {
            return Some(StopReason::LeaseLost);
        }
        self.pause_at.filter(|at| self.calls.get() >= *at).map(|_| StopReason::Pause { reason: None })
    }

    fn recorded(&mut self, id: RolloutId) -> Result<Option<Vec<SampledGroup>>, RunEnd> {
        self.alive()?;
        Ok(self.sampled.get(&id).cloned())
    }

    fn sample(&mut self, request: &SampleRequest<'_>) -> Result<Vec<Vec<Generated>>, RunEnd> {
        self.alive()?;
        // A server whose log-probs differ from the engine's, so that the correction matters.
        let mut groups = servers::serve(request);
        for completion in groups.iter_mut().flatten() {
            let logps = completion.segments.logps().unwrap().iter().map(|logp| logp - 0.03 * logp.fract()).collect();
            completion.segments = Segments::of_completion(completion.segments.ids(), Some(logps));
        }
        self.alive()?;
        Ok(groups)
    }

    fn sampled(&mut self, id: RolloutId, groups: &[SampledGroup]) -> Result<(), RunEnd> {
        self.alive()?;
        let before = self.sampled.insert(id, groups.to_vec());
        assert!(before.is_none(), "{id:?} is in the journal and was sampled again");
        self.alive()
    }
}

fn compare(what: &str, machine: &Machine, whole: &Machine) {
    let (result, expected) = (machine.result(), whole.result());
    assert_eq!(result.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>(), "{what}");
    for (name, bytes) in &expected {
        assert!(result[name] == *bytes, "{what}: {name} differs");
    }
    assert_eq!(machine.metrics, whole.metrics, "{what}");
    assert_eq!(machine.samples, whole.samples, "{what}");
    // A request may be repeated only with the same samples, and only if it had not been answered when
    // the process was lost.
    let first: BTreeMap<_, _> = whole.asked.iter().cloned().collect();
    for (id, samples) in &machine.asked {
        assert_eq!(&first[id], samples, "{what}: {id:?} is asked with other samples");
    }
    let again = machine.asked.len() - machine.asked.iter().map(|(id, _)| *id).collect::<BTreeSet<_>>().len();
    assert!(again <= 1, "{what}: {again} rollouts are asked again");
}

#[test]
fn a_process_lost_at_any_moment_changes_nothing() {
    for (name, plan) in runs() {
        let mut whole = Machine::default();
        assert_eq!(whole.attempt(&plan).expect("trains"), None);
        let moments = whole.calls.get();
        assert!(moments > 100, "{name}: {moments} moments");
        // Most calls are polls between tokens. An odd stride reaches calls of every kind in every step.
        for lost_at in (1..=moments).step_by((moments / 60) | 1) {
            let what = format!("{name}, lost at {lost_at} of {moments}");
            let mut machine = Machine { lost_at: Some(lost_at), ..Machine::default() };
            let lost = machine.attempt(&plan);
            assert!(matches!(lost, Ok(Some(StopReason::LeaseLost))), "{what}: {lost:?}");
            machine.lost_at = None;
            assert_eq!(machine.attempt(&plan).expect("goes on"), None, "{what}");
            compare(&what, &machine, &whole);
        }
    }
}

#[test]
fn a_process_lost_again_and_again_changes_nothing() {
    for (name, plan) in runs() {
        let mut whole = Machine::default();
        whole.attempt(&plan).expect("trains");
        // Each process lives a little longer than it takes to load and to repeat the steps after the checkpoint.
        let mut machine = Machine::default();
        let mut attempts = 0;
        loop {
            attempts += 1;
            machine.lost_at = Some(40 + 17 * attempts);
            match machine.attempt(&plan).expect("stops or finishes") {
                None => break,
                Some(_) => assert!(attempts < 60, "{name}: it never ends"),
            }
        }
        assert!(attempts > 2, "{name}: {attempts} attempts");
        let asked: BTreeSet<_> = machine.asked.iter().map(|(id, _)| *id).collect();
        assert!(machine.asked.len() - asked.len() < attempts, "{name}: a lost process costs at most one answer");
        // One rollout is requested again for each process lost between an answer and the journal, so requests
        // are not compared here.
        machine.asked.clear();
        compare(name, &machine, &whole);
    }
}

#[test]
fn a_pause_at_any_moment_changes_nothing() {
    for (name, plan) in runs() {
        let mut whole = Machine::default();
        whole.attempt(&plan).expect("trains");
        for pause_at in (1..=whole.calls.get()).step_by((whole.calls.get() / 40) | 1) {
            let what = format!("{name}, paused at {pause_at}");
            let mut machine = Machine { pause_at: Some(pause_at), ..Machine::default() };
            let paused = machine.attempt(&plan).expect("stops");
            machine.pause_at = None;
            if paused.is_some() {
                assert_eq!(machine.attempt(&plan).expect("goes on"), None, "{what}");
            }
            compare(&what, &machine, &whole);
        }
    }
}

#[test]
fn an_evaluation_is_recorded_in_batches_and_the_next_attempt_continues_after_them() {
    let mut plan = plan();
    plan.training.max_steps = 1;
    plan.eval = Some(EvalPlan { temperature: 1.0, ..EvalPlan::of_dataset(plan.dataset.clone(), 2) });
    let run = |machine: &mut Machine| {
        machine.calls.set(0);
        let eval_rows = rows().into_iter().cycle().take(150).collect();
        train(&plan, rows(), Start { eval_rows, ..Start::default() }, machine).expect("stops or finishes")
    };
    let pieces = |machine: &Machine, step: u64| -> Vec<usize> {
        let of_step = machine.sampled.iter().filter(|(id, _)| id.phase == SamplePhase::Eval && id.step == step);
        of_step.map(|(_, groups)| groups.len()).collect()
    };
    let mut whole = Machine::default();
    assert_eq!(run(&mut whole), None);
    assert_eq!(pieces(&whole, 1), [64, 64, 22]);

    // Finds the first call at which a lost process leaves two batches of the evaluation before the start.
    let (mut low, mut high) = (1, whole.calls.get());
    let lost = |lost_at: usize| {
        let mut machine = Machine { lost_at: Some(lost_at), ..Machine::default() };
        run(&mut machine);
        machine
    };
    while low < high {
        let middle = usize::midpoint(low, high);
        if pieces(&lost(middle), 0).len() >= 2 {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    let mut machine = lost(low);
    assert_eq!(pieces(&machine, 0), [64, 64]);
    machine.lost_at = None;
    // The host fails if it receives a recorded batch again.
    assert_eq!(run(&mut machine), None);
    compare("an evaluation in pieces", &machine, &whole);

    // An older version recorded the whole evaluation under the first batch's id. Take the batches recorded just
    // before the first step.
    let (mut low, mut high) = (low, whole.calls.get());
    while low < high {
        let middle = usize::midpoint(low, high);
        if pieces(&lost(middle), 0).len() >= 3 {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    let mut old = lost(low);
    let groups: Vec<SampledGroup> = std::mem::take(&mut old.sampled).into_values().flatten().collect();
    assert_eq!(groups.len(), 150);
    old.sampled.insert(RolloutId::eval(0), groups);
    old.lost_at = None;
    assert_eq!(run(&mut old), None);
    compare("an evaluation of an older version", &old, &whole);
}
