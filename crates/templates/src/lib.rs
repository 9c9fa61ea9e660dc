//! The sandbox that chat templates and reward templates share, and the conversion from JSON to template values. A
//! template cannot open files; its instructions (fuel), its nesting depth and the bytes that it allocates are limited.
//!
//! This crate uses minijinja's unstable machinery, because its `fuel` with a limit on the output is not enough: fuel
//! counts instructions, and one instruction can create a value of any size (`'a' * 9999999999`, `a ~ a` in a loop of
//! thirty doublings, `replace`, `join`, `[0] * n`) that is never written, so neither limit detects it. This crate
//! rewrites the compiled instructions so that each one charges the budget first.

mod budget;
mod filters;
mod methods;
mod nulls;
mod operators;
mod program;

use std::sync::Arc;

use minijinja::machinery::{eval, make_string_output};
use minijinja::value::{Enumerator, Object, ObjectRepr};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};

pub use budget::charge;
pub use filters::{environment, raise, refuse_nulls};
pub use nulls::NULL_IN_TEXT;
pub use operators::install as limit_operators;
use program::Program;

self_cell::self_cell! {
    /// The compiled instructions, which borrow from the source text.
    struct Compiled {
        owner: String,
        #[covariant]
        dependent: Program,
    }

    impl {Debug}
}

/// A compiled template or expression.
#[derive(Debug)]
pub struct Template(Compiled);

impl Template {
    /// Compiles a template. The environment defines its syntax; `name` appears in errors.
    pub fn new(environment: &Environment<'static>, name: &'static str, source: String) -> Result<Template, Error> {
        let compiled = Compiled::try_new(source, |source| Program::template(name, source, environment.syntax()))?;
        Ok(Template(compiled))
    }

    /// Compiles a single expression, such as a filter condition.
    pub fn expression(source: String) -> Result<Template, Error> {
        Ok(Template(Compiled::try_new(source, |source| Program::expression(source))?))
    }

    /// Renders the template with these variables: at most `most` bytes of text, while allocating no more than `budget` bytes.
    pub fn render(
        &self,
        environment: &Environment<'static>,
        variables: Value,
        budget: u64,
        most: usize,
    ) -> Result<String, Error> {
        let mut text = String::new();
        budget::with_budget(budget, || self.run(environment, variables, &mut text))?;
        if text.len() > most {
            return Err(Error::new(ErrorKind::InvalidOperation, "the rendered text is too long"));
        }
        Ok(text)
    }

    /// Evaluates the expression and passes its value to `finish`, which runs under the same memory budget.
    pub fn eval<T>(
        &self,
        environment: &Environment<'static>,
        variables: Value,
        budget: u64,
        finish: impl FnOnce(Value) -> Result<T, Error>,
    ) -> Result<T, Error> {
        budget::with_budget(budget, || {
            finish(self.run(environment, variables, &mut String::new())?.unwrap_or_default())
        })
    }

    fn run(
        &self,
        environment: &Environment<'static>,
        variables: Value,
        text: &mut String,
    ) -> Result<Option<Value>, Error> {
        let Program { instructions, blocks } = self.0.borrow_dependent();
        let mut output = make_string_output(text);
        eval(environment, instructions, variables, blocks, &mut output, AutoEscape::None).map(|(value, _)| value)
    }
}

/// Serializes a template value as JSON text.
pub fn to_json(value: &Value) -> Result<String, Error> {
    charge(budget::measure(value)?.written(8))?;
    serde_json::to_string(value).map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))
}

/// Converts a template value to JSON.
pub fn to_json_value(value: &Value) -> Result<serde_json::Value, Error> {
    charge(budget::measure(value)?.written(budget::ITEM_BYTES))?;
    serde_json::to_value(value).map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))
}

/// A JSON object as a template value that keeps the order of its keys.
#[derive(Debug)]
pub struct Ordered(pub Vec<(String, Value)>);

impl Object for Ordered {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Map
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let key = key.as_str()?;
        self.0.iter().find(|(name, _)| name == key).map(|(_, value)| value.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.0.iter().map(|(name, _)| Value::from(name.as_str())).collect())
    }
}

/// Converts JSON to a template value; objects keep the order of their keys.
pub fn to_value(json: &serde_json::Value) -> Value {
    match json {
        serde_json::Value::Null => Value::from(()),
        serde_json::Value::Bool(b) => Value::from(*b),
        serde_json::Value::Number(n) => match (n.as_i64(), n.as_u64(), n.as_f64()) {
            (Some(i), _, _) => Value::from(i),
            (_, Some(u), _) => Value::from(u),
            (_, _, f) => Value::from(f.unwrap_or(f64::NAN)),
        },
        serde_json::Value::String(s) => Value::from(s.as_str()),
        serde_json::Value::Array(list) => list.iter().map(to_value).collect(),
        serde_json::Value::Object(map) => {
            Value::from_object(Ordered(map.iter().map(|(k, v)| (k.clone(), to_value(v))).collect()))
        }
    }
}
