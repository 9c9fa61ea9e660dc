//! The rollout servers of a job: which of them are usable, which adapters they have, and which prompts they are sampling.
//!
//! A prompt is one request. Each goes to the usable server with the fewest requests under way; if it fails there, it goes to another
//! server with the same seed. A server that fails is left out and asked again every 10 s; when it answers, all checks are repeated.
//!
//! Longer than 500 lines: one state machine, whose transitions are read together.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::{BoxFuture, FutureExt};
use futures::stream::{FuturesUnordered, StreamExt};
use serde_json::json;
use tokio::sync::{mpsc, watch};
use tokio_util::task::AbortOnDropHandle;

use super::client::{RolloutClient, SampleOne, SampledOne, ServerError};
use super::colocated::{Colocated, Launch};
use super::failure::FleetError;
use super::prepare::{Checked, Preparation, Tolerance, Version};
use super::publish;
use super::requests::{generated, requests};
use crate::engine::host::{ExportedAdapter, Generated, SampleRequest};
use crate::event::{Event, Metrics};
use crate::id::JobId;
use crate::reward::client::Pace;
use crate::spec::RolloutServerPlan;

/// Interval between two checks of a server that failed.
const PROBE_INTERVAL: Duration = Duration::from_secs(10);
/// Wait before the next request to a server that is busy, if it names none.
const BUSY_WAIT: Duration = Duration::from_secs(1);
/// Time between unloading an adapter and deleting its directory: longer than a slow server tries to load it.
const DELETE_AFTER: Duration = Duration::from_secs(180);
/// Number of adapters that stay loaded: the current one and the one before it.
const KEPT_VERSIONS: usize = 2;
/// Number of unusable answers in a row after which a server is left out.
const MAX_INVALID: u32 = 3;
/// Number of unusable answers to one prompt, from any server, after which the job fails.
const MAX_PROMPT_INVALID: u32 = 12;

/// Number of uploads of one adapter after which a server that does not find it cannot serve the job.
const MAX_UPLOADS: u32 = 2;

/// Uploads the files of the adapter of this name from its directory.
pub(crate) type Upload = Arc<dyn Fn(String, PathBuf) -> BoxFuture<'static, Result<(), String>> + Send + Sync>;

/// The settings of a job's rollout servers.
pub(super) struct Settings {
    pub job: JobId,
    pub attempt: u64,
    /// The folder that worker and servers share.
    pub folder: PathBuf,
    /// Uploads an adapter to the server of rlood, if the folder is not shared; sidecars download it from there.
    pub upload: Option<Upload>,
    pub max_concurrency: usize,
    /// Time without a usable server after which the job pauses.
    pub timeout: Duration,
    pub tolerance: Tolerance,
    /// The server that the worker starts itself, if the job asks for one. It is the only server then.
    pub colocated: Option<Launch>,
    pub pace: Pace,
}

/// Whether a server can be used.
enum State {
    /// Not checked yet, or restarted since.
    New,
    /// Being checked, or loading the current adapter.
    Preparing,
    /// The server has the current adapter.
    Ready,
    /// The server failed; it is asked again at this time.
    Out { ask_at: Instant },
    /// The server cannot serve this job.
    Unfit,
}

struct Server {
    client: Arc<dyn RolloutClient>,
    plan: RolloutServerPlan,
    state: State,
    checked: Option<Checked>,
    in_flight: usize,
    busy_until: Option<Instant>,
    invalid_in_a_row: u32,
    /// Whether the user was told that the server is left out.
    is_announced_out: bool,
    /// The last failure since the server was usable.
    failure: Option<String>,
}

/// A call that has ended, with its result.
enum Done {
    Prepared { server: usize, version: String, result: Result<Checked, ServerError> },
    Sampled { server: usize, prompt: usize, result: Result<Vec<SampledOne>, ServerError> },
}

/// The calls that have not ended yet.
type Running = FuturesUnordered<BoxFuture<'static, Done>>;

/// Counts for a step's metrics.
#[derive(Default)]
struct Counts {
    requests: u64,
    retries: u64,
    publish_seconds: f64,
}

/// The rollout servers of one attempt at a job.
pub(crate) struct Fleet {
    pub(super) settings: Settings,
    servers: Vec<Server>,
    /// The published adapters that servers may have, oldest first.
    versions: VecDeque<Arc<Version>>,
    /// The running server of this worker; `None` before the first request.
    colocated: Option<Colocated>,
    /// Checks and loads under way. They go on between two calls of `sample`, so that a slow server gets ready too.
    preparations: Running,
    /// Directories of unloaded adapters, and when they may be deleted.
    retired: Vec<(Instant, PathBuf)>,
    /// Whether the current adapter need not be uploaded, and how often it was.
    is_uploaded: bool,
    uploads: u32,
    notices: mpsc::UnboundedSender<Event>,
    is_waiting: watch::Sender<bool>,
    counts: Counts,
}

impl Fleet {
    /// Creates the fleet of these servers. Warnings are sent to `notices`.
    pub(super) fn new(
        settings: Settings,
        servers: Vec<(RolloutServerPlan, Arc<dyn RolloutClient>)>,
        notices: mpsc::UnboundedSender<Event>,
        is_waiting: watch::Sender<bool>,
    ) -> Self {
        // Directories of an earlier attempt: its adapters are unloaded when a server is checked.
        let grace = settings.pace.of(DELETE_AFTER);
        let left = publish::left_over(&settings.folder, settings.job);
        let retired = left.into_iter().map(|dir| (Instant::now() + grace, dir)).collect();
        let is_colocated = settings.colocated.is_some();
        let servers = servers.into_iter().map(|(plan, client)| Server {
            client,
            plan,
            state: State::New,
            checked: None,
            in_flight: 0,
            busy_until: None,
            invalid_in_a_row: 0,
            // A server that the worker starts is out until it has loaded its model.
            is_announced_out: is_colocated,
            failure: None,
        });
        Self {
            settings,
            servers: servers.collect(),
            versions: VecDeque::new(),
            colocated: None,
            preparations: Running::new(),
            retired,
            is_uploaded: false,
            uploads: 0,
            notices,
            is_waiting,
            counts: Counts::default(),
        }
    }

    /// Samples the completions of a request, `[prompts][completions]`. Waits while no server is usable, up to the timeout.
    pub(crate) async fn sample(&mut self, request: &SampleRequest<'_>) -> Result<Vec<Vec<Generated>>, FleetError> {
        self.publish(request.adapter)?;
        if let Some(launch) = self.settings.colocated.as_ref().filter(|_| self.colocated.is_none()) {
            self.colocated = Some(launch.start(request.adapter.max_tokens, self.notices.clone()));
        }
        let requests = requests(request, &self.current().name, self.settings.job);
        let sampled = self.sample_all(&requests).await;
        self.is_waiting.send_replace(false);
        let sampled = sampled?;
        self.retire().await;
        let n = request.num_generations.get();
        Ok(sampled.into_iter().map(|completions| generated(completions, n)).collect())
    }

    /// Unloads the job's adapters everywhere and deletes their directories, at the end of an attempt.
    pub(crate) async fn finish(mut self) {
        let versions = std::mem::take(&mut self.versions);
        if self.colocated.take().is_some() {
            // The server has ended, and with it every use of the directories.
            self.servers.clear();
        }
        for version in &versions {
            self.unload(&version.name).await;
            publish::delete(&version.dir);
        }
        self.retired.iter().for_each(|(_, dir)| publish::delete(dir));
    }

    /// Takes the metrics since the last call.
    pub(crate) fn take_metrics(&mut self) -> Metrics {
        let Counts { requests, retries, publish_seconds } = std::mem::take(&mut self.counts);
        let ready = self.servers.iter().filter(|server| matches!(server.state, State::Ready)).count();
        Metrics::from([
            ("rollout/servers_ready".to_owned(), Some(ready as f64)),
            ("rollout/requests".to_owned(), Some(requests as f64)),
            ("rollout/retries".to_owned(), Some(retries as f64)),
            ("rollout/publish_seconds".to_owned(), Some(publish_seconds)),
        ])
    }

    fn current(&self) -> Arc<Version> {
        // `publish` has added a version before every other use.
        self.versions.back().expect("an adapter was published").clone()
    }

    /// Publishes the adapter unless it is the current one.
    fn publish(&mut self, adapter: &ExportedAdapter) -> Result<(), FleetError> {
        let Settings { job, attempt, folder, .. } = &self.settings;
        let started = Instant::now();
        let failed = |source| FleetError::Publish { folder: folder.display().to_string(), source };
        let weights = std::fs::read(adapter.dir.path().join(publish::FILES[1])).map_err(failed)?;
        let name = publish::name(*job, *attempt, adapter.step, &weights);
        if self.versions.back().is_some_and(|current| current.name == name) {
            return Ok(());
        }
        let dir = publish::publish(folder, &name, adapter.dir.path()).map_err(failed)?;
        self.retired.retain(|(_, retired)| *retired != dir);
        (self.is_uploaded, self.uploads) = (false, 0);
        self.versions.push_back(Arc::new(Version {
            name,
            dir,
            probes: adapter.probes.clone(),
            base_logps: adapter.base_logps.clone(),
            logps: adapter.logps.clone(),
            max_tokens: adapter.max_tokens,
        }));
        for server in &mut self.servers {
            if matches!(server.state, State::Ready) {
                server.state = State::New;
            }
        }
        self.counts.publish_seconds += started.elapsed().as_secs_f64();
        Ok(())
    }

    /// Uploads the current adapter if the server of rlood needs it and does not have it.
    async fn upload(&mut self) -> Result<(), FleetError> {
        let Some(upload) = self.settings.upload.clone().filter(|_| !self.is_uploaded) else { return Ok(()) };
        let started = Instant::now();
        let version = self.current();
        upload(version.name.clone(), version.dir.clone()).await.map_err(FleetError::Upload)?;
        self.is_uploaded = true;
        self.uploads += 1;
        self.counts.publish_seconds += started.elapsed().as_secs_f64();
        Ok(())
    }

    async fn sample_all(&mut self, requests: &[SampleOne]) -> Result<Vec<Vec<SampledOne>>, FleetError> {
        let mut done: Vec<Option<Vec<SampledOne>>> = vec![None; requests.len()];
        let mut queue: VecDeque<usize> = (0..requests.len()).collect();
        let mut invalid = vec![0u32; requests.len()];
        let mut running = Running::new();
        let mut unusable_since: Option<Instant> = None;
        // Requests of an earlier call that a stop interrupted are over: their connections are closed, so the servers have aborted them.
        self.servers.iter_mut().for_each(|server| server.in_flight = 0);
        while done.iter().any(Option::is_none) {
            self.upload().await?;
            self.prepare();
            self.assign(requests, &mut queue, &mut running);
            self.fail_if_unfit()?;
            let is_usable = self.servers.iter().any(|server| matches!(server.state, State::Ready));
            if is_usable {
                unusable_since = None;
            }
            let since = *unusable_since.get_or_insert_with(Instant::now);
            let is_out = self.servers.iter().all(|server| server.is_announced_out);
            self.is_waiting.send_if_modified(|waiting| std::mem::replace(waiting, is_out) != is_out);
            if !is_usable && since.elapsed() >= self.settings.timeout {
                return Err(FleetError::Outage { waited_s: since.elapsed().as_secs(), cause: self.reasons() });
            }
            let until = self.next_time(if is_usable { None } else { Some(since + self.settings.timeout) });
            let finished = tokio::select! {
                finished = running.next(), if !running.is_empty() => finished,
                finished = self.preparations.next(), if !self.preparations.is_empty() => finished,
                () = tokio::time::sleep_until(until.into()) => None,
            };
            match finished {
                Some(Done::Prepared { server, version, result }) => self.prepared(server, &version, result),
                Some(Done::Sampled { server, prompt, result }) => {
                    self.servers[server].in_flight -= 1;
                    match result {
                        Ok(completions) => {
                            self.servers[server].invalid_in_a_row = 0;
                            done[prompt] = Some(completions);
                        }
                        Err(error) => {
                            if let ServerError::Invalid(why) = &error {
                                invalid[prompt] += 1;
                                if invalid[prompt] >= MAX_PROMPT_INVALID {
                                    return Err(FleetError::Unfit(format!("no server has a usable answer: {why}")));
                                }
                            }
                            self.counts.retries += 1;
                            queue.push_front(prompt);
                            // Other requests may have found out before that the server has failed.
                            if matches!(self.servers[server].state, State::Ready) {
                                self.failed(server, error);
                            }
                        }
                    }
                }
                None => {}
            }
        }
        Ok(done.into_iter().flatten().collect())
    }

    /// Starts to prepare every server that is new, or due to be asked again.
    fn prepare(&mut self) {
        let (now, version) = (Instant::now(), self.current());
        let Settings { job, tolerance, pace, .. } = &self.settings;
        let kept: Vec<String> = self.versions.iter().map(|version| version.name.clone()).collect();
        for (index, server) in self.servers.iter_mut().enumerate() {
            match &server.state {
                State::New => {}
                State::Out { ask_at } if *ask_at <= now => {}
                State::Preparing | State::Ready | State::Out { .. } | State::Unfit => continue,
            }
            let local = version.dir.display().to_string();
            let Some(path) = server.plan.seen_path(&local) else {
                let why = format!(
                    "the worker's folder of adapters, {}, is not inside of path_map.from: set the worker's --adapter-dir",
                    self.settings.folder.display()
                );
                (server.state, server.failure) = (State::Unfit, Some(why));
                server.is_announced_out = true;
                continue;
            };
            let preparation = Preparation {
                client: server.client.clone(),
                checked: server.checked.clone(),
                version: version.clone(),
                path,
                prefix: publish::prefix(*job),
                kept: kept.clone(),
                tolerance: *tolerance,
                pace: *pace,
            };
            server.state = State::Preparing;
            let name = version.name.clone();
            let task = AbortOnDropHandle::new(tokio::spawn(preparation.run()));
            let prepared = async move {
                // A panic of the task continues here.
                let result = task.await.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
                Done::Prepared { server: index, version: name, result }
            };
            self.preparations.push(prepared.boxed());
        }
    }

    fn prepared(&mut self, index: usize, version: &str, result: Result<Checked, ServerError>) {
        let is_current = self.versions.back().is_some_and(|current| current.name == version);
        match result {
            // Meanwhile the job has published another adapter.
            Ok(checked) if !is_current => {
                let is_kept = self.versions.iter().any(|kept| kept.name == version);
                let server = &mut self.servers[index];
                (server.checked, server.state) = (Some(checked), State::New);
                if !is_kept {
                    let (client, version) = (server.client.clone(), version.to_owned());
                    tokio::spawn(async move { client.unload(&version).await });
                }
            }
            Ok(checked) => {
                let server = &mut self.servers[index];
                let is_first = server.checked.is_none();
                let was_out = std::mem::take(&mut server.is_announced_out);
                if let Some(version) = checked.unknown_version.as_ref().filter(|_| is_first) {
                    let message = format!(
                        "the rollout server {} has version {version}, and only 0.32 was measured",
                        server.plan.url
                    );
                    self.notify("rollout_server_version", index, message);
                }
                let server = &mut self.servers[index];
                server.checked = Some(checked);
                (server.state, server.failure, server.invalid_in_a_row) = (State::Ready, None, 0);
                if was_out {
                    let message = format!("the rollout server {} is usable again", self.servers[index].plan.url);
                    self.notify("rollout_server_back", index, message);
                }
            }
            // The server of rlood loses uploaded adapters when it restarts.
            Err(ServerError::NoDirectory(why)) if self.settings.upload.is_some() && self.uploads < MAX_UPLOADS => {
                self.is_uploaded = false;
                self.failed(index, ServerError::Down(why));
            }
            Err(ServerError::NoDirectory(why)) => self.failed(index, ServerError::Unfit(why)),
            Err(error) => self.failed(index, error),
        }
    }

    /// Gives queued prompts to usable servers.
    fn assign(&mut self, requests: &[SampleOne], queue: &mut VecDeque<usize>, running: &mut Running) {
        let now = Instant::now();
        while let Some(&prompt) = queue.front() {
            let most = self.settings.max_concurrency;
            let is_free = |server: &Server| {
                matches!(server.state, State::Ready)
                    && server.in_flight < most
                    && server.busy_until.is_none_or(|until| until <= now)
            };
            let free = self.servers.iter().enumerate().filter(|(_, server)| is_free(server));
            let Some((index, _)) = free.min_by_key(|(_, server)| server.in_flight) else { return };
            queue.pop_front();
            self.counts.requests += 1;
            let server = &mut self.servers[index];
            server.in_flight += 1;
            let (client, request) = (server.client.clone(), requests[prompt].clone());
            let sampling =
                async move { Done::Sampled { server: index, prompt, result: client.sample(&request).await } };
            running.push(sampling.boxed());
        }
    }

    /// Takes note of a server's error.
    fn failed(&mut self, index: usize, error: ServerError) {
        let now = Instant::now();
        let ask_at = now + self.settings.pace.of(PROBE_INTERVAL);
        let why = error.to_string();
        let server = &mut self.servers[index];
        match error {
            ServerError::Busy { retry_after } => {
                let wait = retry_after.unwrap_or_else(|| self.settings.pace.of(BUSY_WAIT));
                server.busy_until = Some(now + wait);
                // A busy server cannot be prepared either.
                if matches!(server.state, State::Preparing) {
                    (server.state, server.failure) = (State::Out { ask_at: now + wait }, Some(why));
                }
                return;
            }
            // The server was restarted, which loses all adapters, or another process unloaded it.
            ServerError::NoAdapter(_) => {
                if matches!(server.state, State::Ready) {
                    (server.state, server.checked) = (State::New, None);
                    return;
                }
                server.state = State::Out { ask_at };
            }
            ServerError::Invalid(_) if matches!(server.state, State::Ready) => {
                server.invalid_in_a_row += 1;
                if server.invalid_in_a_row < MAX_INVALID {
                    return;
                }
                server.state = State::Out { ask_at };
            }
            ServerError::Unfit(_) => server.state = State::Unfit,
            ServerError::Invalid(_)
            | ServerError::Down(_)
            | ServerError::NoDirectory(_)
            | ServerError::NotFinite(_) => server.state = State::Out { ask_at },
        }
        server.checked = None;
        server.failure = Some(why.clone());
        if !std::mem::replace(&mut server.is_announced_out, true) {
            let url = self.servers[index].plan.url.clone();
            self.notify("rollout_server_out", index, format!("the rollout server {url} is left out: {why}"));
        }
    }

    fn notify(&self, code: &str, index: usize, message: String) {
        let data = json!({"server": index, "url": self.servers[index].plan.url});
        // Without a receiver the attempt has ended.
        let _ = self.notices.send(Event::Warning { code: code.to_owned(), message, data });
    }

    fn fail_if_unfit(&self) -> Result<(), FleetError> {
        match self.servers.iter().all(|server| matches!(server.state, State::Unfit)) {
            true => Err(FleetError::Unfit(self.reasons())),
            false => Ok(()),
        }
    }

    /// The error of each server that has one.
    fn reasons(&self) -> String {
        let reason = |server: &Server| Some(format!("{}: {}", server.plan.url, server.failure.as_ref()?));
        let reasons: Vec<String> = self.servers.iter().filter_map(reason).collect();
        if reasons.is_empty() { "the checks of the servers did not end".to_owned() } else { reasons.join("; ") }
    }

    /// The next time at which something is due although no request ends.
    fn next_time(&self, timeout: Option<Instant>) -> Instant {
        let of_server = |server: &Server| match &server.state {
            State::Out { ask_at } => Some(*ask_at),
            State::Ready => server.busy_until.filter(|until| *until > Instant::now()),
            State::New | State::Preparing | State::Unfit => None,
        };
        let latest = Instant::now() + PROBE_INTERVAL;
        self.servers.iter().filter_map(of_server).chain(timeout).fold(latest, Instant::min)
    }

    /// Unloads adapters that no request uses any more, and deletes their directories after a while.
    async fn retire(&mut self) {
        while self.versions.len() > KEPT_VERSIONS
            && let Some(version) = self.versions.pop_front()
        {
            self.unload(&version.name).await;
            self.retired.push((Instant::now() + self.settings.pace.of(DELETE_AFTER), version.dir.clone()));
        }
        let now = Instant::now();
        let (due, later) = std::mem::take(&mut self.retired).into_iter().partition(|(at, _)| *at <= now);
        self.retired = later;
        let due: Vec<(Instant, PathBuf)> = due;
        due.iter().for_each(|(_, dir)| publish::delete(dir));
    }

    /// Unloads an adapter from every usable server. A server that is not reached now unloads it when it is checked again.
    async fn unload(&self, name: &str) {
        let usable = self.servers.iter().filter(|server| matches!(server.state, State::Ready | State::New));
        let unload = |server: &Server| {
            let (client, url) = (server.client.clone(), server.plan.url.clone());
            async move {
                if let Err(error) = client.unload(name).await {
                    tracing::warn!(%error, url, name, "cannot unload an adapter from a rollout server");
                }
            }
        };
        futures::future::join_all(usable.map(unload)).await;
    }
}
