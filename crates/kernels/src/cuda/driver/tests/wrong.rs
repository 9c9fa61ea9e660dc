//! Checks that the emulator finds errors that a GPU may hide.

use super::*;

params! { struct Wrong { x: u64, y: u64, count: u32, pad: u32 } }

/// Runs a wrong kernel with buffers of 64 floats; returns its error, or its output.
fn run(kernel: &str, block: u32, shared: u32) -> Result<Vec<f32>, CudaError> {
    let device = Device::open(0).unwrap();
    let x = device.upload(&(1..=64).map(|i| i as f32).collect::<Vec<f32>>()).unwrap();
    let y = device.zeros(64 * 4).unwrap();
    let params = Wrong { x: x.pointer(), y: y.pointer(), count: 64, pad: 0 };
    device.launch(kernel, Launch { grid: [2, 1, 1], block, shared }, &params)?;
    device.download(&y, 0, 64)
}

#[track_caller]
fn fails(kernel: &str, block: u32, shared: u32, why: &str) {
    match run(kernel, block, shared) {
        Err(CudaError::Failed(message)) => {
            assert!(message.contains(why) && message.starts_with(kernel), "{message}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_write_outside_a_buffer_is_found() {
    fails("wrong_write_beyond", 32, 0, "at byte 256 of a buffer of 256");
    fails("wrong_write_before", 32, 0, "4 bytes before a buffer of 256");
}

#[test]
fn a_read_outside_a_buffer_gives_nothing_useful() {
    assert!(run("wrong_read_beyond", 32, 0).unwrap()[0].is_nan());
}

#[test]
fn a_missing_barrier_shows_in_the_values() {
    let got = run("wrong_missing_barrier", 64, 0).unwrap();
    assert!((0..64).any(|i| got[i] != ((i + 1) % 64 + 1) as f32));
    // The barrier makes the result correct: the own value is -next, plus twice next.
    let got = run("wrong_missing_second_barrier", 64, 0).unwrap();
    assert!((0..64).any(|i| got[i] != ((i + 1) % 64 + 1) as f32));
}

#[test]
fn lanes_that_part_ways_are_found() {
    fails("wrong_divergent_shuffle", 32, 0, "a warp diverged");
    fails("wrong_two_shuffles", 32, 0, "a warp diverged");
    fails("wrong_part_of_a_warp", 32, 0, "not of all lanes");
    fails("wrong_barrier_of_some", 64, 0, "32 of 64 threads wait");
}

#[test]
fn a_write_outside_shared_memory_is_found() {
    fails("wrong_shared_beyond", 32, 128, "beyond the dynamic shared memory of 128 bytes (block 0, 0, 0)");
    fails("wrong_static_beyond", 32, 0, "beyond a static shared array of 124 bytes");
    fails("probe_neighbors", 32, 228 << 10, "shared memory are too many");
}

#[test]
fn a_block_of_more_threads_than_a_kernel_was_compiled_for_is_found() {
    assert!(run("wrong_bounds", 32, 0).is_ok());
    fails("wrong_bounds", 64, 0, "compiled for 32 at most");
}

#[test]
fn an_address_that_is_not_aligned_is_found() {
    fails("wrong_unaligned", 32, 0, "not a multiple of 16 bytes");
}

#[test]
fn shared_memory_holds_nothing_before_it_is_written_or_waited_for() {
    assert!(run("wrong_unwritten_shared", 64, 256).unwrap().iter().all(|x| x.is_nan()));
    assert!(run("wrong_copy_without_wait", 32, 512).unwrap()[0].is_nan());
}

#[test]
fn a_new_buffer_holds_nothing_and_a_launch_after_a_failure_works() {
    let device = Device::open(0).unwrap();
    drop(device.upload(&[1.0_f32; 16]).unwrap());
    let fresh = device.alloc(64).unwrap();
    assert!(device.download::<f32>(&fresh, 0, 16).unwrap().iter().all(|x| x.is_nan()));
    let y = device.zeros(256).unwrap();
    let params = Wrong { x: y.pointer(), y: y.pointer(), count: 64, pad: 0 };
    assert!(device.launch("wrong_two_shuffles", one_block(32), &params).is_err());
    let x = device.upload(&[3.0_f32; 64]).unwrap();
    scale(&device, &x, &y, 2.0).unwrap();
    assert_eq!(device.download::<f32>(&y, 0, 64).unwrap(), [6.0; 64]);
}
