//! Tests of the runtime with `tests/runner.py`, which keeps to the protocol or breaks it in a way that a test asks for. It needs a
//! python3, and no package.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::environment::{Environment, Limits};
use super::{IMAGES_DIR, TrlHost, train};
use crate::digest::Sha256Digest;
use crate::engine::error::EngineError;
use crate::engine::host::{Host, PromptRow, RunEnd, SavedCheckpoint, Score, ScoreRequest, StopReason, TrainInput};
use crate::event::{Event, OnAlert, Rule};
use crate::rollout::{RewardValue, RolloutId, SampledGroup};
use crate::spec::{Plan, ResourcesPlan, RuntimeFacts, RuntimeName};

const FAKE: &str = include_str!("tests/runner.py");

/// Number of optimizer steps of the tests' plan.
const STEPS: u64 = 4;

pub(super) fn plan(ranks: u32) -> Plan {
    let dataset = json!({"id": crate::id::DatasetId::new(), "sha256": "0", "num_rows": 3});
    let mut plan: Plan = serde_json::from_value(json!({
        "name": null, "model": {"id": "tiny", "sha256": "0"}, "dataset": dataset, "eval": null,
        "rewards": [{"name": "length", "weight": 2.0, "required": true, "type": "length",
                     "min_words": 1, "max_words": 5, "sentence_bonus": 0.5}],
        "rloo": {"num_generations": 2, "beta": 0.0, "epsilon": 0.2, "epsilon_high": 0.2, "num_iterations": 1,
                 "steps_per_generation": 1, "normalize_advantages": false, "reward_clip_range": null,
                 "mask_truncated_completions": false, "combine": "renormalize"},
        "sampling": {"max_completion_length": 4, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
                     "repetition_penalty": 1.0, "stop": [], "chat_template_kwargs": {}},
        "lora": {"r": 2, "alpha": 4.0, "dropout": 0.0, "target_modules": ["q_proj"], "use_rslora": false},
        "optimizer": {"learning_rate": 0.001, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8,
                      "weight_decay": 0.0, "max_grad_norm": 1.0, "lr_scheduler_type": "constant", "warmup_steps": 0},
        "training": {"prompts_per_step": 2, "max_steps": STEPS, "seed": 1, "shuffle_dataset": true},
        "checkpoints": {"every_steps": 2, "keep_last": 1, "keep_best": 0},
        "metadata": {},
        "totals": {"optimizer_steps": STEPS, "completions_per_step": 4, "prompts_per_block": 2, "generation_blocks": STEPS,
                   "completions": 16, "epochs": 1.0, "dropped_rows_per_epoch": 0, "max_completion_tokens": 64}
    }))
    .unwrap();
    plan.runtime.name = RuntimeName::Trl;
    plan.resources = ResourcesPlan { devices: ranks };
    plan
}

fn environment() -> Environment {
    let versions = BTreeMap::from([("trl".to_owned(), "1.16.0".to_owned())]);
    let facts = RuntimeFacts { runtime: "trl".to_owned(), versions, extras: vec![], devices: 8, gpus: false };
    let limits = Limits {
        hello: Duration::from_secs(60),
        deadlock: Duration::from_millis(500),
        silence: Duration::from_secs(60),
        pause: Duration::from_secs(60),
        shutdown: Duration::from_secs(60),
    };
    Environment { python: "python3".into(), runner: FAKE, facts, gpus: Vec::new(), limits }
}

/// A host that keeps its journal and the published checkpoints.
#[derive(Default)]
struct Recorder {
    /// Rollouts by step, with the samplers' states.
    journal: BTreeMap<u64, (Vec<SampledGroup>, Vec<Value>)>,
    /// Steps whose completions were sampled, scored and saved, and metrics that were reported.
    sampled: Vec<u64>,
    scored: Vec<u64>,
    steps: Vec<u64>,
    warnings: Vec<String>,
    alerts: Vec<(Rule, u64)>,
    advantages: Vec<Option<f64>>,
    /// Columns of the samples that were scored.
    columns: Vec<Value>,
    /// Files of the newest checkpoint, with its step.
    saved: Option<(u64, BTreeMap<String, Vec<u8>>)>,
    /// Ends the run while this step's rewards are computed.
    dies_at: Option<u64>,
    /// Requests this stop once that many steps are scored.
    stop_after: Option<(u64, StopReason)>,
}

impl Host for Recorder {
    fn score(&mut self, request: &ScoreRequest<'_>) -> Result<Vec<Score>, RunEnd> {
        if self.dies_at == Some(request.id.step) {
            return Err(RunEnd::Stopped(StopReason::LeaseLost));
        }
        self.scored.push(request.id.step);
        self.columns.extend(request.samples.iter().map(|sample| Value::Object(sample.columns.clone())));
        let value = |place: usize| match place {
            1 => RewardValue::Missing,
            place => RewardValue::Number(place as f64),
        };
        Ok((0..request.samples.len()).map(|place| Score { values: vec![value(place)] }).collect())
    }

    fn event(&mut self, event: Event) -> Result<(), RunEnd> {
        match event {
            Event::Step { step, metrics, .. } => {
                assert!(
                    !metrics.contains_key("surprise")
                        && metrics["loss"] == Some(0.5)
                        && metrics["reward"] == Some(10.0 / 3.0)
                );
                self.steps.push(step);
            }
            Event::Samples { samples } => {
                self.advantages.extend(samples.iter().map(|sample| sample.advantage));
                assert!(samples.iter().all(|sample| sample.rewards.contains_key("length")));
            }
            Event::Warning { code, .. } => self.warnings.push(code),
            Event::Alert { alert } => self.alerts.push((alert.rule, alert.step)),
            _ => {}
        }
        Ok(())
    }

    fn saved(&mut self, checkpoint: &SavedCheckpoint<'_>) -> Result<(), RunEnd> {
        let read = |name: &str| std::fs::read(checkpoint.dir.join(name)).unwrap();
        let files = checkpoint.files.iter().map(|file| (file.name.clone(), read(&file.name)));
        self.saved = Some((checkpoint.step, files.collect()));
        Ok(())
    }

    fn stop(&self) -> Option<StopReason> {
        let (after, reason) = self.stop_after.as_ref()?;
        (self.scored.len() as u64 >= *after).then(|| reason.clone())
    }
}

impl TrlHost for Recorder {
    fn recorded_by_ranks(&mut self, id: RolloutId) -> Option<(Vec<SampledGroup>, Vec<Value>)> {
        self.journal.get(&id.step).cloned()
    }

    fn sampled_by_ranks(&mut self, id: RolloutId, groups: &[SampledGroup], samplers: &[Value]) -> Result<(), RunEnd> {
        self.sampled.push(id.step);
        self.journal.insert(id.step, (groups.to_vec(), samplers.to_vec()));
        Ok(())
    }
}

/// Runs a plan in a new directory, from the host's newest checkpoint, and checks that no process is left.
fn run(plan: &Plan, environment: &Environment, host: &mut Recorder) -> Result<(), RunEnd> {
    let row = |prompt: &str| PromptRow { prompt: json!(prompt), columns: Default::default() };
    run_rows(plan, environment, host, ["one", "two", "three"].map(row).to_vec(), &tempfile::tempdir().unwrap())
}

fn run_rows(
    plan: &Plan,
    environment: &Environment,
    host: &mut Recorder,
    rows: Vec<PromptRow>,
    scratch: &tempfile::TempDir,
) -> Result<(), RunEnd> {
    let resume = host.saved.as_ref().map(|(_, files)| {
        let dir = scratch.path().join("resume");
        std::fs::create_dir(&dir).unwrap();
        files.iter().for_each(|(name, bytes)| std::fs::write(dir.join(name), bytes).unwrap());
        dir
    });
    let input = TrainInput {
        plan,
        model_dir: &rlood_test_support::fixture("parity/qwen3"),
        model_name: "org/tiny",
        rows,
        eval_rows: Vec::new(),
        warm_up_rows: Vec::new(),
        judged_keys: Vec::new(),
        resume,
        initial_adapter: None,
        scratch_dir: scratch.path(),
        device: "cpu",
        backend: None,
    };
    let ended = train(input, environment, 2, host);
    for rank in 0..=plan.resources.devices {
        let pid = std::fs::read_to_string(scratch.path().join(format!("trl/pid-{rank}")));
        if let Ok(pid) = pid {
            let is_gone = || {
                let status = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
                status.is_empty() || status.contains(") Z ")
            };
            let begun = Instant::now();
            while !is_gone() {
                assert!(begun.elapsed() < Duration::from_secs(5), "process {pid} of rank {rank} is still there");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
    ended
}

fn misbehaving(mode: &str) -> Plan {
    let mut plan = plan(2);
    plan.sampling.chat_template_kwargs.insert("mode".to_owned(), json!(mode));
    plan
}

/// Returns the failure with which a run of this mode ends.
fn failure_of(mode: &str) -> (String, String, Recorder) {
    let mut host = Recorder::default();
    match run(&misbehaving(mode), &environment(), &mut host) {
        Err(RunEnd::Failed(EngineError::Host(failure))) => (failure.code, failure.message, host),
        Err(RunEnd::Failed(error)) => (format!("{error:?}"), error.to_string(), host),
        other => panic!("{mode}: {other:?}"),
    }
}

#[test]
fn every_step_is_recorded_scored_and_reported_and_the_last_one_is_saved() {
    for ranks in [1, 2, 4] {
        let mut host = Recorder::default();
        run(&plan(ranks), &environment(), &mut host).unwrap();
        assert_eq!(
            (&host.sampled, &host.scored, &host.steps),
            (&vec![1, 2, 3, 4], &vec![1, 2, 3, 4], &vec![1, 2, 3, 4])
        );
        assert_eq!(host.advantages[..5], [0.0, 1.0, 2.0, 3.0, 0.0].map(Some));
        let (step, files) = host.saved.unwrap();
        assert_eq!(step, STEPS);
        assert!(files.contains_key("global_step4--rank0.pt") && files.contains_key("manifest.json"));
        assert!(!files.contains_key("training_args.bin"), "a pickle is not published");
        let config: Value = serde_json::from_slice(&files["adapter_config.json"]).unwrap();
        assert_eq!(config["base_model_name_or_path"], "org/tiny", "the worker's folder is not published");
    }
}

#[test]
fn each_row_has_the_paths_of_its_images_and_rewards_have_references() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path().join(IMAGES_DIR);
    std::fs::create_dir(&dir).unwrap();
    let image = |bytes: &[u8]| {
        let sha256 = Sha256Digest::of(bytes);
        std::fs::write(dir.join(sha256.to_string()), bytes).unwrap();
        json!({"sha256": sha256, "media_type": "image/png", "width": 56, "height": 56})
    };
    let (one, two) = (image(b"one"), image(b"two"));
    let row = |columns: Value| {
        let Value::Object(columns) = columns else { unreachable!() };
        PromptRow { prompt: json!([{"role": "user", "content": "?"}]), columns }
    };
    let rows = vec![row(json!({"images": [one, two], "answer": "a"})), row(json!({"images": []})), row(json!({}))];
    let mut host = Recorder::default();
    run_rows(&plan(2), &environment(), &mut host, rows, &scratch).unwrap();
    assert_eq!(std::fs::read_to_string(scratch.path().join("trl/images-seen")).unwrap(), "[2, 0, 0]");
    assert!(host.columns.contains(&json!({"images": [one, two], "answer": "a"})), "{:?}", host.columns);
}

#[test]
fn a_run_that_was_killed_while_it_was_scored_ends_with_the_same_bytes_and_samples_nothing_twice() {
    for ranks in [1, 2] {
        let mut calm = Recorder::default();
        run(&plan(ranks), &environment(), &mut calm).unwrap();
        for dies_at in 1..=STEPS {
            let mut host = Recorder { dies_at: Some(dies_at), ..Recorder::default() };
            let ended = run(&plan(ranks), &environment(), &mut host);
            assert!(matches!(ended, Err(RunEnd::Stopped(StopReason::LeaseLost))), "{ended:?}");
            host.dies_at = None;
            run(&plan(ranks), &environment(), &mut host).unwrap();
            assert_eq!(host.sampled, [1, 2, 3, 4], "nothing is sampled twice");
            let ends = [&calm, &host]
                .map(|host| host.saved.clone().map(|(step, files)| (step, files["adapter_model.safetensors"].clone())));
            assert_eq!(ends[0], ends[1], "{ranks} ranks, killed at {dies_at}");
        }
    }
}

#[test]
fn a_pause_saves_the_end_of_the_step_and_a_cancel_kills_the_ranks() {
    let pause = StopReason::Pause { reason: None };
    let mut host = Recorder { stop_after: Some((3, pause.clone())), ..Recorder::default() };
    let ended = run(&plan(2), &environment(), &mut host);
    assert!(matches!(&ended, Err(RunEnd::Stopped(reason)) if *reason == pause), "{ended:?}");
    assert_eq!((host.saved.as_ref().map(|(step, _)| *step), host.scored.len()), (Some(3), 3));
    host.stop_after = None;
    run(&plan(2), &environment(), &mut host).unwrap();
    assert_eq!(host.scored, [1, 2, 3, 4]);

    let mut host = Recorder { stop_after: Some((0, StopReason::Cancel)), ..Recorder::default() };
    let ended = run(&plan(2), &environment(), &mut host);
    assert!(matches!(ended, Err(RunEnd::Stopped(StopReason::Cancel))), "{ended:?}");
    assert_eq!(host.saved, None);
}

#[test]
fn an_alert_is_reported_once_and_pauses_or_ends_the_run() {
    let with = |on_alert| {
        let mut plan = misbehaving("kl");
        plan.training.max_steps = 6;
        plan.doctor.on_alert = on_alert;
        plan
    };
    let mut host = Recorder::default();
    run(&with(OnAlert::Note), &environment(), &mut host).unwrap();
    assert_eq!((host.alerts[0], host.steps.len()), ((Rule::KlExplosion, 3), 6));

    let mut host = Recorder::default();
    let ended = run(&with(OnAlert::Stop), &environment(), &mut host);
    let rule = Rule::KlExplosion;
    assert!(
        matches!(ended, Err(RunEnd::Failed(EngineError::Alert { rule: of, step: 3, .. })) if of == rule),
        "{ended:?}"
    );

    let mut host = Recorder::default();
    let ended = run(&with(OnAlert::Pause), &environment(), &mut host);
    let reason = Some("alert:kl_explosion".to_owned());
    assert!(matches!(&ended, Err(RunEnd::Stopped(StopReason::Pause { reason: why })) if *why == reason), "{ended:?}");
    assert_eq!(host.saved.as_ref().map(|(step, _)| *step), Some(4), "a pause takes effect at the end of the next step");
    run(&with(OnAlert::Pause), &environment(), &mut host).unwrap();
    let times = host.alerts.iter().filter(|(of, _)| *of == rule).count();
    assert_eq!(times, 1, "a resumed run remembers its alerts");
}

#[test]
fn ranks_that_die_or_wait_for_each_other_are_killed_and_the_job_is_tried_again() {
    for (mode, text) in [
        ("hang", "rank 1 is silent, and the others have waited"),
        ("die", "signal: 9"),
        ("close", "rank 0 closed its connection"),
    ] {
        let (debug, message, host) = failure_of(mode);
        assert!(debug.starts_with("Ranks") && message.contains(text), "{mode}: {message}");
        assert_eq!(host.warnings, ["runtime_lost"]);
    }
    let mut slow = environment();
    slow.limits.hello = Duration::from_millis(300);
    let ended = run(&misbehaving("silent"), &slow, &mut Recorder::default());
    assert!(matches!(&ended, Err(RunEnd::Failed(EngineError::Ranks(what))) if what.contains("connected")), "{ended:?}");
}

#[test]
fn ranks_that_lie_end_the_job_with_the_reason() {
    for (mode, text) in [
        ("garbage", "not understood"),
        ("flood", "at the wrong time: Loaded"),
        ("skip", "step 5 follows step 1"),
        ("done", "the ranks ended after step 2, of which there is no checkpoint"),
        ("rows", "row 8 of a dataset with 3 rows"),
        ("long", "does not have 1 to 4 tokens"),
        ("protocol", "with protocol 2"),
        ("twice", "connected as rank 0"),
        ("raise", "ValueError: no such layer"),
    ] {
        let (code, message, _) = failure_of(mode);
        assert!(code == "runtime_failed" && message.contains(text), "{mode}: {code}: {message}");
    }
    assert_eq!(failure_of("version").0, "runtime_version");
    assert!(failure_of("memory").0.starts_with("OutOfMemory"));
    let (error, _, host) = failure_of("nan");
    assert!(error.starts_with("NonFinite") && host.saved.is_none(), "weights after a NaN are not saved: {error}");
    assert!(failure_of("empty").1.contains("wrote no weights"));
}

#[test]
fn a_checkpoint_of_another_number_of_ranks_or_other_settings_is_refused() {
    let mut host = Recorder { stop_after: Some((2, StopReason::Pause { reason: None })), ..Recorder::default() };
    run(&plan(2), &environment(), &mut host).unwrap_err();
    host.stop_after = None;
    let refused = |plan: &Plan, host: &mut Recorder| match run(plan, &environment(), host) {
        Err(RunEnd::Failed(EngineError::Checkpoint(why))) => why,
        other => panic!("should be refused: {other:?}"),
    };
    assert!(refused(&plan(1), &mut host).contains("other settings"));
    let mut other = plan(2);
    other.training.seed = 2;
    assert!(refused(&other, &mut host).contains("other settings"));
}

#[test]
fn an_environment_says_what_is_installed_and_what_is_missing() {
    let scratch = tempfile::tempdir().unwrap();
    let script = |name: &str, text: &str| {
        let path = scratch.path().join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        path
    };
    let good = script("good", "#!/bin/sh\necho trl 1.16.2; echo bitsandbytes 0.50\n");
    let found = Environment::probe(good, vec![0, 3]).unwrap();
    assert!(found.facts.is_usable() && found.facts.extras == ["quantized"] && found.facts.devices == 2);
    let old = Environment::probe(script("old", "#!/bin/sh\necho trl 1.17.0\n"), Vec::new()).unwrap();
    assert!(!old.facts.is_usable() && old.describe().contains("cannot drive"), "{}", old.describe());
    for (path, text) in [
        (script("bad", "#!/bin/sh\nexit 3\n"), "exit status: 3"),
        (script("noise", "#!/bin/sh\necho hello\n"), "did not list"),
        (scratch.path().join("none"), "rlood runtime install trl"),
    ] {
        let error = Environment::probe(path.clone(), Vec::new()).unwrap_err().to_string();
        assert!(error.contains(text), "{}: {error}", Path::new(&path).display());
    }
}
