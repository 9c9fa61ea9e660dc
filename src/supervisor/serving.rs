//! Serving processes (`rlood serving`), one for each device that serves: started with the first request, ended when none came
//! for a while, started again after a crash. The child's side is `rlood_worker::serving`.

use std::collections::HashMap;
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{Children, Tail, pass_on};
use crate::config::{COMPUTE_THREADS, Device, GPU_MEMORY, Serve};
use crate::serving::{
    FromServing, ServedModel, ServedPiece, ServedRequest, ServingError, ServingState, StartServing, ToServing,
};

/// Upper bounds of the buckets of the time to the first token, in seconds.
const BUCKETS_S: [f64; 12] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];

/// Interval at which an idle process is asked whether the last requests have ended.
const LAST_REQUESTS: Duration = Duration::from_millis(100);

/// The serving processes of this server. Cheap to clone.
#[derive(Clone)]
pub struct Serving(Arc<Inner>);

struct Inner {
    children: Children,
    settings: Serve,
    memory_limit_bytes: Option<u64>,
    /// One for each device that serves models, and one for verdicts if their device does not.
    processes: Vec<Process>,
    next_id: AtomicU64,
    /// Number of answers that are running or waiting.
    answers: AtomicUsize,
    /// The same by owner of the key.
    by_owner: Mutex<HashMap<String, usize>>,
    measures: Mutex<Measures>,
    stop: CancellationToken,
}

/// A device, and its process if one runs.
struct Process {
    device: Device,
    running: Mutex<Option<Arc<Running>>>,
}

/// A running process.
struct Running {
    lines: mpsc::UnboundedSender<ToServing>,
    requests: Mutex<HashMap<u64, mpsc::UnboundedSender<Piece>>>,
    state: Mutex<ServingState>,
}

/// The next piece of an answer, or the error that ended it.
pub type Piece = Result<ServedPiece, ServingError>;

/// Counts for `/metrics`.
#[derive(Debug, Clone, Default)]
pub struct Measures {
    /// Number of requests that were started.
    pub requests: u64,
    /// Number of requests that were refused because the server was full.
    pub refused: u64,
    /// Number of requests that failed.
    pub failed: u64,
    /// Prompt tokens of started requests.
    pub prompt_tokens: u64,
    /// Tokens of answers.
    pub tokens: u64,
    /// Number of times to the first token in each bucket, their number and sum in seconds.
    pub first_token: ([u64; BUCKETS_S.len()], u64, f64),
}

/// Who asks for answers.
#[derive(Debug, Clone, Copy)]
pub enum Asker<'a> {
    /// A client with a key of this owner, whose answers are limited.
    Owner(&'a str),
    /// A verdict, on the first of the workers' devices. It limits its answers itself.
    Verdict,
}

/// Why a request cannot be started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StartError {
    /// All places are taken, on this server or of this owner; the text says which.
    Full(String),
    /// The server is shutting down.
    Stopping,
    /// The process could not be started, for this reason.
    Failed(String),
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Serving {
    /// Creates the manager of the serving processes; none is started yet. `stop` ends them.
    pub fn new(children: &Children, settings: Serve, memory_limit_bytes: Option<u64>, stop: CancellationToken) -> Self {
        let process = |device: &Device| Process { device: *device, running: Mutex::default() };
        let mut devices = settings.devices.clone();
        let of_verdicts = verdicts_device(children);
        if !devices.contains(&of_verdicts) {
            devices.push(of_verdicts);
        }
        let processes = devices.iter().map(process).collect();
        Self(Arc::new(Inner {
            children: children.clone(),
            settings,
            memory_limit_bytes,
            processes,
            next_id: AtomicU64::new(1),
            answers: AtomicUsize::new(0),
            by_owner: Mutex::default(),
            measures: Mutex::default(),
            stop,
        }))
    }

    /// Whether the server serves models to clients.
    pub fn is_on(&self) -> bool {
        !self.0.settings.devices.is_empty()
    }

    /// Starts a request; its answers arrive through the result, and dropping that cancels the request.
    ///
    /// # Errors
    /// Fails if there is no room, or the process cannot be started.
    pub fn start(&self, asker: Asker<'_>, model: ServedModel, request: ServedRequest) -> Result<Answers, StartError> {
        let inner = &self.0;
        if inner.stop.is_cancelled() {
            return Err(StartError::Stopping);
        }
        let place = match asker {
            Asker::Owner(owner) => Some(self.reserve(owner, request.num_choices as usize)?),
            Asker::Verdict => None,
        };
        {
            let mut measures = locked(&inner.measures);
            measures.requests += 1;
            measures.prompt_tokens += request.ids.len() as u64;
        }
        let id = inner.next_id.fetch_add(1, Ordering::Relaxed);
        let mut start = ToServing::Start(Box::new(StartServing { id, model: model.clone(), request }));
        // A process that was just ended because it was idle takes no request; the next one is a new process.
        for _ in 0..2 {
            let process =
                self.choose(asker, &model).ok_or_else(|| StartError::Failed("no device serves models".to_owned()))?;
            let running = self.running(process).map_err(|error| StartError::Failed(error.to_string()))?;
            let (sender, pieces) = mpsc::unbounded_channel();
            locked(&running.requests).insert(id, sender);
            match running.lines.send(start) {
                Ok(()) => {
                    return Ok(Answers {
                        inner: inner.clone(),
                        id,
                        running,
                        pieces,
                        started: Some(Instant::now()),
                        _place: place,
                    });
                }
                Err(mpsc::error::SendError(unsent)) => start = unsent,
            }
            locked(&running.requests).remove(&id);
        }
        Err(StartError::Failed("the serving process ended as soon as it was started".to_owned()))
    }

    /// Reserves places for the answers of a request.
    fn reserve(&self, owner: &str, count: usize) -> Result<Place, StartError> {
        let inner = &self.0;
        let (most, most_of_owner) = (inner.settings.max_answers, inner.settings.max_answers_per_owner);
        let mut by_owner = locked(&inner.by_owner);
        let all = inner.answers.load(Ordering::Relaxed);
        let own = by_owner.get(owner).copied().unwrap_or(0);
        let full = if all + count > most {
            Some(format!("the server generates {all} answers of at most {most} (--serve-max-answers); try again"))
        } else if own + count > most_of_owner {
            Some(format!(
                "requests of your keys have {own} answers of at most {most_of_owner} (--serve-max-answers-per-owner); wait for some"
            ))
        } else {
            None
        };
        if let Some(full) = full {
            locked(&inner.measures).refused += 1;
            return Err(StartError::Full(full));
        }
        inner.answers.fetch_add(count, Ordering::Relaxed);
        *by_owner.entry(owner.to_owned()).or_default() += count;
        Ok(Place { inner: inner.clone(), owner: owner.to_owned(), count })
    }

    /// The process for a model: one that has loaded its base, else the one with the fewest answers.
    fn choose(&self, asker: Asker<'_>, model: &ServedModel) -> Option<&Process> {
        let of_verdicts = verdicts_device(&self.0.children);
        let may_ask = |process: &&Process| match asker {
            Asker::Owner(_) => self.0.settings.devices.contains(&process.device),
            Asker::Verdict => process.device == of_verdicts,
        };
        let rank = |process: &&Process| match &*locked(&process.running) {
            Some(running) => {
                let state = locked(&running.state);
                let has_base = state.models.iter().any(|loaded| loaded.base == model.base);
                (!has_base, locked(&running.requests).len())
            }
            None => (true, 0),
        };
        self.0.processes.iter().filter(may_ask).min_by_key(rank)
    }

    /// Returns the running process of a device, and starts it if none runs.
    fn running(&self, process: &Process) -> std::io::Result<Arc<Running>> {
        let mut slot = locked(&process.running);
        if let Some(running) = slot.as_ref().filter(|running| !running.lines.is_closed()) {
            return Ok(running.clone());
        }
        let child = self.spawn(process.device)?;
        let (lines, to_write) = mpsc::unbounded_channel();
        let running = Arc::new(Running { lines, requests: Mutex::default(), state: Mutex::default() });
        *slot = Some(running.clone());
        tokio::spawn(attend(self.0.clone(), running.clone(), child, to_write, process.device));
        Ok(running)
    }

    fn spawn(&self, device: Device) -> std::io::Result<Child> {
        let Inner { children, settings, memory_limit_bytes, .. } = &*self.0;
        let mut command = Command::new(&children.program);
        command
            .args(["serving", "--device", &device.to_string(), "--threads", &children.threads.to_string()])
            .args(["--max-rows", &settings.max_rows.to_string()])
            .args(["--log", &children.log, "--log-format", children.log_format.as_str()])
            .env(COMPUTE_THREADS, children.threads.to_string())
            .env("RLOOD_ISA", children.isa.as_str())
            .env(GPU_MEMORY, children.gpu_memory_bytes.unwrap_or(0).to_string())
            .env_remove("RLOOD_API_KEY")
            .env_remove("RLOOD_WORKER_TOKEN")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true);
        if device == Device::Cpu && children.devices.contains(&Device::Cpu) {
            command.arg("--lending").arg(children.lending()).args(["--share", &settings.share.to_string()]);
        }
        if let Some(limit) = memory_limit_bytes {
            command.args(["--memory-limit", &limit.to_string()]);
        }
        command.spawn()
    }

    /// Counts for `/metrics`, and the state of each process that runs.
    pub fn measures(&self) -> (Measures, Vec<(Device, ServingState)>) {
        let states = self.0.processes.iter().filter_map(|process| {
            let running = locked(&process.running).clone()?;
            let state = locked(&running.state).clone();
            Some((process.device, state))
        });
        (locked(&self.0.measures).clone(), states.collect())
    }

    /// The upper bounds of the buckets of [`Measures::first_token`], in seconds.
    pub fn buckets() -> [f64; BUCKETS_S.len()] {
        BUCKETS_S
    }
}

/// The device on which verdicts sample.
fn verdicts_device(children: &Children) -> Device {
    children.devices.first().copied().unwrap_or(Device::Cpu)
}

/// Places of a request's answers, which are free again when this is dropped.
struct Place {
    inner: Arc<Inner>,
    owner: String,
    count: usize,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut by_owner = locked(&self.inner.by_owner);
        self.inner.answers.fetch_sub(self.count, Ordering::Relaxed);
        if let Some(own) = by_owner.get_mut(&self.owner) {
            *own -= self.count;
            if *own == 0 {
                by_owner.remove(&self.owner);
            }
        }
    }
}

/// The answers of a request, piece by piece.
pub struct Answers {
    inner: Arc<Inner>,
    id: u64,
    running: Arc<Running>,
    pieces: mpsc::UnboundedReceiver<Piece>,
    /// When the request was started; None once its first token came.
    started: Option<Instant>,
    _place: Option<Place>,
}

impl Answers {
    /// Waits for the next piece. None if the process ended without an answer, which is an error of the server.
    pub async fn next(&mut self) -> Option<Piece> {
        let piece = self.pieces.recv().await;
        let mut measures = locked(&self.inner.measures);
        match &piece {
            Some(Ok(piece)) => {
                measures.tokens += piece.ids.len() as u64;
                if let Some(started) = self.started.take_if(|_| !piece.ids.is_empty()) {
                    let took = started.elapsed().as_secs_f64();
                    let (buckets, number, sum) = &mut measures.first_token;
                    if let Some(bucket) = BUCKETS_S.iter().position(|bound| took <= *bound) {
                        buckets[bucket] += 1;
                    }
                    (*number, *sum) = (*number + 1, *sum + took);
                }
            }
            Some(Err(_)) | None => measures.failed += 1,
        }
        piece
    }
}

impl Drop for Answers {
    fn drop(&mut self) {
        // An ended request is not known to the process any more, which ignores the line then.
        if locked(&self.running.requests).remove(&self.id).is_some() {
            drop(self.running.lines.send(ToServing::Cancel(self.id)));
        }
    }
}

/// Writes lines to a process and reads its answers until it ends.
async fn attend(
    inner: Arc<Inner>,
    running: Arc<Running>,
    mut child: Child,
    to_write: mpsc::UnboundedReceiver<ToServing>,
    device: Device,
) {
    let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else { return };
    let tail = Tail::default();
    let errors = child.stderr.take().map(|stderr| tokio::spawn(pass_on(stderr, tail.clone())));
    let stopping = inner.stop.clone();
    let ended = tokio::select! {
        () = stopping.cancelled() => None,
        () = write_lines(&running, stdin, to_write, inner.settings.idle) => None,
        () = read_lines(&running, stdout) => Some(child.wait().await),
    };
    let error = match ended {
        None => {
            // The process holds nothing that must be saved.
            drop(child.kill().await);
            ServingError::Stopping
        }
        Some(status) => {
            if let Some(errors) = errors {
                let _ = tokio::time::timeout(Duration::from_secs(1), errors).await;
            }
            let signal = status.as_ref().ok().and_then(ExitStatusExt::signal);
            let status = status.map_or_else(|error| error.to_string(), |status| status.to_string());
            tracing::error!(%device, status, tail = tail.text(), "a serving process ended unexpectedly");
            match signal {
                Some(libc::SIGKILL | libc::SIGABRT) => ServingError::Killed(status),
                _ => ServingError::Failed(format!("the serving process ended ({status})")),
            }
        }
    };
    for (_, sender) in locked(&running.requests).drain() {
        drop(sender.send(Err(error.clone())));
    }
}

/// Writes lines to the process; returns when the process does not read any more, or when nothing was asked for a while.
async fn write_lines(
    running: &Running,
    mut stdin: ChildStdin,
    mut lines: mpsc::UnboundedReceiver<ToServing>,
    idle: Duration,
) {
    loop {
        let line = match tokio::time::timeout(idle, lines.recv()).await {
            Ok(Some(line)) => line,
            Ok(None) if locked(&running.requests).is_empty() => return,
            Ok(None) => {
                // Requests that came just before the channel was closed are still answered.
                tokio::time::sleep(LAST_REQUESTS).await;
                continue;
            }
            Err(_) => {
                if locked(&running.requests).is_empty() {
                    lines.close();
                }
                continue;
            }
        };
        let Ok(mut bytes) = serde_json::to_vec(&line) else { continue };
        bytes.push(b'\n');
        if stdin.write_all(&bytes).await.is_err() {
            // The reader learns why the process ended.
            std::future::pending::<()>().await;
        }
    }
}

/// Hands the lines of a process to the requests that they belong to, until its standard output closes.
async fn read_lines(running: &Running, stdout: ChildStdout) {
    let mut stdout = BufReader::with_capacity(256 << 10, stdout);
    let mut line = Vec::new();
    loop {
        line.clear();
        match stdout.read_until(b'\n', &mut line).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        match serde_json::from_slice(&line) {
            Ok(FromServing::Pieces(pieces)) => {
                let requests = locked(&running.requests);
                for piece in pieces {
                    if let Some(sender) = requests.get(&piece.id) {
                        drop(sender.send(Ok(piece)));
                    }
                }
            }
            Ok(FromServing::Failed { id, error }) => {
                if let Some(sender) = locked(&running.requests).remove(&id) {
                    drop(sender.send(Err(error)));
                }
            }
            Ok(FromServing::State(state)) => *locked(&running.state) = state,
            Err(error) => tracing::warn!(%error, "a serving process wrote an invalid line"),
        }
    }
}
