//! The Python environment of the runtime `trl`: where it is, and what is installed in it.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::message::shortened;
use crate::spec::RuntimeFacts;

/// The runner of a rank, as it is sent to Python.
pub const RUNNER: &str = include_str!("runner.py");
/// Returns the packages of a part of the environment (`base`, `vlm`, `quantized`, `deepspeed`), with versions and hashes, in the form of
/// pip's requirements; empty for an unknown part.
pub fn requirements(part: &str) -> &'static str {
    match part {
        "base" => include_str!("requirements/base.txt"),
        "vlm" => include_str!("requirements/vlm.txt"),
        "quantized" => include_str!("requirements/quantized.txt"),
        "deepspeed" => include_str!("requirements/deepspeed.txt"),
        _ => "",
    }
}

/// Lists the packages by the names of their `.dist-info` directories: `importlib.metadata` would take ten times as long.
const PROBE: &str = "import os, sys
names = ('trl', 'transformers', 'torch', 'peft', 'accelerate', 'datasets', 'bitsandbytes', 'deepspeed', 'torchvision', 'pillow')
found = {}
for folder in filter(os.path.isdir, sys.path):
    for entry in os.listdir(folder):
        name, _, version = entry.removesuffix('.dist-info').partition('-')
        if entry.endswith('.dist-info') and name.lower() in names:
            found.setdefault(name.lower(), version)
for name, version in found.items():
    print(name, version)
";
/// Time limit for listing the versions. It takes 0.02 s on an idle machine.
const PROBE_TIMEOUT: Duration = Duration::from_secs(20);
const PROBE_POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Number of CPU ranks that a job may ask for, whatever the machine has.
const MAX_CPU_RANKS: u32 = 8;

/// The optional parts of an environment, and the packages that each needs.
const EXTRAS: [(&str, &[&str]); 3] =
    [("vlm", &["torchvision", "pillow"]), ("quantized", &["bitsandbytes"]), ("deepspeed", &["deepspeed"])];

/// An environment that can train.
#[derive(Debug, Clone)]
pub struct Environment {
    /// The Python interpreter of the environment.
    pub python: PathBuf,
    /// The source of the runner.
    pub runner: &'static str,
    /// The facts that the worker reports about the environment.
    pub facts: RuntimeFacts,
    /// Indices of the GPUs that ranks may use; empty = the CPU.
    pub gpus: Vec<u32>,
    /// Time limits for the ranks.
    pub limits: Limits,
}

/// Time limits for the ranks of a job.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Time until every rank has connected.
    pub hello: Duration,
    /// Time for which some ranks may wait for the others.
    pub deadlock: Duration,
    /// Time without any message of any rank.
    pub silence: Duration,
    /// Time that the current step has to end after a pause was requested.
    pub pause: Duration,
    /// The same for the shutdown of the worker.
    pub shutdown: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            hello: Duration::from_secs(180),
            deadlock: Duration::from_secs(600),
            silence: Duration::from_secs(6 * 3600),
            pause: Duration::from_secs(600),
            shutdown: Duration::from_secs(12),
        }
    }
}

/// Why an environment cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum EnvironmentError {
    /// The interpreter could not be started.
    #[error("{} cannot be started; run `rlood runtime install trl`, or set RLOOD_TRL_PYTHON to another interpreter", python.display())]
    NotStarted {
        /// Path of the interpreter.
        python: PathBuf,
        /// Error of the operating system.
        #[source]
        source: std::io::Error,
    },
    /// The interpreter did not list its packages.
    #[error("{} did not list its packages within {} s: {detail}", python.display(), PROBE_TIMEOUT.as_secs())]
    NoAnswer {
        /// Path of the interpreter.
        python: PathBuf,
        /// The output or the status of the program instead.
        detail: String,
    },
    /// The value of `RLOOD_TRL_DEVICES` is not a list of GPU indices.
    #[error("RLOOD_TRL_DEVICES '{0}' is not a list of GPU indices: must be such as 0,1,2,3")]
    Devices(String),
}

/// Settings of the environment, as flags and variables of a worker or a server.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct TrlArgs {
    /// Python interpreter of the environment for the runtime `trl`, made by `rlood runtime install trl`. Default: the interpreter of
    /// the environment in the user's data directory, if there is one.
    #[arg(long, env = "RLOOD_TRL_PYTHON", value_name = "FILE")]
    pub trl_python: Option<PathBuf>,

    /// Indices of the GPUs that a job of the runtime `trl` may use together, comma-separated (0,1,2,3). No other worker may use
    /// them. Default: the worker's own device.
    #[arg(long, env = "RLOOD_TRL_DEVICES", value_name = "LIST")]
    pub trl_devices: Option<String>,
}

impl TrlArgs {
    /// Finds the environment of a worker on this device; `None` if there is none.
    ///
    /// # Errors
    /// Fails if the settings name an environment that cannot be used.
    pub fn find(&self, device: &str) -> Result<Option<Environment>, EnvironmentError> {
        let installed = || default_dir().map(|dir| dir.join("bin/python")).filter(|python| python.exists());
        let Some(python) = self.trl_python.clone().filter(|path| !path.as_os_str().is_empty()).or_else(installed)
        else {
            return Ok(None);
        };
        let gpus = match (self.trl_devices.as_deref().filter(|list| !list.is_empty()), device.strip_prefix("cuda:")) {
            (_, None) => Vec::new(),
            (Some(list), Some(_)) => read_gpus(list)?,
            (None, Some(index)) => read_gpus(index)?,
        };
        Environment::probe(python, gpus).map(Some)
    }
}

fn read_gpus(list: &str) -> Result<Vec<u32>, EnvironmentError> {
    let gpus: Result<Vec<u32>, _> = list.split(',').map(|index| index.trim().parse()).collect();
    gpus.map_err(|_| EnvironmentError::Devices(list.to_owned()))
}

/// Returns the directory in which `rlood runtime install trl` creates the environment by default.
pub fn default_dir() -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let data = absolute("XDG_DATA_HOME").or_else(|| absolute("HOME").map(|home| home.join(".local/share")))?;
    Some(data.join("rlood/runtimes/trl"))
}

impl Environment {
    /// Lists the packages of an environment. `gpus` are the GPUs that its ranks may use; none = the CPU.
    ///
    /// # Errors
    /// Fails if the interpreter cannot be started or does not answer.
    pub fn probe(python: PathBuf, gpus: Vec<u32>) -> Result<Self, EnvironmentError> {
        let versions = list_packages(&python)?;
        let installed = |packages: &[&str]| packages.iter().all(|package| versions.contains_key(*package));
        let extras = EXTRAS.iter().filter(|(_, packages)| installed(packages)).map(|(name, _)| (*name).to_owned());
        let devices = if gpus.is_empty() { MAX_CPU_RANKS } else { u32::try_from(gpus.len()).unwrap_or(u32::MAX) };
        let facts = RuntimeFacts {
            runtime: "trl".to_owned(),
            extras: extras.collect(),
            versions,
            devices,
            gpus: !gpus.is_empty(),
        };
        Ok(Self { python, runner: RUNNER, facts, gpus, limits: Limits::default() })
    }

    /// Returns the names of the optional parts that are installed, and the version of TRL, in words.
    pub fn describe(&self) -> String {
        let version = self.facts.versions.get("trl").map_or("without TRL", String::as_str);
        let usable = if self.facts.is_usable() { "" } else { ", which rlood cannot drive (it needs 1.16)" };
        let extras = match self.facts.extras.as_slice() {
            [] => "no extras".to_owned(),
            extras => extras.join(", "),
        };
        format!("TRL {version}{usable}, {extras}, {}", self.python.display())
    }
}

fn list_packages(python: &Path) -> Result<BTreeMap<String, String>, EnvironmentError> {
    let silent = |detail: String| EnvironmentError::NoAnswer { python: python.to_owned(), detail };
    let mut child = Command::new(python)
        .args(["-I", "-c", PROBE])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|source| EnvironmentError::NotStarted { python: python.to_owned(), source })?;
    let deadline = Instant::now() + PROBE_TIMEOUT;
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < deadline => std::thread::sleep(PROBE_POLL_INTERVAL),
            Ok(None) | Err(_) => {
                // A process that has ended meanwhile needs no kill.
                let _ = child.kill();
                let _ = child.wait();
                return Err(silent("the time limit passed".to_owned()));
            }
        }
    };
    let mut text = String::new();
    if let Some(stdout) = child.stdout.take() {
        // The list of versions is shorter than a pipe's buffer, so the process did not wait for this reader.
        stdout.take(1 << 16).read_to_string(&mut text).map_err(|error| silent(error.to_string()))?;
    }
    if !status.success() {
        return Err(silent(format!("it ended with {status}")));
    }
    let line = |line: &str| {
        let (name, version) = line.split_once(' ')?;
        Some((name.to_owned(), version.trim().to_owned()))
    };
    text.lines().map(line).collect::<Option<_>>().ok_or_else(|| silent(format!("it printed {:?}", shortened(&text))))
}
