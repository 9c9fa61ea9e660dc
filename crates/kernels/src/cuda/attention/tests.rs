//! The tests run on the emulator if its feature is enabled, else on a GPU if there is one.

use half::bf16;

use super::super::super::attention::Visible;
use super::*;

pub(in super::super) use super::super::driver::device;

/// Pseudo-random values in [-1, 1).
pub(in super::super) fn noise(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// Rounds values to the precision of the device's type.
pub(in super::super) fn rounded(values: Vec<f32>, dtype: Dtype) -> Vec<f32> {
    match dtype {
        Dtype::F32 => values,
        Dtype::Bf16 => values.into_iter().map(|value| bf16::from_f32(value).to_f32()).collect(),
    }
}

pub(in super::super) fn upload(device: &Device, values: &[f32], dtype: Dtype) -> Buffer {
    match dtype {
        Dtype::F32 => device.upload(values).unwrap(),
        Dtype::Bf16 => device.upload(&values.iter().map(|value| bf16::from_f32(*value)).collect::<Vec<_>>()).unwrap(),
    }
}

pub(in super::super) fn download(device: &Device, buffer: &Buffer, count: usize, dtype: Dtype) -> Vec<f32> {
    match dtype {
        Dtype::F32 => device.download(buffer, 0, count).unwrap(),
        Dtype::Bf16 => device.download::<bf16>(buffer, 0, count).unwrap().into_iter().map(bf16::to_f32).collect(),
    }
}

/// Checks that each value is within `tolerance` of the expected one, relative to the largest expected value.
pub(in super::super) fn assert_close(actual: &[f32], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    let unit = expected.iter().fold(1e-30, |most: f64, value| most.max(value.abs()));
    let mut worst = (0.0, 0);
    for (at, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        let distance = (f64::from(*actual) - expected).abs() / unit;
        // A NaN counts as the largest distance.
        if distance.is_nan() || distance > worst.0 {
            worst = (distance, at);
        }
    }
    let (distance, at) = worst;
    assert!(distance <= tolerance, "{what}: {distance:e} at {at}: {} for {}", actual[at], expected[at]);
}

pub(in super::super) fn group(prompt_len: usize, completion_lens: &[usize]) -> Group {
    Group { prompt_len, completion_lens: completion_lens.to_vec() }
}

pub(in super::super) struct Case {
    pub heads: Heads,
    pub groups: Vec<Group>,
    pub window: Option<usize>,
}

pub(in super::super) fn heads(num_heads: usize, num_kv_heads: usize, head_dim: usize) -> Heads {
    Heads::new(num_heads, num_kv_heads, head_dim)
}

fn cases() -> Vec<Case> {
    let case = |heads, groups: &[Group], window| Case { heads, groups: groups.to_vec(), window };
    vec![
        case(heads(1, 1, 32), &[group(1, &[])], None),
        case(heads(4, 2, 64), &[group(70, &[5, 66, 0, 1])], None),
        case(heads(8, 1, 32), &[group(3, &[10, 20])], Some(7)),
        case(heads(3, 1, 16), &[group(130, &[3]), group(64, &[64, 65]), group(1, &[1])], Some(64)),
        case(heads(2, 2, 128), &[group(5, &[9, 2])], Some(1)),
        case(heads(7, 1, 256), &[group(67, &[3])], None),
        case(heads(20, 1, 10), &[group(9, &[4])], None),
        case(heads(5, 1, 96), &[group(33, &[40, 7])], Some(50)),
        case(heads(12, 2, 64), &[group(2, &[]), group(4, &[])], None),
    ]
}

impl Case {
    pub fn tokens(&self) -> usize {
        self.groups.iter().map(Group::len).sum()
    }

    pub fn what(&self, dtype: Dtype) -> String {
        format!("{:?}, {:?}, window {:?}, {dtype:?}", self.heads, self.groups, self.window)
    }

    /// The rows that each row attends to.
    fn seen(&self) -> Vec<Vec<usize>> {
        let (mut seen, mut begin) = (Vec::new(), 0);
        for Group { prompt_len, completion_lens } in &self.groups {
            let rows = |visible: Visible, own: usize| -> Vec<usize> {
                visible.prompt.map(|at| begin + at).chain(visible.own.map(|at| own + at)).collect()
            };
            seen.extend((0..*prompt_len).map(|index| rows(Visible::of_prompt(index, self.window), 0)));
            let mut own = begin + prompt_len;
            for len in completion_lens {
                let visible = |index| Visible::of_completion(*prompt_len, index, self.window);
                seen.extend((0..*len).map(|index| rows(visible(index), own)));
                own += len;
            }
            begin = own;
        }
        seen
    }

    /// Computes out, and with `dy` also dL/dqkv.
    fn naive(&self, qkv: &[f32], dy: &[f32]) -> (Vec<f64>, Vec<f64>) {
        let Heads { num_heads, head_dim: dim, .. } = self.heads;
        let (width, q_width, kv_width) = (self.heads.width(), self.heads.q_width(), self.heads.kv_width());
        let (mut out, mut d_qkv) = (vec![0.0; self.tokens() * q_width], vec![0.0; self.tokens() * width]);
        let value = |row: usize, at: usize| f64::from(qkv[row * width + at]);
        for (row, seen) in self.seen().into_iter().enumerate() {
            for head in 0..num_heads {
                let kv = head / self.heads.group_size();
                let (q, k, v) = (head * dim, q_width + kv * dim, q_width + kv_width + kv * dim);
                let scale = (dim as f64).powf(-0.5);
                let dot = |other: usize| (0..dim).map(|d| value(row, q + d) * value(other, k + d)).sum::<f64>() * scale;
                let scores: Vec<f64> = seen.iter().map(|other| dot(*other)).collect();
                let most = scores.iter().fold(f64::MIN, |a, b| a.max(*b));
                let sum: f64 = scores.iter().map(|score| (score - most).exp()).sum();
                let p: Vec<f64> = scores.iter().map(|score| (score - most).exp() / sum).collect();
                let d_out = |d: usize| f64::from(dy[row * q_width + head * dim + d]);
                let dp: Vec<f64> =
                    seen.iter().map(|other| (0..dim).map(|d| d_out(d) * value(*other, v + d)).sum()).collect();
                let mean: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
                for ((other, p), dp) in seen.iter().zip(&p).zip(&dp) {
                    let ds = p * (dp - mean) * scale;
                    for d in 0..dim {
                        out[row * q_width + head * dim + d] += p * value(*other, v + d);
                        d_qkv[other * width + v + d] += p * d_out(d);
                        d_qkv[other * width + k + d] += ds * value(row, q + d);
                        d_qkv[row * width + q + d] += ds * value(*other, k + d);
                    }
                }
            }
        }
        (out, d_qkv)
    }

    pub fn qkv(&self, dtype: Dtype) -> Vec<f32> {
        rounded(noise(self.tokens() * self.heads.width(), 7).iter().map(|v| v * 2.0).collect(), dtype)
    }
}

const DTYPES: [Dtype; 2] = [Dtype::F32, Dtype::Bf16];

/// Computes out and d_qkv with the kernels.
fn run(device: &Device, case: &Case, qkv: &[f32], dy: &[f32], dtype: Dtype) -> (Vec<f32>, Vec<f32>) {
    let (tokens, width, q_width) = (case.tokens(), case.heads.width(), case.heads.q_width());
    let layout = Layout::new(device, &case.heads, &case.groups, case.window).unwrap();
    assert!(layout.is_for(&case.heads, &case.groups, case.window) && layout.tokens() == tokens);
    let (qkv, dy) = (upload(device, qkv, dtype), upload(device, dy, dtype));
    let out = device.alloc(tokens * q_width * dtype.bytes()).unwrap();
    let softmax = device.alloc(tokens * case.heads.num_heads * 4).unwrap();
    let d_qkv = device.alloc(tokens * width * dtype.bytes()).unwrap();
    let qkv = Rows::new(&qkv, tokens, width, dtype);
    let of_out = Rows::new(&out, tokens, q_width, dtype);
    let of_softmax = Rows::new(&softmax, tokens, case.heads.num_heads, Dtype::F32);
    attend(device, &layout, qkv, of_out, of_softmax).unwrap();
    let dy = Rows::new(&dy, tokens, q_width, dtype);
    let backward = Backward { layout: &layout, qkv, out: of_out, softmax: of_softmax, dy };
    attend_vjp(device, &backward, Rows::new(&d_qkv, tokens, width, dtype)).unwrap();
    (download(device, &out, tokens * q_width, dtype), download(device, &d_qkv, tokens * width, dtype))
}

#[test]
fn attention_and_its_gradient_are_the_naive_ones() {
    let Some(device) = device() else { return };
    for case in cases() {
        for dtype in DTYPES {
            if let Err(CudaError::Input(why)) = check_trainable(&device, &case.heads, dtype) {
                let roomy = device.properties().shared_bytes > 100 << 10;
                assert!(!roomy && case.heads.head_dim > 128, "{}: {why}", case.what(dtype));
                continue;
            }
            let qkv = case.qkv(dtype);
            let dy = rounded(noise(case.tokens() * case.heads.q_width(), 3), dtype);
            let (out, d_qkv) = run(&device, &case, &qkv, &dy, dtype);
            let (expected, expected_d) = case.naive(&qkv, &dy);
            let (of_out, of_gradient) = if dtype == Dtype::F32 { (2e-6, 5e-6) } else { (6e-3, 1.2e-2) };
            assert_close(&out, &expected, of_out, &case.what(dtype));
            assert_close(&d_qkv, &expected_d, of_gradient, &format!("gradient of {}", case.what(dtype)));
        }
    }
}

#[test]
fn heads_that_do_not_fit_are_refused() {
    let Some(device) = device() else { return };
    for heads in [heads(3, 2, 32), heads(1, 0, 32), heads(1, 1, 257), heads(1, 1, 0)] {
        assert!(matches!(Layout::new(&device, &heads, &[], None), Err(CudaError::Input(_))), "{heads:?}");
    }
}

/// Shared memory per block of consumer GPUs, in bytes.
#[cfg(feature = "cuda-emulator")]
const SMALL: u32 = 101_376;

#[cfg(feature = "cuda-emulator")]
#[test]
fn little_shared_memory_gives_the_same_bits() {
    let Some(device) = device().filter(|device| device.properties().emulated) else { return };
    let small = Device::open_small(SMALL).unwrap();
    for (heads, is_trainable) in [(heads(4, 2, 64), true), (heads(3, 1, 128), true), (heads(2, 1, 256), false)] {
        let case = Case { heads, groups: vec![group(130, &[70, 3])], window: Some(100) };
        let (qkv, dtype) = (case.qkv(Dtype::Bf16), Dtype::Bf16);
        let dy = rounded(noise(case.tokens() * heads.q_width(), 3), dtype);
        assert_eq!(check_trainable(&small, &heads, dtype).is_ok(), is_trainable, "{heads:?}");
        assert!(check_trainable(&small, &heads, Dtype::F32).is_ok() && check_trainable(&device, &heads, dtype).is_ok());
        if is_trainable {
            assert_eq!(run(&small, &case, &qkv, &dy, dtype), run(&device, &case, &qkv, &dy, dtype), "{heads:?}");
        } else {
            let (tokens, width) = (case.tokens(), heads.width());
            let layout = Layout::new(&small, &heads, &case.groups, case.window).unwrap();
            let qkv = upload(&small, &qkv, dtype);
            let out = small.alloc(tokens * heads.q_width() * 2).unwrap();
            let softmax = small.alloc(tokens * heads.num_heads * 4).unwrap();
            let of_softmax = Rows::new(&softmax, tokens, heads.num_heads, Dtype::F32);
            let of_out = Rows::new(&out, tokens, heads.q_width(), dtype);
            // The forward pass just fits.
            attend(&small, &layout, Rows::new(&qkv, tokens, width, dtype), of_out, of_softmax).unwrap();
            small.synchronize().unwrap();
        }
    }
    let kernel = |device: &Device| BackwardShared::new(device, &Geometry::new(&heads(3, 1, 128)).unwrap(), Dtype::Bf16);
    assert_eq!(kernel(&small).unwrap().kernel, "attend_queries_one_stage");
    assert_eq!(kernel(&device).unwrap().kernel, "attend_queries");
    let error = check_trainable(&small, &heads(2, 1, 256), Dtype::Bf16).unwrap_err();
    assert!(error.to_string().contains("135168 bytes"), "{error}");
}

#[test]
fn rows_of_another_shape_are_refused() {
    let Some(device) = device() else { return };
    let (heads, groups) = (heads(2, 1, 32), [group(3, &[])]);
    let layout = Layout::new(&device, &heads, &groups, None).unwrap();
    let buffer = device.zeros(3 * 128 * 4).unwrap();
    let rows = |rows, width| Rows::new(&buffer, rows, width, Dtype::F32);
    assert!(attend(&device, &layout, rows(2, 128), rows(3, 64), rows(3, 2)).is_err());
    assert!(attend(&device, &layout, rows(3, 128), rows(3, 32), rows(3, 2)).is_err());
    assert!(attend(&device, &layout, rows(3, 128), rows(3, 64), rows(3, 1)).is_err());
}

#[test]
fn a_group_has_the_same_bits_alone_beside_others_and_again() {
    let Some(device) = device() else { return };
    let (heads, window) = (heads(4, 2, 32), Some(70));
    let (first, second) = (group(37, &[9, 66]), group(65, &[3]));
    let both = Case { heads, groups: vec![first.clone(), second.clone()], window };
    let alone = Case { heads, groups: vec![second], window };
    for dtype in DTYPES {
        let (qkv, dy) = (both.qkv(dtype), rounded(noise(both.tokens() * heads.q_width(), 3), dtype));
        let (out, d_qkv) = run(&device, &both, &qkv, &dy, dtype);
        assert_eq!(run(&device, &both, &qkv, &dy, dtype), (out.clone(), d_qkv.clone()), "{dtype:?}");
        let (at, at_out) = (first.len() * heads.width(), first.len() * heads.q_width());
        let actual = run(&device, &alone, &qkv[at..], &dy[at_out..], dtype);
        assert_eq!(actual, (out[at_out..].to_vec(), d_qkv[at..].to_vec()), "{dtype:?}");
    }
}
