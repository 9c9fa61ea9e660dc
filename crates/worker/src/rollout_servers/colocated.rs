//! A vLLM server that the worker starts itself, on its own device, and starts again when it ends.
//!
//! The server is a process group of its own. A thread in it waits for the end of standard input, which the worker holds open, and
//! then kills the group: a worker that is killed leaves no server behind.

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::json;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use crate::device::{Device, machine_memory_bytes};
use crate::event::Event;
use crate::spec::{ComputeDtype, LoraPlan};

/// The program of the server: vLLM's own, after the watch over standard input.
const PROGRAM: &str = "import os, runpy, signal, sys, threading\n\
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), os.killpg(0, signal.SIGKILL)), daemon=True).start()\n\
    runpy.run_module('vllm.entrypoints.openai.api_server', run_name='__main__', alter_sys=True)";
/// Ranks for which vLLM has kernels; `--max-lora-rank` must be one of them.
const LORA_RANKS: [u32; 9] = [1, 8, 16, 32, 64, 128, 256, 320, 512];
/// Wait before the server is started again, at first and at most.
const FIRST_RESTART: Duration = Duration::from_secs(2);
const LONGEST_RESTART: Duration = Duration::from_secs(60);
/// Number of lines kept of the server's output.
const TAIL_LINES: usize = 20;

/// The settings of the server.
#[derive(Debug, Clone)]
pub(super) struct Launch {
    /// Python that has vLLM.
    pub python: PathBuf,
    pub model_dir: PathBuf,
    pub device: Device,
    pub dtype: ComputeDtype,
    pub lora: LoraPlan,
    /// Share of the device's memory, above 0 and below 1.
    pub memory_share: f64,
    /// Number of compute threads of the worker.
    pub threads: u32,
    pub port: u16,
    /// Key that the server asks for.
    pub key: String,
}

/// A server that is kept running until this value is dropped.
#[derive(Debug)]
pub(super) struct Colocated {
    _supervisor: AbortOnDropHandle<()>,
}

/// A process group that is killed when this value is dropped.
struct Group(Child);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(pid) = self.0.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?)) {
            // An error means that the group has ended.
            let _ = kill_process_group(pid, Signal::KILL);
        }
    }
}

/// The last lines of the server's output.
#[derive(Clone, Default)]
struct Tail(Arc<Mutex<VecDeque<String>>>);

impl Launch {
    /// Starts the server for sequences of at most `max_tokens` tokens. Must be called in a runtime.
    pub(super) fn start(&self, max_tokens: usize, notices: mpsc::UnboundedSender<Event>) -> Colocated {
        let supervisor = tokio::spawn(supervise(self.clone(), max_tokens, notices));
        Colocated { _supervisor: AbortOnDropHandle::new(supervisor) }
    }

    /// The command of the server, with its environment.
    fn command(&self, max_tokens: usize) -> Command {
        let rank = self.lora.rank_pattern.values().copied().chain([self.lora.r]).max().unwrap_or(1);
        let rank = LORA_RANKS.into_iter().find(|known| *known >= rank).unwrap_or(rank);
        let dtype = match self.dtype {
            ComputeDtype::F32 => "float32",
            ComputeDtype::Bf16 => "bfloat16",
        };
        let mut command = Command::new(&self.python);
        command
            .args(["-c", PROGRAM, "--host", "127.0.0.1", "--port", &self.port.to_string(), "--model"])
            .arg(&self.model_dir)
            .args(["--served-model-name", "base", "--dtype", dtype, "--enable-lora", "--generation-config", "vllm"])
            .args(["--max-lora-rank", &rank.to_string(), "--max-loras", "2", "--max-cpu-loras", "4"])
            .args(["--max-model-len", &max_tokens.to_string(), "--logprobs-mode", "processed_logprobs"])
            .env("VLLM_API_KEY", &self.key)
            .env("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
            .env("VLLM_NO_USAGE_STATS", "1")
            .env("HF_HUB_OFFLINE", "1")
            .env_remove("RLOOD_WORKER_TOKEN")
            .env_remove("RLOOD_API_KEY")
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        match self.device {
            Device::Cpu => {
                let gib = machine_memory_bytes().unwrap_or(0) as f64 * self.memory_share / (1u64 << 30) as f64;
                // Threads that wait for each other on busy cores make a step ten times slower.
                let threads = self.threads.saturating_sub(1).max(1);
                command
                    .arg("--enforce-eager")
                    .env("VLLM_CPU_KVCACHE_SPACE", (gib.floor() as u64).max(1).to_string())
                    .env("VLLM_CPU_OMP_THREADS_BIND", "nobind")
                    .env("OMP_NUM_THREADS", threads.to_string());
            }
            Device::Cuda(index) => {
                command
                    .args(["--gpu-memory-utilization", &self.memory_share.to_string()])
                    .env("CUDA_VISIBLE_DEVICES", index.to_string());
            }
        }
        command
    }
}

/// Keeps the server running. The fleet waits for it as for any other server.
async fn supervise(launch: Launch, max_tokens: usize, notices: mpsc::UnboundedSender<Event>) {
    let mut wait = FIRST_RESTART;
    loop {
        let tail = Tail::default();
        let started = std::time::Instant::now();
        let ended = run(launch.command(max_tokens), &tail).await;
        if started.elapsed() > LONGEST_RESTART {
            wait = FIRST_RESTART;
        }
        let how = match ended {
            Ok(status) => status.to_string(),
            Err(error) => format!("{} cannot be started: {error}", launch.python.display()),
        };
        let last = tail.last_line();
        let message =
            format!("the vLLM server of this worker ended ({how}) and is started again; its last line: {last}");
        tracing::warn!(how, tail = tail.text(), "the vLLM server of this worker ended");
        // Without a receiver the attempt has ended.
        let data = json!({ "output": tail.text() });
        let _ = notices.send(Event::Warning { code: "rollout_vllm_ended".to_owned(), message, data });
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(LONGEST_RESTART);
    }
}

/// Runs the server until it ends. Dropping the future kills its process group.
async fn run(mut command: Command, tail: &Tail) -> io::Result<std::process::ExitStatus> {
    let mut group = Group(command.spawn()?);
    // Held open until the server ends.
    let _stdin = group.0.stdin.take();
    if let Some(stderr) = group.0.stderr.take() {
        let tail = tail.clone();
        tokio::spawn(async move {
            let mut lines = BufReader::new(stderr).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                tail.push(line);
            }
        });
    }
    group.0.wait().await
}

impl Tail {
    fn push(&self, line: String) {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == TAIL_LINES {
            lines.pop_front();
        }
        lines.push_back(line.chars().take(500).collect());
    }

    fn text(&self) -> String {
        let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().map(String::as_str).collect::<Vec<_>>().join("\n")
    }

    fn last_line(&self) -> String {
        let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().rev().find(|line| !line.trim().is_empty()).cloned().unwrap_or_else(|| "none".to_owned())
    }
}

/// Returns a free port of the loopback address.
pub(super) fn free_port() -> io::Result<u16> {
    Ok(std::net::TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;
    use std::time::Instant;

    use super::*;

    /// A launch whose Python is this shell script.
    fn launch(dir: &Path, script: &str) -> Launch {
        let python = dir.join("python");
        std::fs::write(&python, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&python, std::fs::Permissions::from_mode(0o755)).unwrap();
        Launch {
            python,
            model_dir: dir.join("model"),
            device: Device::Cpu,
            dtype: ComputeDtype::F32,
            lora: LoraPlan::all_linear(12, 24.0),
            memory_share: 0.1,
            threads: 4,
            port: 12_345,
            key: "the-key".to_owned(),
        }
    }

    fn is_alive(pid: &str) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
    }

    async fn read_when_there(path: &Path) -> String {
        let begun = Instant::now();
        loop {
            match std::fs::read_to_string(path) {
                Ok(text) if text.ends_with('\n') => return text,
                _ => assert!(begun.elapsed() < Duration::from_secs(20), "{} does not appear", path.display()),
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    #[tokio::test]
    async fn the_server_gets_the_settings_of_the_job_and_dies_with_its_group() {
        let dir = tempfile::tempdir().unwrap();
        let script = "cd \"$(dirname \"$0\")\"\nsleep 600 &\necho \"$@\" | tail -n 1 >arguments\n\
            echo \"$VLLM_API_KEY $OMP_NUM_THREADS $VLLM_ALLOW_RUNTIME_LORA_UPDATING $VLLM_CPU_KVCACHE_SPACE\" >variables\n\
            echo $$ $! >pids\nwait";
        let (notices, _warnings) = mpsc::unbounded_channel();
        let server = launch(dir.path(), script).start(100, notices);
        let pids = read_when_there(&dir.path().join("pids")).await;
        let arguments = read_when_there(&dir.path().join("arguments")).await;
        for expected in [
            "--port 12345",
            "--dtype float32",
            "--max-lora-rank 16",
            "--max-model-len 100",
            "--logprobs-mode processed_logprobs",
        ] {
            assert!(arguments.contains(expected), "{expected}: {arguments}");
        }
        let variables = read_when_there(&dir.path().join("variables")).await;
        assert!(variables.starts_with("the-key 3 1 "), "{variables}");
        assert!(pids.split_whitespace().all(is_alive));
        drop(server);
        let begun = Instant::now();
        while pids.split_whitespace().any(is_alive) {
            assert!(begun.elapsed() < Duration::from_secs(20), "a process of the server is left");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    #[tokio::test]
    async fn a_server_that_ends_is_reported_with_its_last_line() {
        let dir = tempfile::tempdir().unwrap();
        let (notices, mut warnings) = mpsc::unbounded_channel();
        let server = launch(dir.path(), "echo 'not enough memory for the cache' >&2\nexit 3").start(100, notices);
        let Some(Event::Warning { code, message, .. }) = warnings.recv().await else { panic!("a warning") };
        assert_eq!(code, "rollout_vllm_ended");
        assert!(message.contains("exit status: 3"), "{message}");
        drop(server);
        let launch = Launch { python: dir.path().join("none"), ..launch(dir.path(), "exit 0") };
        let (notices, mut warnings) = mpsc::unbounded_channel();
        let _server = launch.start(100, notices);
        let Some(Event::Warning { message, .. }) = warnings.recv().await else { panic!("a warning") };
        assert!(message.contains("cannot be started"), "{message}");
    }
}
