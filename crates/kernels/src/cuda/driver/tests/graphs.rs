//! Checks that a body run as a graph gives the same result as without a graph.

use super::*;

/// Computes y = 3 (2 x) with an upload, its own buffers, a copy and a product.
fn body(device: &Device, x: &[f32], y: &Buffer, factor: f32) -> Result<Buffer, CudaError> {
    let x = device.upload(x)?;
    let twice = device.alloc(x.bytes() as usize)?;
    scale(device, &x, &twice, 2.0)?;
    drop(x);
    let scaled = device.zeros(twice.bytes() as usize)?;
    scale(device, &twice, &scaled, factor)?;
    device.copy(&scaled, 0, y, 0, scaled.bytes() as usize)?;
    let one = device.upload(&[1.0_f32])?;
    let count = scaled.count::<f32>();
    let out = device.alloc(count * 4)?;
    device.gemm(&Gemm {
        a: Matrix::whole(&scaled, DType::F32, count, 1),
        transpose_a: false,
        b: Matrix::whole(&one, DType::F32, 1, 1),
        transpose_b: false,
        c: Matrix::whole(&out, DType::F32, count, 1),
        alpha: 10.0,
        beta: 0.0,
        order: Order::InTurn,
    })?;
    Ok(out)
}

/// Runs the body and checks its result; returns the counters of the run.
fn step(device: &Device, y: &Buffer, x: &[f32], factor: f32) -> Counters {
    let before = device.counters();
    let out = device.graph(7, || body(device, x, y, factor)).unwrap();
    let after = device.counters();
    let wanted: Vec<f32> = x.iter().map(|x| 2.0 * x * factor).collect();
    assert_eq!(device.download::<f32>(y, 0, x.len()).unwrap(), wanted);
    let tenfold: Vec<f32> = wanted.iter().map(|x| 10.0 * x).collect();
    assert_eq!(device.download::<f32>(&out, 0, x.len()).unwrap(), tenfold);
    Counters {
        launches: after.launches - before.launches,
        products: after.products - before.products,
        uploads: after.uploads - before.uploads,
        waits: after.waits - before.waits,
        captures: after.captures - before.captures,
        replays: after.replays - before.replays,
        mismatches: after.mismatches - before.mismatches,
        capture_failures: after.capture_failures - before.capture_failures,
        allocations: after.allocations - before.allocations,
    }
}

const DIRECT: Counters = Counters {
    launches: 2,
    products: 1,
    uploads: 2,
    waits: 0,
    captures: 0,
    replays: 0,
    mismatches: 0,
    capture_failures: 0,
    allocations: 5,
};
const FIRST: Counters = Counters { launches: 0, products: 0, uploads: 0, captures: 1, replays: 1, ..DIRECT };
const LATER: Counters = Counters { captures: 0, ..FIRST };

#[test]
fn a_body_is_recorded_then_captured_then_replayed_with_new_uploads() {
    let Some(device) = device() else { return };
    let y = device.zeros(16).unwrap();
    assert_eq!(step(&device, &y, &[1.0, 2.0, 3.0, 4.0], 3.0), DIRECT);
    assert_eq!(step(&device, &y, &[5.0, 6.0, 7.0, 8.0], 3.0), FIRST);
    assert_eq!(step(&device, &y, &[9.0, 10.0, 11.0, 12.0], 3.0), LATER);
    assert_eq!(step(&device, &y, &[-1.0, 0.5, 0.25, 0.0], 3.0), LATER);
}

#[test]
fn a_body_that_differs_runs_as_it_is_and_is_captured_anew() {
    let Some(device) = device() else { return };
    let y = device.zeros(16).unwrap();
    let x = [1.0, 2.0, 3.0, 4.0];
    for _ in 0..3 {
        step(&device, &y, &x, 3.0);
    }
    // The second launch differs: the first upload was held back and is started late, but not counted again.
    let differs = step(&device, &y, &x, 4.0);
    assert_eq!((differs.mismatches, differs.replays, differs.launches, differs.uploads), (1, 0, 1, 1));
    assert_eq!(step(&device, &y, &x, 4.0), FIRST);
    assert_eq!(step(&device, &y, &[4.0, 3.0, 2.0, 1.0], 4.0), LATER);
    // A body with another size differs from the first operation on.
    let differs = step(&device, &y, &x[..3], 4.0);
    assert_eq!((differs.mismatches, differs.launches, differs.uploads), (1, 2, 2));
    assert_eq!(step(&device, &y, &x[..3], 4.0), FIRST);
}

#[test]
fn an_address_that_was_taken_meanwhile_is_a_difference() {
    let Some(device) = device() else { return };
    let y = device.zeros(16).unwrap();
    let x = [1.0, 2.0, 3.0, 4.0];
    for _ in 0..2 {
        step(&device, &y, &x, 3.0);
    }
    let taken: Vec<Buffer> = (0..8).map(|_| device.upload(&[0.5_f32; 4]).unwrap()).collect();
    assert_eq!(step(&device, &y, &x, 3.0).mismatches, 1);
    assert_eq!(step(&device, &y, &x, 3.0), FIRST);
    for taken in &taken {
        assert_eq!(device.download::<f32>(taken, 0, 4).unwrap(), [0.5; 4]);
    }
    // Small buffers keep their memory, so that the next phase runs the same graphs.
    device.trim();
    assert_eq!(step(&device, &y, &x, 3.0), LATER);
    // If there is no room, graphs are dropped to free memory.
    device.set_memory_limit(Some(device.memory().used));
    assert!(matches!(device.alloc(1), Err(CudaError::OutOfMemory { .. })));
    device.set_memory_limit(None);
    assert_eq!(step(&device, &y, &x, 3.0), DIRECT);
}

#[test]
fn a_body_that_ends_earlier_or_later_counts_as_different() {
    let Some(device) = device() else { return };
    let (x, y) = (device.upload(&[1.0_f32; 4]).unwrap(), device.zeros(16).unwrap());
    let run = |times: usize| {
        device.clear(&y).unwrap();
        device.graph(1, || (0..times).try_for_each(|i| scale(&device, &x, &y, 1.0 + i as f32))).unwrap();
        (device.download::<f32>(&y, 0, 1).unwrap()[0], device.counters().mismatches)
    };
    assert_eq!(run(3), (3.0, 0));
    assert_eq!(run(3), (3.0, 0));
    assert_eq!(run(2), (2.0, 1));
    assert_eq!(run(2), (2.0, 1));
    assert_eq!(run(4), (4.0, 2));
    assert_eq!(run(4), (4.0, 2));
    assert_eq!(run(0), (0.0, 3));
    assert_eq!(run(0), (0.0, 3));
}

#[test]
fn a_body_that_waits_runs_without_a_graph() {
    let Some(device) = device() else { return };
    let y = device.zeros(16).unwrap();
    for i in 0..3 {
        let x = [i as f32; 4];
        let got = device
            .graph(1, || {
                let x = device.upload(&x)?;
                scale(&device, &x, &y, 2.0)?;
                let seen = device.download::<f32>(&y, 0, 1)?;
                scale(&device, &x, &y, 3.0)?;
                Ok::<_, CudaError>(seen[0])
            })
            .unwrap();
        assert_eq!((got, device.download::<f32>(&y, 0, 4).unwrap()), (2.0 * i as f32, vec![3.0 * i as f32; 4]));
    }
    assert_eq!((device.counters().replays, device.counters().mismatches), (0, 0));
}

#[test]
fn a_failed_body_has_executed_its_operations_so_far() {
    let Some(device) = device() else { return };
    let (x, y) = (device.upload(&[1.0_f32; 4]).unwrap(), device.zeros(16).unwrap());
    let run = |factor: f32, fail: bool| {
        device.graph(1, || {
            scale(&device, &x, &y, 2.0)?;
            let more = device.upload(&[factor; 4])?;
            scale(&device, &more, &y, 1.0)?;
            if fail {
                device.inject_out_of_memory(0);
            }
            let _room = device.alloc(4)?;
            Ok::<_, CudaError>(())
        })
    };
    run(5.0, false).unwrap();
    run(6.0, false).unwrap();
    assert!(matches!(run(7.0, true), Err(CudaError::OutOfMemory { .. })));
    assert_eq!(device.download::<f32>(&y, 0, 1).unwrap(), [7.0]);
    run(8.0, false).unwrap();
    assert_eq!(device.download::<f32>(&y, 0, 1).unwrap(), [8.0]);
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        device.graph(1, || -> Result<(), CudaError> {
            scale(&device, &x, &y, 9.0)?;
            panic!("a body may panic");
        })
    }));
    assert!(caught.is_err());
    assert_eq!(device.download::<f32>(&y, 0, 1).unwrap(), [9.0]);
    run(10.0, false).unwrap();
}

#[test]
fn a_body_within_a_body_is_refused() {
    let Some(device) = device() else { return };
    let inner = device.graph(1, || device.graph(2, || Ok::<_, CudaError>(())));
    assert!(matches!(inner, Err(CudaError::Input(_))));
    device.graph(1, || Ok::<_, CudaError>(())).unwrap();
}

#[test]
fn bodies_run_as_usual_where_graphs_are_off() {
    let Some(device) = device() else { return };
    device.set_graphs(false);
    let y = device.zeros(16).unwrap();
    for _ in 0..3 {
        assert_eq!(step(&device, &y, &[1.0, 2.0, 3.0, 4.0], 3.0), DIRECT);
    }
}

#[test]
fn several_keys_share_memory_and_stay_apart() {
    let Some(device) = device() else { return };
    let y = device.zeros(64).unwrap();
    for round in 0..4 {
        for count in [4, 16, 8] {
            let x: Vec<f32> = (0..count).map(|i| (i * round) as f32).collect();
            let out = device.graph(count as u64, || body(&device, &x, &y, 3.0)).unwrap();
            let wanted: Vec<f32> = x.iter().map(|x| 60.0 * x).collect();
            assert_eq!(device.download::<f32>(&out, 0, count).unwrap(), wanted);
        }
    }
    let counters = device.counters();
    assert_eq!((counters.replays, counters.captures, counters.mismatches), (9, 3, 0));
}
