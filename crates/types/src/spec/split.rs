//! Counts how many rows of the training dataset are used for training, for evaluation, and only by the verdict.

use super::JobSpec;
use super::evaluation::{held_out_count, held_out_rows, test_count, test_rows};
use super::facts::{DatasetFacts, SourceFacts};
use super::mixture::Mixture;

/// Number of rows per source that are not used for training.
pub(super) struct Split {
    /// Rows used for evaluation, by source.
    evaluated: Vec<u64>,
    /// Rows that only the verdict uses, by source.
    tested: Vec<u64>,
}

impl Split {
    /// Returns the number of rows used for evaluation, over all sources.
    pub(super) fn evaluated(&self) -> u64 {
        self.evaluated.iter().sum()
    }

    /// Returns the number of rows that only the verdict uses, over all sources.
    pub(super) fn tested(&self) -> u64 {
        self.tested.iter().sum()
    }
}

/// Splits the rows. If the prompts are not known, the numbers follow from the fractions.
pub(super) fn split(dataset: &DatasetFacts, spec: &JobSpec) -> Split {
    let (fraction, test) = spec.eval.as_ref().map_or((None, 0.0), |eval| (eval.fraction, eval.wanted_test_fraction()));
    if let Some(keys) = &dataset.prompt_keys {
        let seed = spec.training.seed;
        let held_out = |fraction| held_out_rows(spec.arithmetic.split, keys, fraction, seed);
        let evaluated = fraction.map(held_out).unwrap_or_default();
        let tested = test_rows(keys, &evaluated, test, seed);
        let plan = dataset.plan();
        return Split { evaluated: plan.rows_by_source(&evaluated), tested: plan.rows_by_source(&tested) };
    }
    let share = |source: &SourceFacts, part: f64| (source.plan.num_rows as f64 * part).round() as u64;
    let evaluated = fraction.map(|fraction| match dataset.sources.as_slice() {
        [] => vec![held_out_count(dataset.num_rows, fraction)],
        sources => sources.iter().map(|source| share(source, fraction)).collect(),
    });
    let tested = test_count(dataset.num_rows, test);
    let tested = match dataset.sources.as_slice() {
        [] => vec![tested],
        sources => {
            let part = tested as f64 / dataset.num_rows.max(1) as f64;
            sources.iter().map(|source| share(source, part)).collect()
        }
    };
    Split { evaluated: evaluated.unwrap_or_default(), tested }
}

/// Returns the mixture of the rows used for training.
pub(super) fn mixture_of(dataset: &DatasetFacts, split: &Split) -> Mixture {
    let taken = |index: usize| {
        let of = |rows: &[u64]| rows.get(index).copied().unwrap_or_default();
        of(&split.evaluated) + of(&split.tested)
    };
    match dataset.sources.as_slice() {
        [] => Mixture::single(dataset.num_rows.saturating_sub(taken(0))),
        sources => Mixture::new(
            sources
                .iter()
                .enumerate()
                .map(|(index, source)| (source.plan.num_rows.saturating_sub(taken(index)), source.plan.weight)),
        ),
    }
}
