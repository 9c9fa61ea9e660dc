//! The tests run on the emulator if its feature is enabled, else on a GPU if there is one.

use half::bf16;

use super::*;
use crate::rows::tests::noise;

pub(in super::super) use super::super::driver::device;

pub const DTYPES: [Dtype; 2] = [Dtype::F32, Dtype::Bf16];

pub fn rounded(value: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F32 => value,
        Dtype::Bf16 => bf16::from_f32(value).to_f32(),
    }
}

pub fn upload(device: &Device, values: &[f32], dtype: Dtype) -> Buffer {
    match dtype {
        Dtype::F32 => device.upload(values),
        Dtype::Bf16 => device.upload(&values.iter().map(|value| bf16::from_f32(*value)).collect::<Vec<bf16>>()),
    }
    .expect("a buffer")
}

pub fn download(device: &Device, buffer: &Buffer, count: usize, dtype: Dtype) -> Vec<f32> {
    match dtype {
        Dtype::F32 => device.download::<f32>(buffer, 0, count).expect("values"),
        Dtype::Bf16 => {
            device.download::<bf16>(buffer, 0, count).expect("values").iter().map(|value| value.to_f32()).collect()
        }
    }
}

/// Rows of noise in a buffer, with noise around them.
pub struct Given {
    pub buffer: Buffer,
    all: Vec<f32>,
    at: usize,
    rows: usize,
    width: usize,
    stride: usize,
    dtype: Dtype,
}

impl Given {
    /// Rows without gaps, at the beginning of the buffer.
    pub fn new(device: &Device, rows: usize, width: usize, seed: u64, dtype: Dtype) -> Given {
        Given::placed(device, (rows, width), (0, width), seed, dtype)
    }

    /// Rows that cannot be read four at a time.
    pub fn odd(device: &Device, rows: usize, width: usize, seed: u64, dtype: Dtype) -> Given {
        Given::placed(device, (rows, width), (3, width + 5), seed, dtype)
    }

    pub fn placed(
        device: &Device,
        (rows, width): (usize, usize),
        (at, stride): (usize, usize),
        seed: u64,
        dtype: Dtype,
    ) -> Given {
        let all: Vec<f32> = noise(at + rows * stride, seed).iter().map(|value| rounded(4.0 * value, dtype)).collect();
        Given { buffer: upload(device, &all, dtype), all, at, rows, width, stride, dtype }
    }

    /// Rows with these values.
    pub fn of(device: &Device, values: &[f32], width: usize, dtype: Dtype) -> Given {
        let all: Vec<f32> = values.iter().map(|value| rounded(*value, dtype)).collect();
        let (buffer, rows) = (upload(device, &all, dtype), values.len() / width);
        Given { buffer, all, at: 0, rows, width, stride: width, dtype }
    }

    pub fn rows(&self) -> Rows<'_> {
        let Given { buffer, all: _, at, rows, width, stride, dtype } = self;
        Rows { buffer, at: *at, rows: *rows, width: *width, stride: *stride, dtype: *dtype }
    }

    /// The initial values of the rows.
    pub fn values(&self) -> Vec<f32> {
        self.inside(&self.all)
    }

    pub fn wide(&self) -> Vec<f64> {
        self.values().iter().map(|value| f64::from(*value)).collect()
    }

    fn inside(&self, all: &[f32]) -> Vec<f32> {
        (0..self.rows).flat_map(|row| &all[self.at + row * self.stride..][..self.width]).copied().collect()
    }

    /// The current values of the rows; checks that nothing around them has changed.
    #[track_caller]
    pub fn now(&self, device: &Device) -> Vec<f32> {
        let now = download(device, &self.buffer, self.all.len(), self.dtype);
        for (index, (now, before)) in now.iter().zip(&self.all).enumerate() {
            let inside = index >= self.at && (index - self.at) % self.stride < self.width;
            assert!(inside || now.to_bits() == before.to_bits(), "value {index}, between the rows, was changed");
        }
        self.inside(&now)
    }
}

/// Checks that values are within `tolerance` of the expected ones, relative to the largest expected value, plus the
/// rounding of the type.
#[track_caller]
pub fn assert_near(actual: &[f32], expected: &[f64], dtype: Dtype, tolerance: f64, what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    let rounding = if dtype == Dtype::Bf16 { 1.0 / 256.0 } else { 0.0 };
    let scale = expected.iter().fold(0.1f64, |largest, value| largest.max(value.abs()));
    for (index, (a, e)) in actual.iter().zip(expected).enumerate() {
        let error = (f64::from(*a) - e).abs();
        assert!(error <= tolerance * scale + rounding * e.abs(), "{what}, element {index}: {a} for {e}");
    }
}

#[test]
fn rows_are_looked_up_and_converted() {
    let Some(device) = device() else { return };
    for (x_type, out_type) in [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(x, out)| (DTYPES[x], DTYPES[out])) {
        for (width, numbers) in [(1, vec![2, 0, 2]), (7, vec![1]), (64, vec![3, 3, 0, 1]), (301, vec![4, 2])] {
            let x = Given::odd(&device, 5, width, 1, x_type);
            let even = Given::placed(&device, (5, width), (8, width.next_multiple_of(4)), 1, x_type);
            for x in [&x, &even] {
                let out = Given::odd(&device, numbers.len(), width, 2, out_type);
                select(&device, x.rows(), &numbers, out.rows()).expect("a lookup");
                let values = x.values();
                let expected: Vec<f32> = numbers
                    .iter()
                    .flat_map(|row| &values[*row as usize * width..][..width])
                    .map(|value| rounded(*value, out_type))
                    .collect();
                assert_eq!(out.now(&device), expected, "{width} values, {x_type:?} to {out_type:?}");
            }
        }
    }
}

#[test]
fn a_missing_row_is_rejected_by_the_host_and_nan_on_the_device() {
    let Some(device) = device() else { return };
    let (x, out) = (Given::new(&device, 3, 8, 1, Dtype::F32), Given::new(&device, 2, 8, 2, Dtype::F32));
    assert!(matches!(select(&device, x.rows(), &[0, 3], out.rows()), Err(CudaError::Input(_))));
    assert_eq!(out.now(&device), out.values());
    select_by(&device, x.rows(), &device.upload(&[2u32, 3]).expect("a buffer"), out.rows()).expect("a lookup");
    let now = out.now(&device);
    assert_eq!(now[..8], x.values()[16..]);
    assert!(now[8..].iter().all(|value| value.is_nan()));
    assert!(scatter_add(&device, x.rows(), &[0, 1, 2], out.rows()).is_err());
    assert!(copy(&device, x.rows(), out.rows()).is_err());
    let beyond = Rows { rows: 4, ..x.rows() };
    assert!(copy(&device, beyond, beyond).is_err());
}

#[test]
fn rows_are_added_where_they_belong_in_their_order() {
    let Some(device) = device() else { return };
    for dtype in DTYPES {
        for width in [1, 6, 64, 129] {
            let rows = [3u32, 0, 3, 5, 3, 0, 1];
            let (x, out) = (Given::odd(&device, 7, width, 1, dtype), Given::odd(&device, 6, width, 2, Dtype::F32));
            scatter_add(&device, x.rows(), &rows, out.rows()).expect("a sum");
            let mut expected = out.values();
            for (row, x) in rows.iter().zip(x.values().chunks(width)) {
                expected[*row as usize * width..].iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
            }
            assert_eq!(out.now(&device), expected, "{width} values of {dtype:?}");
        }
    }
}

#[test]
fn rows_are_copied_added_and_summed() {
    let Some(device) = device() else { return };
    for (x_type, y_type) in [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(x, y)| (DTYPES[x], DTYPES[y])) {
        for (rows, width) in [(1, 1), (3, 5), (4, 64), (2, 1000)] {
            let x = Given::new(&device, rows, width, 1, x_type);
            let y = Given::odd(&device, rows, width, 2, y_type);
            add(&device, x.rows(), y.rows()).expect("a sum");
            let (from, into) = (x.values(), y.values());
            let sums: Vec<f32> = from.iter().zip(&into).map(|(x, y)| rounded(x + y, y_type)).collect();
            assert_eq!(y.now(&device), sums, "{rows} x {width}, {x_type:?} and {y_type:?}");
            copy(&device, x.rows(), y.rows()).expect("a copy");
            let copied: Vec<f32> = from.iter().map(|x| rounded(*x, y_type)).collect();
            assert_eq!(y.now(&device), copied, "{rows} x {width}, {x_type:?} to {y_type:?}");
        }
    }
    for dtype in DTYPES {
        for (rows, width) in [(1, 1), (9, 29), (64, 3), (150, 300)] {
            let x = Given::odd(&device, rows, width, 1, dtype);
            let sums = Given::placed(&device, (1, width), (7, width), 2, Dtype::F32);
            column_sums(&device, x.rows(), sums.rows()).expect("sums");
            let mut expected = sums.wide();
            for row in x.wide().chunks(width) {
                expected.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
            }
            assert_near(&sums.now(&device), &expected, Dtype::F32, 1e-6, "column sums");
        }
    }
}

#[test]
fn a_product_by_a_library_gets_its_bias_and_residual() {
    let Some(device) = device() else { return };
    for dtype in DTYPES {
        let (rows, width) = (5, 27);
        let bias = Given::placed(&device, (1, width), (1, width), 1, Dtype::F32);
        let (more, out) = (Given::odd(&device, rows, width, 2, Dtype::F32), Given::odd(&device, rows, width, 3, dtype));
        finish(&device, Some(bias.rows()), Some(more.rows()), out.rows()).expect("sums");
        let (bias, more) = (bias.wide(), more.wide());
        let values = out.wide();
        let expected: Vec<f64> = (0..rows * width).map(|i| values[i] + bias[i % width] + more[i]).collect();
        assert_near(&out.now(&device), &expected, dtype, 1e-6, "sums");
    }
}

/// The same function as in engine/src/random.rs.
fn draw(key: u64, word: u64) -> u64 {
    const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;
    fn mix(word: u64) -> u64 {
        let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }
    mix(mix(key.wrapping_mul(3).wrapping_add(mix(word.wrapping_add(GAMMA)))) ^ GAMMA)
}

/// Applies dropout to one value.
pub fn kept(key: u64, column: usize, value: f32, threshold: u64, scale: f32) -> f32 {
    let bits = draw(key, column as u64 / 2);
    let draw = if column.is_multiple_of(2) { bits & 0xffff_ffff } else { bits >> 32 };
    if draw < threshold { 0.0 } else { value * scale }
}

#[test]
fn dropout_takes_what_the_host_takes() {
    let Some(device) = device() else { return };
    let keys: Vec<u64> = (0..9).map(|row| draw(row, 77)).collect();
    let buffer = device.upload(&keys).expect("a buffer");
    for (x_type, out_type) in [(0, 0), (1, 1), (1, 0)].map(|(x, out)| (DTYPES[x], DTYPES[out])) {
        for (rows, width) in [(1, 1), (3, 6), (9, 131)] {
            let (threshold, scale) = ((0.3 * 2f64.powi(32)) as u64, 1.0 / 0.7);
            let dropout = Dropout { keys: &buffer, threshold, scale };
            let (x, out) = (Given::odd(&device, rows, width, 1, x_type), Given::odd(&device, rows, width, 2, out_type));
            let left: Vec<f32> = x
                .values()
                .iter()
                .enumerate()
                .map(|(i, value)| kept(keys[i / width], i % width, *value, threshold, scale))
                .collect();
            drop_out(&device, x.rows(), dropout, true, out.rows()).expect("dropout");
            let sums: Vec<f32> = out.values().iter().zip(&left).map(|(y, x)| rounded(y + x, out_type)).collect();
            assert_eq!(out.now(&device), sums, "{rows} x {width}");
            drop_out(&device, x.rows(), dropout, false, out.rows()).expect("dropout");
            let left: Vec<f32> = left.iter().map(|value| rounded(*value, out_type)).collect();
            assert_eq!(out.now(&device), left, "{rows} x {width}");
        }
    }
}
