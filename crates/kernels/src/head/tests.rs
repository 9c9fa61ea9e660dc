use super::super::pack::PackDtype;
use super::super::rows::tests::{assert_close, assert_same, noise};
use super::*;

fn choose(threads: &Threads, isa: Isa, x: &[f32], head: Head<'_>, picks: &[Pick]) -> Vec<Chosen> {
    // The previous content must not matter.
    let mut chosen = vec![Chosen { token: 7, logp: 1.0 }; 2];
    super::choose(threads, isa, x, head, picks, &mut chosen);
    chosen
}

struct Case {
    rows: usize,
    vocab: usize,
    hidden: usize,
    x: Vec<f32>,
    weight: PackedMatrix,
    softcap: Option<f32>,
    /// The expected logits, `[rows][vocab]`.
    logits: Vec<f64>,
    targets: Vec<u32>,
}

impl Case {
    fn new(rows: usize, vocab: usize, hidden: usize, dtype: PackDtype, softcap: Option<f32>) -> Case {
        // Values that AMX tiles multiply without rounding, too.
        let short = |v: f32| if dtype == PackDtype::Bf16 { half::bf16::from_f32(v).to_f32() } else { v };
        let x: Vec<f32> = noise(rows * hidden, 1).iter().map(|v| short(v * 8.0)).collect();
        let weight = PackedMatrix::new(&noise(vocab * hidden, 2), hidden, dtype);
        let mut logits = vec![];
        let mut packed = vec![vec![0f32; hidden]; vocab];
        packed.iter_mut().enumerate().for_each(|(token, row)| weight.row(token, row));
        for x in x.chunks(hidden) {
            for row in &packed {
                let product: f64 = x.iter().zip(row).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                logits.push(softcap.map_or(product, |c| f64::from(c) * (product / f64::from(c)).tanh()));
            }
        }
        let targets = (0..rows).map(|row| (row * 7919 % vocab) as u32).collect();
        Case { rows, vocab, hidden, x, weight, softcap, logits, targets }
    }

    fn all(rows_and_sizes: &[(usize, usize, usize)]) -> impl Iterator<Item = Case> {
        let kinds = [
            (PackDtype::F32, None),
            (PackDtype::Bf16, None),
            (PackDtype::F32, Some(3.0)),
            (PackDtype::Bf16, Some(0.7)),
        ];
        rows_and_sizes
            .iter()
            .flat_map(move |(r, v, h)| kinds.map(|(dtype, softcap)| Case::new(*r, *v, *h, dtype, softcap)))
    }

    fn head(&self) -> Head<'_> {
        Head { weight: &self.weight, softcap: self.softcap }
    }

    fn forward(&self, temperature: f64) -> Forward<'_> {
        Forward { x: &self.x, head: self.head(), targets: &self.targets, temperature }
    }

    fn what(&self, isa: Isa) -> String {
        format!(
            "{isa}, {} rows, {} tokens, {} inputs, {:?}, softcap {:?}",
            self.rows,
            self.vocab,
            self.hidden,
            self.weight.dtype(),
            self.softcap
        )
    }

    /// The probabilities of a row.
    fn softmax(&self, row: usize, temperature: f64) -> Vec<f64> {
        let logits = &self.logits[row * self.vocab..(row + 1) * self.vocab];
        let largest = logits.iter().fold(f64::MIN, |a, b| a.max(*b));
        let weights: Vec<f64> = logits.iter().map(|logit| ((logit - largest) / temperature).exp()).collect();
        let sum: f64 = weights.iter().sum();
        weights.iter().map(|weight| weight / sum).collect()
    }
}

const SHAPES: [(usize, usize, usize); 6] =
    [(1, 1, 1), (3, 29, 5), (17, 29, 64), (5, 512, 32), (140, 1061, 24), (2, 2048, 64)];

#[test]
fn scores_are_the_naive_ones_on_every_isa() {
    for case in Case::all(&SHAPES) {
        for isa in Isa::available() {
            for temperature in [1.0, 0.7, 3.0] {
                let (mut logp, mut entropy) = (vec![], vec![]);
                for row in 0..case.rows {
                    let p = case.softmax(row, temperature);
                    logp.push(p[case.targets[row] as usize].ln());
                    entropy.push(-p.iter().map(|p| if *p > 0.0 { p * p.ln() } else { 0.0 }).sum::<f64>());
                }
                for count in [1, 2] {
                    let threads = Threads::new(count);
                    let scores = score(&threads, isa, &case.x, case.head(), &case.targets, temperature);
                    let actual: Vec<f32> = scores.tokens.iter().map(|score| score.logp).collect();
                    assert_close(&actual, &logp, 3e-6, &case.what(isa));
                    let actual: Vec<f32> = scores.tokens.iter().map(|score| score.entropy).collect();
                    assert_close(&actual, &entropy, 1e-5, &case.what(isa));
                }
            }
        }
    }
}

#[test]
fn all_logits_are_the_products() {
    for case in Case::all(&SHAPES) {
        for isa in Isa::available() {
            let mut out = vec![0f32; case.rows * case.vocab];
            logits(&Threads::new(2), isa, &case.x, case.head(), &mut out);
            assert_close(&out, &case.logits, 1e-5, &case.what(isa));
        }
    }
}

#[test]
fn gradients_are_the_naive_ones_and_rows_without_one_get_zeros() {
    for case in Case::all(&SHAPES) {
        let mut g = noise(case.rows, 9);
        g.iter_mut().skip(1).step_by(3).for_each(|g| *g = 0.0);
        let temperature = 0.8;
        let (mut d_x, mut d_weight) = (vec![0f64; case.rows * case.hidden], vec![0.25f64; case.vocab * case.hidden]);
        let mut weight = vec![0f32; case.hidden];
        let softmax: Vec<Vec<f64>> = (0..case.rows).map(|row| case.softmax(row, temperature)).collect();
        for token in 0..case.vocab {
            case.weight.row(token, &mut weight);
            for row in 0..case.rows {
                let hit = if case.targets[row] as usize == token { 1.0 } else { 0.0 };
                let capped = case.logits[row * case.vocab + token];
                let slope = case.softcap.map_or(1.0, |c| 1.0 - (capped / f64::from(c)).powi(2));
                let d = f64::from(g[row]) * (hit - softmax[row][token]) / temperature * slope;
                for i in 0..case.hidden {
                    d_x[row * case.hidden + i] += d * f64::from(weight[i]);
                    d_weight[token * case.hidden + i] += d * f64::from(case.x[row * case.hidden + i]);
                }
            }
        }
        for isa in Isa::available() {
            let mut first: Option<(Vec<f32>, Vec<f32>, Vec<f32>)> = None;
            for count in [1, 2, 5] {
                let threads = Threads::new(count);
                let forward = case.forward(temperature);
                // Some rows have sums and no gradient, some the other way around.
                let summed: Vec<bool> = (0..case.rows).map(|row| row % 4 != 2).collect();
                let mut dx = vec![7f32; d_x.len()];
                let scores = score_for_training(&threads, isa, &forward, &summed, &mut dx);
                let alone = score(&threads, isa, &case.x, case.head(), &case.targets, temperature);
                assert_eq!(scores, alone, "{}", case.what(isa));
                let gradient = Gradient { forward, softmax: &scores.softmax, summed: &summed, g: &g };
                let mut dw = vec![0.25f32; d_weight.len()];
                score_vjp(&threads, isa, &gradient, &mut dx, Some(&mut dw));
                // AMX and AVX512-BF16 multiply probabilities and dL/dlogits in bf16.
                let rounded = isa.rounds_inputs() && case.weight.dtype() == PackDtype::Bf16;
                assert_close(&dx, &d_x, if rounded { 4e-3 } else { 1e-5 }, &case.what(isa));
                assert_close(&dw, &d_weight, 1e-5, &case.what(isa));
                for (row, dx) in dx.chunks(case.hidden).enumerate() {
                    assert!(g[row] != 0.0 || dx.iter().all(|v| v.to_bits() == 0), "row {row}");
                }
                let none = vec![false; case.rows];
                let mut later = vec![7f32; d_x.len()];
                score_vjp(&threads, isa, &Gradient { summed: &none, ..gradient }, &mut later, None);
                assert_close(&later, &d_x, if rounded { 4e-3 } else { 1e-5 }, &case.what(isa));
                for (row, (later, dx)) in later.chunks(case.hidden).zip(dx.chunks(case.hidden)).enumerate() {
                    if !summed[row] {
                        assert_same(later, dx, "a second pass for one row and for all");
                    }
                }
                let (dx0, dw0, later0) = first.get_or_insert((dx.clone(), dw.clone(), later.clone()));
                assert_same(&dx, dx0, &case.what(isa));
                assert_same(&dw, dw0, &case.what(isa));
                assert_same(&later, later0, &case.what(isa));
            }
        }
    }
}

#[test]
fn a_choice_is_the_first_token_past_the_uniform_number_and_its_logp_is_the_score() {
    for case in Case::all(&SHAPES) {
        for isa in Isa::available() {
            for temperature in [1.0, 0.6, 2.5] {
                let picks: Vec<Pick> =
                    (0..case.rows).map(|row| Pick { temperature, uniform: (row * 37 % 100) as f64 / 100.0 }).collect();
                let (one, two) = (Threads::new(1), Threads::new(2));
                let chosen = choose(&one, isa, &case.x, case.head(), &picks);
                assert_eq!(chosen, choose(&two, isa, &case.x, case.head(), &picks), "{}", case.what(isa));
                let tokens: Vec<u32> = chosen.iter().map(|chosen| chosen.token).collect();
                let scores = score(&two, isa, &case.x, case.head(), &tokens, temperature);
                for (row, (chosen, pick)) in chosen.iter().zip(&picks).enumerate() {
                    let p = case.softmax(row, temperature);
                    let before: f64 = p[..chosen.token as usize].iter().sum();
                    let after = before + p[chosen.token as usize];
                    let what = case.what(isa);
                    assert!(
                        before <= pick.uniform + 1e-6 && after > pick.uniform - 1e-6,
                        "{what}: {chosen:?}, {pick:?}"
                    );
                    assert_eq!(chosen.logp.to_bits(), scores.tokens[row].logp.to_bits(), "{what}, row {row}");
                    let x = &case.x[row * case.hidden..(row + 1) * case.hidden];
                    assert_eq!(choose(&one, isa, x, case.head(), &[*pick]), [*chosen], "{what}, row {row} alone");
                    let alone = score(&one, isa, x, case.head(), &[chosen.token], temperature);
                    assert_eq!(alone.tokens[0], scores.tokens[row], "{what}, row {row} alone");
                }
            }
        }
    }
}

#[test]
fn temperature_zero_takes_the_lowest_of_the_largest_and_reports_temperature_one() {
    for isa in Isa::available() {
        let mut weight = vec![0f32; 1200];
        for (token, value) in [(3, 1.0), (700, 2.0), (701, 2.0), (1100, 2.0)] {
            weight[token] = value;
        }
        let packed = PackedMatrix::new(&weight, 1, PackDtype::F32);
        let pick = Pick { temperature: 0.0, uniform: 0.99 };
        let chosen = choose(&Threads::new(2), isa, &[1.0, -1.0], Head::of(&packed), &[pick, pick]);
        assert_eq!(chosen.iter().map(|chosen| chosen.token).collect::<Vec<_>>(), [700, 0], "{isa}");
        let scores = score(&Threads::new(1), isa, &[1.0, -1.0], Head::of(&packed), &[700, 0], 1.0);
        assert_eq!(chosen[0].logp, scores.tokens[0].logp, "{isa}");
        assert_eq!(chosen[1].logp, scores.tokens[1].logp, "{isa}");
        // A target is the top if no logit is larger, whichever of several equal ones is chosen.
        let all: Vec<u32> = (0..1200).collect();
        let scores = score(&Threads::new(2), isa, &[1.0; 1200], Head::of(&packed), &all, 1.0);
        let top: Vec<u32> = all.into_iter().filter(|token| scores.tokens[*token as usize].is_top).collect();
        assert_eq!(top, [700, 701, 1100], "{isa}");
    }
}

#[test]
fn nan_never_wins_and_never_panics() {
    for isa in Isa::available() {
        let mut weight = vec![0.5f32; 600];
        weight[2] = f32::NAN;
        weight[550] = 0.75;
        let packed = PackedMatrix::new(&weight, 1, PackDtype::F32);
        let threads = Threads::new(1);
        let greedy = Pick { temperature: 0.0, uniform: 0.0 };
        assert_eq!(choose(&threads, isa, &[1.0], Head::of(&packed), &[greedy])[0].token, 550, "{isa}");
        let drawn = choose(&threads, isa, &[1.0], Head::of(&packed), &[Pick { temperature: 1.0, uniform: 0.5 }]);
        assert!(drawn[0].token < 600 && drawn[0].logp.is_nan(), "{isa}");
        let all = choose(&threads, isa, &[f32::NAN], Head::of(&packed), &[greedy]);
        assert_eq!(all[0].token, 0, "{isa}");
        assert!(score(&threads, isa, &[1.0], Head::of(&packed), &[3], 1.0).tokens[0].logp.is_nan(), "{isa}");
        assert!(!score(&threads, isa, &[1.0], Head::of(&packed), &[2], 1.0).tokens[0].is_top, "{isa}");
    }
}

#[test]
fn huge_logits_give_finite_scores() {
    for isa in Isa::available() {
        let packed = PackedMatrix::new(&[1.0f32, -1.0, 0.5], 1, PackDtype::F32);
        let scores = score(&Threads::new(1), isa, &[1e30], Head::of(&packed), &[0], 1.0);
        let TokenScore { logp, entropy, is_top } = scores.tokens[0];
        assert!(is_top && logp == 0.0 && (0.0..1e-30).contains(&entropy), "{isa}: {logp}, {entropy}");
    }
}

#[test]
fn the_gradient_of_a_probable_target_is_as_exact_as_its_probability() {
    // Two tokens whose logits differ by 12: 1 − p of the target is 6e-6, less than a rounding to bf16 moves p.
    let packed = PackedMatrix::new(&[1.0f32, -1.0], 1, PackDtype::Bf16);
    let rest = f64::from(-12f32).exp() / (1.0 + f64::from(-12f32).exp());
    for isa in Isa::available() {
        let forward = Forward { x: &[6.0], head: Head::of(&packed), targets: &[0], temperature: 1.0 };
        let mut dx = [0f32];
        let scores = score_for_training(&Threads::new(1), isa, &forward, &[true], &mut dx);
        let gradient = Gradient { forward, softmax: &scores.softmax, summed: &[true], g: &[1.0] };
        score_vjp(&Threads::new(1), isa, &gradient, &mut dx, None);
        // dL/dx = (1 − p)·1 − (1 − p)·(−1).
        assert!((f64::from(dx[0]) / (2.0 * rest) - 1.0).abs() < 5e-3, "{isa}: {} instead of {}", dx[0], 2.0 * rest);
    }
}

#[test]
fn sums_follow_a_largest_logit_that_grows_from_chunk_to_chunk() {
    // 1300 tokens, whose logits rise to 130: earlier sums shrink to almost nothing.
    let weight: Vec<f32> = (0..1300).map(|token| token as f32 / 10.0).collect();
    let packed = PackedMatrix::new(&weight, 1, PackDtype::F32);
    let logits: Vec<f64> = weight.iter().map(|weight| f64::from(*weight)).collect();
    let total: f64 = logits.iter().map(|logit| (logit - 129.9).exp()).sum();
    let mean: f64 = logits.iter().map(|logit| (logit - 129.9).exp() / total * logit).sum();
    for isa in Isa::available() {
        let forward = Forward { x: &[1.0], head: Head::of(&packed), targets: &[3], temperature: 1.0 };
        let mut dx = [0f32];
        let scores = score_for_training(&Threads::new(2), isa, &forward, &[true], &mut dx);
        let gradient = Gradient { forward, softmax: &scores.softmax, summed: &[true], g: &[1.0] };
        score_vjp(&Threads::new(2), isa, &gradient, &mut dx, None);
        let expected = logits[3] - mean;
        assert!((f64::from(dx[0]) / expected - 1.0).abs() < 1e-5, "{isa}: {} instead of {expected}", dx[0]);
    }
}
