//! Serves Python code of the user until SIGTERM or Ctrl-C: what `rlood reward serve` and `rlood env serve` have in common.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{ExitCode, ExitStatus};
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::reward::python::{PythonError, PythonServer, Settings};
use crate::reward::signature::Key;

/// Interval between two checks that the Python process still runs.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Why the Python code is not served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A flag is invalid.
    #[error("{0}")]
    Setting(String),
    /// Python, a file, a function or a class cannot be used.
    #[error(transparent)]
    Python(#[from] PythonError),
    /// A system call failed.
    #[error("cannot {doing}")]
    System {
        /// The operation that failed.
        doing: String,
        /// Error of the underlying operation.
        #[source]
        source: std::io::Error,
    },
    /// The Python process that serves the code exited by itself.
    #[error("the Python process that serves the {0} ended ({1}); see its output above")]
    Ended(&'static str, ExitStatus),
}

impl ServeError {
    /// Whether the error is an invalid command line (exit code 2).
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Setting(_) | Self::Python(PythonError::Setting(_)))
    }

    fn system(doing: &str) -> impl FnOnce(std::io::Error) -> Self {
        let doing = doing.to_owned();
        move |source| ServeError::System { doing, source }
    }
}

/// Parses the secrets of `--secret`, separated by spaces.
///
/// # Errors
/// Fails if one is not a signing secret.
pub(super) fn read_secrets(given: Option<&str>) -> Result<Vec<String>, ServeError> {
    let secrets: Vec<String> = given.unwrap_or_default().split_whitespace().map(str::to_owned).collect();
    for secret in &secrets {
        Key::parse(secret).map_err(|error| ServeError::Setting(format!("--secret: {error}")))?;
    }
    Ok(secrets)
}

/// The working directory, from which relative paths start.
///
/// # Errors
/// Fails if the directory is gone.
pub(super) fn working_directory() -> Result<PathBuf, ServeError> {
    std::env::current_dir().map_err(ServeError::system("find the working directory"))
}

/// Serves until a signal arrives, then returns exit code 0. Prints the address and what `stanza` makes of the server. `served` names
/// what is served, in the plural.
///
/// # Errors
/// Fails when the Python code cannot be used, or the serving process exits by itself.
pub(super) async fn serve(
    listen: &str,
    settings: Settings,
    served: &'static str,
    stanza: fn(&PythonServer, bool) -> String,
) -> Result<ExitCode, ServeError> {
    let is_signed = !settings.secrets.is_empty();
    let stop_on = |kind| signal(kind).map_err(ServeError::system("listen for the signals SIGTERM and SIGINT"));
    let mut signals: (Signal, Signal) = (stop_on(SignalKind::terminate())?, stop_on(SignalKind::interrupt())?);
    let listener = TcpListener::bind(listen).map_err(ServeError::system(&format!("listen on {listen}")))?;
    let starting = tokio::task::spawn_blocking(move || PythonServer::start(&listener, &settings));
    let started = tokio::select! {
        started = starting => started.map_err(|error| ServeError::System { doing: "start Python".to_owned(), source: error.into() })?,
        _ = signals.0.recv() => return Ok(ExitCode::SUCCESS),
        _ = signals.1.recv() => return Ok(ExitCode::SUCCESS),
    };
    let mut server = started?;
    if !is_signed && !server.address.ip().is_loopback() {
        tracing::warn!("without --secret every client that reaches {} may call these {served}", server.address);
    }
    println!("listening on http://{}", server.address);
    println!("{}", stanza(&server, is_signed));
    let ended = loop {
        tokio::select! {
            _ = signals.0.recv() => break None,
            _ = signals.1.recv() => break None,
            () = tokio::time::sleep(POLL_INTERVAL) => if let Some(status) = server.ended() { break Some(status) },
        }
    };
    match ended {
        Some(status) => Err(ServeError::Ended(served, status)),
        None => {
            // After a second signal the command exits without waiting for requests in progress.
            tokio::select! {
                _ = tokio::task::spawn_blocking(move || server.stop()) => {}
                _ = signals.0.recv() => {}
                _ = signals.1.recv() => {}
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// The URL of something that the server serves, as another machine would call it.
pub(super) fn url(server: &PythonServer, name: &str) -> String {
    let host = match server.address.ip() {
        ip if ip.is_unspecified() => "THIS_MACHINE".to_owned(),
        ip if ip.is_ipv6() => format!("[{ip}]"),
        ip => ip.to_string(),
    };
    format!("http://{host}:{}/{name}", server.address.port())
}
