//! Limits of numbers. The check, its error message and the JSON schema are all derived from one value.

use std::fmt;

use utoipa::openapi::schema::Object;

/// An interval of numbers; each end is open, closed or absent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::spec) struct Range {
    low: Option<Bound>,
    high: Option<Bound>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Bound {
    value: f64,
    is_inside: bool,
    /// Meaning of the bound itself as a value, such as "0 = off".
    note: &'static str,
}

impl Range {
    /// The range of all finite numbers.
    pub(in crate::spec) const ANY: Range = Range { low: None, high: None };

    /// Creates the range of numbers greater than `low`.
    pub(in crate::spec) const fn above(low: f64) -> Self {
        Self { low: Some(Bound { value: low, is_inside: false, note: "" }), high: None }
    }

    /// Creates the range of numbers that are at least `low`.
    pub(in crate::spec) const fn at_least(low: f64) -> Self {
        Self { low: Some(Bound { value: low, is_inside: true, note: "" }), high: None }
    }

    /// Restricts the range to numbers less than `high`.
    pub(in crate::spec) const fn below(self, high: f64) -> Self {
        Self { high: Some(Bound { value: high, is_inside: false, note: "" }), ..self }
    }

    /// Restricts the range to numbers that are at most `high`.
    pub(in crate::spec) const fn at_most(self, high: f64) -> Self {
        Self { high: Some(Bound { value: high, is_inside: true, note: "" }), ..self }
    }

    /// Adds the meaning of the value at the bound that was set last.
    pub(in crate::spec) const fn noting(mut self, note: &'static str) -> Self {
        match (&mut self.low, &mut self.high) {
            (_, Some(bound)) | (Some(bound), None) => bound.note = note,
            (None, None) => {}
        }
        self
    }

    /// Whether the number is in the interval.
    pub(in crate::spec) fn contains(&self, number: f64) -> bool {
        let above = self.low.is_none_or(|low| number > low.value || (low.is_inside && number == low.value));
        let below = self.high.is_none_or(|high| number < high.value || (high.is_inside && number == high.value));
        number.is_finite() && above && below
    }

    /// Writes the limits into the schema of a number.
    pub(in crate::spec) fn restrict(&self, schema: &mut Object) {
        let [minimum, exclusive_minimum] = ends(self.low);
        let [maximum, exclusive_maximum] = ends(self.high);
        schema.minimum = minimum;
        schema.exclusive_minimum = exclusive_minimum;
        schema.maximum = maximum;
        schema.exclusive_maximum = exclusive_maximum;
    }
}

/// Returns the bound as the inclusive and the exclusive limit of a schema.
fn ends(bound: Option<Bound>) -> [Option<utoipa::Number>; 2] {
    let end = |is_inside| bound.filter(|bound| bound.is_inside == is_inside).map(|bound| bound.value.into());
    [end(true), end(false)]
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let low = self.low.map(|low| (if low.is_inside { "at least" } else { "greater than" }, low));
        let high = self.high.map(|high| (if high.is_inside { "at most" } else { "less than" }, high));
        if low.is_none() && high.is_none() {
            return f.write_str("a number");
        }
        for (index, (words, bound)) in low.into_iter().chain(high).enumerate() {
            let and = if index == 0 { "" } else { " and " };
            write!(f, "{and}{words} {}", bound.value)?;
            if !bound.note.is_empty() {
                write!(f, " ({})", bound.note)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_check_the_message_and_the_schema_of_a_range_agree() {
        let cases = [
            (Range::above(0.0).below(1.0), "greater than 0 and less than 1", vec![0.5], vec![0.0, 1.0]),
            (
                Range::above(0.0).at_most(1.0).noting("1 = off"),
                "greater than 0 and at most 1 (1 = off)",
                vec![1.0],
                vec![0.0, 1.1],
            ),
            (
                Range::at_least(0.0).noting("0 = off").below(1.0),
                "at least 0 (0 = off) and less than 1",
                vec![0.0],
                vec![-0.1, 1.0],
            ),
            (Range::at_least(0.0), "at least 0", vec![0.0, 1e300], vec![-1e-300, f64::INFINITY]),
            (Range::ANY, "a number", vec![-1.0], vec![f64::NAN]),
        ];
        for (range, words, inside, outside) in cases {
            assert_eq!(range.to_string(), words);
            let mut schema = Object::new();
            range.restrict(&mut schema);
            let schema = serde_json::to_value(schema).unwrap();
            let allowed = |number: f64| {
                let limit = |name: &str| schema[name].as_f64();
                limit("minimum").is_none_or(|low| number >= low)
                    && limit("exclusiveMinimum").is_none_or(|low| number > low)
                    && limit("maximum").is_none_or(|high| number <= high)
                    && limit("exclusiveMaximum").is_none_or(|high| number < high)
            };
            for number in inside {
                assert!(range.contains(number) && allowed(number), "{words}: {number}");
            }
            for number in outside {
                assert!(!range.contains(number) && (!number.is_finite() || !allowed(number)), "{words}: {number}");
            }
        }
    }
}
