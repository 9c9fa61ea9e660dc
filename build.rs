//! Lists the dashboard's files for `src/http/web.rs`, and compiles the CUDA kernels, where a feature asks for them.
//!
//! With `cuda`, nvcc (`NVCC`, else `$CUDA_HOME/bin/nvcc`, else `nvcc` on the path) makes PTX of
//! `src/engine/kernels/cuda/device/kernels.cu`; with `RLOOD_CUDA_STUB=1` there is none and no nvcc is needed. With
//! `cuda-emulator` the C++ compiler makes a library of the same kernels that runs them on the CPU, and no PTX either,
//! unless `RLOOD_CUDA_STUB=0` asks for it.

use std::path::{Path, PathBuf};
use std::{env, fs};

const KERNELS: &str = "src/engine/kernels/cuda";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    list_web_files();
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    for folder in ["device", "emulator"] {
        println!("cargo::rerun-if-changed={KERNELS}/{folder}");
    }
    for variable in ["RLOOD_CUDA_STUB", "NVCC", "CUDA_HOME"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    let out = out_dir();
    let emulated = env::var_os("CARGO_FEATURE_CUDA_EMULATOR").is_some();
    let stub = env::var("RLOOD_CUDA_STUB").map_or(emulated, |value| value != "0" && !value.is_empty());
    let ptx = out.join("kernels.ptx");
    if stub {
        fs::write(&ptx, "").expect("OUT_DIR can be written");
    } else {
        compile(&ptx);
    }
    #[cfg(feature = "cuda-emulator")]
    emulator();
}

fn out_dir() -> PathBuf {
    PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"))
}

/// `web_files.rs`: the name below `web/` and the bytes of every file a browser asks for, by name.
fn list_web_files() {
    println!("cargo::rerun-if-changed=web");
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR")).join("web");
    let (mut folders, mut files) = (vec![root.clone()], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("web/ can be read") {
            let path = entry.expect("web/ can be read").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|end| ["html", "js", "css", "svg"].iter().any(|known| end == *known))
            {
                files.push(path);
            }
        }
    }
    files.sort();
    let line = |path: &PathBuf| {
        let name = path.strip_prefix(&root).expect("listed below it").to_str().expect("plain names");
        format!("    ({name:?}, include_bytes!({:?})),\n", path.to_str().expect("plain names"))
    };
    let list: String = files.iter().map(line).collect();
    fs::write(out_dir().join("web_files.rs"), format!("&[\n{list}]\n")).expect("OUT_DIR can be written");
}

/// PTX for every GPU of compute capability 8.0 and later; the driver makes machine code of it.
fn compile(ptx: &Path) {
    let nvcc = match (env::var_os("NVCC"), env::var_os("CUDA_HOME")) {
        (Some(nvcc), _) => PathBuf::from(nvcc),
        (None, Some(home)) => Path::new(&home).join("bin/nvcc"),
        (None, None) => PathBuf::from("nvcc"),
    };
    let status = std::process::Command::new(&nvcc)
        .args(["--ptx", "-arch=compute_80", "-std=c++17", "-O3", "-o"])
        .arg(ptx)
        .arg(Path::new(KERNELS).join("device/kernels.cu"))
        .status();
    match status {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("{} did not compile the CUDA kernels: {status}", nvcc.display()),
        Err(error) => panic!(
            "{} was not run ({error}): the feature `cuda` needs nvcc, in NVCC, in $CUDA_HOME/bin or on the path; \
             RLOOD_CUDA_STUB=1 builds without kernels, for checks only",
            nvcc.display()
        ),
    }
}

/// The kernels behind the emulator. Never contracts a product and a sum by itself: kernels say fmaf where they mean it.
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
        .flag("-Wno-unknown-pragmas")
        .file(Path::new(KERNELS).join("emulator/emulator.cpp"));
    // fmaf as an instruction where this machine, which also runs the tests, has it.
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("fma") {
        build.flag("-mfma");
    }
    build.compile("rlood_cuda_emulator");
}
