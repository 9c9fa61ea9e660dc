//! `rlood check`: checks whether a server would start here.

mod machine;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::ExitCode;

use super::ServeError;
use crate::config::{ServeConfig, no_key_for};
use crate::engine::gpu;
use crate::engine::kernels::isa::Isa;
use crate::files::{DataDir, free_bytes};
use crate::outgoing::OutgoingPolicy;
use crate::store::{self, Store, StoreError};

/// The result of one check: its name, and a description of the state or of the problem.
type Finding = (&'static str, Result<String, String>);

/// Prints versions, data directory, file system, database, keys, devices, limits and address, one line each. The exit code is 0 if
/// a server would start.
///
/// # Errors
/// Never fails: `rlood check` prints the problems that it finds.
pub(crate) async fn run(mut config: ServeConfig) -> Result<ExitCode, ServeError> {
    let database = open_database(&config.data_dir).await;
    let keys = count_keys(&database).await;
    let keys_are_on = matches!(keys, Ok(Some(_)));
    // Ignored here, because the check of the GPUs below reports GPUs that cannot be used.
    let _ = super::without_gpus(&mut config);
    let findings: Vec<Finding> = vec![
        ("rlood", Ok(env!("CARGO_PKG_VERSION").to_owned())),
        ("sqlite", store::sqlite_version().await.map_err(|error| error.to_string())),
        ("data", check_data(&config.data_dir)),
        ("files", machine::check_file_system(&config.data_dir)),
        ("fsync", machine::check_fsync(&config.data_dir)),
        ("disk", check_disk(&config)),
        ("database", check_database(&database).await),
        ("keys", check_keys(&config, &keys)),
        ("devices", Ok(describe_devices(&config))),
        ("kernels", check_kernels(&config)),
        ("gpus", check_gpus(&config)),
        ("trl", check_trl(&config)),
        ("memory", Ok(describe_memory(&config))),
        ("sockets", machine::check_open_files(config.edge.max_connections)),
        ("outgoing", check_outgoing(config.outgoing_allowed(keys_are_on))),
        ("tls", machine::check_certificates()),
        ("listen", check_address(&config).await),
    ];
    if let Ok(Some(database)) = database {
        database.close().await;
    }
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
    if let Some(text) = readable_by_others(&config.data_dir) {
        println!("warn  {:<9} {text}", "data");
    }
    Ok(code)
}

/// Checks the data directory. An existing directory is locked briefly; a missing one is not created.
fn check_data(dir: &Path) -> Result<String, String> {
    if dir.try_exists().map_err(|error| format!("{} cannot be read: {error}", dir.display()))? {
        DataDir::open(dir).map_err(|error| with_cause(&error))?;
        return Ok(format!("{} exists, and no other server uses it", dir.display()));
    }
    let absolute = std::path::absolute(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    let Some(parent) = absolute.ancestors().find(|ancestor| ancestor.exists()) else {
        return Err(format!("the data directory {} cannot be created: no directory above it exists", dir.display()));
    };
    match tempfile::tempfile_in(parent) {
        Ok(_) => Ok(format!("{} does not exist yet: the server will create it", dir.display())),
        Err(error) => {
            Err(format!("the data directory {} cannot be created: {error}; choose another --data-dir", dir.display()))
        }
    }
}

/// Warns if other users of the machine can read the data directory: prompts, completions, weights. The database file has
/// restricted permissions of its own.
fn readable_by_others(dir: &Path) -> Option<String> {
    let mode = std::fs::metadata(dir).ok()?.permissions().mode();
    (mode & 0o077 != 0)
        .then(|| format!("other users can read {0}: restrict access with 'chmod 700 {0}'", dir.display()))
}

/// Checks that free disk space is above `--disk-reserve`.
fn check_disk(config: &ServeConfig) -> Result<String, String> {
    let dir = machine::nearest(&config.data_dir);
    let free = free_bytes(&dir).map_err(|error| with_cause(&error))?;
    let (free_mib, reserve) = (free >> 20, config.edge.disk_reserve_bytes);
    if free < reserve {
        return Err(format!(
            "the disk has {free_mib} MiB free, less than --disk-reserve ({} MiB): jobs would pause",
            reserve >> 20
        ));
    }
    Ok(format!("the disk has {free_mib} MiB free; jobs pause below {} MiB", reserve >> 20))
}

/// Opens the database without upgrading its schema. Returns None if the data directory has no database.
async fn open_database(dir: &Path) -> Result<Option<Store>, String> {
    let path = dir.join("rlood.db");
    match path.try_exists() {
        Ok(true) => Store::open_as_is(&path).await.map(Some).map_err(|error| with_cause(&error)),
        Ok(false) => Ok(None),
        Err(error) => Err(format!("{} cannot be read: {error}", path.display())),
    }
}

async fn check_database(database: &Result<Option<Store>, String>) -> Result<String, String> {
    let Some(store) = database.as_ref().map_err(String::clone)? else { return Ok("none yet".to_owned()) };
    let checked = async {
        store.check_integrity().await?;
        store.is_current().await
    };
    match checked.await.map_err(|error| with_cause(&error))? {
        true => Ok("the database is intact and has the current version".to_owned()),
        false => Ok("the database is intact, but from an older rlood: the next start upgrades it".to_owned()),
    }
}

/// Counts valid keys in the database; None if no key was ever created.
async fn count_keys(database: &Result<Option<Store>, String>) -> Result<Option<u64>, String> {
    let unread = |why: String| format!("not known: {why}");
    let Some(store) = database.as_ref().map_err(|_| unread("the database cannot be read".to_owned()))? else {
        return Ok(None);
    };
    let count = async {
        // The database of an older rlood has no table of API keys.
        if !store.has_table("api_keys").await? || !store.api_keys_exist().await? {
            return Ok(None);
        }
        store.api_keys_usable(store::clock_ms()).await.map(Some)
    };
    count.await.map_err(|error: StoreError| unread(with_cause(&error)))
}

/// A non-loopback address needs a valid key. Once any key was created, requests without a valid key are refused.
fn check_keys(config: &ServeConfig, keys: &Result<Option<u64>, String>) -> Result<String, String> {
    let keys = keys.clone()?;
    let usable = keys.unwrap_or(0);
    match (config.api_key.is_some(), usable) {
        (false, 0) if !config.listen.ip().is_loopback() => Err(no_key_for(config.listen).to_string()),
        (false, 0) if keys.is_some() => {
            Ok("no API key is valid, so every request would be refused: create one with `rlood keys create`".to_owned())
        }
        (false, 0) => {
            Ok("no API key exists, and the server listens on loopback only: every local request is allowed".to_owned())
        }
        (true, usable) => Ok(format!("the key RLOOD_API_KEY, and {usable} valid keys of `rlood keys`")),
        (false, usable) => Ok(format!("{usable} of `rlood keys`")),
    }
}

fn describe_memory(config: &ServeConfig) -> String {
    match config.memory_per_worker() {
        Some(bytes) => format!("each cpu worker may use {} MiB", bytes >> 20),
        None => "no limit".to_owned(),
    }
}

fn describe_devices(config: &ServeConfig) -> String {
    if config.devices.is_empty() {
        return "no devices: only workers that are started separately run jobs".to_owned();
    }
    let names: Vec<String> = config.devices.iter().map(ToString::to_string).collect();
    format!("workers on {}, {} compute threads each", names.join(", "), config.threads_per_worker())
}

/// The instruction set of the CPU kernels.
fn check_kernels(config: &ServeConfig) -> Result<String, String> {
    let isa = Isa::choose(config.isa.as_str()).map_err(|error| format!("--isa: {error}"))?;
    let available: Vec<&str> = Isa::available().map(Isa::name).collect();
    let refused = Isa::refused().map_or(String::new(), |why| format!("; no amx: {why}"));
    let gain = Isa::bf16_gain().map_or(String::new(), |gain| {
        let least = Isa::MIN_BF16_GAIN;
        format!("; avx512_bf16 is {gain:.2} times as fast as avx512 (auto uses it if this is at least {least})")
    });
    Ok(format!("the CPU kernels use {isa}; this machine supports {}{gain}{refused}", available.join(", ")))
}

/// Lists the packages of the runtime `trl`, without importing them.
fn check_trl(config: &ServeConfig) -> Result<String, String> {
    let device = config.devices.first().map_or_else(|| "cpu".to_owned(), ToString::to_string);
    match config.trl.find(&device) {
        Ok(Some(found)) => Ok(found.describe()),
        Ok(None) => Ok("not installed; `rlood runtime install trl` installs it, for jobs that need it".to_owned()),
        Err(error) => Err(with_cause(&error)),
    }
}

/// Opens the pool's GPUs, so that their kernels are loaded; lists other GPUs.
fn check_gpus(config: &ServeConfig) -> Result<String, String> {
    let mut asked = config.gpus().peekable();
    if asked.peek().is_some() {
        let gpus = asked.map(gpu::try_open).collect::<Result<Vec<String>, String>>()?.join("; ");
        return Ok(match config.gpu_memory_limit_bytes {
            Some(bytes) => format!("{gpus}; each worker may use {} MiB of its GPU (--gpu-memory)", bytes >> 20),
            None => gpus,
        });
    }
    match gpu::list() {
        Ok(gpus) if gpus.is_empty() => Ok("the server uses no GPU; the driver lists none".to_owned()),
        Ok(gpus) => {
            let names: Vec<String> = gpus.iter().map(ToString::to_string).collect();
            Ok(format!("the server uses no GPU; available are {}", names.join("; ")))
        }
        Err(why) => Ok(format!("the server uses no GPU; {why}")),
    }
}

fn check_outgoing(allowed: &[String]) -> Result<String, String> {
    OutgoingPolicy::parse(allowed).map_err(|error| format!("--allow-outgoing: {error}"))?;
    if allowed.is_empty() {
        return Ok("the server connects to public addresses only".to_owned());
    }
    Ok(format!("the server connects to public addresses, and to {}", allowed.join(", ")))
}

async fn check_address(config: &ServeConfig) -> Result<String, String> {
    match tokio::net::TcpListener::bind(config.listen).await {
        Ok(_) => Ok(format!("{} is free", config.listen)),
        Err(error) => {
            Err(format!("the address {} cannot be used: {error}; choose another --listen address", config.listen))
        }
    }
}

fn with_cause(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}
