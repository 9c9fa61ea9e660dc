//! One process, one device: claim, engine thread, heartbeats and events, finish.
//!
//! A worker knows the server only through the worker protocol. Children of the server end when their standard input ends,
//! that is, when the server dies; a worker started by hand goes on computing for 15 minutes without a server and
//! commits nothing until its claim is confirmed. SIGTERM: checkpoint, requeue, leave with code 0 within the grace
//! (`--grace-s`); the job of a worker started by hand is then `preempted`, which is never charged to it.

mod attempt;
mod callbacks;
mod client;
mod client_error;
mod clock;
mod events;
mod failure;
mod fetch;
mod held;
mod host;
mod job_models;
mod journal;
mod models;
mod reports;
mod saving;
mod signals;
#[cfg(test)]
mod tests;
mod transfer;

use std::io::Read;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::LocalBoxFuture;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::args::{WorkerArgs, default_cache_dir};
use crate::causes::with_causes;
use crate::device::machine_threads;
use crate::engine::host::{Host, RunEnd, TrainInput};
use crate::engine::kernels::isa::Isa;
use crate::exit::end_process;
use crate::id::WorkerId;
use crate::outgoing::OutgoingPolicy;
use crate::protocol::{ClaimRequest, Finish, KernelFacts, Outcome, PROTOCOL, Register, Registered};
use crate::reward::client::{Pace, RewardClient};
use client::{Client, ClientError, Held, persist};

/// How long the server may hold a call for work.
const CLAIM_WAIT_MS: u64 = 20_000;
/// Before another call for work after one that failed.
const CLAIM_RETRY: Duration = Duration::from_secs(1);
/// For giving back a job that is not understood.
const GIVE_BACK_WITHIN: Duration = Duration::from_secs(5);
/// The code of a process whose server is gone.
const EXIT_ORPHAN: i32 = 3;
/// The code of a process whose engine panicked: a panic's own.
const EXIT_PANIC: u8 = 101;
/// The code of a process whose GPU failed.
const EXIT_DEVICE: u8 = 4;
/// The code of a process in which a built-in reward computes without an end.
const EXIT_GRADING: u8 = 5;

/// The engine, as the worker calls it: the seam where tests put another one.
type TrainFn = fn(TrainInput<'_>, &mut dyn Host) -> Result<(), RunEnd>;

/// Why a worker could not run.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// A setting cannot be used.
    #[error("{0}")]
    Setting(String),
    /// The server does not want this worker.
    #[error("cannot work for {server}")]
    Server {
        /// Its address.
        server: String,
        /// Why.
        #[source]
        source: ClientError,
    },
    /// A system call failed.
    #[error("cannot {doing}")]
    System {
        /// What was being done.
        doing: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// What a worker is, for all its attempts.
struct Worker {
    client: Client,
    id: WorkerId,
    child: bool,
    device: String,
    threads: u32,
    scratch_dir: PathBuf,
    /// Where fetched models lie and what they may take; None = of a server's own worker, which reads them where they are.
    cache: Option<(PathBuf, Option<u64>)>,
    leaving: CancellationToken,
    /// The machine is taken away: not its server's own shutdown, and no Ctrl-C.
    preempted: Arc<AtomicBool>,
    /// From the signal on, until the process is gone.
    leave_within: Duration,
    heartbeat_ms: std::sync::atomic::AtomicU64,
    train: TrainFn,
    /// Of the factor on its waits for rewards.
    reward_pace: Pace,
    /// Kept from job to job, while the rules on addresses stay the same.
    reward_client: Mutex<Option<RewardClient>>,
}

/// What this process computes with on the processor; `None` on a GPU.
fn kernel_facts(device: &str) -> Option<KernelFacts> {
    let isa = Isa::chosen().ok().filter(|_| device == "cpu")?;
    Some(KernelFacts { isa: isa.name().to_owned(), avx512_bf16_gain: Isa::bf16_gain() })
}

/// `rlood worker`: works until SIGTERM or SIGINT; code 0 then.
///
/// # Errors
/// When the server refuses this worker or cannot be reached for a long time.
pub fn run(args: WorkerArgs) -> LocalBoxFuture<'static, Result<ExitCode, WorkerError>> {
    // In a box: so this crate compiles the future, not each that polls it.
    Box::pin(run_worker(args))
}

async fn run_worker(args: WorkerArgs) -> Result<ExitCode, WorkerError> {
    if args.child {
        leave_with_server()?;
    }
    end_on_panic();
    let preempted = Arc::new(AtomicBool::new(false));
    let leaving = leave_on_signal((!args.child).then(|| preempted.clone()))?;
    let cache_dir = args.cache_dir.unwrap_or_else(|| default_cache_dir(args.scratch_dir.as_deref()));
    let cache_limit = args.cache_limit.filter(|bytes| *bytes > 0);
    let (scratch_dir, _scratch) = scratch_dir(args.scratch_dir)?;
    let worker = Worker {
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
                    if let ClientError::Claim { held: Some(held), .. } = &error {
                        self.give_back(**held).await;
                    }
                    return Err(error);
                }
                // A server that restarted has forgotten us: introduce ourselves again.
                Err(error) => {
                    tracing::warn!(error = with_causes(&error), "no answer to the call for work");
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
        };
        let Registered { heartbeat_ms, lease_ms, protocol } =
            persist(|| self.client.register(&register), ClientError::is_transient).await?;
        // One that compares numbers has refused by itself.
        if protocol != PROTOCOL {
            return Err(ClientError::OtherProtocol(format!(
                "the server is older than this worker (worker protocol {protocol}, this worker's is {PROTOCOL}): update \
                 and restart the server, or run the worker with its rlood"
            )));
        }
        // A lease must hold a few heartbeats whatever the server says.
        let heartbeat_ms = heartbeat_ms.min(lease_ms / 3).max(50);
        self.heartbeat_ms.store(heartbeat_ms, Ordering::Relaxed);
        tracing::info!(worker = %self.id, device = self.device, threads = self.threads, "registered");
        Ok(())
    }

    /// A job that this worker does not understand is another one's, or its own after an update.
    async fn give_back(&self, held: Held) {
        let finish = Finish { attempt: held.attempt, outcome: Outcome::Requeued };
        let given = persist(|| self.client.finish(held, &finish), ClientError::is_transient);
        // Without it the claim lapses, and the attempt counts.
        if let Ok(Err(error)) = tokio::time::timeout(GIVE_BACK_WITHIN, given).await {
            tracing::warn!(job = %held.job, error = with_causes(&error), "the job could not be given back");
        }
    }

    /// The connections of all its rewards.
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

/// A panic anywhere but on the engine's threads, which report their own, ends the process: a worker whose heartbeats or events
/// have died without a word would hold its job for nothing.
fn end_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        let thread = std::thread::current();
        if thread.name().is_some_and(|name| name == "main" || name.starts_with("tokio")) {
            end_process(i32::from(EXIT_PANIC));
        }
    }));
}

/// The given directory, or one of our own that goes with us.
fn scratch_dir(given: Option<PathBuf>) -> Result<(PathBuf, Option<tempfile::TempDir>), WorkerError> {
    let system = |source| WorkerError::System { doing: "make the scratch directory", source };
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

/// `preempted` is set by SIGTERM; None = of a child, whose server sends it.
fn leave_on_signal(preempted: Option<Arc<AtomicBool>>) -> Result<CancellationToken, WorkerError> {
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

/// Ends the process at once when standard input ends, whatever else is going on: the server is gone, and with it the
/// claim that gives this process the right to work.
fn leave_with_server() -> Result<(), WorkerError> {
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
        // Without a word: whoever read standard error is gone as well, and writing to it would fail.
        end_process(EXIT_ORPHAN);
    };
    std::thread::Builder::new()
        .name("orphan-watch".to_owned())
        .spawn(watch)
        .map(drop)
        .map_err(|source| WorkerError::System { doing: "watch for the server's end", source })
}
