//! The fleet over servers that are simulated in memory: they compute exact log-probs of a rule, and fail on request.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt;
use tokio::sync::{mpsc, watch};

use super::super::client::{Inventory, Reply, RolloutClient, SampleOne, SampledOne, ServerError};
use super::super::failure::FleetError;
use super::super::fleet::{Fleet, Settings};
use super::super::prepare::{MAX_LOADS, Tolerance};
use super::super::publish;
use crate::engine::host::{ExportedAdapter, Generated, SamplePrompt, SampleRequest};
use crate::event::{Event, FinishReason};
use crate::id::JobId;
use crate::reward::client::Pace;
use crate::rollout::RolloutId;
use crate::spec::{ComputeDtype, PathMap, RolloutServerPlan};

const EOS: u32 = 9;

/// The log-prob of a token under an adapter with these weights, or the base model (`""`).
fn logp(weights: &str, id: u32) -> f32 {
    let shift: u32 = weights.bytes().map(u32::from).sum();
    -0.25 - ((id + shift) % 7) as f32 / 8.0
}

fn logps(weights: &str, ids: &[u32]) -> Vec<f32> {
    ids.iter().skip(1).map(|id| logp(weights, *id)).collect()
}

/// The faults of a simulated server.
#[derive(Default)]
struct Faults {
    /// Errors of the next calls of `sample` with an adapter, the last one first.
    sample: Vec<ServerError>,
    /// Errors of the next calls of `load`, the last one first.
    load: Vec<ServerError>,
    is_down: bool,
    is_raw: bool,
    other_base: bool,
    /// The adapter has no effect.
    ignores_adapters: bool,
    max_model_len: Option<usize>,
}

#[derive(Default)]
struct Simulated {
    faults: Mutex<Faults>,
    adapters: Mutex<BTreeMap<String, PathBuf>>,
    /// All calls, in order.
    calls: Mutex<Vec<String>>,
    samples: Mutex<Vec<SampleOne>>,
}

impl Simulated {
    fn note(&self, call: String) -> Result<(), ServerError> {
        self.calls.lock().unwrap().push(call);
        match self.faults.lock().unwrap().is_down {
            true => Err(ServerError::Down("refused".to_owned())),
            false => Ok(()),
        }
    }

    /// The weights of an adapter, read from its directory, as vLLM may do at any request.
    fn weights(&self, model: &str) -> Result<String, ServerError> {
        if model == "base" {
            return Ok(if self.faults.lock().unwrap().other_base { "another base".to_owned() } else { String::new() });
        }
        let Some(dir) = self.adapters.lock().unwrap().get(model).cloned() else {
            return Err(ServerError::NoAdapter(format!("The model `{model}` does not exist.")));
        };
        let weights = std::fs::read_to_string(dir.join(publish::FILES[1]))
            .map_err(|_| ServerError::Down("EngineCore encountered an issue".to_owned()))?;
        Ok(if self.faults.lock().unwrap().ignores_adapters { String::new() } else { weights })
    }
}

impl RolloutClient for Simulated {
    fn health(&self) -> Reply<'_, String> {
        async { self.note("health".to_owned()).map(|()| "0.32.0".to_owned()) }.boxed()
    }

    fn inventory(&self) -> Reply<'_, Inventory> {
        async {
            let adapters = self.adapters.lock().unwrap();
            let adapters = adapters.iter().map(|(name, dir)| (name.clone(), dir.display().to_string())).collect();
            Ok(Inventory {
                base: "base".to_owned(),
                max_model_len: self.faults.lock().unwrap().max_model_len,
                adapters,
            })
        }
        .boxed()
    }

    fn load<'a>(&'a self, name: &'a str, path: &'a str) -> Reply<'a, ()> {
        async move {
            self.note(format!("load {name}"))?;
            if let Some(error) = self.faults.lock().unwrap().load.pop() {
                return Err(error);
            }
            if !Path::new(path).is_dir() {
                return Err(ServerError::NoDirectory(format!("No adapter found for {path}")));
            }
            self.adapters.lock().unwrap().insert(name.to_owned(), PathBuf::from(path));
            Ok(())
        }
        .boxed()
    }

    fn unload<'a>(&'a self, name: &'a str) -> Reply<'a, ()> {
        async move {
            self.note(format!("unload {name}"))?;
            self.adapters.lock().unwrap().remove(name);
            Ok(())
        }
        .boxed()
    }

    fn score<'a>(&'a self, model: &'a str, ids: &'a [u32]) -> Reply<'a, Vec<f32>> {
        async move {
            self.note(format!("score {model}"))?;
            Ok(logps(&self.weights(model)?, ids))
        }
        .boxed()
    }

    fn sample<'a>(&'a self, request: &'a SampleOne) -> Reply<'a, Vec<SampledOne>> {
        async move {
            self.note(format!("sample {}", request.adapter))?;
            let is_check = request.adapter == "base";
            if let Some(error) = self.faults.lock().unwrap().sample.pop().filter(|_| !is_check) {
                return Err(error);
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
            let weights = self.weights(&request.adapter)?;
            if !is_check {
                self.samples.lock().unwrap().push(request.clone());
            }
            // Log-probs of the sampling distribution differ from those of the prompt at a temperature other than 1.
            let is_raw = self.faults.lock().unwrap().is_raw || request.temperature == 1.0;
            let one = |index: usize| {
                let ids = vec![((request.seed + index as u64) % 7) as u32, EOS];
                let logps = ids.iter().map(|id| logp(&weights, *id) * if is_raw { 1.0 } else { 0.5 }).collect();
                SampledOne { ids, logps, is_stopped: true }
            };
            Ok((0..request.n).map(one).collect())
        }
        .boxed()
    }
}

/// A job over simulated servers.
struct Job {
    servers: Vec<Arc<Simulated>>,
    fleet: Fleet,
    folder: tempfile::TempDir,
    notices: mpsc::UnboundedReceiver<Event>,
    is_waiting: watch::Receiver<bool>,
    job: JobId,
}

fn job(num_servers: usize) -> Job {
    let (folder, job) = (tempfile::tempdir().unwrap(), JobId::new());
    let servers: Vec<Arc<Simulated>> = (0..num_servers).map(|_| Arc::default()).collect();
    let (fleet, notices, is_waiting) = fleet(&servers, folder.path(), job, 1);
    Job { servers, fleet, folder, notices, is_waiting, job }
}

fn fleet(
    servers: &[Arc<Simulated>],
    folder: &Path,
    job: JobId,
    attempt: u64,
) -> (Fleet, mpsc::UnboundedReceiver<Event>, watch::Receiver<bool>) {
    let (sender, notices) = mpsc::unbounded_channel();
    let (waiting, is_waiting) = watch::channel(false);
    let clients = servers.iter().enumerate().map(|(index, server)| {
        let plan = RolloutServerPlan { url: format!("http://server-{index}"), path_map: None };
        (plan, server.clone() as Arc<dyn RolloutClient>)
    });
    let settings = Settings {
        job,
        attempt,
        folder: folder.to_owned(),
        max_concurrency: 3,
        timeout: Duration::from_millis(400),
        tolerance: Tolerance::of(ComputeDtype::F32),
        colocated: None,
        upload: None,
        pace: Pace::new(0.002).unwrap(),
    };
    (Fleet::new(settings, clients.collect(), sender, waiting), notices, is_waiting)
}

fn adapter(step: u64, weights: &str) -> ExportedAdapter {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(publish::FILES[0]), "{}").unwrap();
    std::fs::write(dir.path().join(publish::FILES[1]), weights).unwrap();
    let probes: Vec<Vec<u32>> = (0..4).map(|first| (first..first + 12).map(|id| id % 8).collect()).collect();
    let of = |weights: &str| probes.iter().map(|probe| logps(weights, probe)).collect();
    ExportedAdapter { updates: step, step, dir, max_tokens: 100, base_logps: of(""), logps: of(weights), probes }
}

impl Job {
    async fn sample(&mut self, adapter: &ExportedAdapter) -> Result<Vec<Vec<Generated>>, FleetError> {
        sample(&mut self.fleet, adapter, 1.0).await
    }

    fn warnings(&mut self) -> Vec<(String, String)> {
        let mut warnings = Vec::new();
        while let Ok(Event::Warning { code, message, .. }) = self.notices.try_recv() {
            warnings.push((code, message));
        }
        warnings
    }
}

async fn sample(
    fleet: &mut Fleet,
    adapter: &ExportedAdapter,
    temperature: f64,
) -> Result<Vec<Vec<Generated>>, FleetError> {
    let ids: Vec<Vec<u32>> = (0..20).map(|row| vec![1, row]).collect();
    let prompt = |row: usize| SamplePrompt { row: row as u64, ids: &ids[row], seed: 100 * row as u64 };
    let prompts: Vec<SamplePrompt<'_>> = (0..ids.len()).map(prompt).collect();
    let request = SampleRequest {
        id: RolloutId::train(adapter.step + 1),
        prompts: &prompts,
        num_generations: NonZeroUsize::new(3).unwrap(),
        temperature,
        max_completion_length: 8,
        eos_token_ids: &[EOS],
        vocab_size: 10,
        adapter,
    };
    fleet.sample(&request).await
}

/// Checks the completions that [`sample`] must return, whichever server sampled each prompt.
fn assert_complete(groups: &[Vec<Generated>], weights: &str) {
    assert_eq!(groups.len(), 20);
    for (row, group) in groups.iter().enumerate() {
        assert_eq!(group.len(), 3);
        for (index, completion) in group.iter().enumerate() {
            let first = ((100 * row + index) % 7) as u32;
            assert_eq!(completion.segments.ids(), [first, EOS]);
            assert_eq!(&*completion.segments.logps().unwrap(), [logp(weights, first), logp(weights, EOS)]);
            assert_eq!(completion.finish_reason, FinishReason::Stop);
        }
    }
}

#[tokio::test]
async fn prompts_are_spread_and_every_completion_is_in_its_place() {
    let mut job = job(3);
    assert_complete(&job.sample(&adapter(0, "a")).await.unwrap(), "a");
    let counts: Vec<usize> = job.servers.iter().map(|server| server.samples.lock().unwrap().len()).collect();
    assert_eq!(counts.iter().sum::<usize>(), 20);
    assert!(counts.iter().all(|count| *count >= 3), "{counts:?}");
    assert!(job.warnings().is_empty());
    let metrics = job.fleet.take_metrics();
    assert_eq!(
        (metrics["rollout/servers_ready"], metrics["rollout/requests"], metrics["rollout/retries"]),
        (Some(3.0), Some(20.0), Some(0.0))
    );
    // Greedy completions of a prompt are equal, and a server refuses to sample several.
    let greedy = sample(&mut job.fleet, &adapter(0, "a"), 0.0).await.unwrap();
    assert!(greedy.iter().all(|group| group.len() == 3 && group[0] == group[2]));
    assert!(job.servers.iter().all(|server| {
        server.samples.lock().unwrap().iter().all(|one| one.n == if one.temperature == 0.0 { 1 } else { 3 })
    }));
}

#[tokio::test]
async fn every_step_has_a_new_directory_and_only_two_adapters_stay_loaded() {
    let mut job = job(2);
    for step in 0..5 {
        let weights = format!("w{step}");
        assert_complete(&job.sample(&adapter(step, &weights)).await.unwrap(), &weights);
        for server in &job.servers {
            assert!(server.adapters.lock().unwrap().len() <= 2);
        }
    }
    let loaded: Vec<String> = job.servers[0].adapters.lock().unwrap().keys().cloned().collect();
    assert_eq!(loaded.len(), 2);
    assert!(loaded.iter().all(|name| name.starts_with(&format!("rlood-{}-a1-s", job.job))), "{loaded:?}");
    // An adapter is unloaded before its directory is deleted: the simulated server reads the directory at every request.
    tokio::time::sleep(Duration::from_millis(450)).await;
    assert_complete(&job.sample(&adapter(5, "w5")).await.unwrap(), "w5");
    assert!(publish::left_over(job.folder.path(), job.job).len() <= 3);
    job.fleet.finish().await;
    assert!(publish::left_over(job.folder.path(), job.job).is_empty());
    assert!(job.servers.iter().all(|server| server.adapters.lock().unwrap().is_empty()));
}

#[tokio::test]
async fn the_groups_of_a_server_that_dies_go_elsewhere_with_the_same_seeds() {
    let mut job = job(2);
    job.sample(&adapter(0, "a")).await.unwrap();
    job.servers[1].faults.lock().unwrap().sample =
        vec![ServerError::Down("EngineCore encountered an issue".to_owned())];
    assert_complete(&job.sample(&adapter(1, "b")).await.unwrap(), "b");
    let warnings = job.warnings();
    assert_eq!(warnings[0].0, "rollout_server_out");
    assert!(warnings[0].1.contains("http://server-1") && warnings[0].1.contains("EngineCore"), "{warnings:?}");
    // It is checked again after the pause, and gets the current adapter before its first prompt.
    tokio::time::sleep(Duration::from_millis(50)).await;
    job.servers[1].adapters.lock().unwrap().clear();
    let mut is_back = false;
    for step in 2..200 {
        assert_complete(&job.sample(&adapter(step, "c")).await.unwrap(), "c");
        is_back |= job.warnings().iter().any(|(code, _)| code == "rollout_server_back");
        if is_back {
            break;
        }
    }
    assert!(is_back);
    assert!(job.fleet.take_metrics()["rollout/retries"].unwrap() >= 1.0);
}

#[tokio::test]
async fn a_restarted_server_loads_the_adapter_again() {
    let mut job = job(1);
    let adapter = adapter(0, "a");
    job.sample(&adapter).await.unwrap();
    job.servers[0].adapters.lock().unwrap().clear();
    assert_complete(&job.sample(&adapter).await.unwrap(), "a");
    assert!(job.warnings().is_empty());
}

#[tokio::test]
async fn a_busy_server_is_asked_again_later_without_a_warning() {
    let mut job = job(1);
    job.servers[0].faults.lock().unwrap().sample = vec![
        ServerError::Busy { retry_after: None },
        ServerError::Busy { retry_after: Some(Duration::from_millis(5)) },
    ];
    assert_complete(&job.sample(&adapter(0, "a")).await.unwrap(), "a");
    assert!(job.warnings().is_empty());
}

#[tokio::test]
async fn unusable_answers_are_asked_again_and_a_server_that_keeps_giving_them_is_left_out() {
    let mut job = job(2);
    let invalid = || ServerError::Invalid("2 completions, not 3".to_owned());
    job.servers[0].faults.lock().unwrap().sample = vec![invalid(), invalid()];
    assert_complete(&job.sample(&adapter(0, "a")).await.unwrap(), "a");
    assert!(job.warnings().is_empty());
    job.servers[0].faults.lock().unwrap().sample = (0..40).map(|_| invalid()).collect();
    assert_complete(&job.sample(&adapter(1, "b")).await.unwrap(), "b");
    assert!(
        job.warnings().iter().any(|(code, message)| code == "rollout_server_out" && message.contains("2 completions"))
    );
}

#[tokio::test]
async fn without_any_server_the_job_waits_and_then_pauses() {
    let mut job = job(2);
    job.sample(&adapter(0, "a")).await.unwrap();
    job.servers.iter().for_each(|server| server.faults.lock().unwrap().is_down = true);
    let mut waiting = job.is_waiting.clone();
    let changed = tokio::spawn(async move { waiting.wait_for(|waiting| *waiting).await.is_ok() });
    let error = job.sample(&adapter(1, "b")).await.unwrap_err();
    assert!(matches!(error, FleetError::Outage { .. }), "{error}");
    assert!(error.to_string().contains("http://server-1: refused"), "{error}");
    assert_eq!(error.pause_reason(), Some("rollout_outage"));
    assert!(changed.await.unwrap());
    assert!(!*job.is_waiting.borrow());
    assert_eq!(job.warnings().len(), 2, "each server is announced once");
    job.servers.iter().for_each(|server| server.faults.lock().unwrap().is_down = false);
    assert_complete(&job.sample(&adapter(1, "b")).await.unwrap(), "b");
}

#[tokio::test]
async fn servers_that_would_train_something_else_are_refused_by_name() {
    type Fault = fn(&mut Faults);
    let cases: [(Fault, &str); 5] = [
        (|faults| faults.is_raw = true, "--logprobs-mode processed_logprobs"),
        (|faults| faults.other_base = true, "another model, precision, quantization or rope setting"),
        (|faults| faults.ignores_adapters = true, "with the adapter differ from ours"),
        (|faults| faults.max_model_len = Some(64), "--max-model-len"),
        (
            |faults| faults.load = (0..20).map(|_| ServerError::NoDirectory("No adapter found".to_owned())).collect(),
            "--adapter-dir",
        ),
    ];
    for (fault, expected) in cases {
        let mut job = job(1);
        fault(&mut job.servers[0].faults.lock().unwrap());
        let error = job.sample(&adapter(0, "a")).await.unwrap_err();
        assert!(matches!(error, FleetError::Unfit(_)), "{error}");
        assert!(error.to_string().contains(expected), "{expected}: {error}");
        assert_eq!(error.pause_reason(), None);
        assert_eq!(error.to_failure(1).code, "rollout_servers_unfit");
        // Beside a good server, it is only left out.
        let mut job = self::job(2);
        fault(&mut job.servers[0].faults.lock().unwrap());
        let mut warnings = Vec::new();
        for step in 0..200 {
            assert_complete(&job.sample(&adapter(step, "a")).await.unwrap(), "a");
            warnings.extend(job.warnings());
            if !warnings.is_empty() {
                break;
            }
        }
        assert!(warnings.iter().any(|(_, message)| message.contains(expected)), "{expected}");
    }
}

#[tokio::test]
async fn a_new_attempt_unloads_what_the_last_one_left_and_nothing_of_other_jobs() {
    let mut job = job(1);
    job.sample(&adapter(3, "a")).await.unwrap();
    let other = "rlood-job_other-a1-s1-abc".to_owned();
    job.servers[0].adapters.lock().unwrap().insert(other.clone(), job.folder.path().to_owned());
    let left = job.servers[0].adapters.lock().unwrap().keys().next().unwrap().clone();
    let (mut next, _notices, _waiting) = fleet(&job.servers, job.folder.path(), job.job, 2);
    assert_complete(&sample(&mut next, &adapter(3, "a"), 1.0).await.unwrap(), "a");
    let loaded: Vec<String> = job.servers[0].adapters.lock().unwrap().keys().cloned().collect();
    assert!(loaded.contains(&other) && !loaded.contains(&left), "{loaded:?} {left}");
    assert_eq!(loaded.len(), 2);
}

#[tokio::test]
async fn an_adapter_is_uploaded_once_and_again_only_after_it_could_not_be_loaded() {
    let mut job = job(1);
    let uploads = Arc::new(Mutex::new(Vec::new()));
    let noted = uploads.clone();
    job.fleet.settings.upload = Some(Arc::new(move |name, _| {
        noted.lock().unwrap().push(name);
        async { Ok(()) }.boxed()
    }));
    for _ in 0..2 {
        job.sample(&adapter(1, "a")).await.unwrap();
    }
    assert_eq!(uploads.lock().unwrap().len(), 1);
    let missing = || ServerError::NoDirectory("No adapter found for b".to_owned());
    job.servers[0].faults.lock().unwrap().load.extend((0..MAX_LOADS).map(|_| missing()));
    job.sample(&adapter(2, "b")).await.unwrap();
    let named = uploads.lock().unwrap().clone();
    assert!(named.len() == 3 && named[1] == named[2] && named[1].contains("-s2-"), "{named:?}");

    job.fleet.settings.upload = Some(Arc::new(|_, _| async { Err("the disk is full".to_owned()) }.boxed()));
    let error = job.sample(&adapter(3, "c")).await.unwrap_err();
    assert!(matches!(&error, FleetError::Upload(why) if why == "the disk is full"), "{error}");
}

#[tokio::test]
async fn a_folder_outside_of_the_mapped_one_is_an_error_with_its_remedy() {
    let (folder, job) = (tempfile::tempdir().unwrap(), JobId::new());
    let map = PathMap { from: "/somewhere/else".to_owned(), to: "/adapters".to_owned() };
    let plan = RolloutServerPlan { url: "http://server".to_owned(), path_map: Some(map) };
    let settings = Settings {
        job,
        attempt: 1,
        folder: folder.path().to_owned(),
        max_concurrency: 1,
        timeout: Duration::from_millis(200),
        tolerance: Tolerance::of(ComputeDtype::Bf16),
        colocated: None,
        upload: None,
        pace: Pace::new(0.01).unwrap(),
    };
    let client = Arc::<Simulated>::default() as Arc<dyn RolloutClient>;
    let mut fleet = Fleet::new(settings, vec![(plan, client)], mpsc::unbounded_channel().0, watch::Sender::new(false));
    let error = sample(&mut fleet, &adapter(0, "a"), 1.0).await.unwrap_err().to_string();
    assert!(error.contains("path_map.from") && error.contains("--adapter-dir"), "{error}");
}
