//! Exact arithmetic on whole numbers, for the demo's calculator.

/// Maximum depth of parentheses and signs in an expression.
const MAX_DEPTH: usize = 64;

/// Evaluates an expression of whole numbers with `+ - * /` and parentheses. White space is ignored.
///
/// # Errors
/// Fails, with a text for the model, if the expression is malformed, too deep, divides without an exact result, or leaves the
/// range of 128-bit numbers.
pub fn evaluate(expression: &str) -> Result<i128, String> {
    let characters: Vec<char> = expression.chars().filter(|character| !character.is_whitespace()).collect();
    let mut reader = Reader { rest: &characters };
    let value = reader.sum(0)?;
    match reader.rest.first() {
        None => Ok(value),
        Some(character) => Err(format!("'{character}' is not expected here")),
    }
}

struct Reader<'a> {
    rest: &'a [char],
}

impl Reader<'_> {
    /// Takes the next character if it is one of these.
    fn take(&mut self, wanted: &[char]) -> Option<char> {
        let (first, rest) = self.rest.split_first()?;
        wanted.contains(first).then(|| {
            self.rest = rest;
            *first
        })
    }

    fn sum(&mut self, depth: usize) -> Result<i128, String> {
        let mut value = self.product(depth)?;
        while let Some(operator) = self.take(&['+', '-']) {
            let other = self.product(depth)?;
            let result = if operator == '+' { value.checked_add(other) } else { value.checked_sub(other) };
            value = result.ok_or_else(too_large)?;
        }
        Ok(value)
    }

    fn product(&mut self, depth: usize) -> Result<i128, String> {
        let mut value = self.factor(depth)?;
        while let Some(operator) = self.take(&['*', '/']) {
            let other = self.factor(depth)?;
            value =
                if operator == '*' { value.checked_mul(other).ok_or_else(too_large)? } else { divide(value, other)? };
        }
        Ok(value)
    }

    fn factor(&mut self, depth: usize) -> Result<i128, String> {
        if depth >= MAX_DEPTH {
            return Err(format!("the expression is deeper than {MAX_DEPTH} parentheses"));
        }
        if self.take(&['-']).is_some() {
            return self.factor(depth + 1)?.checked_neg().ok_or_else(too_large);
        }
        if self.take(&['(']).is_some() {
            let value = self.sum(depth + 1)?;
            return self.take(&[')']).map(|_| value).ok_or_else(|| "a parenthesis is not closed".to_owned());
        }
        self.number()
    }

    fn number(&mut self) -> Result<i128, String> {
        let mut value: Option<i128> = None;
        while let Some((first, rest)) = self.rest.split_first()
            && let Some(digit) = first.to_digit(10)
        {
            self.rest = rest;
            let shifted = value.unwrap_or(0).checked_mul(10).and_then(|value| value.checked_add(i128::from(digit)));
            value = Some(shifted.ok_or_else(too_large)?);
        }
        value.ok_or_else(|| match self.rest.first() {
            Some(character) => format!("a number is expected, not '{character}'"),
            None => "a number is expected at the end".to_owned(),
        })
    }
}

fn divide(value: i128, by: i128) -> Result<i128, String> {
    match (value.checked_rem(by), value.checked_div(by)) {
        (Some(0), Some(quotient)) => Ok(quotient),
        (Some(_), _) => Err(format!("{value}/{by} is not a whole number")),
        (None, _) if by == 0 => Err("a division by 0".to_owned()),
        (None, _) => Err(too_large()),
    }
}

fn too_large() -> String {
    "the numbers are too large".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_exact() {
        for (expression, expected) in [
            ("4821+907+3356", 9084),
            ("7", 7),
            (" 2 + 3 * 4 ", 14),
            ("(2+3)*4", 20),
            ("2-3-4", -5),
            ("-(5-8)*--2", 6),
            ("84/4/7", 3),
            ("99999999999999999999*3", 299_999_999_999_999_999_997),
        ] {
            assert_eq!(evaluate(expression), Ok(expected), "{expression}");
        }
    }

    #[test]
    fn other_texts_are_errors_that_say_why() {
        let deep = "(".repeat(100_000);
        for (expression, why) in [
            ("", "expected at the end"),
            ("2+", "expected at the end"),
            ("2+x", "not 'x'"),
            ("2 3)", "')' is not expected"),
            ("(2", "not closed"),
            ("7/2", "7/2 is not a whole number"),
            ("7/0", "division by 0"),
            ("9e9", "'e' is not expected"),
            (&"9".repeat(50), "too large"),
            (&deep, "deeper"),
            ("٣+1", "not '٣'"),
        ] {
            assert!(evaluate(expression).unwrap_err().contains(why), "{expression:.20}: {:?}", evaluate(expression));
        }
    }
}
