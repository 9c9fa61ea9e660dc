//! Compose store, http, supervisor and the requeue tick; drain on SIGTERM.
//!
//! [`run`] is `rlood serve`; [`start`] brings a server up inside this process, for the demo and for tests.

pub mod check;
mod listen;

use std::io::Write;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::config::ServeConfig;
use crate::supervisor::{Children, Lost, Supervisor};

/// What workers have to checkpoint and requeue; with what follows the whole drain stays below 30 s.
const WORKERS_STOP: Duration = Duration::from_secs(25);

/// Why a server could not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address is taken or not ours.
    #[error("cannot listen on {address}; choose another --listen address (port 0 takes a free one)")]
    Listen {
        /// The address asked for.
        address: SocketAddr,
        /// Why.
        #[source]
        source: std::io::Error,
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

/// A server in this process. Dropping it without [`Running::stop`] leaves its tasks to the runtime.
pub struct Running {
    addr: SocketAddr,
    stop_http: CancellationToken,
    http: JoinHandle<()>,
    supervisor: Supervisor,
}

impl Running {
    /// Where it listens; the port is never 0.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// `http://HOST:PORT`.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Drains: workers checkpoint and requeue their jobs while the API still answers, then streams end and connections
    /// close. Takes less than 30 s.
    pub async fn stop(self) {
        let Self { addr: _, stop_http, http, supervisor } = self;
        supervisor.stop(WORKERS_STOP).await;
        stop_http.cancel();
        if let Err(error) = http.await {
            tracing::error!(%error, "the listener ended badly");
        }
    }
}

/// `rlood serve`: start, say where, serve until SIGTERM or SIGINT, drain. A second signal leaves at once.
///
/// # Errors
/// When the server cannot start.
pub async fn run(config: ServeConfig) -> Result<ExitCode, ServeError> {
    let system = |doing| move |source| ServeError::System { doing, source };
    let mut terminate = signal(SignalKind::terminate()).map_err(system("listen for SIGTERM"))?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(system("listen for SIGINT"))?;
    let running = start(config).await?;
    announce(running.addr()).map_err(system("write to standard output"))?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    tracing::info!("stopping: workers checkpoint and requeue their jobs; a second signal leaves at once");
    tokio::select! {
        () = running.stop() => Ok(ExitCode::SUCCESS),
        _ = terminate.recv() => Ok(ExitCode::FAILURE),
        _ = interrupt.recv() => Ok(ExitCode::FAILURE),
    }
}

/// The first line of standard output, for people and for scripts that wait for it.
///
/// # Errors
/// When standard output is closed.
pub fn announce(addr: SocketAddr) -> std::io::Result<()> {
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "listening on http://{addr}")?;
    stdout.flush()
}

/// Starts a server in this process and returns when it answers.
///
/// # Errors
/// When the data directory, the database or the address cannot be used.
pub async fn start(config: ServeConfig) -> Result<Running, ServeError> {
    let config = Arc::new(config);
    let refused = |source| ServeError::Listen { address: config.listen, source };
    let listener = TcpListener::bind(config.listen).await.map_err(refused)?;
    let addr = listener.local_addr().map_err(refused)?;
    let stop_http = CancellationToken::new();
    let router = axum::Router::new();
    let http = tokio::spawn(listen::serve(listener, router, stop_http.clone()));
    let (lost, deaths) = mpsc::unbounded_channel();
    tokio::spawn(report_deaths(deaths));
    let supervisor = Supervisor::start(children(&config, addr)?, &lost);
    Ok(Running { addr, stop_http, http, supervisor })
}

fn children(config: &ServeConfig, addr: SocketAddr) -> Result<Children, ServeError> {
    let program = match &config.worker_program {
        Some(program) => program.clone(),
        None => std::env::current_exe()
            .map_err(|source| ServeError::System { doing: "find the rlood binary to start workers from", source })?,
    };
    Ok(Children {
        program,
        server: format!("http://{}", reachable(addr)),
        token: config.worker_token.clone(),
        devices: config.devices.clone(),
        threads: config.threads_per_worker(),
        scratch_dir: config.data_dir.join("scratch"),
        isa: config.isa,
        log: config.log.clone(),
        log_format: config.log_format,
    })
}

/// An address children can call: the unspecified one stands for all, loopback among them.
fn reachable(addr: SocketAddr) -> SocketAddr {
    match addr {
        SocketAddr::V4(v4) if v4.ip().is_unspecified() => SocketAddr::from(([127, 0, 0, 1], v4.port())),
        SocketAddr::V6(v6) if v6.ip().is_unspecified() => SocketAddr::from((std::net::Ipv6Addr::LOCALHOST, v6.port())),
        other => other,
    }
}

async fn report_deaths(mut deaths: mpsc::UnboundedReceiver<Lost>) {
    while let Some(lost) = deaths.recv().await {
        tracing::error!(worker = %lost.worker, "lost");
    }
}
