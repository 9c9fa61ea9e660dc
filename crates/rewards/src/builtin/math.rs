//! Compares two final answers as mathematics: numbers, fractions, LaTeX, lists, intervals, and expressions with variables,
//! which are compared at a few points. If neither answer can be parsed as mathematics, their texts are compared.

use std::sync::LazyLock;

use regex::Regex;

use super::last_number;
use crate::spec::AnswerPlace;

mod expression;

use expression::Expression;

/// Longest answer that is parsed as mathematics, in bytes.
const MAX_ANSWER_BYTES: usize = 4_000;
/// Values for the variables of two expressions that are compared. Two polynomials that agree at all these points
/// are equal in practice.
const POINTS: [f64; 5] = [0.734_1, 1.391_7, 2.173_9, 3.617_3, 0.219_7];
/// Maximum relative difference between the values of two equal expressions at one of the test points.
const POINT_TOLERANCE: f64 = 1e-9;

/// Returns the final answer of a completion, from the configured place (a `\boxed{…}`, a tag, or the whole text).
pub(super) fn final_answer(text: &str, place: AnswerPlace) -> Option<String> {
    match place {
        AnswerPlace::Boxed => boxed(text),
        AnswerPlace::Tag => tagged(text),
        AnswerPlace::Whole => Some(text.trim().to_owned()),
        AnswerPlace::Auto => boxed(text)
            .or_else(|| tagged(text))
            .or_else(|| marked(text))
            .or_else(|| last_number(text).map(|n| n.to_string())),
    }
}

/// Returns the answer in a dataset's reference column: the marked answer if there is one, else the whole text.
pub(super) fn reference_answer(text: &str) -> String {
    let hashes = text.rsplit_once("####").map(|(_, answer)| answer.trim().to_owned());
    boxed(text).or(hashes).unwrap_or_else(|| text.trim().to_owned())
}

/// Returns the content of the last `\boxed{…}` with balanced braces.
fn boxed(text: &str) -> Option<String> {
    let start = ["\\boxed{", "\\fbox{"].iter().filter_map(|mark| Some(text.rfind(mark)? + mark.len())).max()?;
    let mut depth = 1;
    for (at, c) in text[start..].char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(text[start..start + at].trim().to_owned());
        }
    }
    None
}

fn tagged(text: &str) -> Option<String> {
    let end = text.rfind("</answer>")?;
    let start = text[..end].rfind("<answer>")? + "<answer>".len();
    Some(text[start..end].trim().to_owned())
}

/// Returns the text after `####`, or after "the answer is".
fn marked(text: &str) -> Option<String> {
    static ANSWER_IS: LazyLock<Regex> =
        LazyLock::new(|| Regex::new(r"(?i)answer\s*(?:is|:|=)\s*:?\s*([^\n]+)").expect("a constant pattern"));
    if let Some((_, rest)) = text.rsplit_once("####") {
        return Some(rest.trim().lines().next().unwrap_or_default().trim().to_owned());
    }
    let rest = ANSWER_IS.captures_iter(text).last()?.get(1)?.as_str();
    let sentence = rest.split(". ").next().unwrap_or(rest).trim().trim_end_matches(['.', '!']);
    Some(sentence.trim_matches('*').trim().to_owned())
}

/// Returns whether two answers are equal: whole numbers exactly, other numbers within a relative difference of `tolerance`.
pub(super) fn equal(answer: &str, reference: &str, tolerance: f64) -> bool {
    if answer.len() > MAX_ANSWER_BYTES || reference.len() > MAX_ANSWER_BYTES {
        return answer.trim() == reference.trim();
    }
    let (answer, reference) = (plain(answer), plain(reference));
    if canonical(&answer) == canonical(&reference) {
        return !canonical(&reference).is_empty();
    }
    let (left, right) = (Parts::of(&answer), Parts::of(&reference));
    if left.items.len() > 1 || right.items.len() > 1 {
        return left.equal(&right, tolerance);
    }
    same_value(&answer, &reference, tolerance)
}

/// A final answer that is a list, such as `(1, 2)`, split into its items.
struct Parts<'a> {
    /// The list's opening and closing bracket; `None` for a bare list such as `1, 2`.
    brackets: Option<(char, char)>,
    items: Vec<&'a str>,
}

impl<'a> Parts<'a> {
    fn of(text: &'a str) -> Self {
        let text = text.trim();
        let inner = text.strip_prefix("\\{").and_then(|inner| inner.strip_suffix("\\}"));
        if let Some(inner) = inner {
            return Self { brackets: Some(('{', '}')), items: at_commas(inner) };
        }
        let (first, last) = (text.chars().next(), text.chars().next_back());
        if let (Some(open @ ('(' | '[')), Some(close @ (')' | ']'))) = (first, last)
            && text.len() > 1
        {
            let items = at_commas(&text[1..text.len() - 1]);
            if items.len() > 1 {
                return Self { brackets: Some((open, close)), items };
            }
        }
        static THOUSANDS: LazyLock<Regex> =
            LazyLock::new(|| Regex::new(r"^[-+]?\d{1,3}(,\d{3})+(\.\d+)?\D*$").expect("a constant pattern"));
        let items = if THOUSANDS.is_match(text) { vec![text] } else { at_commas(text) };
        Self { brackets: None, items }
    }

    /// Compares two lists of answers: in order if they have round or square brackets (points, intervals), in any order for
    /// sets and bare lists.
    fn equal(&self, other: &Self, tolerance: f64) -> bool {
        let is_ordered = |brackets: Option<(char, char)>| !matches!(brackets, None | Some(('{', '}')));
        if self.items.len() != other.items.len() || is_ordered(self.brackets) != is_ordered(other.brackets) {
            return false;
        }
        if is_ordered(self.brackets) {
            let mut pairs = self.items.iter().zip(&other.items);
            return self.brackets == other.brackets && pairs.all(|(left, right)| equal(left, right, tolerance));
        }
        let mut open: Vec<&&str> = other.items.iter().collect();
        self.items.iter().all(|left| match open.iter().position(|right| equal(left, right, tolerance)) {
            Some(at) => {
                open.swap_remove(at);
                true
            }
            None => false,
        })
    }
}

/// Splits an answer at commas outside of brackets.
fn at_commas(text: &str) -> Vec<&str> {
    let (mut depth, mut start, mut items) = (0i32, 0, Vec::new());
    for (at, c) in text.char_indices() {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            ',' if depth == 0 => {
                items.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    items.push(text[start..].trim());
    items
}

fn same_value(answer: &str, reference: &str, tolerance: f64) -> bool {
    let (Some(left), Some(right)) = (Value::of(answer), Value::of(reference)) else { return false };
    match (left, right) {
        (Value::Number(left), Value::Number(right)) => {
            // The answer "50%" equals both 0.5 and 50.
            let percents = (answer.contains('%'), reference.contains('%'));
            close(left, right, tolerance)
                || (percents == (true, false) && close(left * 100.0, right, tolerance))
                || (percents == (false, true) && close(left, right * 100.0, tolerance))
        }
        (Value::Formula(left), Value::Formula(right)) => {
            left.variables() == right.variables()
                && POINTS.iter().enumerate().all(|(index, _)| {
                    let value = |expression: &Expression| {
                        // Different variables get different values.
                        expression.value(&|name| {
                            Some(POINTS[(index + name as usize) % POINTS.len()] + f64::from(name as u32 % 7))
                        })
                    };
                    match (value(&left), value(&right)) {
                        (Some(a), Some(b)) => (a - b).abs() <= POINT_TOLERANCE * a.abs().max(b.abs()).max(1.0),
                        (None, None) => true,
                        _ => false,
                    }
                })
                && POINTS.iter().any(|point| left.value(&|_| Some(*point)).is_some())
        }
        (Value::Number(_), Value::Formula(_)) | (Value::Formula(_), Value::Number(_)) => false,
    }
}

enum Value {
    Number(f64),
    Formula(Expression),
}

impl Value {
    fn of(text: &str) -> Option<Self> {
        static UNIT: LazyLock<Regex> =
            LazyLock::new(|| Regex::new(r"^(.*[\d)}%.])\s*[A-Za-z][A-Za-z .²³^0-9/]*$").expect("a constant pattern"));
        let parsed = Expression::parse(text)?;
        match parsed.value(&|_| None) {
            Some(number) => Some(Value::Number(number)),
            None => {
                // Answers such as "5 apples" and "12 cm": only the number before the words is compared.
                let words = text.split(|c: char| !c.is_ascii_alphabetic()).any(|word| word.len() > 1);
                let number = UNIT
                    .captures(text)
                    .filter(|_| words)
                    .and_then(|found| Expression::parse(found.get(1)?.as_str())?.value(&|_| None));
                Some(number.map_or(Value::Formula(parsed), Value::Number))
            }
        }
    }
}

fn close(left: f64, right: f64, tolerance: f64) -> bool {
    if left.fract() == 0.0 && right.fract() == 0.0 {
        return left == right;
    }
    (left - right).abs() <= tolerance * left.abs().max(right.abs())
}

/// Removes LaTeX markup that only affects typesetting, and a leading "x =", from an answer.
fn plain(text: &str) -> String {
    static TEXT: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"\\(?:text|mathrm|textbf|mathbf|mbox|operatorname)\s*\{([^{}]*)\}").expect("a constant pattern")
    });
    static NAMED: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"^\s*[A-Za-z](?:_\w|_\{\w+\})?(?:\([A-Za-z]\))?\s*=\s*").expect("a constant pattern")
    });
    let mut plain = text.trim().trim_matches('$').trim().to_owned();
    for (from, to) in [
        ("\\left", ""),
        ("\\right", ""),
        ("\\dfrac", "\\frac"),
        ("\\tfrac", "\\frac"),
        ("\\cfrac", "\\frac"),
        ("{,}", ""),
        ("\\!", ""),
        ("\\,", " "),
        ("\\;", " "),
        ("\\:", " "),
        ("\\ ", " "),
        ("~", " "),
        ("\\$", ""),
        ("$", ""),
        ("\\%", "%"),
        ("^{\\circ}", ""),
        ("^\\circ", ""),
        ("°", ""),
        ("−", "-"),
        ("\\displaystyle", ""),
        ("\\(", ""),
        ("\\)", ""),
        ("\\[", ""),
        ("\\]", ""),
    ] {
        plain = plain.replace(from, to);
    }
    let plain = TEXT.replace_all(&plain, " $1 ");
    let plain = NAMED.replace(&plain, "");
    plain.trim().trim_end_matches('.').trim().to_owned()
}

/// Normalizes a text for comparison: spaces only between words, lower case, no parentheses around a single word.
fn canonical(text: &str) -> String {
    let mut bare = String::with_capacity(text.len());
    let mut space = false;
    for c in text.chars() {
        if c.is_whitespace() {
            space = true;
            continue;
        }
        if std::mem::take(&mut space) && c.is_alphanumeric() && bare.ends_with(char::is_alphanumeric) {
            bare.push(' ');
        }
        bare.extend(c.to_lowercase());
    }
    let inner = bare.strip_prefix('(').and_then(|inner| inner.strip_suffix(')'));
    inner.filter(|inner| inner.chars().all(char::is_alphanumeric)).map_or(bare.clone(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_found_where_people_put_them() {
        let auto = |text: &str| final_answer(text, AnswerPlace::Auto);
        for (text, expected) in [
            (r"so \boxed{\frac{1}{2}} and then \boxed{3}", Some("3")),
            (r"\boxed{\frac{1}{2}}", Some(r"\frac{1}{2}")),
            ("<think>1</think><answer> 7 </answer>", Some("7")),
            ("It is 3.\n#### 42\n", Some("42")),
            ("The answer is 12. That was easy.", Some("12")),
            ("**Answer:** none\nFinal answer: x = 5", Some("x = 5")),
            ("we get 3 + 4 = 7.", Some("7")),
            ("no idea", None),
        ] {
            assert_eq!(auto(text).as_deref(), expected, "{text}");
        }
        assert_eq!(final_answer("7", AnswerPlace::Boxed), None);
        assert_eq!(final_answer(r"\boxed{7", AnswerPlace::Boxed), None);
        assert_eq!(final_answer("<answer>7</answer> 8", AnswerPlace::Tag).as_deref(), Some("7"));
        assert_eq!(reference_answer("work\n#### 1,234"), "1,234");
    }

    #[test]
    fn equal_answers_are_equal_however_they_are_written() {
        for (left, right) in [
            ("42", "42.0"),
            ("1,234", "1234"),
            ("1{,}234", "1234"),
            (r"\frac{1}{2}", "0.5"),
            (r"\dfrac12", "1/2"),
            (r"-\frac{3}{4}", "-0.75"),
            (r"1\frac{1}{2}", "1.5"),
            ("1 1/2", "3/2"),
            (r"\sqrt{8}", r"2\sqrt{2}"),
            (r"\sqrt[3]{27}", "3"),
            (r"2\pi", "6.283185307"),
            ("2^{10}", "1024"),
            (r"3 \times 10^{-2}", "0.03"),
            (r"50\%", "0.5"),
            ("50%", "50"),
            (r"\$12.50", "12.5"),
            ("12 cm", "12"),
            (r"12\text{ cm}", "12"),
            (r"90^\circ", "90"),
            ("x = 5", "5"),
            ("(x+1)^2", "x^2 + 2x + 1"),
            (r"\frac{x}{2}+y", "y + 0.5x"),
            ("(1, 2)", r"\left(1, \frac{4}{2}\right)"),
            (r"\{1, 2, 3\}", r"\{3, 2, 1\}"),
            ("2, -2", "-2, 2"),
            ("[0, 1)", "[0,1)"),
            (r"\text{Monday}", "monday"),
            ("(B)", "B"),
            ("5!", "120"),
            ("|-3|", "3"),
            (r"\sin(0)", "0"),
            (r"\frac{1}{3}", "0.333333333"),
        ] {
            assert!(equal(left, right, 1e-6), "{left} = {right}");
            assert!(equal(right, left, 1e-6), "{right} = {left}");
        }
    }

    #[test]
    fn different_answers_are_different() {
        for (left, right) in [
            ("42", "43"),
            ("1000000", "1000001"),
            ("1/2", "1/3"),
            ("x+1", "x+2"),
            ("x", "y"),
            ("x", "1"),
            ("(1, 2)", "(2, 1)"),
            ("[0, 1)", "[0, 1]"),
            ("1, 2", "1, 2, 3"),
            ("Monday", "Tuesday"),
            ("A", "B"),
            ("", ""),
            ("", "0"),
            ("1/0", "1/0 + 1"),
            ("0.5", "0.51"),
            ("12", "1 2"),
            ("not a number", "7"),
        ] {
            assert!(!equal(left, right, 1e-6), "{left} ≠ {right}");
        }
    }

    #[test]
    fn no_answer_causes_a_panic_or_a_long_run() {
        let long = "(".repeat(3_000);
        for text in [
            "\\frac",
            "\\frac{",
            "^",
            "\\sqrt[",
            "{}",
            "\\",
            "((",
            "1e999999",
            "9!!!!!!",
            "99999!",
            "é\\boxed{ü",
            "%",
            "|",
            &long,
        ] {
            let _ = equal(text, "1", 1e-6);
            let _ = equal("1", text, 1e-6);
            let _ = final_answer(text, AnswerPlace::Auto);
        }
    }
}
