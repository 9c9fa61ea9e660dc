//! The generated blocks of the reference pages: the HTTP API, error codes, reward types, metrics of a server, and the numbered details of
//! the training loop. `RLOOD_BLESS=1 cargo test --release --test it -- docs::` writes them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use rlood::http::error::Code;
use rlood::scopes::{self, Access};
use serde_json::{Map, Value};

use super::{read, root};
use crate::server::Server;

/// Compares the block of a page between its two markers with what is expected, or writes it where `RLOOD_BLESS` is set.
fn check(page: &str, source: &str, expected: &str) {
    let path = root().join("docs").join(page);
    let (begin, end) =
        (format!("<!-- generated from {source}: begin -->\n"), format!("<!-- generated from {source}: end -->\n"));
    let text = read(&path);
    let (before, rest) = text.split_once(&begin).unwrap_or_else(|| panic!("docs/{page} has no line {begin}"));
    let (written, after) = rest.split_once(&end).unwrap_or_else(|| panic!("docs/{page} has no line {end}"));
    let expected = format!("\n{}\n\n", expected.trim());
    if std::env::var_os("RLOOD_BLESS").is_some() {
        std::fs::write(&path, [before, &begin, &expected, &end, after].concat()).unwrap();
    } else {
        assert!(
            written == expected,
            "docs/{page} is old: RLOOD_BLESS=1 cargo test --release --test it -- docs:: writes it"
        );
    }
}

fn document() -> Value {
    serde_json::to_value(rlood::http::openapi()).unwrap()
}

/// A text as a cell of a table: on one line, without markup of its own.
fn cell(text: &str) -> String {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut escaped = String::new();
    let mut is_code = false;
    for c in text.chars() {
        is_code ^= c == '`';
        match c {
            '|' => escaped.push_str("\\|"),
            '<' if !is_code => escaped.push_str("&lt;"),
            '*' | '_' if !is_code => escaped.extend(['\\', c]),
            c => escaped.push(c),
        }
    }
    escaped
}

fn table(page: &mut String, head: &[&str], rows: &[Vec<String>]) {
    if rows.is_empty() {
        return;
    }
    writeln!(page, "| {} |\n|{}", head.join(" | "), "---|".repeat(head.len())).unwrap();
    for row in rows {
        writeln!(page, "| {} |", row.join(" | ")).unwrap();
    }
    page.push('\n');
}

fn code(text: &str) -> String {
    format!("`{}`", text.replace('|', "\\|"))
}

/// The name of a referenced component.
fn reference(schema: &Value) -> Option<&str> {
    schema["$ref"].as_str()?.rsplit('/').next()
}

/// The values that a schema permits, in a few words.
fn values(document: &Value, schema: &Value) -> String {
    if let Some(name) = reference(schema) {
        let target = &document["components"]["schemas"][name];
        let is_short = target.get("enum").is_some()
            || target.get("oneOf").is_some_and(is_list_of_words)
            || target["type"] == "string";
        return if is_short { values(document, target) } else { name.to_owned() };
    }
    if let Some(words) = schema["enum"].as_array() {
        return words.iter().filter_map(Value::as_str).map(code).collect::<Vec<_>>().join(", ");
    }
    if let Some(options) = schema["oneOf"].as_array().or(schema["anyOf"].as_array()) {
        let shown = options.iter().filter(|option| option["type"] != "null").map(|option| values(document, option));
        return shown.collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>().join(", ");
    }
    let kind = match &schema["type"] {
        Value::String(kind) => kind.clone(),
        Value::Array(kinds) => {
            kinds.iter().filter_map(Value::as_str).filter(|kind| *kind != "null").collect::<Vec<_>>().join(" or ")
        }
        _ => "any JSON".to_owned(),
    };
    if kind == "array" {
        return format!("list of {}", values(document, &schema["items"]));
    }
    match (schema.get("minimum"), schema.get("maximum")) {
        (Some(least), Some(most)) => format!("{kind}, {least} to {most}"),
        (Some(least), None) if *least != 0 => format!("{kind}, at least {least}"),
        _ => kind,
    }
}

fn is_list_of_words(options: &Value) -> bool {
    options.as_array().is_some_and(|options| options.iter().all(|option| option.get("enum").is_some()))
}

/// The HTTP API.
mod api {
    use super::*;

    const METHODS: [&str; 6] = ["get", "head", "post", "put", "patch", "delete"];

    fn content(content: &Value) -> String {
        let kinds = content.as_object().into_iter().flatten().map(|(kind, media)| {
            let schema = &media["schema"];
            match reference(schema).or_else(|| reference(&schema["items"])) {
                Some(name) => format!("{} ({name})", code(kind)),
                None => code(kind),
            }
        });
        kinds.collect::<Vec<_>>().join(", ")
    }

    fn describe(page: &mut String, document: &Value, method: &str, path: &str, operation: &Value) {
        let method = method.to_uppercase();
        let scope = match scopes::of_route(&method, path) {
            Some(Access::Open) => "none; public".to_owned(),
            Some(Access::Needs(scope)) => code(scope.as_str()),
            None => code("admin"),
        };
        writeln!(page, "### {method} {path}\n").unwrap();
        for part in ["summary", "description"] {
            if let Some(text) = operation[part].as_str() {
                writeln!(page, "{}\n", text.replace('<', "&lt;")).unwrap();
            }
        }
        writeln!(page, "Scope: {scope}.").unwrap();
        if let Some(body) = operation.get("requestBody") {
            writeln!(page, "Body: {}.", content(&body["content"])).unwrap();
        }
        page.push('\n');
        let rows = operation["parameters"].as_array().into_iter().flatten().map(|parameter| {
            let optional = if parameter["required"] == true { "" } else { ", optional" };
            vec![
                code(parameter["name"].as_str().unwrap()),
                format!("{}{optional}", parameter["in"].as_str().unwrap()),
                values(document, &parameter["schema"]),
                cell(parameter["description"].as_str().unwrap_or_default()),
            ]
        });
        table(page, &["parameter", "in", "values", "meaning"], &rows.collect::<Vec<_>>());
        let answers = operation["responses"].as_object().unwrap().iter().filter(|(status, _)| *status != "default");
        let rows = answers.map(|(status, answer)| {
            let kinds = if answer["content"].get("application/problem+json").is_some() {
                "problem".to_owned()
            } else {
                content(&answer["content"])
            };
            vec![status.clone(), cell(answer["description"].as_str().unwrap_or_default()), kinds]
        });
        table(page, &["status", "meaning", "body"], &rows.collect::<Vec<_>>());
    }

    #[test]
    fn the_page_of_the_api_is_the_openapi_document() {
        let document = document();
        let mut page = String::new();
        for tag in document["tags"].as_array().unwrap() {
            let name = tag["name"].as_str().unwrap();
            let mut operations = Vec::new();
            for (path, item) in document["paths"].as_object().unwrap() {
                for method in METHODS {
                    let operation = &item[method];
                    if operation["tags"][0] == name {
                        operations.push((method, path, operation));
                    }
                }
            }
            if operations.is_empty() {
                continue;
            }
            writeln!(page, "## {name}\n\n{}\n", tag["description"].as_str().unwrap()).unwrap();
            for (method, path, operation) in operations {
                describe(&mut page, &document, method, path, operation);
            }
        }
        check("reference/http-api.md", "openapi/openapi.json", &page);
    }
}

#[test]
fn the_page_of_errors_is_the_table_of_codes() {
    let mut codes: Vec<Code> = Code::ALL.to_vec();
    codes.sort_by_key(|code| (code.status(), code.as_str()));
    let rows = codes.iter().map(|entry| {
        let retry = if entry.retryable() { "yes" } else { "no" };
        vec![entry.status().as_u16().to_string(), code(entry.as_str()), retry.to_owned(), cell(entry.title())]
    });
    let mut page = String::new();
    table(&mut page, &["status", "`code`", "retryable", "`title`"], &rows.collect::<Vec<_>>());
    check("reference/errors.md", "src/http/error.rs", &page);
}

/// The types of rewards.
mod rewards {
    use super::*;

    /// A type: its name, its schema's description, required fields, fields.
    struct Kind {
        name: String,
        description: String,
        required: BTreeSet<String>,
        fields: Map<String, Value>,
    }

    fn kinds(document: &Value) -> Vec<Kind> {
        let schemas = &document["components"]["schemas"];
        let options = schemas["RewardSpec"]["oneOf"].as_array().unwrap();
        let read = |option: &Value| {
            let schema = &schemas[reference(option).unwrap()];
            let fields = schema["properties"].as_object().unwrap().clone();
            Kind {
                name: fields["type"]["enum"][0].as_str().unwrap().to_owned(),
                description: schema["description"].as_str().unwrap_or_default().to_owned(),
                required: schema["required"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .map(|name| name.as_str().unwrap().to_owned())
                    .collect(),
                fields,
            }
        };
        options.iter().map(read).collect()
    }

    fn is_service(kind: &Kind) -> bool {
        kind.fields.contains_key("max_batch_samples")
    }

    /// The fields that all of these types have with the same meaning and default.
    fn shared<'a>(mut kinds: impl Iterator<Item = &'a Kind>) -> Map<String, Value> {
        let mut fields = kinds.next().unwrap().fields.clone();
        for kind in kinds {
            fields.retain(|name, schema| kind.fields.get(name) == Some(&*schema));
        }
        fields
    }

    fn rows(document: &Value, fields: &Map<String, Value>, required: &BTreeSet<String>) -> Vec<Vec<String>> {
        let row = |(name, schema): (&String, &Value)| {
            let default = match schema.get("default") {
                _ if required.contains(name) => "required".to_owned(),
                None | Some(Value::Null) => String::new(),
                Some(default) => code(&default.to_string()),
            };
            let description = schema["description"].as_str().or_else(|| {
                let target = &document["components"]["schemas"][reference(schema)?];
                target["description"].as_str()
            });
            vec![code(name), values(document, schema), default, cell(description.unwrap_or_default())]
        };
        fields.iter().filter(|(name, _)| *name != "type").map(row).collect()
    }

    #[test]
    fn the_page_of_rewards_is_the_schema() {
        let document = document();
        let kinds = kinds(&document);
        let head = ["field", "values", "default", "meaning"];
        let of_all = shared(kinds.iter());
        let mut of_services = shared(kinds.iter().filter(|kind| is_service(kind)));
        of_services.retain(|name, _| !of_all.contains_key(name));
        let none = BTreeSet::new();
        let mut page = String::from("## Every type\n\n");
        table(&mut page, &head, &rows(&document, &of_all, &none));
        page.push_str("## Every type that calls a service\n\n");
        table(&mut page, &head, &rows(&document, &of_services, &none));
        let heads = [("Services", true), ("Built in", false)];
        for (heading, services) in heads {
            writeln!(page, "## {heading}\n").unwrap();
            for kind in kinds.iter().filter(|kind| is_service(kind) == services) {
                writeln!(page, "### {}\n\n{}\n", kind.name, kind.description.replace('<', "&lt;")).unwrap();
                let mut fields = kind.fields.clone();
                fields.retain(|name, _| !(of_all.contains_key(name) || services && of_services.contains_key(name)));
                table(&mut page, &head, &rows(&document, &fields, &kind.required));
            }
        }
        check("reference/rewards.md", "the schema of rewards", &page);
    }
}

#[tokio::test]
async fn the_page_of_metrics_has_every_metric_of_a_server_and_of_a_job() {
    let server = Server::start().await;
    server.get("/livez").await;
    let text = server.get("/metrics").await.text;
    let mut rows: Vec<Vec<String>> = Vec::new();
    let mut labels: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for line in text.lines() {
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            rows.push(vec![name.to_owned(), String::new(), String::new(), cell(help)]);
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            let row = rows.last_mut().unwrap();
            assert_eq!(row[0], name);
            row[1] = kind.to_owned();
        } else if let Some((name, rest)) = line.split_once('{') {
            let names = rest.split_once('}').unwrap().0.split(',').filter_map(|label| Some(label.split_once('=')?.0));
            let family =
                ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name);
            labels.entry(family).or_default().extend(names);
        }
    }
    for row in &mut rows {
        row[2] = match row[0].as_str() {
            "rlood_reward_errors_total" => "`job`, `reward`, `rewards_of`, `class`".to_owned(),
            "rlood_reward_breaker_state" => "`job`, `reward`, `rewards_of`, `state`".to_owned(),
            "rlood_reward_latency_seconds" => "`job`, `reward`, `rewards_of`, `quantile`".to_owned(),
            "rlood_jobs_paused" => "`reason`".to_owned(),
            "rlood_lifecycle_messages" => "`state`".to_owned(),
            name if name.starts_with("rlood_reward_") => "`job`, `reward`, `rewards_of`".to_owned(),
            name => labels.get(name).into_iter().flatten().map(|label| code(label)).collect::<Vec<_>>().join(", "),
        };
        row[0] = code(&row[0]);
    }
    rows.sort();
    let mut page = String::new();
    table(&mut page, &["metric", "kind", "labels", "meaning"], &rows);
    check("reference/metrics.md", "GET /metrics", &page);

    // The part by hand names every metric that checkpoints can be compared by, and what the engine reports besides.
    let written = read(&root().join("docs/reference/metrics.md"));
    let others = [
        "step_time",
        "eval_step_time",
        "tokens_per_second/train",
        "tokens_per_second/rollout",
        "memory/peak_resident_bytes",
    ];
    let missing: Vec<String> = rlood::spec::metric_names(&[], Some(&[]), true)
        .into_iter()
        .chain(others.map(str::to_owned))
        .filter(|name| {
            let of_rollout = name.strip_prefix("eval_").unwrap_or(name);
            !written.contains(&code(name)) && !written.contains(&code(of_rollout))
        })
        .collect();
    assert!(missing.is_empty(), "docs/reference/metrics.md does not explain {missing:?}");
}

#[test]
fn the_page_of_the_loop_has_its_numbered_details() {
    let source = read(&root().join("crates/engine/src/lib.rs"));
    let rows: Vec<&str> =
        source.lines().filter_map(|line| line.strip_prefix("//! ")).filter(|line| line.starts_with('|')).collect();
    assert!(rows.len() > 40, "{rows:?}");
    // Links to items have no target outside of rustdoc.
    let text = rows.join("\n").replace("[`", "`").replace("`]", "`");
    check("concepts/how-rloo-works.md", "crates/engine/src/lib.rs", &text);
}
