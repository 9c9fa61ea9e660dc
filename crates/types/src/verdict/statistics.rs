//! Paired comparison of two models on the same rows: whether the mean difference is above 0, below 0, or
//! not distinguishable from 0.
//!
//! | rows | interval of the mean difference, 95 % | decided by |
//! |---|---|---|
//! | fewer than [`FEWEST_ROWS`] | none | nothing: too few rows |
//! | fewer than [`FEWEST_FOR_BOOTSTRAP`] | every shift that the sign-flip test does not reject | the sign-flip test |
//! | more | BCa bootstrap (Efron 1987, *Better Bootstrap Confidence Intervals*, sections 3 and 4) | the interval |
//!
//! The sign-flip test is exact: if a row's difference is as likely to be `d` as `−d`, each of the `2^n` choices of signs is
//! equally likely (Fisher 1935, *The Design of Experiments*, section 21). If most rows are equal under both models, few
//! rows carry the result and the bootstrap interval is too narrow. Fewer than [`FEWEST_UNEQUAL`] unequal rows are therefore
//! also decided by that test.
//!
//! All results are functions of the differences alone: the bootstrap's random numbers have a fixed seed.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Number of rows below which nothing is decided.
pub const FEWEST_ROWS: usize = 20;
/// Number of rows below which the sign-flip test decides instead of the bootstrap.
pub const FEWEST_FOR_BOOTSTRAP: usize = 50;
/// Number of unequal rows below which the sign-flip test decides, whatever the total number of rows.
pub const FEWEST_UNEQUAL: usize = 25;
/// Number of bootstrap resamples.
const RESAMPLES: usize = 10_000;
/// Probability that the interval misses the true mean, half of it below and half above.
const ALPHA: f64 = 0.05;
/// Maximum number of steps into which the largest difference is divided before signs are flipped. Rewards usually have few
/// distinct values, and fewer steps represent them exactly. Otherwise the differences are rounded, and the test is exact
/// for the rounded values.
const MOST_STEPS: u32 = 255;

/// The statistical method of a verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// The interval comes from a BCa bootstrap.
    Bca,
    /// The exact sign-flip test decides, and its inversion gives the interval.
    Exact,
    /// No method was used, because there are too few rows.
    None,
}

/// The conclusion from the differences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// The second model is better.
    Up,
    /// The first model is better.
    Down,
    /// No difference between the models was shown.
    Unclear,
    /// There are fewer rows than [`FEWEST_ROWS`], so there is no conclusion.
    TooFewRows,
}

/// The result of a paired comparison.
#[derive(Debug, Clone, PartialEq)]
pub struct Paired {
    /// Mean difference; 0 without rows.
    pub difference: f64,
    /// 95 % interval of the mean difference; `None` with too few rows.
    pub interval: Option<[f64; 2]>,
    /// The statistical method that was used.
    pub method: Method,
    /// Two-sided p-value of the sign-flip test; `None` if the bootstrap decided.
    pub p_value: Option<f64>,
    /// The conclusion from the differences.
    pub direction: Direction,
}

/// Compares two models by the differences of their rows, second minus first. All must be finite.
pub fn paired(differences: &[f64]) -> Paired {
    paired_with(differences, RESAMPLES)
}

/// The conclusion from the differences, and the method behind it.
struct Decision {
    direction: Direction,
    method: Method,
    p_value: Option<f64>,
    interval: Option<[f64; 2]>,
}

fn decide(differences: &[f64], resamples: usize) -> Decision {
    if differences.len() < FEWEST_ROWS {
        return Decision { direction: Direction::TooFewRows, method: Method::None, p_value: None, interval: None };
    }
    let unequal = differences.iter().filter(|difference| **difference != 0.0).count();
    if differences.len() >= FEWEST_FOR_BOOTSTRAP && unequal >= FEWEST_UNEQUAL {
        let [low, high] = bca(differences, resamples);
        let direction = match (low > 0.0, high < 0.0) {
            (true, _) => Direction::Up,
            (_, true) => Direction::Down,
            (false, false) => Direction::Unclear,
        };
        return Decision { direction, method: Method::Bca, p_value: None, interval: Some([low, high]) };
    }
    let p_value = sign_flip(differences);
    let direction = match (p_value <= ALPHA, mean(differences) > 0.0) {
        (true, true) => Direction::Up,
        (true, false) => Direction::Down,
        (false, _) => Direction::Unclear,
    };
    Decision { direction, method: Method::Exact, p_value: Some(p_value), interval: None }
}

fn paired_with(differences: &[f64], resamples: usize) -> Paired {
    let difference = mean(differences);
    let Decision { direction, method, p_value, mut interval } = decide(differences, resamples);
    if method == Method::Exact {
        let [mut low, mut high] = match differences.len() < FEWEST_FOR_BOOTSTRAP {
            true => accepted_shifts(differences, difference),
            false => bca(differences, resamples),
        };
        if direction == Direction::Unclear {
            // Widens the confidence interval so that it never contradicts the sign-flip test.
            (low, high) = (low.min(0.0), high.max(0.0));
        }
        interval = Some([low.min(difference), high.max(difference)]);
    }
    Paired { difference, interval, method, p_value, direction }
}

fn mean(values: &[f64]) -> f64 {
    if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / values.len() as f64 }
}

/// Returns the two-sided probability that random signs move the sum at least as far from 0.
fn sign_flip(differences: &[f64]) -> f64 {
    let largest = differences.iter().fold(0.0, |largest: f64, difference| largest.max(difference.abs()));
    if largest == 0.0 {
        return 1.0;
    }
    let is_whole = |number: f64| (number - number.round()).abs() < 1e-6;
    let holds = |steps: &u32| differences.iter().all(|difference| is_whole(difference / largest * f64::from(*steps)));
    let steps = f64::from((1..MOST_STEPS).find(holds).unwrap_or(MOST_STEPS));
    let rounded = |difference: &f64| (difference / largest * steps).round() as i64;
    let signed: Vec<i64> = differences.iter().map(rounded).filter(|value| *value != 0).collect();
    let sizes: Vec<usize> = signed.iter().map(|value| value.unsigned_abs() as usize).collect();
    let total: usize = sizes.iter().sum();
    // `odds[s]` is the probability that the sizes with a plus sign sum to s. The signed sum is 2 s − total.
    let mut odds = vec![0.0; total + 1];
    odds[0] = 1.0;
    let mut reached = 0;
    for size in sizes {
        reached += size;
        for sum in (0..=reached).rev() {
            let with_plus = if sum >= size { odds[sum - size] } else { 0.0 };
            odds[sum] = (odds[sum] + with_plus) / 2.0;
        }
    }
    let seen = signed.iter().sum::<i64>().unsigned_abs() as usize;
    let at_least = (total + seen) / 2;
    (2.0 * odds[at_least..].iter().sum::<f64>()).min(1.0)
}

/// Returns the lowest and the highest shift of all differences that the sign-flip test does not reject.
fn accepted_shifts(differences: &[f64], center: f64) -> [f64; 2] {
    let is_accepted = |shift: f64| {
        let shifted: Vec<f64> = differences.iter().map(|difference| difference - shift).collect();
        sign_flip(&shifted) > ALPHA
    };
    let (low, high) = differences
        .iter()
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(*value), high.max(*value)));
    let end = |outside: f64| {
        let (mut accepted, mut rejected) = (center, outside);
        for _ in 0..30 {
            let middle = (accepted + rejected) / 2.0;
            if is_accepted(middle) {
                accepted = middle;
            } else {
                rejected = middle;
            }
        }
        accepted
    };
    [end(low), end(high)]
}

/// Returns the BCa interval of the mean.
fn bca(values: &[f64], resamples: usize) -> [f64; 2] {
    let count = values.len();
    let center = mean(values);
    let mut random = SplitMix(0x726c_6f6f_6421);
    let mut means: Vec<f64> =
        (0..resamples).map(|_| (0..count).map(|_| values[random.below(count)]).sum::<f64>() / count as f64).collect();
    means.sort_unstable_by(f64::total_cmp);
    let first = means.partition_point(|mean| *mean < center);
    let after = means.partition_point(|mean| *mean <= center);
    // Ties count half in the bias correction, because rewards have few distinct values.
    let below = (first + after) as f64 / 2.0 / resamples as f64;
    if below <= 0.0 || below >= 1.0 {
        return [center, center];
    }
    let bias = normal_quantile(below);
    // The jackknife mean that leaves out a value lies opposite to that value, so the skewness of the values can be used instead.
    let (squares, cubes) = values.iter().fold((0.0, 0.0), |(squares, cubes), value| {
        let off = value - center;
        (squares + off * off, cubes + off * off * off)
    });
    let acceleration = if squares > 0.0 { cubes / (6.0 * f64::powf(squares, 1.5)) } else { 0.0 };
    let end = |z: f64| {
        let moved = bias + z;
        let part = normal_below(bias + moved / (1.0 - acceleration * moved));
        means[((part * resamples as f64) as usize).min(resamples - 1)]
    };
    [end(normal_quantile(ALPHA / 2.0)), end(normal_quantile(1.0 - ALPHA / 2.0))]
}

/// Returns the probability that a standard normal number is below `x` (Abramowitz and Stegun 26.2.10 and 26.2.14).
fn normal_below(x: f64) -> f64 {
    let density = (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
    if x.abs() < 3.0 {
        let (mut term, mut sum, mut odd) = (x, x, 1.0);
        while term.abs() > 1e-17 * sum.abs() {
            odd += 2.0;
            term *= x * x / odd;
            sum += term;
        }
        return 0.5 + density * sum;
    }
    let fraction = (1..=60).rev().fold(x.abs(), |below, number| x.abs() + f64::from(number) / below);
    if x < 0.0 { density / fraction } else { 1.0 - density / fraction }
}

/// Returns the quantile of the standard normal distribution for probability `p`, which is between 0 and 1.
fn normal_quantile(p: f64) -> f64 {
    let (mut low, mut high) = (-10.0, 10.0);
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if normal_below(middle) < p {
            low = middle;
        } else {
            high = middle;
        }
    }
    (low + high) / 2.0
}

/// Returns the unbiased probability that at least one of `k` samples passes, if `num_passed` of `num_samples` passed (Chen et al.
/// 2021, *Evaluating Large Language Models Trained on Code*, equation 1).
pub fn pass_at_k(num_samples: u64, num_passed: u64, k: u64) -> f64 {
    let failed = num_samples - num_passed;
    if failed < k {
        return 1.0;
    }
    1.0 - (0..k).map(|drawn| (failed - drawn) as f64 / (num_samples - drawn) as f64).product::<f64>()
}

/// The SplitMix64 generator (Steele, Lea and Flood 2014, *Fast Splittable Pseudorandom Number Generators*).
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next()) * bound as u128) >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_normal_distribution_has_its_known_values() {
        for (x, below) in [
            (0.0, 0.5),
            (1.0, 0.841_344_746_068_543),
            (-1.959_963_984_540_054, 0.025),
            (3.5, 0.999_767_370_920_964),
            (-4.0, 3.167_124_183_311_99e-5),
        ] {
            assert!((normal_below(x) - below).abs() < 1e-13, "{x}: {}", normal_below(x));
            assert!((normal_quantile(below) - x).abs() < 1e-9, "{x}");
        }
    }

    #[test]
    fn pass_at_k_is_the_share_of_draws_with_a_pass() {
        assert_eq!((pass_at_k(4, 0, 2), pass_at_k(4, 4, 1), pass_at_k(4, 3, 2)), (0.0, 1.0, 1.0));
        assert!((pass_at_k(4, 1, 1) - 0.25).abs() < 1e-12 && (pass_at_k(4, 1, 2) - 0.5).abs() < 1e-12);
    }

    /// Enumerates all 2^n choices of signs.
    fn sign_flip_by_force(differences: &[f64]) -> f64 {
        let seen = differences.iter().sum::<f64>().abs() - 1e-9;
        let signs = 1u64 << differences.len();
        let sum = |mask: u64| -> f64 {
            let signed = differences.iter().enumerate();
            signed.map(|(bit, value)| if mask >> bit & 1 == 1 { *value } else { -value }).sum()
        };
        (0..signs).filter(|mask| sum(*mask).abs() >= seen).count() as f64 / signs as f64
    }

    #[test]
    fn the_sign_flip_test_counts_every_choice_of_signs() {
        let cases: [&[f64]; 4] = [
            &[1.0, 1.0, 1.0, -1.0, 0.0, 1.0],
            &[0.2, -0.4, 1.0, 0.6, 0.8, -0.2, 0.0, 0.4],
            &[1.0; 10],
            &[-1.0, 0.0, 0.0, 0.0],
        ];
        for differences in cases {
            let expected = sign_flip_by_force(differences);
            assert!((sign_flip(differences) - expected).abs() < 1e-12, "{differences:?} {expected}");
        }
        assert_eq!(sign_flip(&[0.0; 30]), 1.0);
    }

    #[test]
    fn interval_and_probability_are_those_of_scipy() {
        // Reference values from scipy 1.17.1: stats.bootstrap((values,), np.mean, method="BCa", n_resamples=400_000).
        let skewed: Vec<f64> =
            (0..60).map(|index| f64::from((index % 12) * (index % 12) * (index % 5)) / 20.0).collect();
        let three_valued: Vec<f64> = [1.0; 34].into_iter().chain([-1.0; 18]).chain([0.0; 148]).collect();
        for (values, [low, high]) in [(skewed, [2.9833, 5.9133]), (three_valued, [0.01, 0.15])] {
            let interval = bca(&values, 200_000);
            assert!((interval[0] - low).abs() < 0.011 && (interval[1] - high).abs() < 0.011, "{interval:?}");
        }
        // Reference: stats.permutation_test((values,), np.mean, permutation_type="samples", n_resamples=3_000_000).
        let values = [
            0.3, -0.1, 0.7, 0.2, 0.2, -0.4, 0.9, 0.1, 0.05, 0.6, -0.2, 0.3, 0.0, 0.5, 0.4, -0.1, 0.2, 0.6, -0.3, 0.1,
            0.2, 0.45,
        ];
        assert!((sign_flip(&values) - 0.007_252_7).abs() < 2e-4, "{}", sign_flip(&values));
    }

    #[test]
    fn few_rows_decide_nothing_and_equal_rows_are_equal() {
        let few = paired(&[1.0; 19]);
        assert_eq!((few.direction, few.interval, few.method), (Direction::TooFewRows, None, Method::None));
        assert_eq!(paired(&[]).difference, 0.0);
        for count in [20, 60, 300] {
            let equal = paired(&vec![0.0; count]);
            assert_eq!((equal.direction, equal.interval), (Direction::Unclear, Some([0.0, 0.0])), "{count}");
        }
    }

    #[test]
    fn a_clear_difference_is_shown_at_every_size() {
        for count in [20, 49, 50, 200, 1000] {
            let better: Vec<f64> =
                (0..count).map(|row| f64::from(u8::from(row % 4 != 0)) - f64::from(u8::from(row % 8 == 0))).collect();
            let up = paired(&better);
            assert_eq!(up.direction, Direction::Up, "{count} {up:?}");
            let worse: Vec<f64> = better.iter().map(|difference| -difference).collect();
            let down = paired(&worse);
            assert_eq!(down.direction, Direction::Down, "{count}");
            let [low, high] = up.interval.unwrap();
            assert!(0.0 < low && low < up.difference && up.difference < high, "{count} {up:?}");
        }
    }

    #[test]
    fn three_rows_of_two_hundred_show_nothing() {
        let mut differences = vec![0.0; 197];
        differences.extend([1.0; 3]);
        let result = paired(&differences);
        assert_eq!((result.direction, result.method), (Direction::Unclear, Method::Exact));
        assert!((result.p_value.unwrap() - 0.25).abs() < 1e-12 && result.interval.unwrap()[0] <= 0.0);
    }

    /// Returns the fraction of jobs that are called better although nothing was learned. Of ten checkpoints, the one that did best
    /// on the evaluation rows is judged on `rows` test rows; `chance` gives the probability of a correct answer per row.
    fn called_better(jobs: u64, rows: usize, eval_rows: usize, chance: impl Fn(f64) -> f64) -> f64 {
        let mut better = 0;
        for job in 0..jobs {
            let mut random = SplitMix(job * 7919 + rows as u64);
            let mut uniform = move || random.next() as f64 / u64::MAX as f64;
            let hardness: Vec<f64> = (0..rows + eval_rows).map(|_| chance(uniform())).collect();
            let mut answers =
                || -> Vec<f64> { hardness.iter().map(|chance| f64::from(u8::from(uniform() < *chance))).collect() };
            let base = answers();
            let score = |answers: &[f64]| mean(&answers[rows..]);
            let checkpoints: Vec<Vec<f64>> = (0..10).map(|_| answers()).collect();
            let chosen = checkpoints.iter().max_by(|one, other| score(one).total_cmp(&score(other))).unwrap();
            let differences: Vec<f64> =
                chosen[..rows].iter().zip(&base).map(|(trained, base)| trained - base).collect();
            better += u64::from(decide(&differences, 2000).direction == Direction::Up);
        }
        better as f64 / jobs as f64
    }

    #[test]
    fn jobs_without_an_effect_are_rarely_called_better() {
        for (name, chance) in
            [("all rows alike", (|_| 0.5) as fn(f64) -> f64), ("easy and hard rows", |uniform| uniform)]
        {
            let at_200 = called_better(1000, 200, 100, chance);
            assert!((0.015..=0.04).contains(&at_200), "{name}: {at_200} at 200 rows");
            for rows in [20, 35, 49] {
                let share = called_better(1000, rows, 50, chance);
                assert!(share <= 0.04, "{name}: {share} at {rows} rows");
            }
        }
    }
}
