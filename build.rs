//! Compiles the CUDA kernels: to PTX with nvcc (feature `cuda`), and behind the emulator with the C++ compiler (feature
//! `cuda-emulator`). Without these features it does nothing and needs nothing.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

const KERNELS: &str = "src/engine/kernels/cuda";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    println!("cargo::rerun-if-changed={KERNELS}/device");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    compile_ptx(&out);
    #[cfg(feature = "cuda-emulator")]
    compile_emulator();
}

/// One translation unit to PTX that every GPU from compute capability 8.0 on can run; the driver compiles it at first use.
fn compile_ptx(out: &Path) {
    for name in ["RLOOD_CUDA_STUB", "NVCC", "CUDA_HOME", "PATH"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    let ptx = out.join("kernels.ptx");
    let stub = env::var("RLOOD_CUDA_STUB").is_ok_and(|value| value == "1");
    // Under the emulator nothing reads it.
    if stub || env::var_os("CARGO_FEATURE_CUDA_EMULATOR").is_some() {
        std::fs::write(&ptx, "").expect("the output directory can be written");
        return;
    }
    let source = Path::new(KERNELS).join("device/kernels.cu");
    let nvcc = nvcc();
    let mut command = Command::new(&nvcc);
    command.args(["--ptx", "-arch=compute_80", "-O3", "-std=c++17", "-o"]).arg(&ptx).arg(&source);
    let explained = "set NVCC or CUDA_HOME, or RLOOD_CUDA_STUB=1 for a build that holds no kernels";
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("{}: {status} while compiling {}", nvcc.display(), source.display()),
        Err(error) => panic!("{} cannot be run ({error}): {explained}", nvcc.display()),
    }
}

/// `NVCC`, else the one in `CUDA_HOME`, else whatever the path has.
fn nvcc() -> PathBuf {
    if let Some(nvcc) = env::var_os("NVCC").filter(|nvcc| !nvcc.is_empty()) {
        return nvcc.into();
    }
    let of_home = env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("bin/nvcc"));
    of_home.filter(|nvcc| nvcc.exists()).unwrap_or_else(|| "nvcc".into())
}

#[cfg(feature = "cuda-emulator")]
fn compile_emulator() {
    println!("cargo::rerun-if-changed={KERNELS}/emulator");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .opt_level(2)
        .include(Path::new(KERNELS).join("emulator"))
        .include(Path::new(KERNELS).join("device"))
        .file(Path::new(KERNELS).join("emulator/emulator.cpp"))
        .compile("rlood_cuda_emulator");
}
