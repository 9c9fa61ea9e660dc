//! JSON Schema: draft 2020-12 unless the schema's `$schema` says otherwise. Nothing is fetched or read for it.

use boon::{Compiler, SchemaIndex, Schemas, UrlLoader};
use serde_json::Value;

/// Where the schema is said to lie; references are relative to it.
const HOME: &str = "schema:///reward";

/// A compiled schema.
pub struct JsonSchema {
    schemas: Schemas,
    index: SchemaIndex,
}

impl JsonSchema {
    /// Compiles; the error is for the one who wrote it.
    pub fn new(schema: &Value) -> Result<Self, String> {
        let mut compiler = Compiler::new();
        compiler.use_loader(Box::new(Nothing));
        let mut schemas = Schemas::new();
        let told = |error: boon::CompileError| {
            let text = format!("{error:#}");
            let first: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).take(3).collect();
            format!("not a JSON Schema that can be used: {}", first.join(" ").replace(HOME, ""))
        };
        compiler.add_resource(HOME, schema.clone()).map_err(told)?;
        let index = compiler.compile(HOME, &mut schemas).map_err(told)?;
        Ok(Self { schemas, index })
    }

    /// Whether it accepts a value.
    pub fn accepts(&self, value: &Value) -> bool {
        self.schemas.validate(value, self.index).is_ok()
    }
}

impl std::fmt::Debug for JsonSchema {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JsonSchema")
    }
}

/// Loads nothing: a schema of a client's may not make the server read files or reach addresses.
struct Nothing;

impl UrlLoader for Nothing {
    fn load(&self, _: &str) -> Result<Value, Box<dyn std::error::Error>> {
        Err("references to other documents are not followed".into())
    }
}
