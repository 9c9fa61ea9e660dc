//! Real processes on GPUs emulated behind the functions of NVIDIA's driver (tests/cuda/driver.sh). The emulator delays work as long
//! as possible, checks how it is called, and fails where it is asked to. Runs only if `RLOOD_CUDA_DRIVER` names the
//! folder of that library.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};

use crate::kill::adapter;
use crate::processes::{Server, binary, command, model_copy, register, spec};

/// Returns the folder, if there is one.
fn driver() -> Option<PathBuf> {
    let folder = std::env::var_os("RLOOD_CUDA_DRIVER").map(PathBuf::from);
    if folder.is_none() {
        eprintln!("not run: RLOOD_CUDA_DRIVER names no folder that tests/cuda/driver.sh made");
    }
    folder
}

fn with_driver<'a>(command: &'a mut Command, driver: &Path, variables: &[(&str, &str)]) -> &'a mut Command {
    command.env("LD_LIBRARY_PATH", driver).env("RLOOD_CUDA_EMULATOR", "0").envs(variables.iter().copied())
}

struct Run {
    view: Value,
    adapter: Vec<(String, Vec<u8>)>,
}

/// Runs a job to its end on `cuda:0`, with these variables and these changes of its spec.
async fn run(driver: &Path, variables: &[(&str, &str)], steps: u64, change: impl Fn(&mut Value)) -> Run {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start_by(with_driver(&mut command(&dir.path().join("data"), "cuda:0"), driver, variables));
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;
    let mut spec = spec("tiny", steps);
    spec["sampling"]["max_completion_length"] = json!(10);
    change(&mut spec);
    let job = server.submit(&spec).await;
    let view = server.job_in_state(&job, "succeeded").await;
    Run { view, adapter: adapter(&server, &job).await }
}

#[tokio::test]
async fn an_adapter_does_not_depend_on_when_a_gpu_works_or_whether_graphs_and_memory_can_be_had() {
    let Some(driver) = driver() else { return };
    // The precisions at once, since each runs one job after another.
    let runs = async |dtype: &str| {
        let change = |spec: &mut Value| spec["training"]["dtype"] = json!(dtype);
        let late = run(&driver, &[], 2, change).await;
        for (name, value) in [
            ("RLOOD_FAKE_CUDA_EAGER", "1"),
            ("RLOOD_CUDA_GRAPHS", "0"),
            ("RLOOD_FAKE_CUDA_FAIL", "cuStreamBeginCapture_v2:1:900"),
            ("RLOOD_FAKE_CUDA_FAIL", "cuGraphInstantiateWithFlags:2:2"),
            ("RLOOD_FAKE_CUDA_FAIL", "cuMemAllocAsync:4:2"),
        ] {
            let other = run(&driver, &[(name, value)], 2, change).await;
            assert!(other.adapter == late.adapter, "{dtype}: {name}={value}");
            assert_eq!(other.view["attempt"], 1, "{name}={value}");
        }
    };
    tokio::join!(runs("f32"), runs("bf16"));
}

#[tokio::test]
async fn a_gpu_that_fails_ends_its_worker_and_the_next_one_goes_on_to_the_same_adapter() {
    let Some(driver) = driver() else { return };
    let change = |spec: &mut Value| spec["checkpoints"]["every_steps"] = json!(1);
    // The failures occur in a process's second or third step, so that each process gets one checkpoint further.
    let failing = async |failure: &'static str| {
        let disturbed = run(&driver, &[("RLOOD_FAKE_CUDA_FAIL", failure)], 4, change).await;
        assert!(disturbed.view["attempt"].as_u64() > Some(1), "{failure}: {}", disturbed.view);
        (failure, disturbed.adapter)
    };
    // All at once: each job waits for one core.
    let (undisturbed, launch, graph, event) = tokio::join!(
        run(&driver, &[], 4, change),
        failing("cuLaunchKernel:1900:719"),
        failing("cuGraphLaunch:15:700"),
        failing("cuEventSynchronize:50:700"),
    );
    for (failure, adapter) in [launch, graph, event] {
        assert!(adapter == undisturbed.adapter, "{failure}");
    }
}

#[tokio::test]
async fn two_gpus_run_two_jobs_at_once() {
    let Some(driver) = driver() else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut command = command(&dir.path().join("data"), "cuda:0,cuda:1");
    let server = Server::start_by(with_driver(&mut command, &driver, &[("RLOOD_FAKE_CUDA_GPUS", "2")]));
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;
    assert_eq!(server.worker_pids(2).await.len(), 2);
    let (first, second) = (server.submit(&spec("tiny", 100_000)).await, server.submit(&spec("tiny", 100_000)).await);
    let mut devices = Vec::new();
    for job in [&first, &second] {
        let running = server.job_when(job, "a step", |view| view["step"].as_u64() > Some(0)).await;
        devices.push(running["device"].as_str().unwrap_or_default().to_owned());
        server.post(&format!("/jobs/{job}/cancel"), &json!({})).await;
    }
    devices.sort();
    assert_eq!(devices, ["cuda:0", "cuda:1"]);
    for job in [&first, &second] {
        server.job_in_state(job, "cancelled").await;
    }
}

#[tokio::test]
async fn a_worker_keeps_to_its_share_of_a_gpu() {
    let Some(driver) = driver() else { return };
    let dir = tempfile::tempdir().unwrap();
    let start = |size: &str, name: &str| {
        let mut command = command(&dir.path().join(name), "cuda:0,cuda:0");
        command.args(["--gpu-memory", size]);
        Server::start_by(with_driver(&mut command, &driver, &[]))
    };
    let model = model_copy(&dir.path().join("model"));
    // 2 GiB minus the part that stays free.
    let usable = (2_u64 << 30) - (512 << 20) - (2 << 30) / 64;
    let server = start("2G", "two");
    register(&server, "tiny", &model).await;
    let answer = server.post("/jobs/validate", &spec("tiny", 4)).await;
    assert_eq!(answer["estimate"]["memory_limit_bytes"], usable, "{answer}");
    assert!(answer["estimate"]["total_bytes"].as_u64().unwrap() < usable, "{answer}");
    for pid in server.worker_pids(2).await {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap();
        let own = format!("RLOOD_GPU_MEMORY={}", 2_u64 << 30);
        assert!(environment.split(|byte| *byte == 0).any(|variable| variable == own.as_bytes()));
    }
    // Both jobs share the one GPU.
    let (first, second) = (server.submit(&spec("tiny", 4)).await, server.submit(&spec("tiny", 4)).await);
    server.job_in_state(&first, "succeeded").await;
    server.job_in_state(&second, "succeeded").await;
    // The available memory is too little even for the driver itself.
    let server = start("600M", "little");
    register(&server, "tiny", &model).await;
    let answer = server.post("/jobs/validate", &spec("tiny", 4)).await;
    assert_eq!(answer["errors"][0]["code"], "not_enough_memory", "{answer}");
    assert!(answer["errors"][0]["detail"].as_str().unwrap().contains("--gpu-memory"), "{answer}");
}

#[test]
fn what_a_gpu_lacks_is_said_before_a_server_starts() {
    let Some(driver) = driver() else { return };
    let check = |device: &str, variables: &[(&str, &str)]| -> (Output, String) {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new(binary());
        command.args(["check", "--listen", "127.0.0.1:0", "--devices", device, "--data-dir"]).arg(dir.path());
        let output = with_driver(&mut command, &driver, variables).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let line = text.lines().find(|line| line.contains(" gpus ")).unwrap_or_else(|| panic!("{text}")).to_owned();
        (output, line)
    };
    let (output, line) = check("cuda:0", &[]);
    assert!(output.status.success() && line.starts_with("ok") && line.contains("compute capability 9.0"), "{line}");
    for (device, name, value, said) in [
        ("cuda:1", "RLOOD_FAKE_CUDA_GPUS", "1", "there is no cuda:1: the driver shows 1 GPUs"),
        ("cuda:0", "RLOOD_FAKE_CUDA_GPUS", "0", "the driver sees no GPU"),
        ("cuda:0", "RLOOD_FAKE_CUDA_VERSION", "11080", "the NVIDIA driver supports CUDA 11.8, 1"),
        ("cuda:0", "RLOOD_FAKE_CUDA_FAIL", "cuInit:1:803", "the NVIDIA driver did not start"),
        (
            "cuda:0",
            "RLOOD_FAKE_CUDA_FAIL",
            "cuDevicePrimaryCtxRetain:1:2",
            "the GPU's memory is full, other processes use it",
        ),
        (
            "cuda:0",
            "RLOOD_FAKE_CUDA_FAIL",
            "cuModuleLoadDataEx:1:222",
            "is older than the compiler of this build's kernels",
        ),
        ("cuda:0", "RLOOD_FAKE_CUDA_FAIL", "cublasCreate_v2:1:2", "cublasCreate"),
    ] {
        let (output, line) = check(device, &[(name, value)]);
        assert!(!output.status.success() && line.starts_with("FAIL") && line.contains(said), "{name}={value}: {line}");
    }
}
