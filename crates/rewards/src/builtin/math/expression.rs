//! Parses and evaluates arithmetic in plain notation and in LaTeX.

use std::collections::BTreeSet;

/// Maximum nesting depth of an expression.
const MAX_DEPTH: u32 = 60;
const FUNCTIONS: [&str; 9] = ["sin", "cos", "tan", "ln", "log", "exp", "arcsin", "arccos", "arctan"];

/// A parsed arithmetic expression.
#[derive(Debug)]
pub(super) enum Expression {
    Number(f64),
    Variable(char),
    Negative(Box<Expression>),
    Binary(Operation, Box<Expression>, Box<Expression>),
    Function(&'static str, Box<Expression>),
    Factorial(Box<Expression>),
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Operation {
    Add,
    Subtract,
    Multiply,
    Divide,
    Power,
    /// A root, whose right operand is the degree: `Root(8, 3)` is 2.
    Root,
}

impl Expression {
    /// Parses an expression; `None` if the text is not arithmetic.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut parser = Parser { rest: text.trim(), depth: 0 };
        let parsed = parser.sum()?;
        parser.skip();
        parser.rest.is_empty().then_some(parsed)
    }

    /// Returns the value of the expression for given values of its variables; `None` if it is not finite.
    pub(super) fn value(&self, variable: &dyn Fn(char) -> Option<f64>) -> Option<f64> {
        let value = match self {
            Expression::Number(number) => *number,
            Expression::Variable(name) => variable(*name)?,
            Expression::Negative(inner) => -inner.value(variable)?,
            Expression::Binary(operation, left, right) => {
                let (left, right) = (left.value(variable)?, right.value(variable)?);
                match operation {
                    Operation::Add => left + right,
                    Operation::Subtract => left - right,
                    Operation::Multiply => left * right,
                    Operation::Divide => left / right,
                    Operation::Power => left.powf(right),
                    Operation::Root if right == 2.0 => left.sqrt(),
                    Operation::Root if right == 3.0 => left.cbrt(),
                    Operation::Root => left.powf(1.0 / right),
                }
            }
            Expression::Function(name, inner) => {
                let inner = inner.value(variable)?;
                match *name {
                    "sin" => inner.sin(),
                    "cos" => inner.cos(),
                    "tan" => inner.tan(),
                    "ln" => inner.ln(),
                    "log" => inner.log10(),
                    "exp" => inner.exp(),
                    "arcsin" => inner.asin(),
                    "arccos" => inner.acos(),
                    "arctan" => inner.atan(),
                    "abs" => inner.abs(),
                    _ => return None,
                }
            }
            Expression::Factorial(inner) => {
                let inner = inner.value(variable)?;
                if inner.fract() != 0.0 || !(0.0..=170.0).contains(&inner) {
                    return None;
                }
                (1..=inner as u32).map(f64::from).product()
            }
        };
        value.is_finite().then_some(value)
    }

    /// Returns the names of the variables in the expression.
    pub(super) fn variables(&self) -> BTreeSet<char> {
        match self {
            Expression::Number(_) => BTreeSet::new(),
            Expression::Variable(name) => BTreeSet::from([*name]),
            Expression::Negative(inner) | Expression::Function(_, inner) | Expression::Factorial(inner) => {
                inner.variables()
            }
            Expression::Binary(_, left, right) => &left.variables() | &right.variables(),
        }
    }
}

fn binary(operation: Operation, left: Expression, right: Expression) -> Expression {
    Expression::Binary(operation, Box::new(left), Box::new(right))
}

struct Parser<'a> {
    rest: &'a str,
    depth: u32,
}

impl Parser<'_> {
    fn skip(&mut self) {
        self.rest = self.rest.trim_start();
    }

    /// Skips one of the given words if the text that is not parsed yet starts with it.
    fn consume(&mut self, words: &[&str]) -> bool {
        self.skip();
        for word in words {
            let Some(rest) = self.rest.strip_prefix(word) else { continue };
            // A LaTeX command must match as a whole: `\pi` is not the beginning of `\pink`.
            let is_command = word.len() > 2 && word.starts_with('\\');
            if is_command && rest.starts_with(|c: char| c.is_ascii_alphabetic()) {
                continue;
            }
            self.rest = rest;
            return true;
        }
        false
    }

    fn next(&mut self) -> Option<char> {
        self.skip();
        self.rest.chars().next()
    }

    fn sum(&mut self) -> Option<Expression> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return None;
        }
        let mut left = self.product()?;
        loop {
            if self.consume(&["+"]) {
                left = binary(Operation::Add, left, self.product()?);
            } else if self.consume(&["-"]) {
                left = binary(Operation::Subtract, left, self.product()?);
            } else {
                self.depth -= 1;
                return Some(left);
            }
        }
    }

    fn product(&mut self) -> Option<Expression> {
        let mut left = self.signed()?;
        loop {
            if self.consume(&["*", "\\cdot", "\\times", "×", "·"]) {
                left = binary(Operation::Multiply, left, self.signed()?);
            } else if self.consume(&["/", "\\div", "÷"]) {
                left = binary(Operation::Divide, left, self.signed()?);
            } else if self.next().is_some_and(|c| c.is_ascii_alphabetic() || matches!(c, '(' | '\\' | '√' | 'π')) {
                // Parses multiplication without a sign: 2x, 2(x + 1), 2\sqrt{3}.
                left = binary(Operation::Multiply, left, self.power()?);
            } else {
                return Some(left);
            }
        }
    }

    fn signed(&mut self) -> Option<Expression> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return None;
        }
        let signed = if self.consume(&["-"]) {
            Some(Expression::Negative(Box::new(self.signed()?)))
        } else if self.consume(&["+"]) {
            self.signed()
        } else {
            self.power()
        };
        self.depth -= 1;
        signed
    }

    fn power(&mut self) -> Option<Expression> {
        let mut base = self.atom()?;
        loop {
            if self.rest.starts_with('!') {
                self.rest = &self.rest[1..];
                base = Expression::Factorial(Box::new(base));
            } else if self.consume(&["%"]) {
                base = binary(Operation::Divide, base, Expression::Number(100.0));
            } else if self.consume(&["^", "**"]) {
                let exponent = if self.next() == Some('{') { self.argument()? } else { self.signed()? };
                return Some(binary(Operation::Power, base, exponent));
            } else {
                return Some(base);
            }
        }
    }

    fn atom(&mut self) -> Option<Expression> {
        let first = self.next()?;
        if first.is_ascii_digit() || first == '.' {
            return self.number();
        }
        for (open, close) in [("(", ")"), ("{", "}"), ("[", "]")] {
            if self.consume(&[open]) {
                let inner = self.sum()?;
                return self.consume(&[close]).then_some(inner);
            }
        }
        if self.consume(&["|"]) {
            let inner = self.sum()?;
            return self.consume(&["|"]).then(|| Expression::Function("abs", Box::new(inner)));
        }
        if self.consume(&["\\pi", "π"]) {
            return Some(Expression::Number(std::f64::consts::PI));
        }
        if self.rest.starts_with("\\frac") {
            self.rest = &self.rest["\\frac".len()..];
            let (above, below) = (self.argument()?, self.argument()?);
            return Some(binary(Operation::Divide, above, below));
        }
        if self.rest.starts_with("\\sqrt") || self.consume(&["√"]) {
            self.rest = self.rest.strip_prefix("\\sqrt").unwrap_or(self.rest);
            let mut degree = Expression::Number(2.0);
            if self.consume(&["["]) {
                degree = self.sum()?;
                if !self.consume(&["]"]) {
                    return None;
                }
            }
            return Some(binary(Operation::Root, self.argument()?, degree));
        }
        if let Some(command) = self.rest.strip_prefix('\\') {
            let name = FUNCTIONS.into_iter().find(|name| {
                command.strip_prefix(name).is_some_and(|after| !after.starts_with(|c: char| c.is_ascii_alphabetic()))
            })?;
            self.rest = &command[name.len()..];
            let inner = self.power()?;
            return Some(Expression::Function(name, Box::new(inner)));
        }
        if first.is_ascii_alphabetic() {
            self.rest = &self.rest[1..];
            return Some(if first == 'e' {
                Expression::Number(std::f64::consts::E)
            } else {
                Expression::Variable(first)
            });
        }
        None
    }

    /// Parses `{…}`, or a single character, as an argument of a TeX command.
    fn argument(&mut self) -> Option<Expression> {
        if self.consume(&["{"]) {
            let inner = self.sum()?;
            return self.consume(&["}"]).then_some(inner);
        }
        let first = self.next()?;
        if let Some(digit) = first.to_digit(10) {
            self.rest = &self.rest[1..];
            return Some(Expression::Number(f64::from(digit)));
        }
        self.atom()
    }

    /// Parses a number with thousands separators and an exponent, or a mixed number such as "1 1/2".
    fn number(&mut self) -> Option<Expression> {
        let is_digit = |c: char| c.is_ascii_digit();
        let mut length = self.rest.find(|c| !is_digit(c)).unwrap_or(self.rest.len());
        while length > 0 && self.rest[length..].starts_with(',') {
            let group = &self.rest[length + 1..];
            let digits = group.find(|c| !is_digit(c)).unwrap_or(group.len());
            if digits != 3 {
                break;
            }
            length += 4;
        }
        let is_whole = !self.rest[length..].starts_with('.');
        if !is_whole {
            let decimals = &self.rest[length + 1..];
            length += 1 + decimals.find(|c| !is_digit(c)).unwrap_or(decimals.len());
        }
        let exponent = self.rest[length..].strip_prefix(['e', 'E']).map(|rest| {
            let digits = rest.strip_prefix(['+', '-']).unwrap_or(rest);
            let count = digits.find(|c| !is_digit(c)).unwrap_or(digits.len());
            if count == 0 { 0 } else { 1 + rest.len() - digits.len() + count }
        });
        length += exponent.unwrap_or(0);
        let value: f64 = self.rest[..length].replace(',', "").parse().ok()?;
        self.rest = &self.rest[length..];
        let number = Expression::Number(value);
        if !is_whole || exponent.is_some_and(|length| length > 0) {
            return Some(number);
        }
        if self.rest.trim_start().starts_with("\\frac") {
            return Some(binary(Operation::Add, number, self.atom()?));
        }
        // Parses the fraction of a mixed number such as "1 1/2".
        let after = self.rest.trim_start();
        let above = after.find(|c| !is_digit(c)).unwrap_or(0);
        if self.rest.starts_with(' ') && above > 0 && after[above..].starts_with('/') {
            let below = &after[above + 1..];
            let digits = below.find(|c| !is_digit(c)).unwrap_or(below.len());
            let (above, divisor): (f64, f64) = (after[..above].parse().ok()?, below[..digits].parse().ok()?);
            self.rest = &below[digits..];
            return Some(binary(Operation::Add, number, Expression::Number(above / divisor)));
        }
        Some(number)
    }
}
