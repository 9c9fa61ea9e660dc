//! Settings of the server: the flags, and the validated configuration.
//!
//! Longer than other files: one or two lines per flag, and a test next to each check.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};

use clap::Args;

use super::device::parse_devices;
use super::{
    ConfigError, Device, Edge, EdgeArgs, GPU_MEMORY, GRACE_S, HEARTBEAT_MS, HubArgs, HubConfig, Isa, LEASE_MS,
    LogFormat, MIN_SECRET_CHARS, PythonRewards, PythonRewardsArgs, Retention, RetentionArgs, SAMPLES_MAX_BYTES, Serve,
    ServeModelsArgs, TrlArgs, machine_memory_bytes, machine_threads, parse_size_of,
};
use crate::spec::footprint::Place;
use crate::storage::{NoLimit, StorageKind, StorageLimits};

#[derive(Debug, Clone, Args)]
pub struct ServeArgs {
    /// Address to listen on, HOST:PORT; port 0 chooses a free one (printed on the first line of standard output). Any address that
    /// is not loopback requires an API key.
    #[arg(long, env = "RLOOD_LISTEN", default_value = "127.0.0.1:8080", value_name = "HOST:PORT")]
    pub listen: String,

    /// Directory for the database, datasets and checkpoints; created if absent. Only one server at a time can use it.
    #[arg(long, env = "RLOOD_DATA_DIR", default_value = "rlood-data", value_name = "DIR")]
    pub data_dir: PathBuf,

    /// Devices to train on, comma-separated: auto, cpu, cuda:N, or none (only workers started separately). One worker process runs
    /// per entry, so `cpu,cpu` runs two jobs concurrently. auto = every GPU that this build can use, otherwise one cpu.
    #[arg(long, env = "RLOOD_DEVICES", default_value = "auto", value_name = "LIST")]
    pub devices: String,

    /// Admin key, at least 16 characters. With it, or with a key from `rlood keys create`, every request needs `Authorization:
    /// Bearer KEY`. Without any key the server listens on loopback only and requires none. Prefer the variable: flags are
    /// visible to other users.
    #[arg(long, env = "RLOOD_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub api_key: Option<String>,

    /// Token that workers present, at least 16 characters. Default: a random one per start, known only to the server's own workers.
    /// Set it to let `rlood worker` connect from other machines.
    #[arg(long, env = "RLOOD_WORKER_TOKEN", hide_env_values = true, value_name = "TOKEN")]
    pub worker_token: Option<String>,

    /// URL at which clients and reward services reach this server (http:// or https://), if it differs from --listen, for example
    /// behind a proxy. Its host is accepted in the Host header.
    #[arg(long, env = "RLOOD_PUBLIC_URL", value_name = "URL")]
    pub public_url: Option<String>,

    /// Private addresses that outgoing requests (rewards) may reach, comma-separated: CIDR blocks, addresses, host names, or the
    /// word loopback. Default: loopback without an API key, none with a key. Public addresses are always allowed.
    #[arg(long, env = "RLOOD_ALLOW_OUTGOING", value_delimiter = ',', value_name = "CIDR|HOST,…")]
    pub allow_outgoing: Option<Vec<String>>,

    /// Directories that contain models, comma-separated. With an API key a model's path must be below one of them. Without a key
    /// and without this flag, any readable path is accepted.
    #[arg(long, env = "RLOOD_MODEL_ROOT", value_delimiter = ',', value_name = "DIR,…")]
    pub model_root: Option<Vec<PathBuf>>,

    /// Instruction set of the CPU kernels: auto (the fastest one that the machine supports), portable, avx2, avx512, avx512_bf16 or amx.
    #[arg(long, env = "RLOOD_ISA", default_value = "auto", value_enum)]
    pub isa: Isa,

    /// Limit for the stored samples of one job, in bytes. Beyond it the samples of the oldest steps are removed, training samples
    /// first, the newest ones never (the job's events and `removed` in /jobs/{id}/samples report it). Metrics are kept. 0 = no
    /// limit. Default: 1 GiB, about a million samples of 1,000 characters.
    #[arg(long, env = "RLOOD_SAMPLES_MAX_BYTES", default_value_t = SAMPLES_MAX_BYTES, value_name = "BYTES")]
    pub samples_max_bytes: u64,

    /// Grace period in seconds, 2 to 3600: the time that this server's workers have after SIGTERM to save a checkpoint and return
    /// their jobs to the queue. The whole shutdown takes at most 4 s longer. Configure the service manager to wait longer before it
    /// kills the server: Kubernetes' terminationGracePeriodSeconds, systemd's TimeoutStopSec.
    #[arg(long, env = "RLOOD_GRACE_S", default_value_t = GRACE_S, value_name = "SECONDS",
        value_parser = clap::value_parser!(u64).range(2..=3600))]
    pub grace_s: u64,

    /// Factor, above 0 and at most 1, for rlood's own delays when a reward service fails: between retries, while the circuit
    /// breaker is open, between the server's pings. For tests. Shortens retry delays.
    #[arg(long, env = "RLOOD_REWARD_PACE", default_value_t = 1.0, hide = true, value_name = "FACTOR")]
    pub reward_pace: f64,

    /// Whether a verdict is created automatically for each successful job with an evaluation: base model and trained model compared
    /// on the same rows (GET /jobs/{id}/verdict). A job can opt out with `eval.auto_verdict: false`.
    #[arg(long, env = "RLOOD_AUTO_VERDICT", default_value_t = true, action = clap::ArgAction::Set, value_name = "true|false")]
    pub auto_verdict: bool,

    /// Number of compute threads of all workers together, split evenly between the cpu devices. Default: the number of cores.
    #[arg(long, env = "RLOOD_THREADS", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,

    /// Memory limit of all cpu workers together: bytes, or with a unit (512M, 12G; powers of 1024); 0 = no limit. A job whose
    /// estimate exceeds a worker's even share is refused at submission. Default: the control group's limit,
    /// otherwise the machine's memory.
    #[arg(long, env = "RLOOD_MEMORY_LIMIT", value_name = "SIZE")]
    pub memory_limit: Option<String>,

    /// GPU memory limit of each worker, for GPUs that are shared with other programs or by two workers (cuda:0,cuda:0): bytes, or
    /// with a unit (512M, 40G; powers of 1024); 0 = all. Jobs are planned to stay within it, and a job whose estimate exceeds it is
    /// refused at submission. A worker started with `rlood worker` reads the variable. Default: all.
    #[arg(long, env = GPU_MEMORY, value_name = "SIZE")]
    pub gpu_memory: Option<String>,

    /// Storage limits for models, datasets or checkpoints, comma-separated: checkpoints=200GB,datasets=10G. Beyond its limit a
    /// write is refused (507) until something is removed; a job that cannot save its checkpoint pauses. `GET /system/storage`
    /// reports usage, `rlood gc` removes unneeded data. Default: limited only by the disk.
    #[arg(long, env = "RLOOD_STORAGE_LIMIT", value_delimiter = ',', value_name = "KIND=SIZE,…")]
    pub storage_limit: Vec<String>,

    /// Folder in which workers publish the adapters of jobs with rollout servers (vLLM), which must see the same folder, perhaps
    /// under another path. Default: rollout-adapters in the data directory.
    #[arg(long, env = "RLOOD_ADAPTER_DIR", value_name = "DIR")]
    pub adapter_dir: Option<PathBuf>,

    /// Network limits: hosts, origins, connections, disk reserve.
    #[command(flatten)]
    pub edge: EdgeArgs,

    /// Settings of the hub.
    #[command(flatten)]
    pub hub: HubArgs,

    /// Retention times of stored data.
    #[command(flatten)]
    pub retention: RetentionArgs,

    /// Settings of Python rewards.
    #[command(flatten)]
    pub python_rewards: PythonRewardsArgs,

    /// Settings of the runtime `trl`.
    #[command(flatten)]
    pub trl: TrlArgs,

    /// Settings of the served models.
    #[command(flatten)]
    pub serving: ServeModelsArgs,
}

/// The validated configuration of a server. Created by [`ServeArgs::resolve`] or [`ServeConfig::loopback`].
#[derive(Clone)]
pub struct ServeConfig {
    /// The address to bind; loopback unless there is a key.
    pub listen: SocketAddr,
    /// Directory of all persistent data.
    pub data_dir: PathBuf,
    /// Folder of adapters for rollout servers, if it is not in the data directory. Use [`ServeConfig::adapter_dir`].
    pub own_adapter_dir: Option<PathBuf>,
    /// Devices with one worker process each; may be empty.
    pub devices: Vec<Device>,
    /// Whether the devices were detected (`auto`) instead of requested: the driver may list fewer GPUs than the
    /// machine seems to have.
    pub devices_are_found: bool,
    /// The admin key; None = no authentication, loopback only.
    pub api_key: Option<String>,
    /// Token that workers present.
    pub worker_token: String,
    /// Public URL without a trailing slash.
    pub public_url: Option<String>,
    /// CIDR blocks and host names of private addresses that outgoing requests may reach. Use [`ServeConfig::outgoing_allowed`].
    pub allow_outgoing: Vec<String>,
    /// Canonical directories that must contain all models; None = anywhere. Use [`ServeConfig::model_roots_allowed`].
    pub model_roots: Option<Vec<PathBuf>>,
    /// Instruction set, passed on to the workers.
    pub isa: Isa,
    /// Number of compute threads of all workers together.
    pub threads: u32,
    /// Memory limit of all cpu workers together, in bytes; None = unknown or unlimited.
    pub memory_limit_bytes: Option<u64>,
    /// GPU memory limit of each worker, in bytes; None = all of it.
    pub gpu_memory_limit_bytes: Option<u64>,
    /// Usable memory of the pool's smallest GPU, in bytes; None = no GPU, or unknown before the server starts.
    pub gpu_memory_bytes: Option<u64>,
    /// The `rlood` binary to start workers from; None = this process's own.
    pub worker_program: Option<PathBuf>,
    /// Limit for the samples of one job, in bytes; 0 = no limit.
    pub samples_max_bytes: u64,
    /// Factor for delays after failures of reward services; 1 except in tests. Passed on to the workers.
    pub reward_pace: f64,
    /// Whether successful jobs with an evaluation get a verdict automatically.
    pub auto_verdict: bool,
    /// Grace period in seconds for a worker to save and exit after SIGTERM. Passed on to the workers.
    pub grace_s: u64,
    /// Interval between a worker's heartbeats in ms: the maximum delay before a cancel or pause takes effect.
    pub heartbeat_ms: u64,
    /// Lease of a claim without heartbeats, in ms.
    pub lease_ms: u64,
    /// Log filter, passed on to the workers.
    pub log: String,
    /// Log format, passed on to the workers.
    pub log_format: LogFormat,
    /// Validated network limits: names, origins, connections, timeouts, disk.
    pub edge: Edge,
    /// Validated settings of the hub.
    pub hub: HubConfig,
    /// Limits for stored models, datasets and checkpoints.
    pub storage_limits: StorageLimits,
    /// Retention times of stored data.
    pub retention: Retention,
    /// Validated settings of Python rewards.
    pub python_rewards: PythonRewards,
    /// Settings of the runtime `trl`, passed on to the workers.
    pub trl: TrlArgs,
    /// Validated settings of the served models.
    pub serving: Serve,
    /// Whether `allow_outgoing` is the default, which allows loopback only until the database contains an API key.
    pub default_outgoing: bool,
}

impl fmt::Debug for ServeConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServeConfig")
            .field("listen", &self.listen)
            .field("data_dir", &self.data_dir)
            .field("devices", &self.devices)
            .field("api_key", &self.api_key.as_ref().map(|_| "redacted"))
            .field("threads", &self.threads)
            .finish_non_exhaustive()
    }
}

impl ServeConfig {
    /// Returns the configuration of a server without keys on a free loopback port with one cpu worker. The demo and
    /// tests start from it.
    ///
    /// # Errors
    /// Fails when the system provides no random bytes.
    pub fn loopback(data_dir: &Path) -> Result<Self, ConfigError> {
        Ok(Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            data_dir: data_dir.to_owned(),
            own_adapter_dir: None,
            devices: vec![Device::Cpu],
            devices_are_found: false,
            api_key: None,
            worker_token: random_token()?,
            public_url: None,
            allow_outgoing: vec!["loopback".to_owned()],
            model_roots: None,
            isa: Isa::Auto,
            threads: machine_threads(),
            memory_limit_bytes: machine_memory_bytes(),
            gpu_memory_limit_bytes: None,
            gpu_memory_bytes: None,
            worker_program: None,
            samples_max_bytes: SAMPLES_MAX_BYTES,
            reward_pace: 1.0,
            auto_verdict: false,
            grace_s: GRACE_S,
            heartbeat_ms: HEARTBEAT_MS,
            lease_ms: LEASE_MS,
            log: "warn".to_owned(),
            log_format: LogFormat::Text,
            edge: Edge::default(),
            hub: HubConfig::offline(),
            storage_limits: StorageLimits::new(),
            retention: Retention::default(),
            python_rewards: PythonRewards::default(),
            trl: TrlArgs::default(),
            serving: Serve::default(),
            default_outgoing: true,
        })
    }

    /// Returns the folder in which workers publish adapters for rollout servers.
    pub fn adapter_dir(&self) -> PathBuf {
        self.own_adapter_dir.clone().unwrap_or_else(|| self.data_dir.join("rollout-adapters"))
    }

    /// Returns the private addresses that outgoing requests may reach. The default allows loopback only while no request needs a
    /// key; addresses named by the operator always apply.
    pub fn outgoing_allowed(&self, keys_are_on: bool) -> &[String] {
        let is_narrowed = keys_are_on && self.api_key.is_none() && self.default_outgoing;
        if is_narrowed { &[] } else { &self.allow_outgoing }
    }

    /// Returns the directories that must contain all models; None = anywhere. The default allows any only while no
    /// request needs a key.
    pub fn model_roots_allowed(&self, keys_are_on: bool) -> Option<&[PathBuf]> {
        match &self.model_roots {
            None if keys_are_on && self.api_key.is_none() => Some(&[]),
            roots => roots.as_deref(),
        }
    }

    /// Returns the memory that a job may use: an even share of the limit of all cpu workers.
    pub fn memory_per_worker(&self) -> Option<u64> {
        let workers = self.devices.iter().filter(|device| **device == Device::Cpu).count() as u64;
        self.memory_limit_bytes.map(|bytes| bytes / workers.max(1))
    }

    /// Returns the kinds of devices (CPU, GPU) that jobs may run on, in the order of `--devices`.
    pub fn places(&self) -> Vec<Place> {
        let mut places: Vec<Place> = Vec::new();
        for device in &self.devices {
            let place = match device {
                Device::Cpu => Place::Cpu,
                Device::Cuda(_) => Place::Cuda { memory_bytes: self.gpu_memory_bytes },
            };
            if !places.contains(&place) {
                places.push(place);
            }
        }
        places
    }

    /// Keeps the first `listed` of the detected GPUs, which is the number that the driver lists. Falls back to the CPU
    /// if it lists none.
    pub fn keep_found(&mut self, listed: usize) {
        if self.devices_are_found {
            self.devices.retain(|device| !matches!(device, Device::Cuda(index) if *index as usize >= listed));
            if self.devices.is_empty() {
                self.devices.push(Device::Cpu);
            }
        }
    }

    /// Returns the numbers of the pool's GPUs.
    pub fn gpus(&self) -> impl Iterator<Item = u32> {
        self.devices.iter().filter_map(|device| match device {
            Device::Cpu => None,
            Device::Cuda(index) => Some(*index),
        })
    }

    /// Returns the number of compute threads of each cpu worker: an even share, at least 1.
    pub fn threads_per_worker(&self) -> u32 {
        let workers = u32::try_from(self.devices.len()).unwrap_or(u32::MAX).max(1);
        (self.threads / workers).max(1)
    }
}

impl ServeArgs {
    /// Checks every setting. `cli` provides the log settings that the workers inherit.
    ///
    /// # Errors
    /// Returns the first invalid setting.
    pub fn resolve(&self, log: &str, log_format: LogFormat) -> Result<ServeConfig, ConfigError> {
        let api_key = checked_secret(self.api_key.as_deref(), "RLOOD_API_KEY (--api-key)")?;
        // An existing database may contain API keys. The server reads them only after this check, when it opens the database.
        let may_have_key = api_key.is_some() || self.data_dir.join("rlood.db").exists();
        let listen = resolve_listen(&self.listen, may_have_key)?;
        let worker_token = match checked_secret(self.worker_token.as_deref(), "RLOOD_WORKER_TOKEN (--worker-token)")? {
            Some(token) => token,
            None => random_token()?,
        };
        let allow_outgoing = match &self.allow_outgoing {
            Some(given) => {
                given.iter().map(|entry| entry.trim().to_owned()).filter(|entry| !entry.is_empty()).collect()
            }
            None if api_key.is_none() => vec!["loopback".to_owned()],
            None => Vec::new(),
        };
        let devices = parse_devices(&self.devices)?;
        let shares_gpus = self.gpu_memory.as_deref().is_some_and(|size| !size.is_empty());
        Ok(ServeConfig {
            listen,
            data_dir: self.data_dir.clone(),
            own_adapter_dir: self.adapter_dir.clone(),
            trl: self.trl.clone(),
            serving: self.serving.resolve(&devices, shares_gpus)?,
            devices,
            devices_are_found: self.devices.trim() == "auto",
            model_roots: resolve_model_roots(self.model_root.as_deref(), api_key.is_some())?,
            api_key,
            worker_token,
            public_url: self.public_url.as_deref().filter(|url| !url.is_empty()).map(parse_public_url).transpose()?,
            allow_outgoing,
            isa: self.isa,
            threads: self.threads.unwrap_or_else(machine_threads),
            memory_limit_bytes: match self.memory_limit.as_deref().filter(|size| !size.is_empty()) {
                Some(size) => parse_size_of("--memory-limit", size)?,
                None => machine_memory_bytes(),
            },
            gpu_memory_limit_bytes: match self.gpu_memory.as_deref().filter(|size| !size.is_empty()) {
                Some(size) => parse_size_of("--gpu-memory", size)?,
                None => None,
            },
            gpu_memory_bytes: None,
            worker_program: None,
            samples_max_bytes: self.samples_max_bytes,
            reward_pace: parse_pace(self.reward_pace)?,
            auto_verdict: self.auto_verdict,
            grace_s: self.grace_s,
            heartbeat_ms: HEARTBEAT_MS,
            lease_ms: LEASE_MS,
            log: log.to_owned(),
            log_format,
            edge: self.edge.resolve()?,
            hub: self.hub.resolve()?,
            storage_limits: parse_storage_limits(&self.storage_limit)?,
            retention: self.retention.resolve(),
            python_rewards: self.python_rewards.resolve()?,
            default_outgoing: self.allow_outgoing.is_none(),
        })
    }
}

/// Parses limits such as `checkpoints=200GB`; 0 = no limit.
fn parse_storage_limits(given: &[String]) -> Result<StorageLimits, ConfigError> {
    let mut limits = StorageLimits::new();
    for entry in given.iter().map(|entry| entry.trim()).filter(|entry| !entry.is_empty()) {
        let bad = |why: String| ConfigError::new(format!("--storage-limit '{entry}': {why}"));
        let (kind, size) = entry
            .split_once('=')
            .ok_or_else(|| bad("write a storage limit as KIND=SIZE, for example checkpoints=200GB".to_owned()))?;
        let kind: StorageKind = kind.trim().parse().map_err(|why: NoLimit| bad(why.to_string()))?;
        let bytes = parse_size_of(&format!("--storage-limit {kind}:"), size)?;
        if let Some(twice) = bytes.and_then(|bytes| limits.insert(kind, bytes)) {
            return Err(bad(format!(
                "the storage kind '{kind}' already has a limit of {twice} bytes: name each kind once"
            )));
        }
    }
    Ok(limits)
}

/// Checks the value of `--reward-pace`, the factor for delays after failures of reward services.
fn parse_pace(factor: f64) -> Result<f64, ConfigError> {
    if factor > 0.0 && factor <= 1.0 {
        return Ok(factor);
    }
    Err(ConfigError::new(format!("--reward-pace {factor}: the factor must be above 0 and at most 1")))
}

/// Returns 256 random bits in hexadecimal.
pub fn random_token() -> Result<String, ConfigError> {
    let mut bytes = [0_u8; 32];
    rustls::crypto::ring::default_provider().secure_random.fill(&mut bytes).map_err(|_| {
        ConfigError::new("the operating system provided no random bytes for the worker token; set RLOOD_WORKER_TOKEN")
    })?;
    Ok(hex::encode(bytes))
}

/// An empty value counts as absent: compose files pass `RLOOD_API_KEY=` for "none".
fn checked_secret(given: Option<&str>, name: &str) -> Result<Option<String>, ConfigError> {
    let Some(secret) = given.filter(|secret| !secret.is_empty()) else { return Ok(None) };
    if secret.chars().count() < MIN_SECRET_CHARS {
        return Err(ConfigError::new(format!(
            "{name} has {} characters, at least {MIN_SECRET_CHARS} are required: generate one with `openssl rand -hex 24`",
            secret.chars().count()
        )));
    }
    if !secret.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(ConfigError::new(format!("{name} must contain only visible ASCII characters, without spaces")));
    }
    Ok(Some(secret.to_owned()))
}

/// Resolves the listen address. A host name with several addresses resolves to its first IPv4 address.
///
/// # Errors
/// Fails when `--listen` is not an address, or is not a loopback address and there is no API key.
pub fn resolve_listen(listen: &str, has_key: bool) -> Result<SocketAddr, ConfigError> {
    let advice = "write the address as HOST:PORT, such as 127.0.0.1:8080";
    let addresses: Vec<SocketAddr> = listen
        .to_socket_addrs()
        .map_err(|error| ConfigError::new(format!("--listen '{listen}' is not an address ({error}): {advice}")))?
        .collect();
    let Some(address) = addresses.iter().find(|address| address.is_ipv4()).or(addresses.first()).copied() else {
        return Err(ConfigError::new(format!("--listen '{listen}' names no address: {advice}")));
    };
    if address.ip().is_loopback() || has_key {
        return Ok(address);
    }
    Err(no_key_for(listen))
}

/// The error for a non-loopback address without a key.
pub fn no_key_for(listen: impl fmt::Display) -> ConfigError {
    ConfigError::new(format!(
        "--listen {listen} would be reachable from other machines, but no API key is set: set RLOOD_API_KEY (at least \
         {MIN_SECRET_CHARS} characters) or create a key with `rlood keys create`, or listen on 127.0.0.1"
    ))
}

fn resolve_model_roots(given: Option<&[PathBuf]>, has_key: bool) -> Result<Option<Vec<PathBuf>>, ConfigError> {
    let roots: Vec<&PathBuf> = given.unwrap_or_default().iter().filter(|root| !root.as_os_str().is_empty()).collect();
    if roots.is_empty() {
        return Ok(has_key.then(Vec::new));
    }
    let canonical = roots.into_iter().map(|root| {
        root.canonicalize().map_err(|error| {
            ConfigError::new(format!("--model-root {}: {error}; name an existing directory", root.display()))
        })
    });
    canonical.collect::<Result<_, _>>().map(Some)
}

fn parse_public_url(url: &str) -> Result<String, ConfigError> {
    let bad =
        |why: &str| ConfigError::new(format!("--public-url '{url}' {why}; use https://HOST or https://HOST/PREFIX"));
    let parsed = reqwest::Url::parse(url).map_err(|error| bad(&format!("is not a URL ({error})")))?;
    if !matches!(parsed.scheme(), "http" | "https") {
        return Err(bad("is neither http nor https"));
    }
    if parsed.query().is_some() || parsed.fragment().is_some() || !parsed.username().is_empty() {
        return Err(bad("has a query, a fragment or a user name"));
    }
    Ok(url.trim_end_matches('/').to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::config::{Cli, Command};

    fn args(words: &[&str]) -> ServeArgs {
        match Cli::try_parse_from([&["rlood", "serve"], words].concat()).unwrap().command {
            Command::Serve(args) => args,
            _ => unreachable!("serve was parsed"),
        }
    }

    fn resolve(words: &[&str]) -> Result<ServeConfig, ConfigError> {
        args(words).resolve("info", LogFormat::Text)
    }

    #[test]
    fn an_open_address_needs_a_key_of_sixteen_characters() {
        let error = resolve(&["--listen", "0.0.0.0:0"]).unwrap_err().to_string();
        assert!(error.contains("RLOOD_API_KEY"), "{error}");
        let error = resolve(&["--listen", "0.0.0.0:0", "--api-key", "fifteen-letters"]).unwrap_err().to_string();
        assert!(error.contains("15 characters"), "{error}");
        let config = resolve(&["--listen", "0.0.0.0:0", "--api-key", "sixteen-letters!"]).unwrap();
        assert!(config.allow_outgoing.is_empty());
        assert_eq!(config.model_roots, Some(Vec::new()));
    }

    #[test]
    fn without_a_key_loopback_is_reachable_and_models_may_lie_anywhere() {
        let config = resolve(&["--listen", "127.0.0.1:0", "--devices", "cpu,cpu", "--threads", "3"]).unwrap();
        assert_eq!(config.allow_outgoing, ["loopback"]);
        assert_eq!(config.model_roots, None);
        assert_eq!(config.devices, [Device::Cpu, Device::Cpu]);
        assert_eq!(config.threads_per_worker(), 1);
        assert_eq!(config.worker_token.len(), 64);
    }

    #[test]
    fn of_gpus_that_were_found_those_stay_that_the_driver_lists() {
        let mut config = resolve(&["--listen", "127.0.0.1:0", "--devices", "auto"]).unwrap();
        assert!(config.devices_are_found);
        let all = vec![Device::Cuda(0), Device::Cuda(1), Device::Cuda(2)];
        for (listed, kept) in [(3, all.clone()), (1, vec![Device::Cuda(0)]), (0, vec![Device::Cpu])] {
            config.devices = all.clone();
            config.keep_found(listed);
            assert_eq!(config.devices, kept);
        }
        // Devices that the user named are kept even if the driver does not list them: the server reports later that they are
        // missing.
        config = ServeConfig { devices: all.clone(), devices_are_found: false, ..config };
        config.keep_found(0);
        assert_eq!(config.devices, all);
    }

    #[test]
    fn the_share_of_a_gpu_is_a_size() {
        let limit = |size: &str| {
            let config = resolve(&["--listen", "127.0.0.1:0", "--gpu-memory", size])?;
            Ok::<_, ConfigError>(config.gpu_memory_limit_bytes)
        };
        assert_eq!(limit("40G"), Ok(Some(40 << 30)));
        assert_eq!(limit("0"), Ok(None));
        let refused = limit("half").unwrap_err().to_string();
        assert!(refused.contains("--gpu-memory 'half'") && refused.contains("12G"), "{refused}");
    }

    #[test]
    fn limits_of_storage_name_a_kind_and_a_size() {
        let limits = |given: &str| {
            let config = resolve(&["--listen", "127.0.0.1:0", "--storage-limit", given])?;
            Ok::<_, ConfigError>(config.storage_limits)
        };
        let both = [(StorageKind::Checkpoints, 200_000_000_000), (StorageKind::Datasets, 10 << 30)];
        assert_eq!(limits("checkpoints=200GB, datasets=10G"), Ok(StorageLimits::from(both)));
        assert_eq!(limits("models=0"), Ok(StorageLimits::new()));
        for (bad, part) in [
            ("samples=1G", "name models, datasets or checkpoints"),
            ("checkpoints", "checkpoints=200GB"),
            ("checkpoints=much", "12G"),
            ("models=1G,models=2G", "name each kind once"),
        ] {
            let error = limits(bad).unwrap_err().to_string();
            assert!(error.contains("--storage-limit") && error.contains(part), "{bad}: {error}");
        }
    }

    #[test]
    fn bad_devices_say_what_to_write() {
        for (given, part) in [
            ("gpu", "must be cpu or cuda:N"),
            ("cuda", "cuda:0"),
            ("cuda:x", "must be cpu or cuda:N"),
            ("", "empty"),
            ("cpu,auto", "cannot be part of a list"),
        ] {
            let error = resolve(&["--devices", given]).unwrap_err().to_string();
            assert!(error.contains(part), "{given}: {error}");
        }
        if !cfg!(feature = "cuda") {
            let error = resolve(&["--devices", "cuda:0"]).unwrap_err().to_string();
            assert!(error.contains("built without CUDA"), "{error}");
            // `rlood worker` uses this error message for its own --device flag too.
            assert!(error.contains("use cpu") && !error.contains("use --devices"), "{error}");
        }
    }

    #[test]
    fn a_public_url_is_http_without_extras() {
        assert_eq!(
            resolve(&["--public-url", "https://a.example/x/"]).unwrap().public_url.unwrap(),
            "https://a.example/x"
        );
        for bad in ["a.example", "ftp://a.example", "https://a.example/?q=1"] {
            assert!(resolve(&["--public-url", bad]).is_err(), "{bad}");
        }
    }

    #[test]
    fn debug_output_shows_no_key() {
        let config = resolve(&["--api-key", "sixteen-letters!", "--worker-token", "seventeen-letters"]).unwrap();
        let text = format!("{config:?}");
        assert!(!text.contains("letters"), "{text}");
    }
}
