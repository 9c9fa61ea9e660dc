//! Compiles the CUDA kernels if a feature asks for them.
//!
//! With `cuda`, nvcc (`NVCC`, else `$CUDA_HOME/bin/nvcc`, else `nvcc` on the path) compiles
//! `src/cuda/device/kernels.cu` to machine code for current GPUs, and to PTX for later ones. With `RLOOD_CUDA_STUB=1`
//! there are no kernels and no nvcc is needed. With `cuda-emulator` the C++ compiler builds a library of the same
//! kernels that runs them on the CPU, and no nvcc is needed either unless `RLOOD_CUDA_STUB=0` is set. With
//! `RLOOD_EMULATOR_RACES=1` GCC builds one that detects races and is four times slower (`testing/emulator/races.cpp`). With
//! `RLOOD_EMULATOR_STUB=1` it is not built: that is for clippy, which links nothing.

use std::path::{Path, PathBuf};
use std::{env, fs};

const DEVICE: &str = "src/cuda/device";
const EMULATOR: &str = "testing/emulator";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(emulator_races)");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    for folder in [DEVICE, EMULATOR] {
        println!("cargo::rerun-if-changed={folder}");
    }
    for variable in ["RLOOD_CUDA_STUB", "RLOOD_EMULATOR_STUB", "NVCC", "CUDA_HOME"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    let out = out_dir();
    let emulated = env::var_os("CARGO_FEATURE_CUDA_EMULATOR").is_some();
    let stub = env::var("RLOOD_CUDA_STUB").map_or(emulated, |value| value != "0" && !value.is_empty());
    let kernels = out.join("kernels.fatbin");
    if stub {
        fs::write(&kernels, "").expect("OUT_DIR can be written");
    } else {
        compile(&kernels);
    }
    #[cfg(feature = "cuda-emulator")]
    if env::var_os("RLOOD_EMULATOR_STUB").is_none_or(|value| value != "1") {
        emulator();
    }
}

fn out_dir() -> PathBuf {
    PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"))
}

/// Machine code for compute capabilities 8.x, 9.0 and 10.0, so that a device opens in milliseconds, and PTX, which the
/// driver compiles for later ones; compressed. From 9.0 on, kernels contain the instructions that let one start before
/// the one before it has ended. The assembler's register counts are written to `kernels.log`.
const TARGETS: [&str; 4] =
    ["-gencode", "arch=compute_80,code=sm_80", "-gencode", "arch=compute_90,code=[compute_90,sm_90,sm_100]"];

fn compile(kernels: &Path) {
    let nvcc = match (env::var_os("NVCC"), env::var_os("CUDA_HOME")) {
        (Some(nvcc), _) => PathBuf::from(nvcc),
        (None, Some(home)) => Path::new(&home).join("bin/nvcc"),
        (None, None) => PathBuf::from("nvcc"),
    };
    let output = std::process::Command::new(&nvcc)
        .arg("-fatbin")
        .args(TARGETS)
        .args(["-Xfatbin", "--compress-all", "--compress-mode=size"])
        // Kernels call fmaf explicitly where they need it, as behind the emulator. The compiler must not contract by
        // itself: it would do so differently in each kernel, but decode must have the same bits as training.
        .args(["-fmad=false", "--threads", "0", "-Xptxas", "--verbose", "-std=c++17", "-O3", "-o"])
        .arg(kernels)
        .arg(Path::new(DEVICE).join("kernels.cu"))
        .output();
    match output {
        Ok(output) if output.status.success() => {
            fs::write(kernels.with_extension("log"), output.stderr).expect("OUT_DIR can be written");
            if let Some(major) = major_version(&nvcc) {
                println!("cargo::rustc-env=RLOOD_CUDA_MAJOR={major}");
            }
        }
        Ok(output) => panic!(
            "{} did not compile the CUDA kernels: {}\n{}",
            nvcc.display(),
            output.status,
            String::from_utf8_lossy(&output.stderr)
        ),
        Err(error) => panic!(
            "{} was not run ({error}): the feature `cuda` needs nvcc, in NVCC, in $CUDA_HOME/bin or on the path; \
             RLOOD_CUDA_STUB=1 builds without kernels, for checks only",
            nvcc.display()
        ),
    }
}

/// Major version of the compiler: machine code from any CUDA 13 needs a driver of CUDA 13.
fn major_version(nvcc: &Path) -> Option<u32> {
    let output = std::process::Command::new(nvcc).arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.split("release ").nth(1)?.split('.').next()?.parse().ok()
}

/// Compiles the kernels behind the emulator. The compiler never contracts a product and a sum by itself:
/// kernels call fmaf explicitly.
#[cfg(feature = "cuda-emulator")]
fn emulator() {
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++17")
        .opt_level(2)
        .debug(false)
        .define("RLOOD_EMULATOR", None)
        .flag("-fno-exceptions")
        .flag("-fno-strict-aliasing")
        .flag("-fno-threadsafe-statics")
        .flag("-ffp-contract=off")
        .flag("-Wno-unknown-pragmas");
    // Compile fmaf to an instruction if this machine, which also runs the tests, has it.
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("fma") {
        build.flag("-mfma");
    }
    println!("cargo::rerun-if-env-changed=RLOOD_EMULATOR_RACES");
    let folder = PathBuf::from(EMULATOR);
    if env::var_os("RLOOD_EMULATOR_RACES").is_some_and(|value| value == "1") {
        return with_races(build, &folder);
    }
    build.file(folder.join("emulator.cpp")).compile("rlood_cuda_emulator");
}

/// Compiles the kernels with the race detector (`emulator/races.cpp`), using GCC: a shared library, which keeps its
/// line numbers when the rest is stripped.
#[cfg(feature = "cuda-emulator")]
fn with_races(mut build: cc::Build, folder: &Path) {
    build.define("RLOOD_EMULATOR_RACES", None).pic(true).flag("-g1").flag("-fno-optimize-sibling-calls");
    let mut kernels = build.clone();
    kernels.flag("-fsanitize=thread").flag("--param=tsan-instrument-func-entry-exit=0");
    let mut objects = kernels.file(folder.join("races_kernels.cpp")).compile_intermediates();
    objects.extend(
        build.clone().files(["emulator.cpp", "races.cpp"].map(|file| folder.join(file))).compile_intermediates(),
    );
    let out = out_dir();
    let mut link = build.get_compiler().to_command();
    link.arg("-shared").args(objects).arg("-ldl").arg("-o").arg(out.join("librlood_cuda_emulator.so"));
    assert!(link.status().expect("the C++ compiler is there").success(), "the emulator was not linked: {link:?}");
    println!("cargo::rustc-cfg=emulator_races");
    println!("cargo::rustc-link-search=native={}", out.display());
    println!("cargo::rustc-link-lib=dylib=rlood_cuda_emulator");
    println!("cargo::rustc-link-arg=-Wl,-rpath,{}", out.display());
}
