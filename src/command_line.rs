//! The entry point of the `rlood` binary: parses the command line and runs a subcommand. It is part of the library because
//! futures are compiled in the crate that polls them, so the binary itself has almost nothing to compile.

use std::io::IsTerminal;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use futures::future::{BoxFuture, LocalBoxFuture};
use rlood_worker::{certify, preflight, serving};

use crate::commands::{
    adapter_sidecar, backup, bench, convert, env_check, env_serve, gc, keys, python_serve, reward_check, reward_serve,
    runtime,
};
use crate::config::{COMPUTE_THREADS, Cli, Command as Role, EnvCommand, LogFormat, RewardCommand, ServeConfig};
use crate::error_text::with_causes;
use crate::{config, demo, engine, exporter, http, judge, reward_server, serve, worker};

/// Exit code for an invalid setting, the same as for clap's own errors.
const EXIT_USAGE: u8 = 2;

/// Runs the subcommand that the command line names.
pub fn run() -> ExitCode {
    // If a shell asks for completions of a command line, clap prints them here and ends the process.
    clap_complete::CompleteEnv::with_factory(Cli::command).complete();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return exit_with_usage_error(&error),
    };
    let format = cli.log_format;
    // The demo shows its own progress, which the server's usual log lines would disturb.
    let log = if matches!(cli.command, Role::Demo(_)) && cli.log == "info" { "warn" } else { &cli.log };
    if let Err(message) = start_logging(log, format) {
        return exit_usage(format, &message);
    }
    // Every TLS client of the process uses this provider; installing it a second time is not an error.
    let _ = rustls::crypto::ring::default_provider().install_default();
    match cli.command {
        Role::Serve(args) => match args.resolve(&cli.log, format) {
            Ok(config) => on_runtime(format, None, serve::run(config)),
            Err(error) => exit_usage(format, &error),
        },
        Role::Check(args) => match args.resolve(&cli.log, format) {
            Ok(config) => on_runtime(format, None, serve::check::run(config)),
            Err(error) => exit_usage(format, &error),
        },
        Role::Backup(args) => on_runtime(format, None, backup::backup(args)),
        Role::Restore(args) => on_runtime(format, None, backup::restore(args)),
        Role::Gc(args) => on_runtime(format, None, gc::run(args)),
        Role::Keys(args) => on_runtime(format, None, keys::run(args)),
        Role::Runtime(args) => runtime::run(&args).unwrap_or_else(|error| exit_failure(format, &error)),
        Role::Openapi(args) => openapi(args.schemas.as_deref()).unwrap_or_else(|error| exit_failure(format, &*error)),
        Role::Convert(args) => convert::run(&args).unwrap_or_else(|error| exit_failure(format, &error)),
        Role::Api(command) => {
            on_runtime(format, None, async move { Ok::<_, std::convert::Infallible>(rlood_cli::run(command).await) })
        }
        Role::Demo(args) => on_runtime(format, None, demo::run(args)),
        Role::AdapterSidecar(args) => on_runtime(format, None, adapter_sidecar::run(args)),
        Role::Worker(args) => computing(format, args.threads, || on_runtime(format, Some(2), worker::run(args))),
        Role::Preflight(args) => computing(format, args.threads, || on_runtime(format, Some(2), preflight::run(args))),
        Role::ExportCheckpoint(args) => computing(format, args.threads, || {
            exporter::run(&args).unwrap_or_else(|error| exit_failure(format, &error))
        }),
        Role::Serving(args) => {
            computing(format, args.threads, || serving::run(&args).unwrap_or_else(|error| exit_failure(format, &error)))
        }
        Role::Certifier(args) => {
            computing(format, args.threads, || certify::run(&args).unwrap_or_else(|error| exit_failure(format, &error)))
        }
        Role::Judge(args) => computing(format, args.threads, || on_runtime(format, Some(2), judge::run(args))),
        Role::RewardServer(args) => {
            computing(format, args.threads, || on_runtime(format, None, reward_server::run(args)))
        }
        Role::Reward(args) => match args.command {
            RewardCommand::Serve(args) => serving_python(format, reward_serve::run(args)),
            RewardCommand::Check(args) => checking(format, reward_check::run(args)),
        },
        Role::Env(args) => match args.command {
            EnvCommand::Serve(args) => serving_python(format, env_serve::run(args)),
            EnvCommand::Check(args) => checking(format, env_check::run(args)),
        },
        Role::Bench(args) => computing(format, args.threads, || {
            bench::run(&args, start_server).unwrap_or_else(|error| exit_failure(format, &error))
        }),
    }
}

/// Starts the server that `rlood bench` asks.
fn start_server(config: ServeConfig) -> BoxFuture<'static, Result<bench::serving::Server, String>> {
    Box::pin(async move {
        let server = serve::start(config).await.map_err(|error| with_causes(&error))?;
        Ok(bench::serving::Server { addr: server.addr(), stop: Box::pin(server.stop()) })
    })
}

/// Serves Python code. An error of the command line has the exit code of a usage error.
fn serving_python(
    format: LogFormat,
    serving: impl Future<Output = Result<ExitCode, python_serve::ServeError>> + 'static,
) -> ExitCode {
    on_runtime(format, None, async move {
        match serving.await {
            Err(error) if error.is_usage() => Ok(exit_usage(format, &error)),
            ended => ended,
        }
    })
}

/// Runs a check of a service. A check fails only for an invalid flag, so every error of it is a usage error.
fn checking(
    format: LogFormat,
    check: impl Future<Output = Result<ExitCode, reward_check::CheckError>> + 'static,
) -> ExitCode {
    on_runtime(format, None, async move {
        Ok::<_, std::convert::Infallible>(check.await.unwrap_or_else(|error| exit_usage(format, &error)))
    })
}

/// Prints the OpenAPI document to standard output, or writes the contracts' schemas to a directory.
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

/// Runs a subcommand to its end on a tokio runtime with `threads` threads; None = one per core.
fn on_runtime<E: std::error::Error + 'static>(
    format: LogFormat,
    threads: Option<usize>,
    role: impl Future<Output = Result<ExitCode, E>> + 'static,
) -> ExitCode {
    block_on(format, threads, Box::pin(async move { Ok(role.await?) }))
}

fn block_on(
    format: LogFormat,
    threads: Option<usize>,
    role: LocalBoxFuture<'static, Result<ExitCode, Box<dyn std::error::Error>>>,
) -> ExitCode {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    if let Some(threads) = threads {
        builder.worker_threads(threads);
    }
    match builder.enable_all().build() {
        Ok(runtime) => {
            let code = runtime.block_on(role).unwrap_or_else(|error| exit_failure(format, &*error));
            // The runtime is leaked, because dropping it would wait for blocking calls whose results are no longer needed.
            runtime.shutdown_background();
            code
        }
        Err(error) => exit_failure(format, &error),
    }
}

/// Runs a subcommand that computes, with thread pools of the requested size. candle and rayon read the size from an environment
/// variable, which can be set safely only for a new process, so this process re-executes itself once. The server sets the
/// variable for its worker processes.
fn computing(format: LogFormat, threads: Option<u32>, role: impl FnOnce() -> ExitCode) -> ExitCode {
    match config::gpu_memory_limit() {
        Ok(bytes) => engine::gpu::limit_memory(bytes),
        Err(error) => return exit_usage(format, &error),
    }
    let Some(threads) = threads.map(|threads| threads.to_string()) else { return role() };
    if std::env::var(COMPUTE_THREADS).is_ok_and(|set| set == threads) {
        return role();
    }
    let error = match std::env::current_exe() {
        Ok(program) => Command::new(program).args(std::env::args_os().skip(1)).env(COMPUTE_THREADS, threads).exec(),
        Err(error) => error,
    };
    exit_usage(format, &format_args!("--threads: could not re-execute the program with {COMPUTE_THREADS} set: {error}"))
}

fn start_logging(filter: &str, format: LogFormat) -> Result<(), String> {
    let filter = tracing_subscriber::EnvFilter::try_new(by_crate(filter))
        .map_err(|error| format!("RLOOD_LOG (--log) '{filter}' is not a log filter: {error}; use info, for example"))?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // Write errors are ignored, because a closed standard error must not end the process.
        .log_internal_errors(false)
        .with_ansi(std::io::stderr().is_terminal());
    match format {
        LogFormat::Text => builder.init(),
        LogFormat::Json => builder.json().init(),
    }
    Ok(())
}

/// Translates module names in a log filter, such as `rlood::store`, from the time when rlood was one crate
/// to the current crates.
fn by_crate(filter: &str) -> String {
    let directive = |directive: &str| {
        let Some(path) = directive.trim().strip_prefix("rlood::") else { return directive.to_owned() };
        let end = path.find([':', '=', '[']).unwrap_or(path.len());
        let (module, rest) = path.split_at(end);
        match module {
            "store" => format!("rlood_store{rest}"),
            "files" => format!("rlood_store::files{rest}"),
            "reward" => format!("rlood_rewards{rest}"),
            "engine" => format!("rlood_engine{rest}"),
            "worker" => format!("rlood_worker::{path}"),
            "generator" => format!("rlood_worker::serving{rest}"),
            "prober" => format!("rlood_worker::preflight{rest}"),
            "errand" => format!("rlood_worker::one_shot{rest}"),
            _ => directive.to_owned(),
        }
    };
    filter.split(',').map(directive).collect::<Vec<_>>().join(",")
}

/// Prints clap's usage error and exits with its code.
fn exit_with_usage_error(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand || !asks_for_json() {
        error.exit();
    }
    let text = error.to_string();
    exit_usage(LogFormat::Json, &text.trim_start_matches("error: ").trim_end())
}

/// Whether the user asked for JSON logs. Reads the flag and the variable directly, because clap could not
/// parse the command line.
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

fn exit_usage(format: LogFormat, error: &dyn std::fmt::Display) -> ExitCode {
    print_error(format, &error.to_string());
    ExitCode::from(EXIT_USAGE)
}

/// Prints the error and its causes, and returns the exit code of a failure.
fn exit_failure(format: LogFormat, error: &dyn std::error::Error) -> ExitCode {
    print_error(format, &with_causes(error));
    ExitCode::FAILURE
}

/// Prints a fatal error in the format of the log, regardless of the log filter.
fn print_error(format: LogFormat, words: &str) {
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

#[cfg(test)]
mod tests {
    use super::by_crate;

    #[test]
    fn filters_of_versions_of_one_crate_name_the_same_modules() {
        let cases = [
            ("info", "info"),
            ("rlood=debug", "rlood=debug"),
            ("info,rlood::store=debug", "info,rlood_store=debug"),
            ("rlood::store::claims=trace,warn", "rlood_store::claims=trace,warn"),
            ("rlood::worker[job]=debug", "rlood_worker::worker[job]=debug"),
            ("rlood::generator=debug", "rlood_worker::serving=debug"),
            ("rlood::prober=debug", "rlood_worker::preflight=debug"),
            ("rlood::reward_server=debug,rlood::reward", "rlood::reward_server=debug,rlood_rewards"),
        ];
        for (given, expected) in cases {
            assert_eq!(by_crate(given), expected);
        }
    }
}
