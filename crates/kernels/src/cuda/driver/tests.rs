//! The tests run on the emulator if its feature is enabled, else on a GPU if there is one.

mod graphs;
mod probes;
#[cfg(emulator_races)]
mod races;
#[cfg(feature = "cuda-emulator")]
mod wrong;

use half::bf16;

use super::*;

params! { pub(super) struct Scale { x: u64, y: u64, factor: f32, count: u32 } }

/// Opens the emulator or a GPU; None if neither exists and the test is not required to use one.
pub(in super::super) fn device() -> Option<Device> {
    let asked = cfg!(feature = "cuda-emulator") || std::env::var("RLOOD_TEST_BACKEND").is_ok_and(|kind| kind == "cuda");
    match Device::open(0) {
        Err(CudaError::Unavailable(why)) if !asked => {
            eprintln!("not run: {why}");
            None
        }
        opened => Some(opened.unwrap()),
    }
}

fn one_block(threads: u32) -> Launch {
    Launch { grid: [1, 1, 1], block: threads, shared: 0 }
}

/// Computes y = factor x.
fn scale(device: &Device, x: &Buffer, y: &Buffer, factor: f32) -> Result<(), CudaError> {
    let count = x.count::<f32>();
    let params = Scale { x: x.at::<f32>(0, count)?, y: y.at::<f32>(0, count)?, factor, count: count as u32 };
    device.launch("probe_scale", Launch { grid: [count.div_ceil(64) as u32, 1, 1], block: 64, shared: 0 }, &params)
}

#[test]
fn uploaded_values_are_downloaded_unchanged() {
    let Some(device) = device() else { return };
    let values: Vec<u32> = (0..5_000_000_u32).map(|i| i.wrapping_mul(2654435761)).collect();
    let buffer = device.upload(&values).unwrap();
    assert_eq!(buffer.bytes(), 20_000_000);
    assert_eq!(device.download::<u32>(&buffer, 0, values.len()).unwrap(), values);
    assert_eq!(device.download::<u32>(&buffer, 4_999_998, 2).unwrap(), values[4_999_998..]);
    device.write(&buffer, 3, &[7_u32, 8]).unwrap();
    assert_eq!(device.download::<u32>(&buffer, 2, 4).unwrap(), [values[2], 7, 8, values[5]]);
    let halves = device.upload(&[bf16::from_f32(1.5), bf16::from_f32(-2.0)]).unwrap();
    assert_eq!(device.download::<bf16>(&halves, 0, 2).unwrap(), [bf16::from_f32(1.5), bf16::from_f32(-2.0)]);
}

#[test]
fn uploads_of_many_pieces_keep_their_order() {
    let Some(device) = device() else { return };
    let values: Vec<Vec<u32>> = (0..6_u32).map(|i| (0..2_300_000).map(|j| i << 28 | j).collect()).collect();
    let large: Vec<Buffer> = values.iter().map(|values| device.upload(values).unwrap()).collect();
    let small = device.zeros(4 * 1000).unwrap();
    for i in 0..1000_u32 {
        device.write(&small, i as usize, &[i]).unwrap();
    }
    for (buffer, values) in large.iter().zip(&values) {
        assert!(device.download::<u32>(buffer, 0, values.len()).unwrap() == *values);
    }
    assert_eq!(device.download::<u32>(&small, 0, 1000).unwrap(), (0..1000).collect::<Vec<_>>());
}

#[test]
fn a_fetch_holds_what_was_there_when_it_began() {
    let Some(device) = device() else { return };
    let buffer = device.upload(&[1_u32, 2, 3]).unwrap();
    let large = device.upload(&vec![9_u8; 3 << 20]).unwrap();
    let first = device.fetch::<u32>(&buffer, 1, 2).unwrap();
    let all = device.fetch::<u8>(&large, 0, 3 << 20).unwrap();
    drop(device.fetch::<u32>(&buffer, 0, 1).unwrap());
    device.write(&buffer, 0, &[7_u32, 8, 9]).unwrap();
    let second = device.fetch::<u32>(&buffer, 0, 3).unwrap();
    device.clear(&buffer).unwrap();
    assert_eq!(second.wait().unwrap(), [7, 8, 9]);
    assert_eq!(first.wait().unwrap(), [2, 3]);
    assert!(all.wait().unwrap().iter().all(|&x| x == 9));
    assert_eq!(device.fetch::<u32>(&buffer, 3, 0).unwrap().wait().unwrap(), [0; 0]);
    assert!(matches!(device.fetch::<u32>(&buffer, 2, 2), Err(CudaError::Input(_))));
}

#[test]
fn a_profile_names_each_kernel_and_how_often_it_ran() {
    let Some(device) = device() else { return };
    let (x, y) = (device.upload(&[1.0_f32; 64]).unwrap(), device.zeros(256).unwrap());
    device.start_profile();
    for _ in 0..3 {
        device.graph(1, || scale(&device, &x, &y, 2.0)).unwrap();
    }
    device.clear(&y).unwrap();
    let timings = device.take_profile().unwrap();
    let mut counts: Vec<(&str, u64)> = timings.iter().map(|timing| (timing.name.as_str(), timing.count)).collect();
    counts.sort_unstable();
    assert_eq!(counts, [("probe_scale", 3), ("zero", 1)]);
    assert!(timings.iter().all(|timing| timing.seconds >= 0.0) && timings[0].seconds >= timings[1].seconds);
    scale(&device, &x, &y, 2.0).unwrap();
    assert_eq!(device.take_profile().unwrap(), []);
}

#[test]
fn zeros_are_zero_also_where_memory_is_used_again() {
    let Some(device) = device() else { return };
    drop(device.upload(&[1_u8; 1000]).unwrap());
    let zeros = device.zeros(1000).unwrap();
    assert_eq!(device.download::<u8>(&zeros, 0, 1000).unwrap(), [0; 1000]);
}

#[test]
fn bytes_are_copied_within_the_device() {
    let Some(device) = device() else { return };
    let from = device.upload(&[1_u32, 2, 3, 4]).unwrap();
    let to = device.zeros(16).unwrap();
    device.copy(&from, 4, &to, 8, 8).unwrap();
    device.copy(&to, 8, &to, 0, 4).unwrap();
    assert_eq!(device.download::<u32>(&to, 0, 4).unwrap(), [2, 0, 2, 3]);
    assert!(matches!(device.copy(&from, 0, &from, 4, 8), Err(CudaError::Input(_))));
}

#[test]
fn a_range_outside_a_buffer_is_refused() {
    let Some(device) = device() else { return };
    let buffer = device.zeros(16).unwrap();
    assert!(matches!(device.write(&buffer, 3, &[0_u32, 0]), Err(CudaError::Input(_))));
    assert!(matches!(device.download::<u32>(&buffer, 1, 4), Err(CudaError::Input(_))));
    assert!(matches!(device.copy(&buffer, 0, &device.zeros(8).unwrap(), 4, 8), Err(CudaError::Input(_))));
    assert!(buffer.at::<f32>(4, 0).is_ok() && buffer.at::<f32>(4, 1).is_err());
    assert!(buffer.at::<f32>(usize::MAX / 2, 1).is_err());
}

#[test]
fn an_empty_buffer_is_a_buffer() {
    let Some(device) = device() else { return };
    let empty = device.upload::<f32>(&[]).unwrap();
    assert_eq!(device.download::<f32>(&empty, 0, 0).unwrap(), [0.0; 0]);
    device.clear(&empty).unwrap();
    assert_eq!(device.zeros(0).unwrap().bytes(), 0);
}

#[test]
fn a_buffer_of_another_device_is_refused() {
    let (Some(one), Some(other)) = (device(), device()) else { return };
    let buffer = one.zeros(4).unwrap();
    assert!(matches!(other.clear(&buffer), Err(CudaError::Input(_))));
    assert!(matches!(other.download::<f32>(&buffer, 0, 1), Err(CudaError::Input(_))));
}

#[test]
fn a_kernel_runs_by_its_name() {
    let Some(device) = device() else { return };
    let x = device.upload(&[1.0_f32, 2.0, 3.0]).unwrap();
    let y = device.zeros(12).unwrap();
    scale(&device, &x, &y, 2.0).unwrap();
    assert_eq!(device.download::<f32>(&y, 0, 3).unwrap(), [2.0, 4.0, 6.0]);
}

#[test]
fn an_unknown_kernel_and_a_parameter_of_another_size_are_refused() {
    params! { struct Longer { x: u64, y: u64, z: u64, factor: f32, count: u32 } }
    let Some(device) = device() else { return };
    let longer = Longer { x: 0, y: 0, z: 0, factor: 0.0, count: 0 };
    let refused = device.launch("probe_scale", one_block(32), &longer);
    assert!(matches!(refused, Err(CudaError::Input(why)) if why.contains("32 bytes, but the kernel takes 24")));
    let refused = device.launch("probe_nothing", one_block(32), &longer);
    assert!(matches!(refused, Err(CudaError::Input(why)) if why.contains("probe_nothing")));
}

#[test]
fn impossible_blocks_and_grids_are_refused_and_none_is_nothing() {
    let Some(device) = device() else { return };
    let params = Scale { x: 0, y: 0, factor: 0.0, count: 0 };
    for block in [0, 33, 1056] {
        assert!(matches!(device.launch("probe_scale", one_block(block), &params), Err(CudaError::Input(_))));
    }
    let wide = Launch { grid: [1, 65536, 1], block: 32, shared: 0 };
    assert!(matches!(device.launch("probe_scale", wide, &params), Err(CudaError::Input(_))));
    let before = device.counters().launches;
    device.launch("probe_scale", Launch { grid: [1, 0, 1], block: 32, shared: 0 }, &params).unwrap();
    assert_eq!(device.counters().launches, before);
}

#[test]
fn memory_is_counted_and_peaks_are_remembered() {
    let Some(device) = device() else { return };
    let before = device.memory();
    let a = device.alloc(2 << 20).unwrap();
    let b = device.alloc(3 << 20).unwrap();
    let both = device.memory();
    assert!(both.used - before.used >= 5 << 20 && both.used - before.used < (5 << 20) + 4096);
    assert!(both.reserved >= both.used && both.total > 1 << 30);
    drop(a);
    assert_eq!(device.memory().peak, both.used);
    device.reset_peak();
    assert_eq!(device.memory().peak, device.memory().used);
    drop(b);
    device.trim();
    assert_eq!((device.memory().used, device.memory().reserved), (before.used, 0));
}

#[test]
fn out_of_memory_is_reported_and_the_device_still_works() {
    let Some(device) = device() else { return };
    device.set_memory_limit(Some(1 << 20));
    let kept = device.zeros(1 << 19).unwrap();
    match device.alloc(1 << 20) {
        Err(CudaError::OutOfMemory { requested, used, total }) => {
            assert!(requested >= 1 << 20 && used >= 1 << 19 && total == 1 << 20);
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(device.alloc(usize::MAX), Err(CudaError::OutOfMemory { .. })));
    device.set_memory_limit(None);
    assert_eq!(device.download::<u8>(&kept, 0, 4).unwrap(), [0; 4]);
    device.inject_out_of_memory(1);
    device.alloc(4).unwrap();
    assert!(matches!(device.alloc(4), Err(CudaError::OutOfMemory { .. })));
    device.alloc(4).unwrap();
}

/// Pseudo-random numbers between -1 and 1 that bf16 represents exactly.
fn numbers(count: usize, mut state: u64) -> Vec<f32> {
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 57) as f32 - 64.0) / 64.0
    };
    (0..count).map(|_| next()).collect()
}

#[test]
fn cublas_multiplies_views_with_strides_transposed_and_accumulated() {
    let Some(device) = device() else { return };
    let (m, n, k) = (5, 7, 6);
    for (bf16_in, bf16_out) in [(false, false), (true, false), (true, true)] {
        for case in 0..4 {
            let (transpose_a, transpose_b) = (case & 1 == 1, case & 2 == 2);
            let (rows_a, columns_a) = if transpose_a { (k, m) } else { (m, k) };
            let (rows_b, columns_b) = if transpose_b { (n, k) } else { (k, n) };
            // Strides and offsets are multiples of 8, which tensor cores need.
            let (a, b, c) = (numbers(8 + rows_a * 8, 1), numbers(8 + rows_b * 16, 2), numbers(16 + m * 8, 3));
            let put = |values: &[f32], halves: bool| match halves {
                true => device.upload(&values.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>()).unwrap(),
                false => device.upload(values).unwrap(),
            };
            let (da, db, dc) = (put(&a, bf16_in), put(&b, bf16_in), put(&c, bf16_out));
            let dtype = |halves| if halves { DType::Bf16 } else { DType::F32 };
            let gemm = Gemm {
                a: Matrix { at: 8, stride: 8, ..Matrix::whole(&da, dtype(bf16_in), rows_a, columns_a) },
                transpose_a,
                b: Matrix { at: 8, stride: 16, ..Matrix::whole(&db, dtype(bf16_in), rows_b, columns_b) },
                transpose_b,
                c: Matrix { at: 16, stride: 8, ..Matrix::whole(&dc, dtype(bf16_out), m, n) },
                alpha: 0.5,
                beta: 2.0,
                order: Order::InTurn,
            };
            device.gemm(&gemm).unwrap();
            let count = c.len();
            let got: Vec<f32> = match bf16_out {
                true => device.download::<bf16>(&dc, 0, count).unwrap().iter().map(|x| x.to_f32()).collect(),
                false => device.download::<f32>(&dc, 0, count).unwrap(),
            };
            let mut wanted: Vec<f64> = c.iter().map(|&x| f64::from(x)).collect();
            for i in 0..m {
                for j in 0..n {
                    let product = |l: usize| {
                        let x = if transpose_a { a[8 + l * 8 + i] } else { a[8 + i * 8 + l] };
                        let y = if transpose_b { b[8 + j * 16 + l] } else { b[8 + l * 16 + j] };
                        f64::from(x) * f64::from(y)
                    };
                    let at = 16 + i * 8 + j;
                    wanted[at] = 0.5 * (0..k).map(product).sum::<f64>() + 2.0 * wanted[at];
                }
            }
            let tolerance = if bf16_out { 0.02 } else { 1e-5 };
            for (got, wanted) in got.iter().zip(&wanted) {
                assert!((f64::from(*got) - wanted).abs() <= tolerance * wanted.abs().max(1.0), "{got} {wanted}");
            }
        }
    }
}

#[test]
fn a_product_of_shapes_that_do_not_fit_is_refused() {
    let Some(device) = device() else { return };
    let buffer = device.zeros(4 * 12).unwrap();
    let f32s = |rows, columns| Matrix::whole(&buffer, DType::F32, rows, columns);
    let gemm =
        |a, b, c| Gemm { a, transpose_a: false, b, transpose_b: false, c, alpha: 1.0, beta: 0.0, order: Order::InTurn };
    let refused = |gemm: Gemm<'_>| matches!(device.gemm(&gemm), Err(CudaError::Input(_)));
    assert!(refused(gemm(f32s(2, 3), f32s(4, 2), f32s(2, 2))));
    assert!(refused(gemm(f32s(2, 3), f32s(3, 2), f32s(2, 3))));
    assert!(refused(gemm(f32s(4, 4), f32s(4, 1), f32s(4, 1))));
    assert!(refused(gemm(f32s(2, 0), f32s(0, 2), f32s(2, 2))));
    let halves = Matrix::whole(&buffer, DType::Bf16, 3, 2);
    assert!(refused(gemm(f32s(2, 3), halves, f32s(2, 2))));
    assert!(refused(gemm(halves, Matrix::whole(&buffer, DType::F32, 2, 2), f32s(3, 2))));
    let narrow = Matrix { stride: 2, ..f32s(2, 3) };
    assert!(refused(gemm(narrow, f32s(3, 2), f32s(2, 2))));
}

#[test]
fn missing_parts_are_named_in_the_message() {
    let Err(error) = Device::open(99) else { panic!("there is no 99th device") };
    assert!(matches!(&error, CudaError::Unavailable(_)), "{error}");
    assert!(!error.to_string().contains("panic") && error.to_string().len() > 20);
}
