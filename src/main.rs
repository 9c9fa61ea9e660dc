//! The `rlood` binary: parse the command line, run a role.

use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use rlood::config::{Cli, Command, LogFormat, RewardCommand};
use rlood::reward::check;
use rlood::{backup, bench, convert, demo, generator, http, keys, prober, reward_server, serve, worker};

/// A setting cannot be used, as with clap's own errors.
const EXIT_USAGE: u8 = 2;

fn main() -> ExitCode {
    let cli = Cli::parse();
    // The demo shows its progress itself: the server's usual log lines would tear it apart.
    let log = if matches!(cli.command, Command::Demo(_)) && cli.log == "info" { "warn" } else { &cli.log };
    if let Err(message) = start_logging(log, cli.log_format) {
        return refuse(&message);
    }
    // Every TLS client of the process takes this provider; a second installation is no error.
    let _ = rustls::crypto::ring::default_provider().install_default();
    match cli.command {
        Command::Serve(args) => match args.resolve(&cli.log, cli.log_format) {
            Ok(config) => on_runtime(None, serve::run(config)),
            Err(error) => refuse(&error),
        },
        Command::Check(args) => match args.resolve(&cli.log, cli.log_format) {
            Ok(config) => on_runtime(None, serve::check::run(config)),
            Err(error) => refuse(&error),
        },
        Command::Backup(args) => on_runtime(None, backup::backup(args)),
        Command::Restore(args) => on_runtime(None, backup::restore(args)),
        Command::Keys(args) => on_runtime(None, keys::run(args)),
        Command::Openapi(args) => openapi(args.schemas.as_deref()).unwrap_or_else(|error| fail(&*error)),
        Command::Convert(args) => convert::run(&args).unwrap_or_else(|error| fail(&error)),
        Command::Demo(args) => on_runtime(None, demo::run(args)),
        Command::Worker(args) => {
            limit_threads(args.threads);
            on_runtime(Some(2), worker::run(args))
        }
        Command::Probe(args) => {
            limit_threads(args.threads);
            on_runtime(Some(2), prober::run(args))
        }
        Command::Generate(args) => {
            limit_threads(args.threads);
            generator::run(&args).unwrap_or_else(|error| fail(&error))
        }
        Command::RewardServer(args) => {
            limit_threads(args.threads);
            on_runtime(None, reward_server::run(args))
        }
        Command::Reward(args) => match args.command {
            // Nothing but a flag that cannot be used is an error here.
            RewardCommand::Check(args) => on_runtime(None, async {
                Ok::<_, check::CheckError>(check::run(args).await.unwrap_or_else(|error| refuse(&error)))
            }),
        },
        Command::Bench(args) => {
            limit_threads(args.threads);
            bench::run(&args).unwrap_or_else(|error| fail(&error))
        }
    }
}

/// The document to standard output, or the reward contract's schemas into a directory.
fn openapi(schemas: Option<&Path>) -> Result<ExitCode, Box<dyn std::error::Error>> {
    match schemas {
        None => println!("{}", http::openapi().to_pretty_json()?),
        Some(dir) => {
            std::fs::create_dir_all(dir)?;
            for (name, text) in http::schemas::contract_schemas() {
                std::fs::write(dir.join(name), text)?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs a role to its end; `threads` of the async runtime, None = one a core.
fn on_runtime<E: std::error::Error>(
    threads: Option<usize>,
    role: impl Future<Output = Result<ExitCode, E>>,
) -> ExitCode {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    if let Some(threads) = threads {
        builder.worker_threads(threads);
    }
    match builder.enable_all().build() {
        Ok(runtime) => {
            let code = runtime.block_on(role).unwrap_or_else(|error| fail(&error));
            // Not dropped: that would wait for blocking calls that nobody needs any more.
            runtime.shutdown_background();
            code
        }
        Err(error) => fail(&error),
    }
}

/// Before any other thread exists, so that every pool of the process has the size asked for.
fn limit_threads(threads: Option<u32>) {
    if let Some(threads) = threads {
        #[expect(unsafe_code, reason = "candle and rayon take their thread count from this variable only")]
        // SAFETY: `main` calls this before it starts the runtime: no other thread reads the environment.
        unsafe {
            std::env::set_var("RAYON_NUM_THREADS", threads.to_string());
        }
    }
}

fn start_logging(filter: &str, format: LogFormat) -> Result<(), String> {
    let filter = tracing_subscriber::EnvFilter::try_new(filter)
        .map_err(|error| format!("RLOOD_LOG (--log) '{filter}' is not a log filter: {error}; use info, for example"))?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // A closed standard error must not end anything.
        .log_internal_errors(false)
        .with_ansi(std::io::stderr().is_terminal());
    match format {
        LogFormat::Text => builder.init(),
        LogFormat::Json => builder.json().init(),
    }
    Ok(())
}

fn refuse(error: &dyn std::fmt::Display) -> ExitCode {
    eprintln!("rlood: {error}");
    ExitCode::from(EXIT_USAGE)
}

/// Prints the error and its causes, each once.
fn fail(error: &dyn std::error::Error) -> ExitCode {
    eprint!("rlood: {error}");
    let mut cause = error.source();
    while let Some(error) = cause {
        eprint!(": {error}");
        cause = error.source();
    }
    eprintln!();
    ExitCode::FAILURE
}
