//! The tools of a conversation: function schemas in the form of OpenAI's API.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::schema;
use crate::turn::shortened;

/// Maximum number of tools of a conversation.
pub const MAX_TOOLS: usize = 64;
/// Maximum length of a tool's name in bytes, as in OpenAI's API.
const MAX_NAME_BYTES: usize = 64;

/// The reason why a list of tools cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{detail}")]
pub struct ToolError {
    /// JSON pointer into the list, such as `/0/function/name`; empty if the list as a whole is wrong.
    pub pointer: String,
    /// The error, and how to fix it.
    pub detail: String,
}

impl ToolError {
    fn new(pointer: impl Into<String>, detail: impl Into<String>) -> ToolError {
        ToolError { pointer: pointer.into(), detail: detail.into() }
    }
}

/// A tool that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Name of the function.
    pub name: String,
    /// JSON Schema of the arguments; null if the function declares none, and then any object is accepted.
    pub parameters: Value,
}

/// The tools of a conversation, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tools {
    tools: Vec<Tool>,
    by_name: BTreeMap<String, usize>,
    schemas: Vec<Value>,
}

impl Tools {
    /// Reads a list of function schemas, `{"type": "function", "function": {"name", "description"?, "parameters"?}}`.
    ///
    /// # Errors
    /// Fails at the first entry that is not such a schema, at a name that occurs twice, and if there are more than [`MAX_TOOLS`].
    pub fn new(schemas: &[Value]) -> Result<Tools, ToolError> {
        if schemas.len() > MAX_TOOLS {
            let detail = format!("there are {} tools: must be at most {MAX_TOOLS}", schemas.len());
            return Err(ToolError::new("", detail));
        }
        let mut read = Tools::default();
        for (index, schema) in schemas.iter().enumerate() {
            let tool = read_tool(index, schema)?;
            if read.by_name.insert(tool.name.clone(), index).is_some() {
                let detail = format!("the name '{}' occurs twice: give each tool a name of its own", tool.name);
                return Err(ToolError::new(format!("/{index}/function/name"), detail));
            }
            read.tools.push(tool);
            read.schemas.push(schema.clone());
        }
        Ok(read)
    }

    /// The tool of this name.
    pub fn get(&self, name: &str) -> Option<&Tool> {
        self.tools.get(*self.by_name.get(name)?)
    }

    /// Returns whether there are no tools.
    pub fn is_empty(&self) -> bool {
        self.tools.is_empty()
    }

    /// The names of the tools, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tools.iter().map(|tool| tool.name.as_str())
    }

    /// The schemas as they were given, for the chat template.
    pub fn schemas(&self) -> &[Value] {
        &self.schemas
    }
}

impl Tool {
    /// Checks the arguments of a call against the schema.
    ///
    /// # Errors
    /// Fails at the first argument that is missing, unknown or of the wrong type, with a message for the model.
    pub fn check(&self, arguments: &Map<String, Value>) -> Result<(), String> {
        schema::check(&self.parameters, &Value::Object(arguments.clone()))
    }

    /// The schema of an argument; null if the tool does not declare it.
    pub fn parameter(&self, name: &str) -> &Value {
        self.parameters.get("properties").and_then(|properties| properties.get(name)).unwrap_or(&Value::Null)
    }
}

fn read_tool(index: usize, schema: &Value) -> Result<Tool, ToolError> {
    let wrong = |place: &str, detail: String| Err(ToolError::new(format!("/{index}{place}"), detail));
    if !schema.is_object() {
        return wrong("", "a tool must be an object {\"type\": \"function\", \"function\": {…}}".to_owned());
    }
    if schema.get("type").is_some_and(|kind| *kind != json!("function")) {
        return wrong("/type", "only tools of type 'function' are supported".to_owned());
    }
    let Some(function) = schema.get("function").and_then(Value::as_object) else {
        return wrong(
            "/function",
            "the field 'function' is required: an object with 'name' and 'parameters'".to_owned(),
        );
    };
    let name = function.get("name").and_then(Value::as_str).unwrap_or_default();
    let is_letter = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.chars().all(is_letter) {
        let shown = shortened(name);
        let detail =
            format!("the name '{shown}' must have 1 to {MAX_NAME_BYTES} letters, digits, underscores, hyphens or dots");
        return wrong("/function/name", detail);
    }
    if function.get("description").is_some_and(|text| !text.is_string() && !text.is_null()) {
        return wrong("/function/description", "the description must be a text".to_owned());
    }
    let parameters = function.get("parameters").cloned().unwrap_or(Value::Null);
    if !parameters.is_object() && !parameters.is_null() {
        return wrong("/function/parameters", "the parameters must be a JSON Schema, an object".to_owned());
    }
    if let Err(detail) = schema::check_depth(&parameters) {
        return wrong("/function/parameters", detail);
    }
    Ok(Tool { name: name.to_owned(), parameters })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
    }

    #[test]
    fn tools_are_checked() {
        let good = Tools::new(&[tool("add"), tool("a.b-c_1")]).unwrap();
        assert_eq!(good.names().collect::<Vec<_>>(), ["add", "a.b-c_1"]);
        assert_eq!(good.get("add").unwrap().name, "add");
        assert!(good.get("sub").is_none());
        let cases = [
            (vec![json!(3)], "/0", "must be an object"),
            (vec![tool("add"), tool("add")], "/1/function/name", "occurs twice"),
            (vec![tool("")], "/0/function/name", "1 to 64 letters"),
            (vec![tool("a<b")], "/0/function/name", "1 to 64 letters"),
            (vec![json!({"type": "retrieval"})], "/0/type", "only tools of type"),
            (vec![json!({"type": "function"})], "/0/function", "is required"),
            (vec![json!({"function": {"name": "f", "parameters": []}})], "/0/function/parameters", "an object"),
            (vec![json!({"function": {"name": "f", "description": 1}})], "/0/function/description", "a text"),
            ((0..65).map(|i| tool(&format!("t{i}"))).collect(), "", "at most 64"),
        ];
        for (schemas, pointer, detail) in cases {
            let error = Tools::new(&schemas).unwrap_err();
            assert_eq!(error.pointer, pointer);
            assert!(error.detail.contains(detail), "{error}");
        }
    }
}
