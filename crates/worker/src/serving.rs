//! `rlood serving`: keeps models loaded and generates for many requests at once. The server starts one such process for each
//! device that serves; it reads [`ToServing`] lines from standard input, writes [`FromServing`] lines to standard output, and
//! exits when standard input closes.

mod models;
mod share;

use std::io::{BufRead, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::{Duration, Instant};

use rlood_types::serving::{FromServing, ServedPiece, ServingState, StartServing, ToServing};

use crate::args::ServingArgs;
use crate::device::machine_threads;
use crate::engine::backend::BackendKind;
use crate::exit::end_process;
use crate::one_shot::{EXIT_ORPHAN, OneShotError, be_killed_first, failed};
use models::{Loaded, Models};
use share::Share;

/// Minimum time between two reports of the process's state while it generates.
const STATE_INTERVAL: Duration = Duration::from_millis(250);

/// A message to the thread that generates.
enum Message {
    /// A line from the server.
    Line(ToServing),
    /// A model was loaded, or could not be.
    Loaded(Box<Loaded>),
}

/// Runs `rlood serving` until standard input closes.
///
/// # Errors
/// Fails when the device is unknown, or standard output is closed.
pub fn run(args: &ServingArgs) -> Result<ExitCode, OneShotError> {
    be_killed_first();
    let backend = BackendKind::of_device(&args.device.to_string()).map_err(failed("cannot use the device"))?;
    let (sender, messages) = mpsc::channel();
    read_lines(sender.clone()).map_err(failed("cannot start the thread that reads standard input"))?;
    let models = Models::new(backend, args.memory_limit, args.max_rows, sender);
    let threads = args.threads.unwrap_or_else(machine_threads) as usize;
    let share = args.lending.as_deref().and_then(|path| share_cores(path, threads, args.share));
    Process { models, share, messages, reported: ServingState::default(), reported_at: Instant::now() }.run()?;
    Ok(ExitCode::SUCCESS)
}

/// Opens the file of lent cores. Without it, training and serving only compete for the cores.
fn share_cores(path: &Path, threads: usize, share: f64) -> Option<Share> {
    Share::open(path, threads, share)
        .inspect_err(|error| tracing::warn!(%error, path = %path.display(), "cannot borrow cores from workers"))
        .ok()
}

/// Starts the thread that forwards lines from standard input, and ends the process when the server is gone.
fn read_lines(sender: Sender<Message>) -> std::io::Result<()> {
    let forward = move || {
        for line in std::io::stdin().lock().lines() {
            let Ok(line) = line else { break };
            match serde_json::from_str(&line) {
                Ok(line) => drop(sender.send(Message::Line(line))),
                Err(error) => tracing::error!(%error, "the server sent an invalid line"),
            }
        }
        end_process(EXIT_ORPHAN);
    };
    std::thread::Builder::new().name("requests".to_owned()).spawn(forward).map(drop)
}

struct Process {
    models: Models,
    /// None if no training uses the same cores.
    share: Option<Share>,
    messages: Receiver<Message>,
    reported: ServingState,
    reported_at: Instant,
}

impl Process {
    fn run(mut self) -> Result<(), OneShotError> {
        while self.receive()? {
            let rest = self.share.as_mut().map_or(Duration::ZERO, Share::rest);
            if !rest.is_zero() {
                std::thread::sleep(rest);
                continue;
            }
            let (pieces, failures) = self.compute(Models::choose);
            self.write(pieces, failures)?;
            let failures = self.compute(Models::advance);
            self.write(Vec::new(), failures)?;
            self.report()?;
        }
        Ok(())
    }

    /// Computes on the cores that this process may use now.
    fn compute<T>(&mut self, step: impl FnOnce(&mut Models) -> T) -> T {
        match &mut self.share {
            Some(share) => share.compute(|| step(&mut self.models)),
            None => step(&mut self.models),
        }
    }

    /// Handles the messages that have arrived; waits for one if there is nothing to generate. Returns false when no
    /// message can arrive any more.
    fn receive(&mut self) -> Result<bool, OneShotError> {
        loop {
            let message = match self.models.is_idle() {
                true => {
                    if let Some(share) = &mut self.share {
                        share.give_back();
                    }
                    match self.messages.recv_timeout(STATE_INTERVAL) {
                        Ok(message) => Some(message),
                        Err(RecvTimeoutError::Timeout) => {
                            self.report()?;
                            continue;
                        }
                        Err(RecvTimeoutError::Disconnected) => return Ok(false),
                    }
                }
                false => match self.messages.try_recv() {
                    Ok(message) => Some(message),
                    Err(TryRecvError::Empty) => None,
                    Err(TryRecvError::Disconnected) => return Ok(false),
                },
            };
            let failures = match message {
                None => return Ok(true),
                Some(Message::Line(ToServing::Start(start))) => {
                    let StartServing { id, model, request } = *start;
                    self.models.start(id, model, request)
                }
                Some(Message::Line(ToServing::Cancel(id))) => self.models.cancel(id),
                Some(Message::Loaded(loaded)) => self.models.add(*loaded),
            };
            self.write(Vec::new(), failures)?;
        }
    }

    fn write(&mut self, pieces: Vec<ServedPiece>, failures: Vec<FromServing>) -> Result<(), OneShotError> {
        let pieces = (!pieces.is_empty()).then_some(FromServing::Pieces(pieces));
        let lines: Vec<FromServing> = pieces.into_iter().chain(failures).collect();
        if lines.is_empty() {
            return Ok(());
        }
        let mut bytes = Vec::new();
        for line in &lines {
            serde_json::to_writer(&mut bytes, line).map_err(failed("cannot write an answer"))?;
            bytes.push(b'\n');
        }
        let mut stdout = std::io::stdout().lock();
        stdout.write_all(&bytes).and_then(|()| stdout.flush()).map_err(failed("cannot write an answer"))
    }

    /// Reports the state if it changed: at once if models, or whether there is work, changed, else from time to time.
    fn report(&mut self) -> Result<(), OneShotError> {
        let state = self.models.state();
        let is_urgent = state.models != self.reported.models || (state.running == 0) != (self.reported.running == 0);
        if state == self.reported || (!is_urgent && self.reported_at.elapsed() < STATE_INTERVAL) {
            return Ok(());
        }
        (self.reported, self.reported_at) = (state.clone(), Instant::now());
        self.write(Vec::new(), vec![FromServing::State(state)])
    }
}
