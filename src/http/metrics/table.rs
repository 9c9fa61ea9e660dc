//! Collects steps from their stored text: one JSON object per row, and columns of numbers where rows are selected by value.
//!
//! Text that is only passed on is not parsed: a page of ten thousand steps with thirty numbers each is copied.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Write;

use crate::event::SamplePhase;
use crate::store::{StepLine, StepLines};

/// Why a stored metrics line cannot be parsed.
pub(super) type Broken = &'static str;

/// Steps in stored order; training and evaluation of a step share one row.
#[derive(Debug, Default)]
pub(super) struct Rows {
    /// The objects `{"step":N,…}`, one after the other.
    text: String,
    /// The step number of each row, and where its text ends in `text`.
    ends: Vec<(u64, usize)>,
    /// Whether the text of the rows was dropped because there were too many. Only the step numbers are known then.
    has_no_text: bool,
}

/// Values by column, one row per step; NaN = no value.
#[derive(Debug, Default)]
pub(super) struct Columns {
    columns: Vec<Column>,
    /// The column index of each key of the previous row, in its order: a fast path, because the next row most likely
    /// has the same keys.
    likely: Vec<usize>,
}

#[derive(Debug)]
struct Column {
    /// The metric's name as written in JSON, with escapes.
    key: String,
    values: Vec<f64>,
}

impl Rows {
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(super) fn size_bytes(&self) -> usize {
        self.text.len()
    }

    /// Returns the step at this row.
    pub(super) fn step(&self, row: usize) -> Option<u64> {
        self.ends.get(row).map(|(step, _)| *step)
    }

    pub(super) fn truncate(&mut self, len: usize) {
        self.ends.truncate(len);
        self.text.truncate(self.ends.last().map_or(0, |(_, end)| *end));
    }

    /// Drops the text of all rows, including later ones, and keeps only their step numbers.
    pub(super) fn drop_text(&mut self) {
        (self.text, self.has_no_text) = (String::new(), true);
    }

    pub(super) fn has_text(&self) -> bool {
        !self.has_no_text
    }

    /// Iterates over the JSON objects of the rows.
    pub(super) fn iter(&self) -> impl Iterator<Item = &str> {
        let starts = std::iter::once(0).chain(self.ends.iter().map(|(_, end)| *end));
        starts.zip(&self.ends).filter_map(|(start, (_, end))| self.text.get(start..*end))
    }

    /// Returns the rows with these ascending indices.
    pub(super) fn chosen(&self, places: &[usize]) -> Rows {
        let mut chosen = Rows::default();
        for place in places {
            let start = place.checked_sub(1).and_then(|before| self.ends.get(before)).map_or(0, |(_, end)| *end);
            let Some((step, end)) = self.ends.get(*place) else { continue };
            chosen.text.push_str(self.text.get(start..*end).unwrap_or_default());
            chosen.ends.push((*step, chosen.text.len()));
        }
        chosen
    }

    /// Adds the steps of these lines that have any of `keys` (as [`in_json`]; None = all), and their numbers to `columns`.
    pub(super) fn take(
        &mut self,
        lines: &StepLines,
        keys: Option<&[String]>,
        mut columns: Option<&mut Columns>,
    ) -> Result<(), Broken> {
        let mut lines = lines.iter().peekable();
        while let Some(line) = lines.next() {
            let line = line.map_err(|_| "a stored line of step metrics is malformed")?;
            let is_same = |next: &Result<StepLine<'_>, _>| next.as_ref().is_ok_and(|next| next.step == line.step);
            let metrics = match lines.next_if(is_same) {
                Some(other) => {
                    Cow::Owned(together(line, other.map_err(|_| "a stored line of step metrics is malformed")?)?)
                }
                None => Cow::Borrowed(line.metrics),
            };
            self.take_row(line.step, &metrics, keys, columns.as_deref_mut())?;
        }
        Ok(())
    }

    pub(super) fn take_row(
        &mut self,
        step: u64,
        metrics: &str,
        keys: Option<&[String]>,
        columns: Option<&mut Columns>,
    ) -> Result<(), Broken> {
        let begin = self.text.len();
        let _ = write!(self.text, "{{\"step\":{step}");
        let empty = self.text.len();
        match keys {
            None => {
                let inner = metrics.trim().strip_prefix('{').and_then(|rest| rest.strip_suffix('}'));
                let inner = inner.ok_or("the stored metrics are not a JSON object")?.trim();
                if !inner.is_empty() {
                    self.text.push(',');
                    self.text.push_str(inner);
                }
            }
            Some(keys) => {
                for entry in entries(metrics) {
                    let (key, value) = entry?;
                    if keys.iter().any(|wanted| wanted == key) {
                        let _ = write!(self.text, ",\"{key}\":{value}");
                    }
                }
            }
        }
        if self.text.len() == empty {
            self.text.truncate(begin);
            return Ok(());
        }
        self.text.push('}');
        let row = self.ends.len();
        self.ends.push((step, self.text.len()));
        if let Some(columns) = columns {
            // The key `step` is not a metric.
            let inner = self.text.get(empty + 1..).unwrap_or_default();
            for (place, entry) in entries_after_brace(inner).enumerate() {
                let (key, value) = entry?;
                columns.put(row, place, key, value)?;
            }
        }
        if self.has_no_text {
            self.text.clear();
        }
        Ok(())
    }
}

impl Columns {
    fn put(&mut self, row: usize, place: usize, key: &str, value: &str) -> Result<(), Broken> {
        let value = if value == "null" {
            f64::NAN
        } else {
            value.parse().map_err(|_| "the value of a stored metric is not a number")?
        };
        let likely = self.likely.get(place).copied();
        let is = |index: &usize| self.columns.get(*index).is_some_and(|column| column.key == key);
        let index = likely.filter(is).or_else(|| self.columns.iter().position(|column| column.key == key));
        let index = index.unwrap_or_else(|| {
            self.columns.push(Column { key: key.to_owned(), values: Vec::new() });
            self.columns.len() - 1
        });
        if likely != Some(index) {
            self.likely.truncate(place);
            self.likely.push(index);
        }
        if let Some(Column { values, .. }) = self.columns.get_mut(index) {
            values.resize(row, f64::NAN);
            values.push(value);
        }
        Ok(())
    }

    /// Returns the columns, each padded to the number of rows: those of `first` in its order, then the others by name.
    pub(super) fn ordered(&mut self, first: &[&str], rows: usize) -> Vec<&[f64]> {
        self.columns.iter_mut().for_each(|column| column.values.resize(rows, f64::NAN));
        let rank = |column: &Column| first.iter().position(|key| *key == column.key).unwrap_or(first.len());
        self.columns.sort_by(|a, b| rank(a).cmp(&rank(b)).then_with(|| a.key.cmp(&b.key)));
        self.likely.clear();
        self.columns.iter().map(|column| column.values.as_slice()).collect()
    }
}

/// Merges the two lines of a step into one object; the evaluation's value wins if both have a key.
fn together(first: StepLine<'_>, second: StepLine<'_>) -> Result<String, Broken> {
    let (train, eval) = if first.kind == SamplePhase::Train { (first, second) } else { (second, first) };
    let mut all = BTreeMap::new();
    for entry in entries(train.metrics).chain(entries(eval.metrics)) {
        let (key, value) = entry?;
        all.insert(key, value);
    }
    let pairs: Vec<String> = all.iter().map(|(key, value)| format!("\"{key}\":{value}")).collect();
    Ok(format!("{{{}}}", pairs.join(",")))
}

/// Encodes a key as in JSON, without its quotes.
pub(super) fn in_json(key: &str) -> String {
    let text = serde_json::to_string(key).unwrap_or_default();
    text.get(1..text.len().saturating_sub(1)).unwrap_or_default().to_owned()
}

/// Decodes a key from JSON.
pub(super) fn from_json(key: &str) -> String {
    serde_json::from_str(&format!("\"{key}\"")).unwrap_or_else(|_| key.to_owned())
}

/// Iterates over keys (with escapes) and the texts of their values in a JSON object of numbers and nulls.
pub(super) fn entries(object: &str) -> Entries<'_> {
    match object.trim_start().strip_prefix('{') {
        Some(rest) => entries_after_brace(rest),
        None => Entries { rest: Err("the stored metrics are not a JSON object") },
    }
}

fn entries_after_brace(rest: &str) -> Entries<'_> {
    Entries { rest: Ok(rest) }
}

#[derive(Debug)]
pub(super) struct Entries<'a> {
    /// The text of the object that is not parsed yet; after an error, iteration ends.
    rest: Result<&'a str, Broken>,
}

impl<'a> Iterator for Entries<'a> {
    type Item = Result<(&'a str, &'a str), Broken>;

    fn next(&mut self) -> Option<Self::Item> {
        let rest = match self.rest {
            Ok(rest) => rest.trim_start_matches([',', ' ', '\n', '\t', '\r']),
            Err(broken) => {
                self.rest = Ok("");
                return Some(Err(broken));
            }
        };
        if rest.is_empty() || rest.starts_with('}') {
            self.rest = Ok("");
            return None;
        }
        match entry(rest) {
            Some((key, value, rest)) => {
                self.rest = Ok(rest);
                Some(Ok((key, value)))
            }
            None => {
                self.rest = Ok("");
                Some(Err("the stored metrics do not map names to numbers"))
            }
        }
    }
}

/// Parses the first key and value of an object's text, and returns them with the rest of the text.
fn entry(text: &str) -> Option<(&str, &str, &str)> {
    let text = text.strip_prefix('"')?;
    let bytes = text.as_bytes();
    let mut end = bytes.iter().position(|byte| matches!(byte, b'"' | b'\\'))?;
    while bytes.get(end)? == &b'\\' {
        end += 2;
        end += bytes.get(end..)?.iter().position(|byte| matches!(byte, b'"' | b'\\'))?;
    }
    let (key, rest) = (text.get(..end)?, text.get(end + 1..)?);
    let rest = rest.trim_start().strip_prefix(':')?.trim_start();
    let length = rest.bytes().position(|byte| matches!(byte, b',' | b'}' | b' ' | b'\n' | b'\t' | b'\r'))?;
    let (value, rest) = (rest.get(..length)?, rest.get(length..)?);
    let number = value.bytes().next().is_some_and(|byte| byte == b'-' || byte.is_ascii_digit());
    (number || value == "null").then_some((key, value, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(object: &str) -> Result<Vec<(&str, &str)>, Broken> {
        entries(object).collect()
    }

    #[test]
    fn entries_are_read_as_they_stand() {
        assert_eq!(all(r#"{"a":1,"b/c":null,"d":-2.5e-7}"#), Ok(vec![("a", "1"), ("b/c", "null"), ("d", "-2.5e-7")]));
        assert_eq!(all(" { \"a\" : 1 ,\n\"b\": 2 } "), Ok(vec![("a", "1"), ("b", "2")]));
        assert_eq!(all(r#"{"a\"b\\":3}"#), Ok(vec![(r#"a\"b\\"#, "3")]));
        assert_eq!(all("{}"), Ok(vec![]));
        for broken in ["[]", "", "{\"a\"", "{\"a\":\"b\"}", "{\"a\":true}", "{\"a\":{}}", "{a:1}", "{\"a\\"] {
            assert!(all(broken).is_err(), "{broken}");
        }
        assert_eq!((in_json("a\"b"), from_json("a\\\"b")), ("a\\\"b".to_owned(), "a\"b".to_owned()));
    }

    #[test]
    fn rows_and_columns_agree_where_keys_come_and_go() {
        let (mut rows, mut columns) = (Rows::default(), Columns::default());
        for (step, metrics) in [(1, r#"{"a":1,"b":2}"#), (2, r#"{"b":null,"c":3}"#), (3, "{}"), (4, r#"{"a":4}"#)] {
            rows.take_row(step, metrics, None, Some(&mut columns)).unwrap();
        }
        let texts: Vec<&str> = rows.iter().collect();
        assert_eq!(texts, [r#"{"step":1,"a":1,"b":2}"#, r#"{"step":2,"b":null,"c":3}"#, r#"{"step":4,"a":4}"#]);
        let columns = columns.ordered(&["c", "x"], rows.len());
        let shown: Vec<String> = columns.iter().map(|values| format!("{values:?}")).collect();
        assert_eq!(shown, ["[NaN, 3.0, NaN]", "[1.0, NaN, 4.0]", "[2.0, NaN, NaN]"]);
        let chosen = rows.chosen(&[0, 2]);
        assert_eq!(chosen.iter().collect::<Vec<_>>(), [texts[0], texts[2]]);
        assert_eq!((chosen.step(1), chosen.step(2)), (Some(4), None));
        let mut some = Rows::default();
        for (step, metrics) in [(1, r#"{"a":1,"b":2}"#), (2, r#"{"a":3}"#)] {
            some.take_row(step, metrics, Some(&["b".to_owned()]), None).unwrap();
        }
        assert_eq!(some.iter().collect::<Vec<_>>(), [r#"{"step":1,"b":2}"#]);
    }
}
