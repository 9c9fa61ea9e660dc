//! `rlood check`: would a server start here?

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

/// A finding: what was looked at, and what is there or what is wrong.
type Finding = (&'static str, Result<String, String>);

/// Prints versions, data directory, file system, database, keys, devices, limits and address, one line each; the exit code is 0 when a server would start.
///
/// # Errors
/// None: what is wrong is printed.
pub async fn run(mut config: ServeConfig) -> Result<ExitCode, ServeError> {
    let database = open_database(&config.data_dir).await;
    let keys = count_keys(&database).await;
    let keys_are_on = matches!(keys, Ok(Some(_)));
    // Said below, of the GPUs.
    let _ = super::without_gpus(&mut config);
    let findings: Vec<Finding> = vec![
        ("rlood", Ok(env!("CARGO_PKG_VERSION").to_owned())),
        ("sqlite", store::sqlite_version().await.map_err(|error| error.to_string())),
        ("data", look_at_data(&config.data_dir)),
        ("files", machine::look_at_file_system(&config.data_dir)),
        ("fsync", machine::look_at_fsync(&config.data_dir)),
        ("disk", look_at_disk(&config)),
        ("database", look_at_database(&database).await),
        ("keys", look_at_keys(&config, &keys)),
        ("devices", Ok(describe_devices(&config))),
        ("kernels", look_at_kernels(&config)),
        ("gpus", look_at_gpus(&config)),
        ("memory", Ok(describe_memory(&config))),
        ("sockets", machine::look_at_open_files(config.edge.max_connections)),
        ("outgoing", look_at_outgoing(config.outgoing_allowed(keys_are_on))),
        ("tls", machine::look_at_certificates()),
        ("listen", look_at_address(&config).await),
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

/// An existing directory is locked for a moment; one that does not exist is not made.
fn look_at_data(dir: &Path) -> Result<String, String> {
    if dir.try_exists().map_err(|error| format!("{} cannot be looked at: {error}", dir.display()))? {
        DataDir::open(dir).map_err(|error| with_cause(&error))?;
        return Ok(format!("{}, and no other server uses it", dir.display()));
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

/// Prompts, completions and weights lie there; the database protects itself.
fn readable_by_others(dir: &Path) -> Option<String> {
    let mode = std::fs::metadata(dir).ok()?.permissions().mode();
    (mode & 0o077 != 0)
        .then(|| format!("other users may look into {0}: take that away with 'chmod 700 {0}'", dir.display()))
}

/// There is room above the watermark.
fn look_at_disk(config: &ServeConfig) -> Result<String, String> {
    let dir = machine::nearest(&config.data_dir);
    let free = free_bytes(&dir).map_err(|error| with_cause(&error))?;
    let (free_mib, reserve) = (free >> 20, config.edge.disk_reserve_bytes);
    if free < reserve {
        return Err(format!("{free_mib} MiB free, less than --disk-reserve ({} MiB): jobs would pause", reserve >> 20));
    }
    Ok(format!("{free_mib} MiB free; jobs pause below {} MiB", reserve >> 20))
}

/// As it is: it is not brought up to date. None where there is none.
async fn open_database(dir: &Path) -> Result<Option<Store>, String> {
    let path = dir.join("rlood.db");
    match path.try_exists() {
        Ok(true) => Store::open_as_is(&path).await.map(Some).map_err(|error| with_cause(&error)),
        Ok(false) => Ok(None),
        Err(error) => Err(format!("{} cannot be looked at: {error}", path.display())),
    }
}

async fn look_at_database(database: &Result<Option<Store>, String>) -> Result<String, String> {
    let Some(store) = database.as_ref().map_err(String::clone)? else { return Ok("none yet".to_owned()) };
    let checked = async {
        store.check_integrity().await?;
        store.is_current().await
    };
    match checked.await.map_err(|error| with_cause(&error))? {
        true => Ok("whole, and of this version".to_owned()),
        false => Ok("whole, of an older rlood: the next start brings it up to date".to_owned()),
    }
}

/// Keys of the database that open something now; None when none was ever made.
async fn count_keys(database: &Result<Option<Store>, String>) -> Result<Option<u64>, String> {
    let unread = |why: String| format!("not known: {why}");
    let Some(store) = database.as_ref().map_err(|_| unread("the database cannot be read".to_owned()))? else {
        return Ok(None);
    };
    let count = async {
        // An older rlood had none.
        if !store.has_table("api_keys").await? || !store.api_keys_exist().await? {
            return Ok(None);
        }
        store.api_keys_usable(store::clock_ms()).await.map(Some)
    };
    count.await.map_err(|error: StoreError| unread(with_cause(&error)))
}

/// An open address needs one that can be used; without one nobody gets in as soon as there was any.
fn look_at_keys(config: &ServeConfig, keys: &Result<Option<u64>, String>) -> Result<String, String> {
    let keys = keys.clone()?;
    let usable = keys.unwrap_or(0);
    match (config.api_key.is_some(), usable) {
        (false, 0) if !config.listen.ip().is_loopback() => Err(no_key_for(config.listen).to_string()),
        (false, 0) if keys.is_some() => {
            Ok("none that can be used, so nobody gets in: make one with `rlood keys create`".to_owned())
        }
        (false, 0) => Ok("none: loopback only, and everybody there may do everything".to_owned()),
        (true, usable) => Ok(format!("RLOOD_API_KEY, and {usable} of `rlood keys`")),
        (false, usable) => Ok(format!("{usable} of `rlood keys`")),
    }
}

fn describe_memory(config: &ServeConfig) -> String {
    match config.memory_per_worker() {
        Some(bytes) => format!("{} MiB a cpu worker", bytes >> 20),
        None => "not limited".to_owned(),
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
    let gain = Isa::bf16_gain().map_or(String::new(), |gain| {
        let rule = Isa::WORTH_IT;
        format!("; avx512_bf16 multiplies {gain:.2} times as fast as avx512 (auto takes it from {rule} times on)")
    });
    Ok(format!("{isa}; this machine has {}{gain}{refused}", available.join(", ")))
}

/// Those of the pool are opened, so that their kernels are loaded; others are listed.
fn look_at_gpus(config: &ServeConfig) -> Result<String, String> {
    let mut asked = config.gpus().peekable();
    if asked.peek().is_some() {
        let gpus = asked.map(gpu::try_open).collect::<Result<Vec<String>, String>>()?.join("; ");
        return Ok(match config.gpu_memory_limit_bytes {
            Some(bytes) => format!("{gpus}; a worker may use {} MiB of its one (--gpu-memory)", bytes >> 20),
            None => gpus,
        });
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

fn look_at_outgoing(allowed: &[String]) -> Result<String, String> {
    OutgoingPolicy::parse(allowed).map_err(|error| format!("--allow-outgoing: {error}"))?;
    if allowed.is_empty() {
        return Ok("public addresses only".to_owned());
    }
    Ok(format!("public addresses, and {}", allowed.join(", ")))
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
