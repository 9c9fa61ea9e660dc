//! Starts store, http, supervisor, lease timer and outage watch, and shuts them down on SIGTERM.
//!
//! `run` is `rlood serve`; `start` starts a server inside this process, for the demo.

pub mod check;
pub mod disk;
mod outage;
pub mod retention;

use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::config::{ConfigError, ServeConfig, no_key_for};
use crate::downloads::Downloads;
use crate::engine::gpu;
use crate::engine::kernels::isa::Isa;
use crate::error_text::with_causes;
use crate::files::{DataDir, FilesError};
use crate::http::{self, AppState};
use crate::listen;
use crate::outgoing::{OutgoingError, OutgoingPolicy};
use crate::reward::client::{Pace, RewardClient};
use crate::store::background::{spawn, spawn_blocking};
use crate::store::leases::LeaseWatch;
use crate::store::recovery::{RecoveryError, recover};
use crate::store::{Store, StoreError, clock_ms};
use crate::supervisor::one_shot::{Certifications, Exports, Preflights, Verdicts};
use crate::supervisor::serving::Serving;
use crate::supervisor::{Children, Lost, Supervisor};
use crate::webhook_sender::{WebhookSender, WebhookSenderError};
use disk::DiskWatch;

/// Extra time after the workers' grace period before workers that still run are killed.
const WORKERS_MARGIN: Duration = Duration::from_secs(1);
/// Time limit for requests in flight once the workers have stopped, as far as [`STOP_MARGIN`] allows.
const REQUESTS_STOP: Duration = Duration::from_secs(20);
/// Maximum duration of the shutdown beyond the workers' grace period: by default the total stays below 30 s.
const STOP_MARGIN: Duration = Duration::from_secs(4);

/// Interval between two checks for expired leases.
const TICK: Duration = Duration::from_secs(1);
/// Number of lease checks between two cleanups of outdated rows and exports.
const TICKS_PER_CLEANUP: u32 = 60;
/// Idle workers without contact for this long are removed from the list, in ms.
const WORKER_SILENCE_MS: i64 = 120_000;

/// Why a server could not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The data directory cannot be used; another server may be using it.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// The database cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The value of `--allow-outgoing` is invalid.
    #[error("--allow-outgoing cannot be used")]
    Outgoing(#[source] OutgoingError),
    /// The client for reward services cannot be created.
    #[error("reward services cannot be contacted: {0}")]
    RewardClient(String),
    /// This machine does not support the requested instruction set.
    #[error("--isa: {0}")]
    Isa(String),
    /// A GPU of the pool cannot be used.
    #[error("--devices: {0}")]
    Gpu(String),
    /// The sender of lifecycle messages cannot be created.
    #[error(transparent)]
    WebhookSender(#[from] WebhookSenderError),
    /// A non-loopback address without a usable key.
    #[error(transparent)]
    NoKey(ConfigError),
    /// The address is in use or not available on this host.
    #[error("cannot listen on {address}; choose another --listen address (port 0 selects a free one)")]
    Listen {
        /// The address that was requested.
        address: SocketAddr,
        /// Error of the underlying operation.
        #[source]
        source: std::io::Error,
    },
    /// A system call failed.
    #[error("cannot {doing}")]
    System {
        /// The operation that failed.
        doing: &'static str,
        /// Error of the underlying operation.
        #[source]
        source: std::io::Error,
    },
}

impl From<RecoveryError> for ServeError {
    fn from(error: RecoveryError) -> Self {
        match error {
            RecoveryError::Files(error) => error.into(),
            RecoveryError::Store(error) => error.into(),
        }
    }
}

/// A server in this process. Dropping it without [`Running::stop`] leaves its tasks running on the runtime.
pub struct Running {
    addr: SocketAddr,
    /// Grace period of a shutdown, in which workers save a checkpoint and requeue their jobs.
    grace: Duration,
    stop_children: CancellationToken,
    stop_http: CancellationToken,
    abort_http: CancellationToken,
    http: JoinHandle<()>,
    supervisor: Supervisor,
    lease_timer: AbortOnDropHandle<()>,
    outages: AbortOnDropHandle<()>,
    worker_exits: AbortOnDropHandle<()>,
    webhook_sender: AbortOnDropHandle<()>,
    retention_task: AbortOnDropHandle<()>,
    tasks: [AbortOnDropHandle<()>; 3],
    store: Store,
}

impl Running {
    /// Returns the address that the server listens on; the port is never 0.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Returns the server's URL, `http://HOST:PORT`.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Shuts the server down. Workers save checkpoints and requeue their jobs while the API still answers. Then streams end,
    /// waiting requests are answered, requests in flight complete, and connections close. Takes at most 4 s longer than the
    /// workers' grace period: by default less than 30 s.
    pub async fn stop(self) {
        let Self {
            addr: _,
            grace,
            stop_children,
            stop_http,
            abort_http,
            mut http,
            supervisor,
            lease_timer,
            outages,
            worker_exits,
            webhook_sender,
            retention_task,
            tasks,
            store,
        } = self;
        let begun = Instant::now();
        stop_children.cancel();
        supervisor.stop(grace + WORKERS_MARGIN).await;
        drop((lease_timer, outages, worker_exits, webhook_sender, retention_task, tasks));
        stop_http.cancel();
        let drain = REQUESTS_STOP.min((grace + STOP_MARGIN).saturating_sub(begun.elapsed()));
        let ended = tokio::select! {
            ended = &mut http => ended,
            () = tokio::time::sleep(drain) => {
                abort_http.cancel();
                http.await
            }
        };
        if let Err(error) = ended {
            tracing::error!(%error, "the server's listener ended with an error");
        }
        store.close().await;
    }
}

/// `rlood serve`: starts, prints the address, serves until SIGTERM or SIGINT, then shuts down. A second signal exits immediately.
///
/// # Errors
/// Fails when the server cannot start.
pub(crate) async fn run(config: ServeConfig) -> Result<ExitCode, ServeError> {
    let system = |doing| move |source| ServeError::System { doing, source };
    let mut terminate = signal(SignalKind::terminate()).map_err(system("listen for the signal SIGTERM"))?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(system("listen for the signal SIGINT"))?;
    let running = start(config).await?;
    announce(running.addr()).map_err(system("write to standard output"))?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    tracing::info!("shutting down: workers save checkpoints and requeue their jobs; a second signal exits immediately");
    tokio::select! {
        () = running.stop() => Ok(ExitCode::SUCCESS),
        _ = terminate.recv() => Ok(ExitCode::FAILURE),
        _ = interrupt.recv() => Ok(ExitCode::FAILURE),
    }
}

/// Prints the server's URL as the first line of standard output, for people and for scripts that wait for it.
///
/// # Errors
/// Fails when standard output is closed.
pub fn announce(addr: SocketAddr) -> std::io::Result<()> {
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "listening on http://{addr}")?;
    stdout.flush()
}

/// Removes GPUs that `--devices auto` detected but the driver does not list. Returns a message about removed GPUs, if any.
fn without_gpus(config: &mut ServeConfig) -> Option<String> {
    let found = config.gpus().count();
    if !config.devices_are_found || found == 0 {
        return None;
    }
    let (listed, why) = match gpu::list() {
        Ok(gpus) => (gpus.len(), format!("{found} GPUs were detected, but the driver lists {}", gpus.len())),
        Err(why) => (0, why),
    };
    config.keep_found(listed);
    let instead = if listed == 0 { "; jobs run on the CPU" } else { "" };
    (listed < found).then(|| format!("{why}{instead}"))
}

/// Starts a server in this process and returns when it answers requests.
///
/// # Errors
/// Fails when the data directory, the database or the address cannot be used.
pub(crate) async fn start(mut config: ServeConfig) -> Result<Running, ServeError> {
    // Every TLS client needs this crypto provider; installing it twice is not an error.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let policy =
        |keys_are_on| OutgoingPolicy::parse(config.outgoing_allowed(keys_are_on)).map_err(ServeError::Outgoing);
    let (outgoing, keyed_outgoing) = (policy(false)?, policy(true)?);
    let pace = Pace::new(config.reward_pace).map_err(ServeError::RewardClient)?;
    let client = |policy| RewardClient::new(policy).map_err(ServeError::RewardClient).map(|new| new.with_pace(pace));
    let rewards = outage::Clients { without_keys: client(&outgoing)?, with_keys: client(&keyed_outgoing)? };
    Isa::choose(config.isa.as_str()).map_err(ServeError::Isa)?;
    if let Some(why) = without_gpus(&mut config) {
        tracing::warn!("some of the machine's GPUs cannot be used: {why}");
    }
    let gpus: Vec<u32> = config.gpus().collect();
    if !gpus.is_empty() {
        let smallest = gpu::smallest(&gpus).map_err(ServeError::Gpu)?;
        config.gpu_memory_bytes = Some(config.gpu_memory_limit_bytes.map_or(smallest, |limit| limit.min(smallest)));
    }
    let files = DataDir::open(&config.data_dir)?;
    let store = Store::open(&files.database()).await?.with_verdicts(config.auto_verdict);
    let is_open = config.api_key.is_none() && !config.listen.ip().is_loopback();
    if is_open && store.api_keys_usable(clock_ms()).await? == 0 {
        return Err(ServeError::NoKey(no_key_for(config.listen)));
    }
    let webhook_sender = WebhookSender::new(store.clone(), outgoing)?.narrowed_by_keys(keyed_outgoing)?;
    let config = Arc::new(config);
    recover(&store, &files, lease_ms(&config), clock_ms()).await?;
    // Free disk space is checked before any worker can ask for a job.
    let mut disk = DiskWatch::new(config.edge.disk_reserve_bytes);
    disk.check(&store, &files, clock_ms()).await;

    let refused = |source| ServeError::Listen { address: config.listen, source };
    let listener = TcpListener::bind(config.listen).await.map_err(refused)?;
    let addr = listener.local_addr().map_err(refused)?;
    let (stop_http, abort_http) = (CancellationToken::new(), CancellationToken::new());
    let children = children(&config, files.scratch(), addr)?;
    let mut state = AppState::new(store.clone(), files.clone(), config.clone());
    state.disk_low = disk.low();
    state.stopping = stop_http.clone();
    if let Err(problem) = http::demo::settle(&state).await {
        tracing::warn!(?problem, "the demo's model could not be restored: jobs of POST /demo may fail");
    }
    state.preflights = Some(Preflights::new(&children));
    let stop_children = CancellationToken::new();
    let serve = config.serving.clone();
    state.serving = Some(Serving::new(&children, serve, config.memory_per_worker(), stop_children.clone()));
    state.certifications = Some(Certifications::new(&children, stop_children.clone()));
    resume_downloads(&state).await;
    let tasks = start_tasks(&state, &children, &stop_children);
    let downloads = state.downloads.clone();
    let connections = state.connections.clone();
    let router = http::router(state);
    let stop = listen::Stop { begin: stop_http.clone(), cut: abort_http.clone() };
    let http = spawn(listen::serve(listener, router, config.edge.clone(), connections, stop));

    let (lost, worker_exits) = mpsc::unbounded_channel();
    let worker_exits = AbortOnDropHandle::new(spawn(requeue_jobs_of_exited_workers(store.clone(), worker_exits)));
    let lease_timer = run_lease_timer(store.clone(), files.clone(), downloads, lease_ms(&config), disk);
    let lease_timer = AbortOnDropHandle::new(spawn(lease_timer));
    let outages = AbortOnDropHandle::new(spawn(outage::watch(store.clone(), rewards)));
    let supervisor = Supervisor::start(children, &lost);
    let webhook_sender = AbortOnDropHandle::new(spawn(webhook_sender.run()));
    let retention_task = retention::run_retention(store.clone(), files, config.retention);
    let retention_task = AbortOnDropHandle::new(spawn(retention_task));
    Ok(Running {
        addr,
        grace: Duration::from_secs(config.grace_s),
        stop_children,
        stop_http,
        abort_http,
        http,
        supervisor,
        lease_timer,
        outages,
        worker_exits,
        webhook_sender,
        retention_task,
        tasks,
        store,
    })
}

/// Resumes the downloads that the previous server process did not finish, and plans jobs as their datasets are stored.
async fn resume_downloads(state: &AppState) {
    if let Err(problem) = http::models::hub::resume(state).await {
        tracing::warn!(?problem, "unfinished downloads of models could not be resumed");
    }
    if let Err(problem) = http::dataset_downloads::resume(state).await {
        tracing::warn!(?problem, "unfinished downloads of datasets could not be resumed");
    }
    spawn(http::waiting_jobs::run(state.clone()));
}

/// Starts the tasks that run queued verdicts, exports and pushes.
fn start_tasks(state: &AppState, children: &Children, stop: &CancellationToken) -> [AbortOnDropHandle<()>; 3] {
    let verdicts = http::verdicts::run(state.clone(), Verdicts::new(children, stop.clone()));
    let exports = http::exports::run(state.clone(), Exports::new(children, stop.clone()));
    let pushes = http::pushes::run(state.clone());
    [
        AbortOnDropHandle::new(spawn(verdicts)),
        AbortOnDropHandle::new(spawn(exports)),
        AbortOnDropHandle::new(spawn(pushes)),
    ]
}

/// Requeues the jobs of workers whose lease expired and checks the disk. Cleans up once a minute.
async fn run_lease_timer(store: Store, files: DataDir, downloads: Downloads, lease_ms: i64, mut disk: DiskWatch) {
    let begun = Instant::now();
    let steady_ms = move || i64::try_from(begun.elapsed().as_millis()).unwrap_or(i64::MAX);
    let mut watch = LeaseWatch::new(clock_ms(), steady_ms(), lease_ms);
    let mut interval = tokio::time::interval(TICK);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    for count in 0_u32.. {
        interval.tick().await;
        let now = clock_ms();
        match watch.tick(&store, now, steady_ms()).await {
            Ok(jobs) => jobs
                .iter()
                .for_each(|job| tracing::warn!(%job, "the lease of the job's worker expired; the job is queued again")),
            Err(error) => tracing::error!(error = with_causes(&error), "could not requeue jobs with expired leases"),
        }
        disk.check(&store, &files, now).await;
        if let Err(error) = store.log_checkpoint().await {
            tracing::warn!(error = with_causes(&error), "could not truncate the database's write-ahead log");
        }
        if count % TICKS_PER_CLEANUP == 0 {
            let kept = store.keys_expire(now).await.and(store.sessions_expire(now).await);
            let kept = kept.and(store.workers_prune(now - WORKER_SILENCE_MS).await);
            let kept = kept.and(store.callbacks_prune(now).await);
            if let Err(error) = kept {
                tracing::error!(error = with_causes(&error), "could not remove outdated rows of the database");
            }
            downloads.clean().await;
            remove_expired(&store, &files, now).await;
            let files = files.clone();
            tokio::task::spawn_blocking(move || files.remove_stale_links());
        }
    }
}

/// Removes exports whose retention time is over.
async fn remove_expired(store: &Store, files: &DataDir, now: i64) {
    let expired = match store.tasks_expired(now).await {
        Ok(expired) => expired,
        Err(error) => return tracing::warn!(error = with_causes(&error), "could not list expired exports"),
    };
    for row in expired {
        let (of_export, id) = (files.clone(), row.id.clone());
        let removed = spawn_blocking(move || of_export.export_remove(&id)).await;
        let gone = match removed {
            Ok(Ok(())) => store.task_delete(row.kind, &row.id).await.map_err(|error| with_causes(&error)),
            Ok(Err(error)) => Err(error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        if let Err(error) = gone {
            tracing::warn!(export = row.id, error, "could not remove an expired export");
        }
    }
}

fn lease_ms(config: &ServeConfig) -> i64 {
    i64::try_from(config.lease_ms).unwrap_or(i64::MAX)
}

fn children(config: &ServeConfig, scratch_dir: PathBuf, addr: SocketAddr) -> Result<Children, ServeError> {
    let program = match &config.worker_program {
        Some(program) => program.clone(),
        None => std::env::current_exe().map_err(|source| ServeError::System {
            doing: "find the rlood executable that workers are started from",
            source,
        })?,
    };
    Ok(Children {
        program,
        server: format!("http://{}", reachable(addr)),
        token: config.worker_token.clone(),
        devices: config.devices.clone(),
        threads: config.threads_per_worker(),
        scratch_dir,
        adapter_dir: config.adapter_dir(),
        grace_s: config.grace_s,
        reward_pace: config.reward_pace,
        isa: config.isa,
        gpu_memory_bytes: config.gpu_memory_limit_bytes,
        trl: config.trl.clone(),
        log: config.log.clone(),
        log_format: config.log_format,
    })
}

/// Returns an address at which worker processes on this machine reach the server: loopback if it listens
/// on the unspecified address.
fn reachable(addr: SocketAddr) -> SocketAddr {
    match addr {
        SocketAddr::V4(v4) if v4.ip().is_unspecified() => SocketAddr::from(([127, 0, 0, 1], v4.port())),
        SocketAddr::V6(v6) if v6.ip().is_unspecified() => SocketAddr::from((std::net::Ipv6Addr::LOCALHOST, v6.port())),
        other => other,
    }
}

/// Requeues the job of a crashed worker process immediately, and writes the process's last log lines to the job's log.
async fn requeue_jobs_of_exited_workers(store: Store, mut worker_exits: mpsc::UnboundedReceiver<Lost>) {
    while let Some(Lost { worker, device, status, tail }) = worker_exits.recv().await {
        let detail = format!("the worker on {device} ended ({status})\n{tail}");
        match store.worker_lost(worker, Some(detail.trim_end()), clock_ms()).await {
            Ok(Some(job)) => tracing::warn!(%job, %worker, "the worker ended unexpectedly; its job is queued again"),
            Ok(None) => {}
            // Only logged, because the worker's lease expires soon and then its job is queued again too.
            Err(error) => {
                tracing::error!(%worker, error = with_causes(&error), "could not store the end of a worker process in the database")
            }
        }
    }
}
