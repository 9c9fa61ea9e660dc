//! The tests run on the emulator if its feature is enabled, else on a GPU if there is one.

use super::super::attention::tests::{assert_close, device, download, noise, rounded, upload};
use super::*;

struct Case {
    rows: usize,
    vocab: usize,
    hidden: usize,
    dtype: Dtype,
    x: Vec<f32>,
    weight: Vec<f32>,
    /// The expected logits, `[rows][vocab]`.
    logits: Vec<f64>,
    targets: Vec<u32>,
}

/// Several shapes, with a buffer that holds the logits of few rows.
const SHAPES: [(usize, usize, usize); 5] = [(1, 1, 16), (3, 29, 16), (18, 513, 32), (40, 100, 24), (2, 2100, 64)];
const MAX_LOGITS: usize = 2048;

impl Case {
    fn new((rows, vocab, hidden): (usize, usize, usize), dtype: Dtype) -> Case {
        let x = rounded(noise(rows * hidden, 1).iter().map(|v| v * 4.0).collect(), dtype);
        let weight = rounded(noise(vocab * hidden, 2), dtype);
        let dot = |x: &[f32], w: &[f32]| x.iter().zip(w).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        let logits =
            x.chunks(hidden).flat_map(|x| weight.chunks(hidden).map(move |w| dot(x, w)).collect::<Vec<_>>()).collect();
        let targets = (0..rows).map(|row| (row * 7919 % vocab) as u32).collect();
        Case { rows, vocab, hidden, dtype, x, weight, logits, targets }
    }

    fn all() -> impl Iterator<Item = Case> {
        SHAPES.into_iter().flat_map(|shape| [Dtype::F32, Dtype::Bf16].map(|dtype| Case::new(shape, dtype)))
    }

    fn what(&self) -> String {
        format!("{} rows, {} tokens, {} inputs, {:?}", self.rows, self.vocab, self.hidden, self.dtype)
    }

    fn softmax(&self, row: usize, temperature: f64) -> Vec<f64> {
        let logits = &self.logits[row * self.vocab..(row + 1) * self.vocab];
        let largest = logits.iter().fold(f64::MIN, |a, b| a.max(*b));
        let weights: Vec<f64> = logits.iter().map(|logit| ((logit - largest) / temperature).exp()).collect();
        let sum: f64 = weights.iter().sum();
        weights.iter().map(|weight| weight / sum).collect()
    }
}

/// A case on the device.
struct There {
    x: Buffer,
    weight: Buffer,
}

impl There {
    fn new(device: &Device, case: &Case) -> There {
        There { x: upload(device, &case.x, case.dtype), weight: upload(device, &case.weight, case.dtype) }
    }

    fn head(&self, case: &Case) -> Head<'_> {
        let weight = Rows::new(&self.weight, case.vocab, case.hidden, case.dtype);
        Head { weight, gemm: Gemm::Exact, max_logits: MAX_LOGITS }
    }

    fn x(&self, case: &Case) -> Rows<'_> {
        Rows::new(&self.x, case.rows, case.hidden, case.dtype)
    }
}

#[test]
fn scores_are_the_naive_ones() {
    let Some(device) = device() else { return };
    for case in Case::all() {
        let there = There::new(&device, &case);
        for temperature in [1.0, 0.7, 3.0] {
            let (mut logp, mut entropy) = (vec![], vec![]);
            for row in 0..case.rows {
                let p = case.softmax(row, temperature);
                logp.push(p[case.targets[row] as usize].ln());
                entropy.push(-p.iter().map(|p| if *p > 0.0 { p * p.ln() } else { 0.0 }).sum::<f64>());
            }
            let head = there.head(&case);
            let (scores, _) = score(&device, &head, there.x(&case), &case.targets, temperature).unwrap();
            let actual: Vec<f32> = scores.iter().map(|score| score.logp).collect();
            assert_close(&actual, &logp, 3e-6, &case.what());
            let actual: Vec<f32> = scores.iter().map(|score| score.entropy).collect();
            assert_close(&actual, &entropy, 1e-5, &case.what());
            let greedy = Pick { temperature: 0.0, uniform: 0.0 };
            let chosen = choose(&device, &head, there.x(&case), &vec![greedy; case.rows], &Filters::OFF).unwrap();
            let top: Vec<u32> = chosen.iter().map(|chosen| chosen.token).collect();
            let is_top = |targets: &[u32]| -> Vec<bool> {
                let (scores, _) = score(&device, &head, there.x(&case), targets, temperature).unwrap();
                scores.iter().map(|score| score.is_top).collect()
            };
            assert_eq!(is_top(&top), vec![true; case.rows], "{}", case.what());
            let others: Vec<u32> = top.iter().map(|token| (token + 1) % case.vocab as u32).collect();
            assert_eq!(is_top(&others), vec![case.vocab == 1; case.rows], "{}", case.what());
        }
    }
}

#[test]
fn the_gradient_of_scores_is_the_naive_one() {
    let Some(device) = device() else { return };
    for case in Case::all() {
        let (there, temperature) = (There::new(&device, &case), 0.8);
        let mut g = noise(case.rows, 5);
        if case.rows > 2 {
            g[1] = 0.0;
        }
        let (mut dx, mut dw) = (vec![0.0; case.rows * case.hidden], vec![1.0; case.vocab * case.hidden]);
        for row in 0..case.rows {
            for (token, p) in case.softmax(row, temperature).into_iter().enumerate() {
                let hit = if token == case.targets[row] as usize { 1.0 } else { 0.0 };
                let d = f64::from(g[row]) / temperature * (hit - p);
                for i in 0..case.hidden {
                    dx[row * case.hidden + i] += d * f64::from(case.weight[token * case.hidden + i]);
                    dw[token * case.hidden + i] += d * f64::from(case.x[row * case.hidden + i]);
                }
            }
        }
        let (head, x) = (there.head(&case), there.x(&case));
        let (_, normalizers) = score(&device, &head, x, &case.targets, temperature).unwrap();
        let d_weight = device.upload(&vec![1.0_f32; dw.len()]).unwrap();
        let out = device.alloc(dx.len() * 4).unwrap();
        let backward = Backward {
            x,
            targets: &case.targets,
            temperature,
            normalizers: &normalizers,
            g: &g,
            d_weight: Some(Rows::new(&d_weight, case.vocab, case.hidden, Dtype::F32)),
        };
        score_vjp(&device, &head, &backward, Rows::new(&out, case.rows, case.hidden, Dtype::F32)).unwrap();
        let tolerance = if case.dtype == Dtype::F32 { 1e-5 } else { 8e-3 };
        assert_close(&download(&device, &out, dx.len(), Dtype::F32), &dx, tolerance, &case.what());
        assert_close(&download(&device, &d_weight, dw.len(), Dtype::F32), &dw, tolerance, &case.what());
    }
}

#[test]
fn choices_invert_the_cumulated_softmax() {
    let Some(device) = device() else { return };
    for case in Case::all() {
        let there = There::new(&device, &case);
        for (temperature, uniform) in [(1.0, 0.0), (1.0, 0.37), (0.5, 0.999_999_9), (4.0, 0.62)] {
            let picks = vec![Pick { temperature, uniform }; case.rows];
            let chosen = choose(&device, &there.head(&case), there.x(&case), &picks, &Filters::OFF).unwrap();
            for (row, chosen) in chosen.iter().enumerate() {
                let p = case.softmax(row, temperature);
                let before: f64 = p[..chosen.token as usize].iter().sum();
                let after = before + p[chosen.token as usize];
                // Rounding may move a bound slightly.
                let near = before - 1e-5 <= uniform && uniform <= after + 1e-5;
                assert!(near, "row {row}: {uniform} not in {before}..{after}, {}", case.what());
            }
        }
    }
}

#[test]
fn a_choice_has_the_log_prob_of_its_score_to_the_bit() {
    let Some(device) = device() else { return };
    for case in Case::all() {
        let there = There::new(&device, &case);
        for temperature in [0.0, 1.0, 0.6] {
            let picks: Vec<Pick> =
                (0..case.rows).map(|row| Pick { temperature, uniform: row as f64 / case.rows as f64 }).collect();
            let chosen = choose(&device, &there.head(&case), there.x(&case), &picks, &Filters::OFF).unwrap();
            let tokens: Vec<u32> = chosen.iter().map(|chosen| chosen.token).collect();
            let scored = if temperature == 0.0 { 1.0 } else { temperature };
            // Each row alone and with other rows, in other blocks.
            for row in 0..case.rows {
                let x = there.x(&case).part(row..row + 1);
                let (scores, _) = score(&device, &there.head(&case), x, &tokens[row..row + 1], scored).unwrap();
                assert_eq!(chosen[row].logp.to_bits(), scores[0].logp.to_bits(), "row {row}, {}", case.what());
            }
            let (scores, _) = score(&device, &there.head(&case), there.x(&case), &tokens, scored).unwrap();
            for (chosen, score) in chosen.iter().zip(&scores) {
                assert_eq!(chosen.logp.to_bits(), score.logp.to_bits(), "{}", case.what());
            }
        }
    }
}

#[test]
fn greedy_takes_the_first_of_the_largest_and_never_a_nan() {
    let Some(device) = device() else { return };
    // There is one input, so that the weights are the logits.
    let mut weight = vec![0.0_f32; 1200];
    (weight[700], weight[701], weight[3], weight[1199]) = (5.0, 5.0, f32::NAN, 5.0);
    let weight = device.upload(&weight).unwrap();
    let x = device.upload(&[1.0_f32]).unwrap();
    let head = Head { weight: Rows::new(&weight, 1200, 1, Dtype::F32), gemm: Gemm::Exact, max_logits: MAX_LOGITS };
    let x = Rows::new(&x, 1, 1, Dtype::F32);
    let chosen = choose(&device, &head, x, &[Pick { temperature: 0.0, uniform: 0.5 }], &Filters::OFF).unwrap();
    assert_eq!(chosen[0].token, 700);
}

#[test]
fn logits_are_the_products() {
    let Some(device) = device() else { return };
    for case in Case::all() {
        let there = There::new(&device, &case);
        let out = device.alloc(case.logits.len() * 4).unwrap();
        let rows = Rows::new(&out, case.rows, case.vocab, Dtype::F32);
        logits(&device, &there.head(&case), there.x(&case), rows).unwrap();
        let actual = download(&device, &out, case.logits.len(), Dtype::F32);
        assert_close(&actual, &case.logits, 1e-6, &case.what());
    }
}

#[test]
fn other_shapes_and_tokens_are_refused() {
    let Some(device) = device() else { return };
    let case = Case::new((3, 29, 16), Dtype::F32);
    let there = There::new(&device, &case);
    let (head, x) = (there.head(&case), there.x(&case));
    assert!(score(&device, &head, x, &[0, 1], 1.0).is_err());
    assert!(score(&device, &head, x, &[0, 1, 29], 1.0).is_err());
    assert!(choose(&device, &head, x, &[], &Filters::OFF).is_err());
    let greedy = [Pick { temperature: 0.0, uniform: 0.5 }; 3];
    assert!(choose(&device, &head, x, &greedy, &Filters { top_k: 2, ..Filters::OFF }).is_err());
    assert!(logits(&device, &head, x, Rows::new(&there.x, 3, 28, Dtype::F32)).is_err());
}

/// The tokens that `engine::sampling::Sampler` keeps, with their weights, ascending.
fn kept(logits: &[f32], temperature: f64, filters: &Filters) -> Vec<(usize, f64)> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> = logits.iter().map(|logit| (f64::from(logit - largest) / temperature).exp()).collect();
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by(|a, b| weights[*b].total_cmp(&weights[*a]).then(a.cmp(b)));
    if filters.top_k > 0 {
        let last = order.get(filters.top_k as usize - 1).map_or(0.0, |token| weights[*token]);
        order.retain(|token| weights[*token] >= last);
    }
    if filters.top_p < 1.0 {
        let total: f64 = order.iter().map(|token| weights[*token]).sum();
        let mut mass = 0.0;
        let reached = order.iter().position(|token| {
            mass += weights[*token];
            mass >= filters.top_p * total
        });
        order.truncate(reached.map_or(order.len(), |rank| rank + 1));
    }
    let floor = filters.min_p * weights[order[0]];
    order.retain(|token| weights[*token] >= floor);
    order.sort_unstable();
    order.into_iter().map(|token| (token, weights[token])).collect()
}

/// Compares choices over the whole range of `uniform` on the device with the expected ones.
fn assert_filters(device: &Device, logits: &[f32], temperature: f64, filters: Filters, draws: usize) {
    let weight = device.upload(logits).unwrap();
    let x = device.upload(&vec![1.0_f32; draws]).unwrap();
    let head =
        Head { weight: Rows::new(&weight, logits.len(), 1, Dtype::F32), gemm: Gemm::Exact, max_logits: MAX_LOGITS };
    let uniform = |draw: usize| (draw as f64 + 0.003) / draws as f64;
    let picks: Vec<Pick> = (0..draws).map(|draw| Pick { temperature, uniform: uniform(draw) }).collect();
    let chosen = choose(device, &head, Rows::new(&x, draws, 1, Dtype::F32), &picks, &filters).unwrap();
    let kept = kept(logits, temperature, &filters);
    let total: f64 = kept.iter().map(|(_, weight)| weight).sum();
    for (draw, chosen) in chosen.iter().enumerate() {
        let mut sum = 0.0;
        let near = kept.iter().any(|(token, weight)| {
            let before = sum;
            sum += weight;
            let (before, after) = (before / total - 1e-6, sum / total + 1e-6);
            *token == chosen.token as usize && before <= uniform(draw) && uniform(draw) <= after
        });
        assert!(near, "{filters:?} at {temperature} gave {} at {}, kept {kept:?}", chosen.token, uniform(draw));
    }
}

#[test]
fn filtered_choices_are_those_of_the_host() {
    let Some(device) = device() else { return };
    let off = Filters::OFF;
    let cases = [
        (1.0, off),
        (1.0, Filters { top_k: 1, ..off }),
        (2.0, Filters { top_k: 7, ..off }),
        (1.0, Filters { top_k: 5000, ..off }),
        (1.0, Filters { top_p: 0.5, ..off }),
        (1.0, Filters { top_p: 1e-9, ..off }),
        (3.0, Filters { top_p: 0.93, ..off }),
        (1.0, Filters { min_p: 0.3, ..off }),
        (1.5, Filters { top_k: 20, top_p: 0.8, min_p: 0.02 }),
    ];
    let spread = |count, factor: f32| noise(count, 9).iter().map(|v| v * factor).collect::<Vec<_>>();
    // A case with ties: few distinct values.
    let tied: Vec<f32> = noise(700, 4).iter().map(|v| (v * 3.0).round()).collect();
    for logits in [spread(5, 3.0), spread(1000, 6.0), tied, vec![-2.5; 40]] {
        for (temperature, filters) in cases {
            assert_filters(&device, &logits, temperature, filters, 24);
        }
    }
}

#[test]
fn filtered_choices_among_many_cells_are_those_of_the_host() {
    let Some(device) = device() else { return };
    let off = Filters::OFF;
    let cases = [
        (1.0, Filters { top_k: 1, ..off }),
        (2.0, Filters { top_k: 30, ..off }),
        // More tokens than there are cells, and more than a list can hold.
        (1.0, Filters { top_k: 300, ..off }),
        (1.0, Filters { top_k: 12_000, ..off }),
        (1.0, Filters { top_p: 0.6, ..off }),
        (3.0, Filters { top_p: 0.97, ..off }),
        (0.5, Filters { min_p: 0.1, ..off }),
        (1.5, Filters { top_k: 60, top_p: 0.8, min_p: 0.02 }),
    ];
    for (count, factor) in [(5_000, 6.0), (20_011, 3.0)] {
        let logits: Vec<f32> = noise(count, 11).iter().map(|v| v * factor).collect();
        for (temperature, filters) in cases {
            assert_filters(&device, &logits, temperature, filters, 24);
        }
    }
}

#[test]
fn choices_among_more_cells_than_a_warp_has_lanes_are_those_of_the_host() {
    let Some(device) = device() else { return };
    let mut logits: Vec<f32> = noise(40_001, 13).iter().map(|v| v * 4.0).collect();
    for temperature in [1.0, 3.0] {
        assert_filters(&device, &logits, temperature, Filters::OFF, 24);
    }
    (logits[31_007], logits[31_008], logits[33_333]) = (50.0, 50.0, 50.0);
    let weight = device.upload(&logits).unwrap();
    let x = device.upload(&[1.0_f32]).unwrap();
    let head = Head { weight: Rows::new(&weight, 40_001, 1, Dtype::F32), gemm: Gemm::Exact, max_logits: MAX_LOGITS };
    let greedy = [Pick { temperature: 0.0, uniform: 0.5 }];
    let chosen = choose(&device, &head, Rows::new(&x, 1, 1, Dtype::F32), &greedy, &Filters::OFF).unwrap();
    assert_eq!(chosen[0].token, 31_007);
}

#[test]
fn a_vocabulary_of_more_cells_than_a_block_has_threads_is_filtered() {
    let Some(device) = device() else { return };
    let logits: Vec<f32> = noise(300_001, 12).iter().map(|v| v * 5.0).collect();
    let off = Filters::OFF;
    for filters in [Filters { top_k: 30, ..off }, Filters { top_k: 700, ..off }, Filters { top_p: 0.9, ..off }] {
        assert_filters(&device, &logits, 1.0, filters, 2);
    }
}

#[test]
fn of_equal_logits_in_several_cells_the_first_are_kept() {
    let Some(device) = device() else { return };
    let mut logits = vec![-3.0_f32; 1600];
    for token in (500..531).chain(1020..1030).chain(1590..1600) {
        logits[token] = 1.0;
    }
    // 51 tokens are equal. The kept ones end before the third cell, within it, at its end, and within the last cell.
    for top_p in [0.2, 0.39, 0.42, 0.45, 0.47, 0.53, 0.6, 0.9] {
        for top_k in [0, 3] {
            assert_filters(&device, &logits, 1.0, Filters { top_k, top_p, min_p: 0.0 }, 24);
        }
    }
    assert_filters(&device, &logits, 1.0, Filters { top_p: 0.5, min_p: 0.5, ..Filters::OFF }, 24);
}

#[test]
fn a_filtered_choice_is_never_a_nan() {
    let Some(device) = device() else { return };
    let mut weight = vec![-1.0_f32; 1300];
    (weight[3], weight[600], weight[1100]) = (f32::NAN, 2.0, f32::NAN);
    let weight = device.upload(&weight).unwrap();
    let x = device.upload(&[1.0_f32; 2]).unwrap();
    let head = Head { weight: Rows::new(&weight, 1300, 1, Dtype::F32), gemm: Gemm::Exact, max_logits: MAX_LOGITS };
    let picks = [0.0, 0.999].map(|uniform| Pick { temperature: 1.0, uniform });
    for filters in [Filters { top_k: 1, ..Filters::OFF }, Filters { min_p: 0.9, ..Filters::OFF }] {
        for chosen in choose(&device, &head, Rows::new(&x, 2, 1, Dtype::F32), &picks, &filters).unwrap() {
            assert_eq!(chosen.token, 600);
        }
    }
}
