//! The formula of a `multi` grader: arithmetic over the graders' names, with the functions of OpenAI's grader.

use std::collections::BTreeMap;

use minijinja::{Environment, Error, ErrorKind, UndefinedBehavior, Value};

use crate::jinja::{Template, limit_operators};

/// Maximum number of steps per evaluation of a formula.
const MAX_STEPS: u64 = 10_000;
/// Maximum number of bytes that one evaluation may allocate. Numbers do not count.
const MAX_ALLOCATED_BYTES: u64 = 1 << 20;
const FUNCTIONS: [&str; 8] = ["min", "max", "abs", "floor", "ceil", "exp", "sqrt", "log"];
const WORDS: [&str; 14] =
    ["and", "or", "not", "in", "is", "if", "else", "true", "false", "none", "True", "False", "None", "loop"];

type OfOne = fn(f64) -> f64;
type OfTwo = fn(f64, f64) -> f64;

/// A formula that was parsed successfully.
#[derive(Debug)]
pub struct Formula {
    environment: Environment<'static>,
    expression: Template,
    text: String,
}

impl Formula {
    /// Parses `text`. The error message is for the user who wrote the formula.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut environment = Environment::empty();
        environment.set_fuel(Some(MAX_STEPS));
        environment.set_undefined_behavior(UndefinedBehavior::Strict);
        limit_operators(&mut environment);
        let one: [(&'static str, OfOne); 6] = [
            ("abs", f64::abs),
            ("floor", f64::floor),
            ("ceil", f64::ceil),
            ("exp", f64::exp),
            ("sqrt", f64::sqrt),
            ("log", f64::ln),
        ];
        for (name, function) in one {
            environment.add_function(name, function);
        }
        let many: [(&'static str, OfTwo); 2] = [("min", f64::min), ("max", f64::max)];
        for (name, function) in many {
            environment.add_function(name, move |values: minijinja::value::Rest<f64>| {
                let best = values.iter().copied().reduce(function);
                best.ok_or_else(|| Error::new(ErrorKind::MissingArgument, format!("{name}() needs numbers")))
            });
        }
        match Template::expression(text.to_owned()) {
            Ok(expression) => Ok(Self { environment, expression, text: text.to_owned() }),
            Err(error) => {
                let why = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
                Err(format!(
                    "the text is not a formula ({why}): available are + - * / ** ( ) and {}",
                    FUNCTIONS.join(", ")
                ))
            }
        }
    }

    /// Whether a grader may have this name.
    pub fn is_name(name: &str) -> bool {
        let mut chars = name.chars();
        chars.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
            && chars.all(|c| c.is_ascii_alphanumeric() || c == '_')
            && name.len() <= 64
            && !FUNCTIONS.contains(&name)
            && !WORDS.contains(&name)
    }

    /// Returns the names of the graders in the formula.
    pub fn names(&self) -> Vec<String> {
        let Ok(compiled) = self.environment.compile_expression(&self.text) else { return Vec::new() };
        let mut names: Vec<String> = compiled.undeclared_variables(false).into_iter().collect();
        names.retain(|name| !FUNCTIONS.contains(&name.as_str()));
        names.sort_unstable();
        names
    }

    /// Evaluates the formula; the value is a finite number.
    pub fn value(&self, scores: &BTreeMap<&str, f64>) -> Result<f64, String> {
        let variables = Value::from_pairs(scores.iter().map(|(name, score)| (*name, *score)));
        let value = self.expression.eval(&self.environment, variables, MAX_ALLOCATED_BYTES, Ok).map_err(|error| {
            let why = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
            format!("the formula has no value: {why}")
        })?;
        let number = match value.kind() {
            minijinja::value::ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
            minijinja::value::ValueKind::Number => f64::try_from(value).ok(),
            _ => None,
        };
        match number {
            Some(number) if number.is_finite() => Ok(number),
            Some(number) => Err(format!("the formula gives {number}")),
            None => Err("the formula gives no number".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str) -> Result<f64, String> {
        Formula::parse(text)?.value(&BTreeMap::from([("a", 0.5), ("b", 2.0), ("none_of", 0.0)]))
    }

    #[test]
    fn arithmetic_is_pythons() {
        for (text, expected) in [
            ("a", 0.5),
            ("0.8 * a + 0.2 * b", 0.8),
            ("(a + b) / 2", 1.25),
            ("1 / 4", 0.25),
            ("b ** 3 - 1", 7.0),
            ("-a", -0.5),
            ("min(a, b, 1)", 0.5),
            ("max(a, b)", 2.0),
            ("abs(-b) + floor(1.7) + ceil(1.2)", 5.0),
            ("sqrt(4) * exp(0) + log(1)", 2.0),
            ("a if b > 1 else 0", 0.5),
            ("b > 1", 1.0),
        ] {
            assert_eq!(value(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn a_formula_without_a_finite_value_is_an_error() {
        for text in
            ["a / none_of", "log(none_of)", "'x'", "c", "a +", "import os", "a.b", "range(3)", "max()", "exp(10000)"]
        {
            assert!(value(text).is_err(), "{text}: {:?}", value(text));
        }
        let deep = format!("a{}", "+1".repeat(20_000));
        for text in ["'x' * 100000000 == a", "[a] * 100000000 == a", "(a, b) * 50000000 == a", &deep] {
            let error = value(text).unwrap_err();
            assert!(error.contains("MiB") || error.contains("deep"), "{error}");
        }
    }

    #[test]
    fn names_are_those_of_graders() {
        assert_eq!(Formula::parse("max(a, 0.5 * short) + a").unwrap().names(), ["a", "short"]);
        assert!(Formula::is_name("right_1") && Formula::is_name("_x"));
        assert!(["", "1a", "a-b", "min", "if", "ä"].iter().all(|name| !Formula::is_name(name)));
    }
}
