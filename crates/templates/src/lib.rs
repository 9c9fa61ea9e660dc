//! What the templates of chats and of rewards share: JSON as their values, and a sandbox. A template has no files, and its
//! work (fuel), depth and everything that it makes (a budget of bytes) have an end.
//!
//! Why minijinja's unstable machinery, and not its `fuel` with a limit on the output alone: fuel counts instructions, and one instruction can
//! make a value of any size (`'a' * 9999999999`, `a ~ a` in a loop of thirty doublings, `replace`, `join`, `[0] * n`) that is never written,
//! so neither of the two sees it. The compiled instructions are rewritten here so that each asks the budget first.

mod budget;
mod filters;
mod methods;
mod operators;
mod program;

use std::sync::Arc;

use minijinja::machinery::{eval, make_string_output};
use minijinja::value::{Enumerator, Object, ObjectRepr};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};

pub use budget::draw;
pub use filters::{environment, raise};
pub use operators::install as guard;
use program::Program;

self_cell::self_cell! {
    /// The instructions are slices of the source.
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
    /// Of a text with statements. Its syntax is the environment's, and its name is for errors.
    pub fn new(environment: &Environment<'static>, name: &'static str, source: String) -> Result<Template, Error> {
        let compiled = Compiled::try_new(source, |source| Program::template(name, source, environment.syntax()))?;
        Ok(Template(compiled))
    }

    /// Of an expression alone.
    pub fn expression(source: String) -> Result<Template, Error> {
        Ok(Template(Compiled::try_new(source, |source| Program::expression(source))?))
    }

    /// The text for these variables, of `most` bytes at most, making no more than `budget` bytes on the way.
    pub fn render(
        &self,
        environment: &Environment<'static>,
        variables: Value,
        budget: u64,
        most: usize,
    ) -> Result<String, Error> {
        let mut text = String::new();
        budget::within(budget, || self.run(environment, variables, &mut text))?;
        if text.len() > most {
            return Err(Error::new(ErrorKind::InvalidOperation, "the rendered text is too long"));
        }
        Ok(text)
    }

    /// What `finish` makes of the value of an expression, as a part of the same budget.
    pub fn eval<T>(
        &self,
        environment: &Environment<'static>,
        variables: Value,
        budget: u64,
        finish: impl FnOnce(Value) -> Result<T, Error>,
    ) -> Result<T, Error> {
        budget::within(budget, || finish(self.run(environment, variables, &mut String::new())?.unwrap_or_default()))
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

/// A JSON text of a value.
pub fn to_json(value: &Value) -> Result<String, Error> {
    draw(budget::size(value)?.written(8))?;
    serde_json::to_string(value).map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))
}

/// A value as JSON.
pub fn to_json_value(value: &Value) -> Result<serde_json::Value, Error> {
    draw(budget::size(value)?.written(budget::ITEM_BYTES))?;
    serde_json::to_value(value).map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))
}

/// A JSON object that keeps its order.
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

/// JSON as templates see it; objects keep their order.
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
