//! The `rlood` binary: parse the command line, run a role.

use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;
use rlood::causes::with_causes;
use rlood::config::{Cli, Command, LogFormat, RewardCommand};
use rlood::reward::check;
use rlood::{backup, bench, convert, demo, generator, http, keys, prober, reward_server, serve, worker};

/// A setting cannot be used, as with clap's own errors.
const EXIT_USAGE: u8 = 2;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return unparsed(&error),
    };
    let format = cli.log_format;
    // The demo shows its progress itself: the server's usual log lines would tear it apart.
    let log = if matches!(cli.command, Command::Demo(_)) && cli.log == "info" { "warn" } else { &cli.log };
    if let Err(message) = start_logging(log, format) {
        return refuse(format, &message);
    }
    // Every TLS client of the process takes this provider; a second installation is no error.
    let _ = rustls::crypto::ring::default_provider().install_default();
    match cli.command {
        Command::Serve(args) => match args.resolve(&cli.log, format) {
            Ok(config) => on_runtime(format, None, serve::run(config)),
            Err(error) => refuse(format, &error),
        },
        Command::Check(args) => match args.resolve(&cli.log, format) {
            Ok(config) => on_runtime(format, None, serve::check::run(config)),
            Err(error) => refuse(format, &error),
        },
        Command::Backup(args) => on_runtime(format, None, backup::backup(args)),
        Command::Restore(args) => on_runtime(format, None, backup::restore(args)),
        Command::Keys(args) => on_runtime(format, None, keys::run(args)),
        Command::Openapi(args) => openapi(args.schemas.as_deref()).unwrap_or_else(|error| fail(format, &*error)),
        Command::Convert(args) => convert::run(&args).unwrap_or_else(|error| fail(format, &error)),
        Command::Demo(args) => on_runtime(format, None, demo::run(args)),
        Command::Worker(args) => {
            limit_threads(args.threads);
            on_runtime(format, Some(2), worker::run(args))
        }
        Command::Probe(args) => {
            limit_threads(args.threads);
            on_runtime(format, Some(2), prober::run(args))
        }
        Command::Generate(args) => {
            limit_threads(args.threads);
            generator::run(&args).unwrap_or_else(|error| fail(format, &error))
        }
        Command::RewardServer(args) => {
            limit_threads(args.threads);
            on_runtime(format, None, reward_server::run(args))
        }
        Command::Reward(args) => match args.command {
            // Nothing but a flag that cannot be used is an error here.
            RewardCommand::Check(args) => on_runtime(format, None, async {
                Ok::<_, check::CheckError>(check::run(args).await.unwrap_or_else(|error| refuse(format, &error)))
            }),
        },
        Command::Bench(args) => {
            limit_threads(args.threads);
            bench::run(&args).unwrap_or_else(|error| fail(format, &error))
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
    format: LogFormat,
    threads: Option<usize>,
    role: impl Future<Output = Result<ExitCode, E>>,
) -> ExitCode {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    if let Some(threads) = threads {
        builder.worker_threads(threads);
    }
    match builder.enable_all().build() {
        Ok(runtime) => {
            let code = runtime.block_on(role).unwrap_or_else(|error| fail(format, &error));
            // Not dropped: that would wait for blocking calls that nobody needs any more.
            runtime.shutdown_background();
            code
        }
        Err(error) => fail(format, &error),
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

/// A command line that is none: in clap's words and with its exit code.
fn unparsed(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand || !asks_for_json() {
        error.exit();
    }
    let text = error.to_string();
    refuse(LogFormat::Json, &text.trim_start_matches("error: ").trim_end())
}

/// Whether the log was to be JSON, as far as a command line that is none can say it.
fn asks_for_json() -> bool {
    let mut given = std::env::var("RLOOD_LOG_FORMAT").ok();
    let mut words = std::env::args_os().map(|word| word.to_string_lossy().into_owned());
    while let Some(word) = words.next() {
        match word.strip_prefix("--log-format") {
            Some("") => given = words.next(),
            Some(rest) => given = rest.strip_prefix('=').map(str::to_owned).or(given),
            None => {}
        }
    }
    given.as_deref() == Some(LogFormat::Json.as_str())
}

fn refuse(format: LogFormat, error: &dyn std::fmt::Display) -> ExitCode {
    say(format, &error.to_string());
    ExitCode::from(EXIT_USAGE)
}

/// Says the error and its causes.
fn fail(format: LogFormat, error: &dyn std::error::Error) -> ExitCode {
    say(format, &with_causes(error));
    ExitCode::FAILURE
}

/// The last words of a process that cannot go on, in the form of its log, whatever the log's filter says.
fn say(format: LogFormat, words: &str) {
    match format {
        LogFormat::Text => eprintln!("rlood: {words}"),
        LogFormat::Json => {
            let time = jiff::Timestamp::now().to_string();
            let fields = serde_json::json!({ "message": words });
            eprintln!(
                "{}",
                serde_json::json!({"timestamp": time, "level": "ERROR", "fields": fields, "target": "rlood"})
            );
        }
    }
}
