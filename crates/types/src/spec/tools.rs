//! Reads the tools of a job that has no environment: MCP servers, and tools behind one address each. Header values are returned
//! separately.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::foreign::advice;
use super::reader::{Field, Reader, shown};
use super::rewards::{check_metric_name, read_headers, read_url};
use super::{HttpToolPlan, McpToolsPlan, RewardSecrets, ToolPlan};

/// Maximum number of tools that a model may read, as in an answer of an environment.
const MAX_TOOLS: usize = 64;
/// Maximum length of a tool's name in characters, as in OpenAI's API.
const MAX_NAME_CHARS: usize = 64;
/// Maximum length of a tool's description in characters.
const MAX_DESCRIPTION_CHARS: usize = 16_384;
/// Maximum nesting depth of the schema of a tool's arguments.
const MAX_DEPTH: usize = 32;

/// The kinds of tools.
type ReadTool = fn(&Reader<'_>) -> ToolPlan;
const KINDS: [(&str, ReadTool); 2] =
    [("mcp", |reader| ToolPlan::Mcp(read_mcp(reader))), ("http", |reader| ToolPlan::Http(read_http(reader)))];

/// Reads the section `tools`, and the headers by the names under which they are stored.
pub(super) fn read_tools(field: &Field<'_>) -> (Vec<ToolPlan>, BTreeMap<String, RewardSecrets>) {
    let (mut tools, mut secrets) = (Vec::new(), BTreeMap::new());
    let Some(items) = field.items() else { return (tools, secrets) };
    if items.is_empty() {
        field.fail("required", "give at least one tool, or leave the section out");
    }
    let (mut entries, mut callable) = (BTreeSet::new(), BTreeSet::new());
    for item in items.iter().take(MAX_TOOLS) {
        let Some(reader) = item.object() else { continue };
        let Some(read) = reader.required("type", "give mcp or http").choice(&KINDS) else { continue };
        let tool = read(&reader);
        let headers = read_headers(&reader.field("headers")).unwrap_or_default();
        reader.finish(advice);
        if !entries.insert(tool.name().to_owned()) {
            let detail = format!("two entries are named '{}': give each a different name", shown(tool.name()));
            item.fail_at("name", "duplicate", detail);
        }
        for (index, name) in callable_names(&tool).enumerate() {
            if !name.is_empty() && !callable.insert(name.to_owned()) {
                let at = if matches!(tool, ToolPlan::Mcp(_)) { format!("allow/{index}") } else { "name".to_owned() };
                let detail = format!("two tools are named '{}', and the model calls tools by name", shown(name));
                fail_inside(item, &at, "duplicate", &detail);
            }
        }
        if !headers.is_empty() {
            secrets.insert(tool.secret_name(), RewardSecrets { headers, ..RewardSecrets::default() });
        }
        tools.push(tool);
    }
    if callable.len() > MAX_TOOLS || items.len() > MAX_TOOLS {
        field.fail("out_of_range", format!("a job may have at most {MAX_TOOLS} tools"));
    }
    (tools, secrets)
}

/// Reports an error at a path inside an entry.
fn fail_inside(item: &Field<'_>, at: &str, code: &str, detail: &str) {
    match (at.split_once('/'), item.object()) {
        (Some((list, index)), Some(reader)) => reader.entry(list).fail_at(index, code, detail),
        (None, _) | (_, None) => item.fail_at(at, code, detail),
    }
}

/// Returns the tools in the form in which a job gives them, without headers.
pub(super) fn submittable_tools(tools: &[ToolPlan]) -> Value {
    json!(tools)
}

/// Iterates over the names by which the model calls the tools of an entry.
fn callable_names(tool: &ToolPlan) -> impl Iterator<Item = &str> {
    let (of_server, own) = match tool {
        ToolPlan::Mcp(server) => (server.allow.as_slice(), None),
        ToolPlan::Http(tool) => (&[][..], Some(tool.name.as_str())),
    };
    of_server.iter().map(String::as_str).chain(own)
}

fn read_mcp(reader: &Reader<'_>) -> McpToolsPlan {
    let name = reader.field("name");
    let given = name.nonempty(MAX_NAME_CHARS);
    if let Some(given) = given {
        check_metric_name(&name, given);
    }
    let url = read_url(&reader.required("url", "give the address of the MCP server's streamable HTTP endpoint"));
    let allowed = reader.required("allow", "name the tools that the model may call: the server's list may grow");
    let items = allowed.items().unwrap_or_default();
    if allowed.value().is_some_and(|list| list.as_array().is_some_and(Vec::is_empty)) {
        allowed.fail("required", "name at least one tool that the model may call");
    }
    let allow = items.iter().filter_map(|item| read_name(item).map(str::to_owned)).collect();
    McpToolsPlan { name: given.unwrap_or("mcp").to_owned(), url, allow }
}

fn read_http(reader: &Reader<'_>) -> HttpToolPlan {
    let name = reader.required("name", "name the tool, as the model calls it");
    let server_url = read_url(&reader.required("server_url", "give the address that receives the calls"));
    let parameters = reader.field("parameters");
    HttpToolPlan {
        name: read_name(&name).unwrap_or_default().to_owned(),
        server_url,
        description: reader.field("description").string(MAX_DESCRIPTION_CHARS).unwrap_or_default().to_owned(),
        parameters: read_parameters(&parameters).unwrap_or_else(|| {
            Map::from_iter([("type".to_owned(), json!("object")), ("properties".to_owned(), json!({}))])
        }),
    }
}

fn read_name<'v>(field: &Field<'v>) -> Option<&'v str> {
    let name = field.nonempty(MAX_NAME_CHARS)?;
    let is_letter = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if !name.chars().all(is_letter) {
        field.fail("invalid_value", "a tool's name has letters, digits, '_', '-' and '.' only");
        return None;
    }
    Some(name)
}

fn read_parameters(field: &Field<'_>) -> Option<Map<String, Value>> {
    let schema = field.map()?;
    if schema.get("type").is_some_and(|kind| kind != "object") {
        field.fail_at("type", "invalid_value", "must be \"object\": the arguments of a tool are an object");
    }
    if !has_depth(&field.value()?.clone(), MAX_DEPTH) {
        field.fail("out_of_range", format!("the schema must not be nested deeper than {MAX_DEPTH} levels"));
    }
    Some(schema.clone())
}

/// Whether a value is nested at most so many levels.
fn has_depth(value: &Value, left: usize) -> bool {
    match value {
        Value::Array(items) => left > 0 && items.iter().all(|item| has_depth(item, left - 1)),
        Value::Object(fields) => left > 0 && fields.values().all(|field| has_depth(field, left - 1)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{EnvironmentKind, JobSpec, resolve, submittable};

    fn document(changes: Value) -> Value {
        let mut document = json!({
            "model": "m", "dataset": {"records": [{"prompt": "a"}, {"prompt": "b"}]}, "rewards": [{"type": "length"}],
            "training": {"prompts_per_step": 1, "max_steps": 4},
            "tools": [
                {"type": "mcp", "url": "http://10.0.0.7/mcp", "allow": ["search", "fetch"], "headers": {"authorization": "Bearer s3cret"}},
                {"type": "http", "name": "add", "server_url": "http://10.0.0.8/add", "description": "Adds.",
                 "parameters": {"type": "object", "properties": {"a": {"type": "number", "default": null}}}},
            ],
        });
        for (key, value) in changes.as_object().unwrap() {
            document[key] = value.clone();
        }
        document
    }

    fn errors(changes: Value) -> Vec<(String, String)> {
        let (_, errors) = JobSpec::read(document(changes));
        errors.into_iter().map(|error| (error.pointer, error.code)).collect()
    }

    #[test]
    fn a_job_with_tools_has_an_environment_without_a_server_and_without_a_reward() {
        let (spec, errors) = JobSpec::read(document(json!({"environment": {"max_turns": 3}})));
        assert!(errors.is_empty(), "{errors:?}");
        assert_eq!(spec.secrets["tool:mcp"].headers["authorization"], "Bearer s3cret");
        assert!(!spec.redacted.to_string().contains("s3cret"), "{}", spec.redacted);
        let context = crate::spec::Context {
            model: Some(crate::spec::example::model(true)),
            dataset: Some(crate::spec::DatasetFacts::of_records(&[json!({"prompt": "a"}), json!({"prompt": "b"})])),
            ..Default::default()
        };
        let plan = resolve(&spec, &context).unwrap().plan;
        let environment = plan.environment.as_ref().unwrap();
        assert_eq!((environment.kind, environment.max_turns), (EnvironmentKind::Tools, 3));
        assert_eq!((environment.service.max_tries, environment.service.timeout_ms), (3, 600_000));
        assert_eq!(plan.tools().map(ToolPlan::name).collect::<Vec<_>>(), ["mcp", "add"]);
        assert_eq!(plan.rewards.len(), 1, "tools pay no reward");
        let document = submittable(&plan);
        let (again, errors) = JobSpec::read(document.clone());
        assert!(errors.is_empty(), "{errors:?} {document}");
        assert_eq!(again.environment, plan.environment);
        let old: crate::spec::EnvironmentPlan = serde_json::from_value(json!(environment)).unwrap();
        assert_eq!(&old, environment);
    }

    #[test]
    fn what_cannot_be_meant_is_refused_where_it_stands() {
        let mcp = json!({"type": "mcp", "url": "http://10.0.0.7/mcp", "allow": ["search"]});
        let http = json!({"type": "http", "name": "search", "server_url": "http://10.0.0.8/add"});
        let with = |tool: &Value, key: &str, value: Value| {
            let mut tool = tool.clone();
            tool[key] = value;
            json!({"tools": [tool]})
        };
        for (changes, pointer, code) in [
            (json!({"environment": {"url": "http://10.0.0.9/"}}), "/environment/url", "conflict"),
            (json!({"environment": {"type": "openenv"}}), "/environment/type", "conflict"),
            (json!({"environment": {"headers": {"a": "b"}}}), "/environment/headers", "conflict"),
            (json!({"tools": []}), "/tools", "required"),
            (json!({"tools": [{"type": "grpc"}]}), "/tools/0/type", "invalid_value"),
            (json!({"tools": [{"type": "mcp", "url": "http://10.0.0.7/mcp"}]}), "/tools/0/allow", "required"),
            (with(&mcp, "allow", json!([])), "/tools/0/allow", "required"),
            (with(&mcp, "allow", json!(["a b"])), "/tools/0/allow/0", "invalid_value"),
            (with(&mcp, "url", json!("nowhere")), "/tools/0/url", "invalid_value"),
            (with(&mcp, "server_url", json!("http://a/")), "/tools/0/server_url", "unknown_field"),
            (with(&http, "parameters", json!({"type": "array"})), "/tools/0/parameters/type", "invalid_value"),
            (with(&http, "headers", json!({"host": "a"})), "/tools/0/headers/host", "invalid_value"),
            (json!({"tools": [mcp, http]}), "/tools/1/name", "duplicate"),
            (json!({"tools": [mcp, mcp]}), "/tools/1/name", "duplicate"),
            (json!({"tools": [http, mcp]}), "/tools/1/allow/0", "duplicate"),
        ] {
            let errors = errors(changes.clone());
            assert!(errors.contains(&(pointer.to_owned(), code.to_owned())), "{changes}: {errors:?}");
        }
        let mut deep = json!({});
        for _ in 0..40 {
            deep = json!({"properties": deep});
        }
        assert_eq!(
            errors(with(&http, "parameters", deep)),
            [("/tools/0/parameters".to_owned(), "out_of_range".to_owned())]
        );
        let without = json!({"rewards": null});
        assert_eq!(errors(without), [("/rewards".to_owned(), "required".to_owned())]);
    }
}
