//! Compares the functions available to kernels with naive implementations. Running the same tests on a GPU shows that
//! the emulator behaves like a GPU.

use super::*;

params! { struct Rows { x: u64, sums: u64, largest: u64, width: u32, pad: u32 } }
params! { struct Shuffles { out: u64 } }
params! { struct Tiles { a: u64, b: u64, b_columns: u64, d: u64, d_columns: u64, pairs: u64 } }
params! { struct Roundings { x: u64, packed: u64, rounded: u64, widened: u64 } }
params! { struct Counts { blocks: u64, threads: u64 } }
params! { struct Neighbors { x: u64, y: u64, rounds: u32, pad: u32 } }

fn halves(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|&x| bf16::from_f32(x)).collect()
}

#[test]
fn a_block_sums_its_row_and_finds_the_largest() {
    let Some(device) = device() else { return };
    let (rows, width) = (3, 500);
    let values = numbers(rows * width, 5);
    for (name, x) in [
        ("probe_rows_f32", device.upload(&values).unwrap()),
        ("probe_rows_bf16", device.upload(&halves(&values)).unwrap()),
    ] {
        for block in [32, 128, 1024] {
            let (sums, largest) = (device.zeros(rows * 4).unwrap(), device.zeros(rows * 4).unwrap());
            let pointers = (sums.pointer(), largest.pointer());
            let params = Rows { x: x.pointer(), sums: pointers.0, largest: pointers.1, width: width as u32, pad: 0 };
            device.launch(name, Launch { grid: [rows as u32, 1, 1], block, shared: 0 }, &params).unwrap();
            let (sums, largest) = (device.download::<f32>(&sums, 0, rows), device.download::<f32>(&largest, 0, rows));
            for (row, (sum, largest)) in sums.unwrap().into_iter().zip(largest.unwrap()).enumerate() {
                let row = &values[row * width..][..width];
                assert!((sum - row.iter().sum::<f32>()).abs() < 1e-4);
                assert_eq!(largest, row.iter().copied().fold(f32::MIN, f32::max));
            }
        }
    }
}

#[test]
fn lanes_exchange_values() {
    let Some(device) = device() else { return };
    let out = device.zeros(64 * 8 * 4).unwrap();
    device.launch("probe_shuffles", one_block(64), &Shuffles { out: out.pointer() }).unwrap();
    let thirds = (0..32).filter(|lane| lane % 3 == 0).fold(0_u32, |votes, lane| votes | 1 << lane);
    for (thread, got) in device.download::<u32>(&out, 0, 512).unwrap().chunks(8).enumerate() {
        let (thread, first) = (thread as u32, thread as u32 / 32 * 32);
        let lane = thread - first;
        let of = |lane: u32| 100 + first + lane;
        let down = if lane + 3 < 32 { lane + 3 } else { lane };
        let up = if lane >= 3 { lane - 3 } else { lane };
        assert_eq!(got, [of(lane ^ 5), of(7), of(down), of(up), thirds, u32::from(first == 0), 1, 31 * 16]);
    }
}

#[test]
fn tiles_are_copied_loaded_and_multiplied() {
    let Some(device) = device() else { return };
    let (a, b) = (numbers(16 * 16, 11), numbers(16 * 8, 12));
    let b_columns: Vec<f32> = (0..8 * 16).map(|i| b[i % 16 * 8 + i / 16]).collect();
    let put = |values: &[f32]| device.upload(&halves(values)).unwrap();
    let (da, db, dt) = (put(&a), put(&b), put(&b_columns));
    let (d, e, pairs) = (device.zeros(512).unwrap(), device.zeros(512).unwrap(), device.zeros(512).unwrap());
    let params = Tiles {
        a: da.pointer(),
        b: db.pointer(),
        b_columns: dt.pointer(),
        d: d.pointer(),
        d_columns: e.pointer(),
        pairs: pairs.pointer(),
    };
    device.launch("probe_tiles", Launch { shared: 1024, ..one_block(32) }, &params).unwrap();
    let (d, e) = (device.download::<f32>(&d, 0, 128).unwrap(), device.download::<f32>(&e, 0, 128).unwrap());
    for i in 0..16 {
        for j in 0..8 {
            let wanted: f64 = (0..16).map(|k| f64::from(a[i * 16 + k]) * f64::from(b[k * 8 + j])).sum();
            assert!((f64::from(d[i * 8 + j]) - wanted).abs() < 1e-5);
            assert_eq!(d[i * 8 + j].to_bits(), e[i * 8 + j].to_bits());
        }
    }
    // Matrix i of the four has its rows at lane 8 i, as the kernel addressed them: (0, 0), (8, 0), (0, 8), (8, 8).
    let bits = |row: usize, column: usize| u32::from(bf16::from_f32(a[row * 16 + column]).to_bits());
    for (lane, got) in device.download::<u32>(&pairs, 0, 128).unwrap().chunks(4).enumerate() {
        for (i, &got) in got.iter().enumerate() {
            let (row, column) = (8 * (i % 2) + 2 * (lane % 4), 8 * (i / 2) + lane / 4);
            assert_eq!(got, bits(row, column) | bits(row + 1, column) << 16);
        }
    }
}

#[test]
fn bf16_is_rounded_to_nearest_even() {
    let Some(device) = device() else { return };
    let mut x: Vec<f32> = (0..64).map(|i| f32::from_bits(0x3f80_0000 + i * 0x1001)).collect();
    let special =
        [0x3f80_8000, 0x3f81_8000, 0x3f80_8001, 0x7f7f_ffff, 0xff80_0000, 0x8000_0000, 0x0000_8000, 0x0001_8000];
    for (x, bits) in x.iter_mut().zip(special) {
        *x = f32::from_bits(bits);
    }
    x[63] = f32::NAN;
    let dx = device.upload(&x).unwrap();
    let (packed, rounded, widened) =
        (device.zeros(128).unwrap(), device.zeros(128).unwrap(), device.zeros(256).unwrap());
    let (packed_at, rounded_at, widened_at) = (packed.pointer(), rounded.pointer(), widened.pointer());
    let params = Roundings { x: dx.pointer(), packed: packed_at, rounded: rounded_at, widened: widened_at };
    device.launch("probe_roundings", one_block(32), &params).unwrap();
    let packed = device.download::<u32>(&packed, 0, 32).unwrap();
    let rounded = device.download::<bf16>(&rounded, 0, 64).unwrap();
    let widened = device.download::<f32>(&widened, 0, 64).unwrap();
    for (i, &x) in x.iter().enumerate() {
        let half = (packed[i / 2] >> (16 * (i % 2))) as u16;
        assert_eq!(half, rounded[i].to_bits());
        let wanted = bf16::from_f32(x);
        if x.is_nan() {
            assert!(rounded[i].is_nan() && widened[i].is_nan());
        } else {
            assert_eq!((half, widened[i]), (wanted.to_bits(), wanted.to_f32()), "{x:e}");
        }
    }
}

#[test]
fn a_grid_has_three_dimensions_and_integers_are_added_atomically() {
    let Some(device) = device() else { return };
    let (blocks, threads) = (device.zeros(24 * 4).unwrap(), device.zeros(4).unwrap());
    let params = Counts { blocks: blocks.pointer(), threads: threads.pointer() };
    device.launch("probe_counts", Launch { grid: [2, 3, 4], block: 64, shared: 0 }, &params).unwrap();
    assert_eq!(device.download::<u32>(&blocks, 0, 24).unwrap(), (1..=24).collect::<Vec<u32>>());
    assert_eq!(device.download::<i32>(&threads, 0, 1).unwrap(), [24 * 64]);
}

#[test]
fn barriers_part_writes_from_reads() {
    let Some(device) = device() else { return };
    for block in [32, 96, 1024] {
        let mut wanted: Vec<f32> = (0..block).map(|i| (i % 7) as f32).collect();
        let x = device.upload(&wanted).unwrap();
        let y = device.zeros(block as usize * 4).unwrap();
        let params = Neighbors { x: x.pointer(), y: y.pointer(), rounds: 5, pad: 0 };
        device.launch("probe_neighbors", Launch { shared: block * 4, ..one_block(block) }, &params).unwrap();
        for _ in 0..5 {
            let before = wanted.clone();
            for (i, own) in wanted.iter_mut().enumerate() {
                *own += before[(i + 1) % before.len()];
            }
        }
        assert_eq!(device.download::<f32>(&y, 0, block as usize).unwrap(), wanted);
    }
}

#[test]
fn a_block_may_have_all_the_shared_memory_that_the_device_names() {
    let Some(device) = device() else { return };
    let shared = device.properties().shared_bytes;
    let (x, y) = (device.zeros(128).unwrap(), device.zeros(128).unwrap());
    let params = Neighbors { x: x.pointer(), y: y.pointer(), rounds: 1, pad: 0 };
    device.launch("probe_neighbors", Launch { shared, ..one_block(32) }, &params).unwrap();
    assert_eq!(device.download::<f32>(&y, 0, 32).unwrap(), [0.0; 32]);
}
