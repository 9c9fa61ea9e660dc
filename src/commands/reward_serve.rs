//! `rlood reward serve rewards.py:accuracy,format`: serves Python functions as reward services of contract v1,
//! until SIGTERM or Ctrl-C.

use std::net::TcpListener;
use std::process::{ExitCode, ExitStatus};
use std::time::Duration;

use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use crate::config::RewardServeArgs;
use crate::reward::python::{PythonError, PythonServer, Settings, read_targets};
use crate::reward::signature::Key;

/// Interval between two checks that the Python process still runs.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Why the functions are not served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A flag is invalid.
    #[error("{0}")]
    Setting(String),
    /// Python, a file or a function cannot be used.
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
    /// The Python process that serves the functions exited by itself.
    #[error("the Python process that serves the reward functions ended ({0}); see its output above")]
    Ended(ExitStatus),
}

impl ServeError {
    /// Whether the error is an invalid command line (exit code 2).
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Setting(_) | Self::Python(PythonError::Setting(_)))
    }
}

/// Serves the functions until a signal arrives, then returns exit code 0.
///
/// # Errors
/// Fails when a flag or a function is invalid, or the serving process exits by itself.
pub async fn run(args: RewardServeArgs) -> Result<ExitCode, ServeError> {
    let system = |doing: &str| {
        let doing = doing.to_owned();
        move |source| ServeError::System { doing, source }
    };
    let directory = std::env::current_dir().map_err(system("find the working directory"))?;
    let secrets: Vec<String> =
        args.secret.as_deref().unwrap_or_default().split_whitespace().map(str::to_owned).collect();
    for secret in &secrets {
        Key::parse(secret).map_err(|error| ServeError::Setting(format!("--secret: {error}")))?;
    }
    let settings = Settings {
        python: args.python,
        processes: args.processes,
        batch_size: args.batch_size,
        call_timeout: Duration::from_secs_f64(args.timeout),
        reload: args.reload,
        secrets,
        allowed_hosts: args.allowed_hosts.unwrap_or_default(),
        max_connections: args.max_connections,
        ..Settings::new(read_targets(&args.functions, &directory)?)
    };
    let is_signed = !settings.secrets.is_empty();
    let mut signals = (
        signal(SignalKind::terminate()).map_err(system("listen for the signals SIGTERM and SIGINT"))?,
        signal(SignalKind::interrupt()).map_err(system("listen for the signals SIGTERM and SIGINT"))?,
    );
    let listener = TcpListener::bind(&args.listen).map_err(system(&format!("listen on {}", args.listen)))?;
    let starting = tokio::task::spawn_blocking(move || PythonServer::start(&listener, &settings));
    let started = tokio::select! {
        started = starting => started.map_err(|error| ServeError::System { doing: "start Python".to_owned(), source: error.into() })?,
        _ = signals.0.recv() => return Ok(ExitCode::SUCCESS),
        _ = signals.1.recv() => return Ok(ExitCode::SUCCESS),
    };
    let mut server = started?;
    if !is_signed && !server.address.ip().is_loopback() {
        tracing::warn!("without --secret every client that reaches {} may call these reward functions", server.address);
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
        Some(status) => Err(ServeError::Ended(status)),
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

/// Returns the served functions as rewards to paste into a job.
fn stanza(server: &PythonServer, is_signed: bool) -> String {
    let host = match server.address.ip() {
        ip if ip.is_unspecified() => "THIS_MACHINE".to_owned(),
        ip if ip.is_ipv6() => format!("[{ip}]"),
        ip => ip.to_string(),
    };
    let reward = |name: &String| {
        let url = format!("http://{host}:{}/{name}", server.address.port());
        let mut reward = json!({"type": "webhook", "name": name, "url": url, "completion_ids": true});
        if is_signed {
            reward["secret"] = json!("whsec_… (the secret of this server)");
        }
        format!("  {reward}")
    };
    let rewards: Vec<String> = server.functions.iter().map(reward).collect();
    format!("\"rewards\": [\n{}\n]", rewards.join(",\n"))
}
