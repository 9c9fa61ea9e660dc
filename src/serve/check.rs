//! `rlood check`: would a server start here?

use std::path::Path;
use std::process::ExitCode;

use super::ServeError;
use crate::config::ServeConfig;
use crate::engine::gpu;
use crate::engine::kernels::isa::Isa;
use crate::files::DataDir;
use crate::outgoing::OutgoingPolicy;
use crate::store;

/// A finding: what was looked at, and what is there or what is wrong.
type Finding = (&'static str, Result<String, String>);

/// Prints versions, data directory, devices and address, one line each; the exit code is 0 when a server would start.
///
/// # Errors
/// None: what is wrong is printed.
pub async fn run(config: ServeConfig) -> Result<ExitCode, ServeError> {
    let findings: [Finding; 8] = [
        ("rlood", Ok(env!("CARGO_PKG_VERSION").to_owned())),
        ("sqlite", store::sqlite_version().await.map_err(|error| error.to_string())),
        ("data", look_at_data(&config.data_dir)),
        ("devices", Ok(describe_devices(&config))),
        ("kernels", look_at_kernels(&config)),
        ("gpus", look_at_gpus(&config)),
        ("outgoing", look_at_outgoing(&config)),
        ("listen", look_at_address(&config).await),
    ];
    let mut code = ExitCode::SUCCESS;
    for (what, finding) in findings {
        match finding {
            Ok(text) => println!("ok    {what:<9} {text}"),
            Err(text) => {
                println!("FAIL  {what:<9} {text}");
                code = ExitCode::FAILURE;
            }
        }
    }
    Ok(code)
}

/// An existing directory is locked for a moment; one that does not exist is not made.
fn look_at_data(dir: &Path) -> Result<String, String> {
    if dir.exists() {
        let files = DataDir::open(dir).map_err(|error| with_cause(&error))?;
        let free_mib = files.free_bytes().map_err(|error| with_cause(&error))? / (1024 * 1024);
        return Ok(format!("{}, {free_mib} MiB free", dir.display()));
    }
    let absolute = std::path::absolute(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    let Some(parent) = absolute.ancestors().find(|ancestor| ancestor.exists()) else {
        return Err(format!("{}: no directory above it exists", dir.display()));
    };
    match tempfile::tempfile_in(parent) {
        Ok(_) => Ok(format!("{}, to be created", dir.display())),
        Err(error) => Err(format!("{} cannot be created: {error}; choose another --data-dir", dir.display())),
    }
}

fn describe_devices(config: &ServeConfig) -> String {
    if config.devices.is_empty() {
        return "none: only workers started by hand".to_owned();
    }
    let names: Vec<String> = config.devices.iter().map(ToString::to_string).collect();
    format!("{}, {} compute threads each", names.join(", "), config.threads_per_worker())
}

/// The rung of the CPU's kernels.
fn look_at_kernels(config: &ServeConfig) -> Result<String, String> {
    let isa = Isa::choose(config.isa.as_str()).map_err(|error| format!("--isa: {error}"))?;
    let available: Vec<&str> = Isa::available().map(Isa::name).collect();
    let refused = Isa::refused().map_or(String::new(), |why| format!("; no amx: {why}"));
    Ok(format!("{isa}; this machine has {}{refused}", available.join(", ")))
}

/// Those of the pool are opened, so that their kernels are loaded; others are listed.
fn look_at_gpus(config: &ServeConfig) -> Result<String, String> {
    let mut asked = config.gpus().peekable();
    if asked.peek().is_some() {
        return asked.map(gpu::try_open).collect::<Result<Vec<String>, String>>().map(|gpus| gpus.join("; "));
    }
    match gpu::list() {
        Ok(gpus) if gpus.is_empty() => Ok("none used; the driver lists none".to_owned()),
        Ok(gpus) => {
            let names: Vec<String> = gpus.iter().map(ToString::to_string).collect();
            Ok(format!("none used; there is {}", names.join("; ")))
        }
        Err(why) => Ok(format!("none used; {why}")),
    }
}

fn look_at_outgoing(config: &ServeConfig) -> Result<String, String> {
    OutgoingPolicy::parse(&config.allow_outgoing).map_err(|error| format!("--allow-outgoing: {error}"))?;
    if config.allow_outgoing.is_empty() {
        return Ok("public addresses only".to_owned());
    }
    Ok(format!("public addresses, and {}", config.allow_outgoing.join(", ")))
}

async fn look_at_address(config: &ServeConfig) -> Result<String, String> {
    match tokio::net::TcpListener::bind(config.listen).await {
        Ok(_) => Ok(format!("{} is free", config.listen)),
        Err(error) => Err(format!("{} cannot be used: {error}; choose another --listen address", config.listen)),
    }
}

fn with_cause(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}
