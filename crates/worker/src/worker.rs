//! The worker process: claims jobs and runs them on one device.
//!
//! A worker communicates with the server only through the worker protocol. Child processes of the server exit when their
//! standard input closes, that is, when the server dies. A worker that was started separately continues to compute for 15
//! minutes without a server, and commits nothing until its claim is confirmed. On SIGTERM the worker saves a checkpoint,
//! requeues the job, and exits with code 0 within the grace period (`--grace-s`). The job of a separately started worker is
//! then `preempted`, which does not count as a failed attempt.

mod attempt;
mod callbacks;
mod checkpoint_schedule;
mod claim_ref;
mod client;
mod client_error;
mod clock;
mod environments;
mod events;
mod failure;
mod fetch;
mod host;
mod images;
mod job_models;
mod journal;
mod models;
mod reports;
mod signals;
#[cfg(test)]
mod tests;
mod transfer;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::LocalBoxFuture;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::args::{WorkerArgs, default_cache_dir};
use crate::device::machine_threads;
use crate::engine::backend::cpu::Cpu;
use crate::engine::host::{Host, RunEnd, TrainInput};
use crate::engine::kernels::isa::Isa;
use crate::engine::kernels::lending::Lender;
use crate::error_text::with_causes;
use crate::exit::end_process;
use crate::id::WorkerId;
use crate::outgoing::OutgoingPolicy;
use crate::protocol::{ClaimRequest, Finish, KernelFacts, Outcome, PROTOCOL, Register, Registered};
use crate::reward::client::{Pace, RewardClient};
use crate::runtime::trl;
use client::{ClaimRef, Client, ClientError, with_retries};

/// How long the server may hold a worker's request for a job while the queue is empty, in milliseconds.
const CLAIM_WAIT_MS: u64 = 20_000;
/// Pause after a failed request for a job.
const CLAIM_RETRY: Duration = Duration::from_secs(1);
/// Time limit for returning a job to the queue that this version of the worker cannot run.
const GIVE_BACK_TIMEOUT: Duration = Duration::from_secs(5);
/// Exit code when the server is gone.
const EXIT_ORPHAN: i32 = 3;
/// Exit code after a panic of the engine, the same as for any panic.
const EXIT_PANIC: u8 = 101;
/// Exit code after a failure of the GPU.
const EXIT_DEVICE: u8 = 4;
/// Exit code when a built-in reward does not stop computing.
const EXIT_GRADING: u8 = 5;

/// The engine function that trains a job. Tests replace it.
type TrainFn = fn(TrainInput<'_>, &mut dyn Host) -> Result<(), RunEnd>;

/// Reason why a worker could not run.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// A setting of the worker is not valid.
    #[error("{0}")]
    Setting(String),
    /// The server rejects this worker.
    #[error("cannot work for {server}")]
    Server {
        /// Address of the server.
        server: String,
        /// Error of the worker's registration.
        #[source]
        source: ClientError,
    },
    /// A system call of the worker failed.
    #[error("cannot {doing}")]
    System {
        /// Name of the operation that failed.
        doing: &'static str,
        /// Error of the operating system.
        #[source]
        source: std::io::Error,
    },
}

/// State of a worker across all its attempts.
struct Worker {
    client: Client,
    id: WorkerId,
    child: bool,
    device: String,
    threads: u32,
    scratch_dir: PathBuf,
    /// Directory and size limit of the model cache. `None` for a child of the server, which reads models at the server's paths.
    cache: Option<(PathBuf, Option<u64>)>,
    leaving: CancellationToken,
    /// Set by SIGTERM, which announces that the machine is being taken away. Not set by Ctrl-C, or when the
    /// server itself shuts down.
    preempted: Arc<AtomicBool>,
    /// Time from SIGTERM or SIGINT until this process must exit.
    leave_within: Duration,
    heartbeat_ms: std::sync::atomic::AtomicU64,
    train: TrainFn,
    /// Folder in which adapters are published for rollout servers.
    adapter_dir: PathBuf,
    /// Whether adapters for rollout servers are uploaded, because no folder was given that others read.
    uploads_adapters: bool,
    /// Python that has vLLM, for servers that this worker starts.
    vllm_python: Option<PathBuf>,
    /// Factor on the waits of reward requests; 1 except in tests.
    reward_pace: Pace,
    /// The environment of the runtime `trl`; `None` = this worker has none.
    trl: Option<trl::Environment>,
    /// HTTP connections for rewards, kept from job to job while the policy for outgoing addresses stays the same.
    reward_client: Mutex<Option<RewardClient>>,
}

/// Describes the CPU kernels of this process; `None` on a GPU.
fn kernel_facts(device: &str) -> Option<KernelFacts> {
    let isa = Isa::chosen().ok().filter(|_| device == "cpu")?;
    Some(KernelFacts { isa: isa.name().to_owned(), avx512_bf16_gain: Isa::bf16_gain() })
}

/// Finds the environment of the runtime `trl`. A worker with an environment that cannot be used runs all other jobs.
fn find_trl(args: &trl::environment::TrlArgs, device: &str) -> Option<trl::Environment> {
    match args.find(device) {
        Ok(found) => found.inspect(|found| tracing::info!("the runtime trl is available: {}", found.describe())),
        Err(error) => {
            tracing::warn!(error = with_causes(&error), "the runtime trl is not available");
            None
        }
    }
}

/// Lends cores to the server's serving process. Without that file, the two only compete for them.
fn lend_cores(path: &Path, slot: usize) {
    match Lender::open(path, slot) {
        Ok(Some(lender)) => Cpu::process_threads().lend(lender),
        Ok(None) => {}
        Err(error) => tracing::warn!(%error, path = %path.display(), "cannot lend cores to the serving process"),
    }
}

/// Runs `rlood worker` until SIGTERM or SIGINT, and returns code 0 then.
///
/// # Errors
/// Fails when the server rejects this worker or is unreachable for a long time.
pub fn run(args: WorkerArgs) -> LocalBoxFuture<'static, Result<ExitCode, WorkerError>> {
    // The boxed future is compiled in this crate, instead of in each crate that polls it.
    Box::pin(run_worker(args))
}

async fn run_worker(args: WorkerArgs) -> Result<ExitCode, WorkerError> {
    if args.child {
        exit_with_server()?;
    }
    exit_on_panic();
    if let Some(path) = &args.lending {
        lend_cores(path, args.lending_slot);
    }
    let preempted = Arc::new(AtomicBool::new(false));
    let leaving = stop_on_signal((!args.child).then(|| preempted.clone()))?;
    let cache_dir = args.cache_dir.unwrap_or_else(|| default_cache_dir(args.scratch_dir.as_deref()));
    let cache_limit = args.cache_limit.filter(|bytes| *bytes > 0);
    let trl = find_trl(&args.trl, &args.device.to_string());
    let (scratch_dir, _scratch) = scratch_dir(args.scratch_dir)?;
    let uploads_adapters = args.adapter_dir.is_none();
    let adapter_dir = args.adapter_dir.unwrap_or_else(|| scratch_dir.join("rollout-adapters"));
    let worker = Worker {
        adapter_dir,
        uploads_adapters,
        vllm_python: args.vllm_python,
        client: Client::new(&args.server, &args.token, args.child).map_err(WorkerError::Setting)?,
        id: args.id.unwrap_or_else(WorkerId::new),
        child: args.child,
        device: args.device.to_string(),
        threads: args.threads.unwrap_or_else(machine_threads),
        scratch_dir,
        cache: (!args.child).then_some((cache_dir, cache_limit)),
        leaving,
        preempted,
        leave_within: Duration::from_secs(args.grace_s),
        heartbeat_ms: crate::protocol::HEARTBEAT_MS.into(),
        train: crate::engine::train,
        trl,
        reward_pace: Pace::new(args.reward_pace).map_err(|why| WorkerError::Setting(format!("--reward-pace {why}")))?,
        reward_client: Mutex::default(),
    };
    worker.work().await.map_err(|source| WorkerError::Server { server: args.server, source })
}

impl Worker {
    async fn work(&self) -> Result<ExitCode, ClientError> {
        let mut registered = false;
        loop {
            let ask = async {
                if !registered {
                    self.register().await?;
                }
                let ask = ClaimRequest { worker: self.id, wait_ms: CLAIM_WAIT_MS, protocol: PROTOCOL };
                self.client.claim(&ask).await
            };
            let claimed = tokio::select! {
                biased;
                () = self.leaving.cancelled() => return Ok(ExitCode::SUCCESS),
                claimed = ask => claimed,
            };
            match claimed {
                Ok(Some(claim)) => {
                    registered = true;
                    if let Some(code) = attempt::run(self, claim).await {
                        return Ok(ExitCode::from(code));
                    }
                }
                Ok(None) => registered = true,
                Err(error @ (ClientError::Unauthorized | ClientError::Protocol(_) | ClientError::OtherProtocol(_))) => {
                    return Err(error);
                }
                Err(error @ ClientError::Claim { .. }) => {
                    if let ClientError::Claim { claim_ref: Some(claim_ref), .. } = &error {
                        self.give_back(**claim_ref).await;
                    }
                    return Err(error);
                }
                // A restarted server does not know this worker, so it must register again.
                Err(error) => {
                    tracing::warn!(error = with_causes(&error), "the claim request failed");
                    registered = false;
                    tokio::select! {
                        () = tokio::time::sleep(CLAIM_RETRY) => {}
                        () = self.leaving.cancelled() => return Ok(ExitCode::SUCCESS),
                    }
                }
            }
        }
    }

    async fn register(&self) -> Result<(), ClientError> {
        let register = Register {
            worker: self.id,
            device: self.device.clone(),
            pid: std::process::id(),
            threads: self.threads,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            child: self.child,
            protocol: PROTOCOL,
            kernels: kernel_facts(&self.device),
            runtimes: self.trl.iter().map(|trl| trl.facts.clone()).collect(),
        };
        let Registered { heartbeat_ms, lease_ms, protocol } =
            with_retries(|| self.client.register(&register), ClientError::is_transient).await?;
        // A current server rejects a worker with another protocol version itself; this check is for older servers.
        if protocol != PROTOCOL {
            return Err(ClientError::OtherProtocol(format!(
                "the server is older than this worker (worker protocol {protocol}, this worker's is {PROTOCOL}): update \
                 and restart the server, or run the worker with its rlood"
            )));
        }
        // The claim's lease must cover several heartbeats, whatever interval the server asks for.
        let heartbeat_ms = heartbeat_ms.min(lease_ms / 3).max(50);
        self.heartbeat_ms.store(heartbeat_ms, Ordering::Relaxed);
        tracing::info!(worker = %self.id, device = self.device, threads = self.threads, "registered");
        Ok(())
    }

    /// Returns a job that this version cannot run to the queue, for another worker or for this one after an update.
    async fn give_back(&self, claim_ref: ClaimRef) {
        let finish = Finish { attempt: claim_ref.attempt, outcome: Outcome::Requeued };
        let given = with_retries(|| self.client.finish(claim_ref, &finish), ClientError::is_transient);
        // If the job cannot be returned, the claim expires and the attempt counts as failed.
        if let Ok(Err(error)) = tokio::time::timeout(GIVE_BACK_TIMEOUT, given).await {
            tracing::warn!(job = %claim_ref.job, error = with_causes(&error), "the job could not be given back");
        }
    }

    /// Returns the connections shared by all rewards of this worker.
    fn reward_client(&self, policy: &OutgoingPolicy) -> Result<RewardClient, String> {
        let mut kept = self.reward_client.lock().unwrap_or_else(PoisonError::into_inner);
        match &*kept {
            Some(client) if client.policy() == policy => Ok(client.clone()),
            _ => Ok(kept.insert(RewardClient::new(policy)?.with_pace(self.reward_pace)).clone()),
        }
    }

    fn heartbeat(&self) -> Duration {
        Duration::from_millis(self.heartbeat_ms.load(Ordering::Relaxed))
    }
}

/// Exits the worker on a panic outside of the engine's threads, which report panics themselves. A worker whose task for heartbeats
/// or events has panicked must not keep its job.
fn exit_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        let thread = std::thread::current();
        if thread.name().is_some_and(|name| name == "main" || name.starts_with("tokio")) {
            end_process(i32::from(EXIT_PANIC));
        }
    }));
}

/// Returns the scratch directory: the given one, or a temporary one that is removed on exit.
fn scratch_dir(given: Option<PathBuf>) -> Result<(PathBuf, Option<tempfile::TempDir>), WorkerError> {
    let system = |source| WorkerError::System { doing: "create the scratch directory", source };
    match given {
        Some(dir) => {
            std::fs::create_dir_all(&dir).map_err(system)?;
            Ok((dir, None))
        }
        None => {
            let dir = tempfile::Builder::new().prefix("rlood-worker-").tempdir().map_err(system)?;
            Ok((dir.path().to_owned(), Some(dir)))
        }
    }
}

/// Returns a token that is cancelled on SIGTERM or SIGINT. SIGTERM also sets `preempted`, which is `None` for a child process of
/// the server, because there the signal comes from the server.
fn stop_on_signal(preempted: Option<Arc<AtomicBool>>) -> Result<CancellationToken, WorkerError> {
    let system = |source| WorkerError::System { doing: "listen for signals", source };
    let mut terminate = signal(SignalKind::terminate()).map_err(system)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(system)?;
    let leaving = CancellationToken::new();
    let leave = leaving.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {
                if let Some(preempted) = preempted {
                    preempted.store(true, Ordering::Relaxed);
                }
            }
            _ = interrupt.recv() => {}
        }
        tracing::info!("leaving: checkpoint and requeue");
        leave.cancel();
    });
    Ok(leaving)
}

/// Exits the process as soon as standard input closes: the server is gone, and with it the claim that
/// permits this process to work.
fn exit_with_server() -> Result<(), WorkerError> {
    let watch = || {
        let mut stdin = std::io::stdin().lock();
        let mut byte = [0];
        loop {
            match stdin.read(&mut byte) {
                Ok(0) => break,
                Err(error) if error.kind() != std::io::ErrorKind::Interrupted => break,
                Ok(_) | Err(_) => {}
            }
        }
        // The exit is not logged: the server that reads standard error is gone too, so writing would fail.
        end_process(EXIT_ORPHAN);
    };
    std::thread::Builder::new()
        .name("orphan-watch".to_owned())
        .spawn(watch)
        .map(drop)
        .map_err(|source| WorkerError::System { doing: "watch for the server's end", source })
}
