//! Compares each operation and its vector-Jacobian product with autograd over tensor operations.

use candle_core::{Device, Result, Tensor, Var};

use super::slices::{Group, Heads, Visible};
use super::*;
use crate::random::{Key, Stream};

fn random(seed: u64, rows: usize, width: usize) -> Tensor {
    let key = Key::new(seed, Stream::Probe);
    let values: Vec<f32> = (0..(rows * width) as u64).map(|i| (key.with(i).uniform() * 4.0 - 2.0) as f32).collect();
    Tensor::from_vec(values, (rows, width), &Device::Cpu).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

fn assert_close(what: &str, fast: &Tensor, slow: &Tensor) {
    assert_eq!(fast.dims(), slow.dims(), "{what}");
    for (fast, slow) in values(fast).iter().zip(values(slow)) {
        assert!((fast - slow).abs() < 2e-5 * slow.abs().max(1.0), "{what}: {fast} and {slow}");
    }
}

/// Compares forward and VJP with those of the tensor operations.
fn compare(
    what: &str,
    x: &Tensor,
    fast: impl Fn(&Tensor) -> Result<Tensor>,
    vjp: impl Fn(&Tensor, &Tensor) -> Result<Tensor>,
    plain: impl Fn(&Tensor) -> Result<Tensor>,
) {
    let var = Var::from_tensor(x).unwrap();
    let slow = plain(var.as_tensor()).unwrap();
    assert_close(what, &fast(x).unwrap(), &slow);
    let dy = random(99, slow.dims()[0], slow.dims()[1]);
    let gradients = (slow * &dy).unwrap().sum_all().unwrap().backward().unwrap();
    assert_close(&format!("{what} vjp"), &vjp(x, &dy).unwrap(), gradients.get(var.as_tensor()).unwrap());
}

/// The scale differs from the usual root of the head's width.
const HEADS: Heads = Heads { num_heads: 6, num_kv_heads: 2, head_dim: 10, scale: 0.4, softcap: None };

#[test]
fn rms_norm_and_its_vjp_equal_the_plain_twin() {
    for (rows, width) in [(1, 64), (3, 33), (700, 64)] {
        let (x, weight) = (random(1, rows, width), random(2, 1, width));
        let w = values(&weight);
        compare(
            "rms_norm",
            &x,
            |x| rms_norm(x, &w, 1e-5),
            |x, dy| rms_norm_vjp(x, &w, 1e-5, dy),
            |x| plain::rms_norm(x, &weight.flatten_all()?, 1e-5),
        );
    }
}

#[test]
fn gated_activations_and_their_vjp_equal_the_plain_twin() {
    for (activation, rows) in
        [Activation::Silu, Activation::GeluTanh].into_iter().flat_map(|a| [(a, 1), (a, 5), (a, 600)])
    {
        let x = (random(3, rows, 2 * 40) * 3.0).unwrap();
        let (fast, vjp) = (|x: &Tensor| gated(activation, x), |x: &Tensor, dy: &Tensor| gated_vjp(activation, x, dy));
        compare(&format!("{activation:?}"), &x, fast, vjp, |x| plain::gated(activation, x));
    }
}

#[test]
fn softcap_and_its_vjp_equal_the_plain_twin() {
    let x = (random(4, 7, 40) * 5.0).unwrap();
    let vjp = |x: &Tensor, dy: &Tensor| softcap_vjp(&softcap(x, 3.0)?, 3.0, dy);
    compare("softcap", &x, |x| softcap(x, 3.0), vjp, |x| (x / 3.0)?.tanh()? * 3.0);
}

#[test]
fn qk_norm_and_rope_and_their_vjp_equal_the_plain_twin() {
    let (rows, half) = (9, HEADS.head_dim / 2);
    let positions: Vec<usize> = (0..rows).map(|i| (i * 5) % 7).collect();
    let angles: Vec<f32> = (0..7 * half).map(|i| i as f32 * 0.3).collect();
    let table = RopeTable {
        cos: angles.iter().map(|a| a.cos()).collect(),
        sin: angles.iter().map(|a| a.sin()).collect(),
        half,
    };
    let (q_weight, k_weight) = (random(5, 1, HEADS.head_dim), random(6, 1, HEADS.head_dim));
    let (q, k) = (values(&q_weight), values(&k_weight));
    let gather = |table: &dyn Fn(usize) -> Vec<f32>| {
        let all: Vec<f32> = positions.iter().flat_map(|p| table(*p)).collect();
        Tensor::from_vec(all, (rows, half), &Device::Cpu).unwrap()
    };
    let (cos, sin) = (gather(&|p| table.at(p).0.to_vec()), gather(&|p| table.at(p).1.to_vec()));
    for normed in [false, true] {
        let qk_norm = normed.then_some((q.as_slice(), k.as_slice(), 1e-6));
        let rotation = Rotation { heads: &HEADS, qk_norm, table: &table, positions: &positions };
        compare(
            "rotate",
            &random(4, rows, HEADS.width()),
            |x| rotate(&rotation, x),
            |x, dy| rotate_vjp(&rotation, x, dy),
            |x| {
                let part = |at: usize, count: usize, weight: &Tensor| {
                    let part = x.narrow(1, at, count * HEADS.head_dim)?.reshape((rows, count, HEADS.head_dim))?;
                    let part = if normed { plain::rms_norm(&part, &weight.flatten_all()?, 1e-6)? } else { part };
                    plain::rotate(&part, &cos, &sin)?.reshape((rows, count * HEADS.head_dim))
                };
                let q = part(0, HEADS.num_heads, &q_weight)?;
                let k = part(HEADS.q_width(), HEADS.num_kv_heads, &k_weight)?;
                let v = x.narrow(1, HEADS.q_width() + HEADS.kv_width(), HEADS.kv_width())?;
                Tensor::cat(&[q, k, v], 1)
            },
        );
    }
}

#[test]
fn attention_and_its_vjp_equal_the_plain_twin() {
    let groups = [
        Group { prompt_len: 5, completion_lens: vec![3, 0, 6] },
        Group { prompt_len: 1, completion_lens: vec![] },
        Group { prompt_len: 2, completion_lens: vec![9] },
    ];
    let rows: usize = groups.iter().map(Group::len).sum();
    let softcaps = [None, Some(1.5)];
    let windows = [None, Some(1), Some(3), Some(6), Some(100)];
    for (window, softcap) in windows.into_iter().flat_map(|window| softcaps.map(|softcap| (window, softcap))) {
        let heads = Heads { softcap, ..HEADS };
        let visible: Vec<Vec<Visible>> = groups.iter().map(|g| slices::visible(g, window)).collect();
        compare(
            "attention",
            &random(7, rows, HEADS.width()),
            |x| attention(&heads, &groups, &visible, x),
            |x, dy| attention_vjp(&heads, &groups, &visible, x, dy),
            |x| {
                let mut begin = 0;
                let parts = groups.iter().map(|group| {
                    let part = x.narrow(0, begin, group.len())?;
                    begin += group.len();
                    plain::attention(&heads, group, window, &part)
                });
                Tensor::cat(&parts.collect::<Result<Vec<Tensor>>>()?, 0)
            },
        );
    }
}

#[test]
fn log_probs_and_entropies_and_their_vjp_equal_the_plain_twin() {
    let (rows, vocab, temperature) = (7, 50, 0.7);
    let targets: Vec<u32> = (0..rows as u32).map(|i| (i * 13) % vocab as u32).collect();
    let logits = random(8, rows, vocab);
    let picked = |log_probs: &Tensor| -> Result<Tensor> {
        log_probs.gather(&Tensor::new(targets.as_slice(), &Device::Cpu)?.unsqueeze(1)?, 1)
    };
    let scores = token_scores(&logits, &targets, temperature).unwrap();
    let logps: Vec<f32> = scores.iter().map(|s| s.logp).collect();
    compare(
        "token_scores",
        &logits,
        |_| Tensor::from_vec(logps.clone(), (rows, 1), &Device::Cpu),
        |x, dy| token_scores_vjp(x, &targets, temperature, &values(dy)),
        |x| picked(&plain::log_softmax(&(x / temperature)?)?),
    );
    let log_probs = plain::log_softmax(&(&logits / temperature).unwrap()).unwrap();
    let entropy = (log_probs.exp().unwrap() * &log_probs).unwrap().sum(1).unwrap().neg().unwrap();
    for (score, entropy) in scores.iter().zip(values(&entropy)) {
        assert!((score.entropy - entropy).abs() < 1e-5, "{} and {entropy}", score.entropy);
    }
}
