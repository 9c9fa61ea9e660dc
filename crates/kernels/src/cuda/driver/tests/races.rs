//! Checks that the race detector finds races in wrong kernels, whether or not they affect the values, and
//! none in correct kernels.

use std::ffi::{CStr, c_char};

use super::*;

params! { struct Wrong { x: u64, y: u64, count: u32, pad: u32 } }

unsafe extern "C" {
    fn rlood_emulator_races(name: *const c_char, name_bytes: usize) -> *const c_char;
}

/// The report for a kernel, run with two blocks of 64 threads, buffers of 64 floats, 1 KiB of shared memory.
fn findings(kernel: &str) -> String {
    let device = Device::open(0).unwrap();
    let x = device.upload(&(1..=64).map(|i| i as f32).collect::<Vec<f32>>()).unwrap();
    let y = device.zeros(64 * 4).unwrap();
    let params = Wrong { x: x.pointer(), y: y.pointer(), count: 64, pad: 0 };
    device.launch(kernel, Launch { grid: [2, 1, 1], block: 64, shared: 1024 }, &params).unwrap();
    device.download::<f32>(&y, 0, 64).unwrap();
    // SAFETY: the arguments are a name and its length; the result is null or a terminated string that stays valid.
    unsafe {
        let found = rlood_emulator_races(kernel.as_ptr().cast(), kernel.len());
        if found.is_null() { String::new() } else { CStr::from_ptr(found).to_string_lossy().into_owned() }
    }
}

/// Checks that the report contains each of `what`.
#[track_caller]
fn finds(kernel: &str, what: &[&str]) {
    let found = findings(kernel);
    for class in what {
        assert!(found.lines().any(|line| line.starts_with(&format!("{kernel}: {class}: "))), "{class}:\n{found}");
    }
}

#[test]
fn a_missing_barrier_is_found() {
    finds("wrong_missing_barrier", &["race, shared"]);
    finds("wrong_missing_second_barrier", &["race, shared"]);
    finds("wrong_global_neighbor", &["race, global"]);
    finds("wrong_syncwarp_for_a_barrier", &["race, shared"]);
}

#[test]
fn lanes_of_a_warp_without_a_barrier_are_found() {
    finds("wrong_within_a_warp", &["race, shared"]);
    finds("wrong_matrix_of_lanes", &["race, shared"]);
    let found = findings("wrong_shuffle_for_a_barrier");
    assert!(found.contains("weak, shared") && !found.contains(": race, "), "{found}");
}

#[test]
fn blocks_that_touch_the_same_place_are_found() {
    finds("wrong_blocks_write", &["race, global"]);
    finds("wrong_block_reads_what_another_wrote", &["race, global"]);
    finds("wrong_block_writes_what_another_read", &["race, global"]);
    finds("wrong_count", &["race, global"]);
    finds("wrong_read_of_a_count", &["race, global"]);
    let found = findings("wrong_blocks_write_the_same");
    assert!(found.contains("same value, global") && !found.contains(": race, "), "{found}");
}

#[test]
fn copies_that_are_read_or_refilled_too_early_are_found() {
    finds("wrong_copy_of_another", &["copy, shared", "race, shared"]);
    finds("wrong_own_copy_too_early", &["copy, shared"]);
    finds("wrong_refill", &["race, shared"]);
    finds("wrong_refill_in_the_third_round", &["race, shared"]);
}

#[test]
fn a_read_of_unwritten_memory_is_found() {
    finds("wrong_unwritten_shared", &["unwritten, shared"]);
}

#[test]
fn a_finding_names_the_lines_and_the_threads() {
    let found = findings("wrong_syncwarp_for_a_barrier");
    assert!(
        found.contains("write at wrong_races.cuh:") && found.contains("thread 0 and block (0, 0, 0) thread"),
        "{found}"
    );
}

#[test]
fn kernels_that_are_right_are_clean() {
    for kernel in ["right_kernel", "right_count", "right_ring_of_copies"] {
        assert_eq!(findings(kernel), "");
    }
}
