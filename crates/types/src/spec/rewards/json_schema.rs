//! JSON Schema: draft 2020-12 unless the schema's `$schema` says otherwise. Nothing is fetched or read for it.
//!
//! The validator (boon) has neither fuel nor a limit on its stack, and 1 kB of schema can ask for years of work: definitions
//! that reference the one before twice, or a recursive schema that does so on each level of a value. So the work is bounded
//! before it begins: a schema whose references branch too often is refused when it is compiled ([`graph`]), and the steps that
//! one value takes are counted, each pair of subschema and part of the value once, before it is validated ([`cost`]).

mod cost;
mod graph;

use boon::{Compiler, SchemaIndex, Schemas, UrlLoader};
use serde_json::{Value, json};

pub use cost::TooCostly;
use graph::Graph;

/// The schema's address inside the compiler; references are relative to it.
const HOME: &str = "schema:///reward";
/// The address of `{"not": {"not": the schema}}`: below `not` the validator stops at the first error and describes none.
const BRIEF: &str = "schema:///brief";
/// The stack of a thread that compiles or validates. Depth is bounded by [`cost::MAX_DEPTH`].
const STACK_BYTES: usize = 64 << 20;
/// Values that nest the validator deeper than this are validated on a thread with [`STACK_BYTES`].
const SHALLOW: usize = 64;

/// A compiled schema.
pub struct JsonSchema {
    schemas: Schemas,
    index: SchemaIndex,
    graph: Graph,
}

impl JsonSchema {
    /// Compiles the schema.
    ///
    /// # Errors
    /// What is wrong with it and what to do, for the user who wrote it.
    pub fn new(schema: &Value) -> Result<Self, String> {
        // Before the validator sees it: compiling takes time quadratic in the number of subschemas.
        let graph = Graph::new(schema)?;
        let (schemas, index) = on_large_stack(|| compile(schema))??;
        Ok(Self { schemas, index, graph })
    }

    /// Whether the schema accepts a value.
    ///
    /// # Errors
    /// When that would take more steps than a value may take.
    pub fn accepts(&self, value: &Value) -> Result<bool, TooCostly> {
        let depth = cost::count(&self.graph, value)?;
        let valid = || self.schemas.validate(value, self.index).is_ok();
        if depth <= SHALLOW {
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
    compiler.use_loader(Box::new(Nothing));
    let mut schemas = Schemas::new();
    let told = |error: boon::CompileError| {
        let text = format!("{error:#}");
        let first: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).take(3).collect();
        format!("not a JSON Schema that can be used: {}", first.join(" ").replace(HOME, ""))
    };
    compiler.add_resource(HOME, schema.clone()).map_err(told)?;
    compiler.compile(HOME, &mut schemas).map_err(told)?;
    compiler.add_resource(BRIEF, json!({"not": {"not": {"$ref": HOME}}})).map_err(told)?;
    let index = compiler.compile(BRIEF, &mut schemas).map_err(told)?;
    Ok((schemas, index))
}

/// Runs `work` on a thread of its own with [`STACK_BYTES`] of stack.
fn on_large_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, String> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("json-schema".to_owned()).stack_size(STACK_BYTES);
        let running = thread.spawn_scoped(scope, work).map_err(|error| format!("no thread can be started: {error}"))?;
        Ok(running.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

/// Loads nothing: a schema of a client's may not make the server read files or reach addresses.
struct Nothing;

impl UrlLoader for Nothing {
    fn load(&self, _: &str) -> Result<Value, Box<dyn std::error::Error>> {
        Err("references to other documents are not followed".into())
    }
}

#[cfg(test)]
mod tests;
