//! Downsampling of metrics that loses no peak.

/// Selects at most `max_points` of `len` rows, in order: the first and the last, and the lowest and highest value of every column
/// in as many equal intervals as the limit allows. NaN = no value.
pub(in crate::http) fn kept_rows(columns: &[&[f64]], len: usize, max_points: usize) -> Vec<usize> {
    let mut stretches = (max_points / 2).min(len);
    while stretches > 0 {
        let mut kept = Kept::new(len, max_points);
        kept.insert(0);
        kept.insert(len - 1);
        // Counting stops as soon as this number of intervals gives more rows than the limit; fewer intervals are tried next.
        for stretch in 0..stretches {
            let range = stretch * len / stretches..(stretch + 1) * len / stretches;
            columns.iter().flat_map(|column| extremes(column, range.clone())).for_each(|row| kept.insert(row));
            if kept.is_over() {
                break;
            }
        }
        if !kept.is_over() {
            return kept.rows();
        }
        stretches = (stretches * 3 / 4).min(stretches - 1);
    }
    // Even one interval gives more rows than the limit: keep the extremes of the first columns only.
    let mut kept = Kept::new(len, max_points);
    for row in columns.iter().flat_map(|column| extremes(column, 0..len)) {
        if kept.count < max_points {
            kept.insert(row);
        }
    }
    kept.rows()
}

struct Kept {
    is_kept: Vec<bool>,
    count: usize,
    limit: usize,
}

impl Kept {
    fn new(len: usize, limit: usize) -> Self {
        Self { is_kept: vec![false; len], count: 0, limit }
    }

    fn insert(&mut self, row: usize) {
        if let Some(is_kept) = self.is_kept.get_mut(row)
            && !std::mem::replace(is_kept, true)
        {
            self.count += 1;
        }
    }

    fn is_over(&self) -> bool {
        self.count > self.limit
    }

    fn rows(self) -> Vec<usize> {
        (0..).zip(self.is_kept).filter_map(|(row, is_kept)| is_kept.then_some(row)).collect()
    }
}

/// Returns the rows with the lowest and the highest value of a column (the first of equal ones); none if the
/// column has no values.
fn extremes(column: &[f64], range: std::ops::Range<usize>) -> impl Iterator<Item = usize> {
    let (mut lowest, mut highest) = (None, None);
    let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
    let start = range.start;
    for (row, value) in (start..).zip(column.get(range).unwrap_or_default()) {
        // A comparison with NaN is always false, so missing values are skipped.
        if *value < low {
            (low, lowest) = (*value, Some(row));
        }
        if *value > high {
            (high, highest) = (*value, Some(row));
        }
    }
    lowest.into_iter().chain(highest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_outlier_survives_thinning_in_every_place() {
        for place in [0, 1, 499, 998, 999] {
            for outlier in [-50.0, 50.0] {
                let mut values: Vec<f64> = (0..1000).map(|i| (f64::from(i) * 0.1).sin()).collect();
                values[place] = outlier;
                let kept = kept_rows(&[&values], 1000, 40);
                assert!((20..=40).contains(&kept.len()), "{}", kept.len());
                assert!(kept.contains(&place), "{place} {outlier}");
                assert_eq!((kept[0], kept[kept.len() - 1]), (0, 999));
                assert!(kept.is_sorted());
            }
        }
    }

    #[test]
    fn many_columns_keep_the_extremes_of_as_many_as_fit() {
        let rising: Vec<f64> = (0..100).map(f64::from).collect();
        let mut columns = vec![rising];
        columns.extend((0..20).map(|key| (0..100).map(|row| ((row * (key + 7)) % 97) as f64).collect::<Vec<_>>()));
        let columns: Vec<&[f64]> = columns.iter().map(Vec::as_slice).collect();
        let kept = kept_rows(&columns, 100, 5);
        assert!(kept.len() <= 5 && kept.contains(&0) && kept.contains(&99), "{kept:?}");
    }

    #[test]
    fn what_has_no_value_is_no_extreme() {
        let mut values = vec![f64::NAN; 1000];
        (values[300], values[301], values[700]) = (1.0, 3.0, 2.0);
        let kept = kept_rows(&[&values], 1000, 10);
        assert!([0, 300, 301, 700, 999].iter().all(|row| kept.contains(row)) && kept.len() <= 10, "{kept:?}");
        assert_eq!(kept_rows(&[&[f64::NAN; 50]], 50, 2), [0, 49]);
    }
}
