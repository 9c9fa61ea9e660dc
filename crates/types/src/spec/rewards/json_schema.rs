//! JSON Schema: draft 2020-12 unless the schema's `$schema` says otherwise. Referenced schemas are neither fetched nor read from files.
//!
//! The validator (boon) has neither a step limit nor a stack limit, and 1 kB of schema can cause years of work: for example,
//! definitions that each reference the previous one twice, or a recursive schema that does so on each level of a value. The work is
//! therefore limited before it begins. A schema whose references branch too often is rejected when it is compiled ([`graph`]).
//! Before a value is validated, its steps are counted, with each pair of subschema and part of the value visited once ([`cost`]).

mod cost;
mod graph;

use boon::{Compiler, SchemaIndex, Schemas, UrlLoader};
use serde_json::{Value, json};

pub use cost::TooCostly;
use graph::Graph;

/// Address of the schema inside the compiler, to which the schema's references are relative.
const SCHEMA_ADDRESS: &str = "schema:///reward";
/// Address of `{"not": {"not": the schema}}`, which accepts the same values. Below `not` the validator stops at the first error and
/// does not describe it.
const BRIEF_ADDRESS: &str = "schema:///brief";
/// Stack size of a thread that compiles or validates, in bytes. The depth is limited by [`cost::MAX_DEPTH`].
const STACK_BYTES: usize = 64 << 20;
/// Nesting depth above which a value is validated on a thread with [`STACK_BYTES`] of stack.
const MAX_INLINE_DEPTH: usize = 64;

/// A compiled JSON Schema.
pub struct JsonSchema {
    schemas: Schemas,
    index: SchemaIndex,
    graph: Graph,
}

impl JsonSchema {
    /// Compiles a JSON Schema and checks its cost.
    ///
    /// # Errors
    /// Returns what is wrong with the schema and how to fix it, for the user who wrote it.
    pub fn new(schema: &Value) -> Result<Self, String> {
        // Checked before the validator sees the schema, because compiling takes time quadratic in the number of subschemas.
        let graph = Graph::new(schema)?;
        let (schemas, index) = on_large_stack(|| compile(schema))??;
        Ok(Self { schemas, index, graph })
    }

    /// Whether the schema accepts a value.
    ///
    /// # Errors
    /// Fails if the validation would take more than `cost::MAX_STEPS` steps.
    pub fn accepts(&self, value: &Value) -> Result<bool, TooCostly> {
        let depth = cost::count(&self.graph, value)?;
        let valid = || self.schemas.validate(value, self.index).is_ok();
        if depth <= MAX_INLINE_DEPTH {
            return Ok(valid());
        }
        on_large_stack(valid).map_err(|_| TooCostly::Thread)
    }
}

impl std::fmt::Debug for JsonSchema {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JsonSchema")
    }
}

fn compile(schema: &Value) -> Result<(Schemas, SchemaIndex), String> {
    let mut compiler = Compiler::new();
    compiler.use_loader(Box::new(NoLoader));
    let mut schemas = Schemas::new();
    let told = |error: boon::CompileError| {
        let text = format!("{error:#}");
        let first: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).take(3).collect();
        format!("the value is not a JSON Schema that can be used: {}", first.join(" ").replace(SCHEMA_ADDRESS, ""))
    };
    compiler.add_resource(SCHEMA_ADDRESS, schema.clone()).map_err(told)?;
    compiler.compile(SCHEMA_ADDRESS, &mut schemas).map_err(told)?;
    compiler.add_resource(BRIEF_ADDRESS, json!({"not": {"not": {"$ref": SCHEMA_ADDRESS}}})).map_err(told)?;
    let index = compiler.compile(BRIEF_ADDRESS, &mut schemas).map_err(told)?;
    Ok((schemas, index))
}

/// Runs `work` on a separate thread with [`STACK_BYTES`] of stack.
fn on_large_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, String> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("json-schema".to_owned()).stack_size(STACK_BYTES);
        let running = thread
            .spawn_scoped(scope, work)
            .map_err(|error| format!("no thread can be started to check the JSON Schema: {error}"))?;
        Ok(running.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

/// A loader that loads nothing: a client's schema must not make the server read files or contact addresses.
struct NoLoader;

impl UrlLoader for NoLoader {
    fn load(&self, _: &str) -> Result<Value, Box<dyn std::error::Error>> {
        Err("a schema's references to other documents are not followed".into())
    }
}

#[cfg(test)]
mod tests;
