//! `rlood runtime install`: makes the Python environment of a runtime, from requirements that are part of the binary.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use rlood_worker::runtime::trl::environment::{Environment, EnvironmentError, default_dir, requirements};

use crate::config::{RuntimeArgs, RuntimeCommand, RuntimeExtra, RuntimeInstallArgs};

/// Why an environment could not be made.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// Neither `XDG_DATA_HOME` nor `HOME` is set.
    #[error("the user's data directory is not known; name a directory with --dir")]
    NoDirectory,
    /// A program could not be started.
    #[error("could not start {program}; {remedy}")]
    NotStarted {
        /// The program that could not be started.
        program: String,
        /// Advice to the user, who has to install or name the program.
        remedy: &'static str,
        /// Error of the operating system.
        #[source]
        source: std::io::Error,
    },
    /// A program ended with an error, which it has printed.
    #[error("{program} failed ({status}); its messages are above. Run the command again to continue")]
    Failed {
        /// The program that failed.
        program: String,
        /// How the program ended.
        status: String,
    },
    /// The interpreter is too old.
    #[error("Python 3.11 or later is required, and {python} is {version}; name another interpreter with --python")]
    OldPython {
        /// The interpreter that was used.
        python: String,
        /// Version of the interpreter.
        version: String,
    },
    /// A file could not be written.
    #[error("could not write the list of packages")]
    Write(#[source] std::io::Error),
    /// The finished environment cannot be used.
    #[error("the environment was made, but it cannot be used")]
    Unusable(#[from] EnvironmentError),
}

/// Installs the environment of a runtime.
///
/// # Errors
/// Fails when a program cannot be started or fails, or the environment cannot be used.
pub fn run(args: &RuntimeArgs) -> Result<ExitCode, RuntimeError> {
    let RuntimeCommand::Install(args) = &args.command;
    let dir = args.dir.clone().or_else(default_dir).ok_or(RuntimeError::NoDirectory)?;
    check_python(args)?;
    let has_uv = Command::new("uv").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    let python = dir.join("bin/python");
    if !python.exists() {
        let mut make = match has_uv {
            true => Command::new("uv"),
            false => Command::new(&args.python),
        };
        match has_uv {
            true => make.arg("venv").arg("--python").arg(&args.python).arg(&dir),
            false => make.args(["-m", "venv"]).arg(&dir),
        };
        run_program(make)?;
    }
    for part in std::iter::once("base").chain(args.extras.iter().map(|extra| extra.as_str())) {
        install(part, &python, has_uv)?;
    }
    let environment = Environment::probe(python, Vec::new())?;
    // Standard output may be closed: the environment is made all the same.
    let _ = writeln!(std::io::stdout(), "installed: {}", environment.describe());
    if args.dir.is_some() {
        let _ = writeln!(std::io::stdout(), "start workers with RLOOD_TRL_PYTHON={}", environment.python.display());
    }
    Ok(ExitCode::SUCCESS)
}

fn check_python(args: &RuntimeInstallArgs) -> Result<(), RuntimeError> {
    let print = "import sys; print('%d.%d' % sys.version_info[:2])";
    let python = args.python.display().to_string();
    let output = Command::new(&args.python).args(["-I", "-c", print]).output();
    let output = output.map_err(|source| RuntimeError::NotStarted {
        program: python.clone(),
        remedy: "install Python 3.11 or later, or name an interpreter with --python",
        source,
    })?;
    let version = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let numbers: Vec<u32> = version.split('.').filter_map(|number| number.parse().ok()).collect();
    match numbers.as_slice() {
        [3, minor] if *minor >= 11 => Ok(()),
        _ => Err(RuntimeError::OldPython { python, version }),
    }
}

/// Installs the packages of a part, which are complete: nothing else is resolved.
fn install(part: &str, python: &Path, has_uv: bool) -> Result<(), RuntimeError> {
    let mut file = tempfile::Builder::new().prefix("rlood-requirements-").suffix(".txt").tempfile();
    let file = match &mut file {
        Ok(file) => file.write_all(requirements(part).as_bytes()).map(|()| file.path().to_owned()),
        Err(error) => Err(std::io::Error::new(error.kind(), error.to_string())),
    };
    let path: PathBuf = file.map_err(RuntimeError::Write)?;
    let mut pip = match has_uv {
        true => Command::new("uv"),
        false => Command::new(python),
    };
    match has_uv {
        true => pip.args(["pip", "install", "--python"]).arg(python),
        false => pip.args(["-m", "pip", "install", "--disable-pip-version-check"]),
    };
    pip.args(["--require-hashes", "--no-deps"]);
    if part == RuntimeExtra::Deepspeed.as_str() {
        // DeepSpeed is distributed as source only. It imports the installed torch, and compiles its kernels when they are used.
        pip.arg("--no-build-isolation").env("DS_BUILD_OPS", "0");
    }
    pip.arg("-r").arg(path);
    run_program(pip)
}

fn run_program(mut command: Command) -> Result<(), RuntimeError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let status = command.stdin(Stdio::null()).status().map_err(|source| RuntimeError::NotStarted {
        program: program.clone(),
        remedy: "install it, or name another interpreter with --python",
        source,
    })?;
    match status.success() {
        true => Ok(()),
        false => Err(RuntimeError::Failed { program, status: status.to_string() }),
    }
}
