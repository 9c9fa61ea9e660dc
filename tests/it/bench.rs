//! `rlood bench`: the figures that it writes, on a model small enough to run in seconds.

use std::process::{Command, Output};

use serde_json::Value;

fn bench(extra: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rlood"));
    command.args(["--log", "warn", "bench", "--steps", "1", "--threads", "2"]);
    command.args(["--prompts", "2", "--generations", "3", "--prompt-len", "5", "--completion", "7"]);
    command.args(extra).output().unwrap()
}

#[test]
fn it_writes_its_figures_as_finite_positive_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("figures.json");
    let output = bench(&["--shape", "tiny,layers=2,vocab=64", "--json", file.to_str().unwrap()]);
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}\n{errors}");
    let figures: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    for key in ["decode_tok_s", "train_tok_s", "step_s", "peak_mib", "read_gb_s", "gemm_tflop_s"] {
        let value = figures[key].as_f64().unwrap_or_else(|| panic!("{key} is missing: {figures:#}"));
        assert!(value.is_finite() && value > 0.0, "{key} is {value}");
    }
    // No completion ended early: 2 prompts × 3 completions of 7 tokens, after 5 prompt tokens.
    assert_eq!(figures["step"]["completion_tokens"], 42.0);
    assert_eq!(figures["step"]["tokens"], 72.0);
    assert_eq!(figures["training"]["tokens"], 72);
    assert_eq!(figures["training"]["shared_tokens"], 52);
    let fastest = &figures["step"]["fastest"];
    let part = |name: &str| fastest[name].as_f64().unwrap();
    assert!(part("generate_s") + part("train_s") <= 1.01 * figures["step"]["median"]["step_s"].as_f64().unwrap());
    for part in ["step", "training"] {
        let part = &figures[part];
        assert!(part["warm"] == true && part["estimate_mib"].as_f64().unwrap() > 0.0, "{part:#}");
    }
    assert!(figures["training"]["score_tok_s"].as_f64().unwrap() > 0.0);
    for title in ["limits", "matrix products", "decode", "training", "RLOO step"] {
        assert!(said.contains(title), "no {title}:\n{said}");
    }
}

#[test]
fn it_measures_one_part_of_a_model_it_kept() {
    let dir = tempfile::tempdir().unwrap();
    let (model, file) = (dir.path().join("model"), dir.path().join("figures.json"));
    let (model, file) = (model.to_str().unwrap(), file.to_str().unwrap());
    let kept = bench(&["--shape", "tiny,vocab=64", "--dtype", "f32", "--save-model", model, "--only", "limits"]);
    assert!(kept.status.success(), "{}", String::from_utf8_lossy(&kept.stderr));
    let output = bench(&["--model", model, "--dtype", "f32", "--only", "decode", "--json", file]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let figures: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    assert!(figures["decode_tok_s"].as_f64().unwrap() > 0.0);
    assert_eq!(figures["model"]["vocab_size"], 64);
    assert!(figures.get("step_s").is_none() && figures.get("training").is_none(), "{figures:#}");
}

/// A part that is interrupted by its time limit keeps the figures measured so far, such as those of completed steps.
#[test]
fn a_part_that_is_stopped_leaves_its_figures() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("figures.json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_rlood"));
    command.args(["--log", "warn", "bench", "--steps", "10000", "--threads", "1", "--only", "step"]);
    command.args(["--prompts", "1", "--generations", "2", "--prompt-len", "5", "--completion", "7"]);
    command.args(["--shape", "tiny,layers=1,vocab=64", "--json", file.to_str().unwrap()]);
    let mut running = command.stdout(std::process::Stdio::null()).spawn().unwrap();
    let measured = || -> Option<Value> {
        let figures: Value = serde_json::from_str(&std::fs::read_to_string(&file).ok()?).expect("a file is whole");
        (figures["step"]["steps"].as_u64()? >= 2).then_some(figures)
    };
    let figures = (0..6000).find_map(|_| {
        std::thread::sleep(std::time::Duration::from_millis(10));
        measured()
    });
    running.kill().unwrap();
    running.wait().unwrap();
    let figures = figures.expect("two steps within a minute");
    assert_eq!((&figures["step"]["warm"], &figures["step"]["tokens"]), (&true.into(), &24.0.into()));
    assert!(measured().is_some(), "what was known is still there");
}

#[test]
fn a_shape_that_cannot_be_used_is_refused_by_name() {
    let output = bench(&["--shape", "tiny,heads=3"]);
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("num_key_value_heads"), "{said}");
}

#[test]
fn requests_get_the_tokens_they_asked_for_and_sampling_agrees_with_training() {
    let dir = tempfile::tempdir().unwrap();
    let (model, file) = (dir.path().join("model"), dir.path().join("figures.json"));
    let (model, file) = (model.to_str().unwrap(), file.to_str().unwrap());
    let lengths = dir.path().join("lengths.json");
    std::fs::write(&lengths, "[[3, 4], [5, 1], [2, 6]]").unwrap();
    let kept = bench(&["--shape", "tiny,layers=2,vocab=64", "--save-model", model, "--only", "limits"]);
    assert!(kept.status.success(), "{}", String::from_utf8_lossy(&kept.stderr));
    let part = |extra: &[&str]| -> Value {
        let output = bench(&[&["--model", model, "--json", file], extra].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
    };
    let requests = part(&["--only", "requests", "--requests", lengths.to_str().unwrap()])["requests"].clone();
    assert_eq!((&requests["prompt_tokens"], &requests["completion_tokens"]), (&10.into(), &11.into()));
    // 3 steps over 4, 5 and 6 tokens; none; 5 steps over 3 to 7.
    assert_eq!((&requests["decode_steps"], &requests["attended_tokens"]), (&6.into(), &40.into()));
    assert!(requests["tok_s"].as_f64().unwrap() > 0.0);
    let mismatch = part(&["--only", "mismatch"])["mismatch"].clone();
    assert_eq!((&mismatch["tokens"], &mismatch["unequal_tokens"]), (&42.into(), &0.into()));
    assert_eq!((mismatch["samples_exactly"].as_bool(), mismatch["max"].as_f64()), (Some(true), Some(0.0)));
}

/// Every part on a GPU, with sizes that the emulator can run in seconds.
#[cfg(feature = "cuda-emulator")]
#[test]
fn a_gpu_is_measured_with_its_own_limits_and_memory() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("figures.json");
    let file = file.to_str().unwrap();
    let output = bench(&["--device", "cuda:0", "--shape", "tiny,layers=2,vocab=64", "--json", file]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let figures: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    assert_eq!(figures["limits"]["emulated"], true);
    for key in ["decode_tok_s", "train_tok_s", "step_s", "copy_gb_s", "bf16_gflop_s", "device_peak_mib"] {
        let value = figures[key].as_f64().unwrap_or_else(|| panic!("{key} is missing: {figures:#}"));
        assert!(value.is_finite() && value > 0.0, "{key} is {value}");
    }
    for part in ["decode", "training", "step"] {
        assert!(figures[part]["device_peak_mib"].as_f64().unwrap() > 0.0, "{part}: {figures:#}");
    }
    assert!(figures.get("kernels").is_none() && figures.get("read_gb_s").is_none(), "{figures:#}");
    // Beside other parts only what they are compared with.
    assert!(figures["limits"]["bf16"].is_object() && figures["limits"]["f32"].is_null(), "{figures:#}");
    for part in ["decode", "training"] {
        let shape = ["--device", "cuda:0", "--shape", "tiny,layers=2,vocab=64", "--only", part, "--profile"];
        let output = bench(&[&shape[..], &["--json", file]].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let figures: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
        let kernels = figures[part]["profile"]["kernels"].as_array().unwrap().clone();
        assert!((2..=25).contains(&kernels.len()), "{kernels:#?}");
        assert!(kernels.iter().all(|kernel| kernel["count"].as_u64() > Some(0)), "{kernels:#?}");
    }
    let refused = bench(&["--device", "cuda:0", "--shape", "tiny,layers=2,vocab=64", "--only", "kernels"]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("the CPU's kernels"), "{said}");
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_build_without_cuda_says_so_when_it_is_asked_for_a_gpu() {
    let output = bench(&["--device", "cuda:0"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("built without CUDA"), "{said}");
}

#[cfg(not(feature = "cuda"))]
#[test]
fn the_advice_for_a_device_that_cannot_be_used_names_no_flag_of_another_role() {
    for (role, flag, other) in [("worker", "--device", "--devices"), ("serve", "--devices", "--device ")] {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_rlood"));
        let output =
            command.args([role, flag, "cuda:0"]).env("RLOOD_WORKER_TOKEN", "sixteen-letters!").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(flag) && said.contains("use cpu, or a build with CUDA"), "{said}");
        assert!(!said.contains(other), "{said}");
    }
}
