//! Chat templates: Jinja in a sandbox, with the functions and variables that transformers provides to templates.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};
use serde_json::Map;

use crate::jinja::{Ordered, Template, charge, environment, raise, to_value};

/// Maximum number of instructions that a chat template may run; real templates need thousands.
const FUEL: u64 = 20_000_000;
const MAX_OUTPUT_BYTES: usize = 64 << 20;
/// Maximum number of bytes that one rendering of a chat template may allocate in total.
const BUDGET: u64 = 128 << 20;
/// Maximum length in bytes of the format that a template passes to `strftime_now`, since a field may ask for a large width.
const MAX_TIME_FORMAT_BYTES: usize = 1000;
const NAME: &str = "chat_template";
/// The error for tools among the template's further variables, where nothing would check them.
const TOOLS_AS_KWARG: &str = "chat_template_kwargs must not contain 'tools': give the tools in their own field";

/// The reason why a chat template failed.
#[derive(Debug, thiserror::Error)]
#[error("the chat template failed: {0}")]
pub struct TemplateError(String);

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    template: Template,
    source: String,
    special_tokens: Vec<(String, String)>,
}

impl ChatTemplate {
    /// Compiles a chat template. `special_tokens` (`bos_token` …) become variables of the template.
    pub fn new(source: String, special_tokens: Vec<(String, String)>) -> Result<ChatTemplate, TemplateError> {
        let mut environment = environment(FUEL);
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(failed)?;
        environment.set_syntax(syntax);
        environment.set_formatter(write_python);
        environment.add_filter("tojson", tojson);
        environment.add_test("iterable", is_iterable);
        environment.add_function("raise_exception", |message: Value| raise(&message));
        environment.add_function("strftime_now", |format: &str| -> Result<String, Error> {
            if format.len() > MAX_TIME_FORMAT_BYTES {
                return Err(Error::new(ErrorKind::InvalidOperation, "strftime_now: the format is too long"));
            }
            jiff::fmt::strtime::format(format, &jiff::Zoned::now())
                .map_err(|e| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {e}")))
        });
        let template = Template::new(&environment, NAME, without_generation(&source)).map_err(failed)?;
        Ok(ChatTemplate { environment, template, source, special_tokens })
    }

    /// The Jinja source of the template.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders chat messages to text, without tools; `kwargs` are further variables of the template.
    ///
    /// # Errors
    /// Fails for the same reasons as [`ChatTemplate::render_with_tools`].
    pub fn render(
        &self,
        messages: &[serde_json::Value],
        add_generation_prompt: bool,
        kwargs: &Map<String, serde_json::Value>,
    ) -> Result<String, TemplateError> {
        self.render_with_tools(messages, &[], add_generation_prompt, kwargs)
    }

    /// Renders chat messages to text. `tools` are function schemas as OpenAI's API has them; an empty list is none to the template,
    /// since some templates write an introduction for an empty list.
    ///
    /// # Errors
    /// Fails if the template raises an error or exceeds a limit, or if `kwargs` contains `tools`.
    pub fn render_with_tools(
        &self,
        messages: &[serde_json::Value],
        tools: &[serde_json::Value],
        add_generation_prompt: bool,
        kwargs: &Map<String, serde_json::Value>,
    ) -> Result<String, TemplateError> {
        if kwargs.contains_key("tools") {
            return Err(TemplateError(TOOLS_AS_KWARG.to_owned()));
        }
        let tools = if tools.is_empty() { Value::from(()) } else { tools.iter().map(to_value).collect() };
        let mut variables = vec![
            ("messages".to_owned(), messages.iter().map(|message| to_value(&as_given(message))).collect()),
            ("tools".to_owned(), tools),
            ("documents".to_owned(), Value::from(())),
            ("add_generation_prompt".to_owned(), Value::from(add_generation_prompt)),
        ];
        variables.extend(self.special_tokens.iter().map(|(name, text)| (name.clone(), Value::from(text.as_str()))));
        // A variable in `kwargs` replaces another one of the same name, because the last value counts.
        variables.extend(kwargs.iter().map(|(name, value)| (name.clone(), to_value(value))));
        variables.reverse();
        let variables = Value::from_object(Ordered(variables));
        self.template.render(&self.environment, variables, BUDGET, MAX_OUTPUT_BYTES).map_err(failed)
    }
}

/// Field names under which a message may have the assistant's reasoning; the first one with a value counts.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Prepares a chat message for the template as transformers 5 does: drops keys that are null, and provides the reasoning under the
/// two names that templates read, in the same order of keys.
fn as_given(message: &serde_json::Value) -> serde_json::Value {
    let Some(fields) = message.as_object() else { return message.clone() };
    let mut given: Map<String, serde_json::Value> =
        fields.iter().filter(|(_, value)| !value.is_null()).map(|(key, value)| (key.clone(), value.clone())).collect();
    if let Some(reasoning) = REASONING.iter().find_map(|name| given.get(*name)).cloned() {
        let mut renamed = Map::from_iter([("thinking".to_owned(), reasoning.clone())]);
        renamed.extend(given);
        renamed.insert("reasoning_content".to_owned(), reasoning);
        given = renamed;
    }
    given.into()
}

/// Replaces `{% generation %}…{% endgeneration %}`, which marks the assistant's text for transformers and prints
/// nothing. A scope block of the same shape replaces it, so that whitespace control and line trimming work as in Jinja.
fn without_generation(source: &str) -> String {
    let (mut out, mut rest) = (String::with_capacity(source.len()), source);
    while let Some((before, tag)) = rest.split_once("{%") {
        let (inner, after) = tag.split_at(tag.find("%}").unwrap_or(tag.len()));
        let inner = match inner.trim_matches(['-', '+']).trim() {
            "generation" => inner.replacen("generation", "with", 1),
            "endgeneration" => inner.replacen("endgeneration", "endwith", 1),
            _ => inner.to_owned(),
        };
        out.extend([before, "{%", inner.as_str()]);
        rest = after;
    }
    out + rest
}

fn failed(error: Error) -> TemplateError {
    let mut text = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    if let Some(line) = error.line() {
        text = format!("{text} (line {line})");
    }
    TemplateError(text)
}

/// The test `iterable` as Jinja has it: unlike in minijinja, `none` cannot be iterated.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// Writes a template value as Python's `str()` does, so that `{{ x }}` prints the same as in Jinja.
fn write_python(out: &mut Output, _state: &mut State, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => {
            charge(text.len() as u64)?;
            out.write_str(text).map_err(Error::from)
        }
        None => {
            let mut text = String::new();
            python_repr(value, &mut text, 0)?;
            charge(text.len() as u64)?;
            out.write_str(&text).map_err(Error::from)
        }
    }
}

const MAX_DEPTH: usize = 100;

fn too_deep() -> Error {
    Error::new(ErrorKind::InvalidOperation, "a value is nested too deeply")
}

fn python_repr(value: &Value, out: &mut String, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(too_deep());
    }
    match value.kind() {
        ValueKind::Undefined => {}
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::String => match value.as_str() {
            Some(text) if depth > 0 => {
                let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
                out.push(quote);
                for c in text.chars() {
                    match c {
                        '\n' => out.push_str("\\n"),
                        '\r' => out.push_str("\\r"),
                        '\t' => out.push_str("\\t"),
                        '\\' => out.push_str("\\\\"),
                        c if c == quote => out.extend(['\\', c]),
                        c => out.push(c),
                    }
                }
                out.push(quote);
            }
            text => out.push_str(text.unwrap_or_default()),
        },
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            for (i, item) in value.try_iter()?.enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                python_repr(&item, out, depth + 1)?;
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter()?.enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                python_repr(&key, out, depth + 1)?;
                out.push_str(": ");
                python_repr(&value.get_item(&key)?, out, depth + 1)?;
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
    if out.len() > MAX_OUTPUT_BYTES {
        return Err(Error::new(ErrorKind::InvalidOperation, "the rendered prompt is too long"));
    }
    Ok(())
}

/// The filter `tojson` as transformers defines it: Python's `json.dumps(ensure_ascii=False)`, without HTML escapes.
fn tojson(value: &Value, kwargs: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    let _: Option<Value> = kwargs.get("ensure_ascii")?;
    let separators: Option<Vec<String>> = kwargs.get("separators")?;
    let sort_keys: Option<bool> = kwargs.get("sort_keys")?;
    kwargs.assert_all_used()?;
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        _ if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        _ => (", ".to_owned(), ": ".to_owned()),
    };
    let style = JsonStyle { indent, item, key, sort_keys: sort_keys.unwrap_or(false) };
    let mut out = String::new();
    style.write(value, &mut out, 0)?;
    charge(out.len() as u64)?;
    Ok(out)
}

struct JsonStyle {
    indent: Option<usize>,
    item: String,
    key: String,
    sort_keys: bool,
}

impl JsonStyle {
    fn newline(&self, out: &mut String, depth: usize) {
        if let Some(width) = self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', width.min(64) * depth));
        }
    }

    fn write(&self, value: &Value, out: &mut String, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(too_deep());
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::String => {
                let text = serde_json::Value::from(value.as_str().unwrap_or_default()).to_string();
                out.push_str(&text);
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                out.push('[');
                for (i, item) in items.iter().enumerate() {
                    out.push_str(if i > 0 { &self.item } else { "" });
                    self.newline(out, depth + 1);
                    self.write(item, out, depth + 1)?;
                }
                if !items.is_empty() {
                    self.newline(out, depth);
                }
                out.push(']');
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                out.push('{');
                for (i, key) in keys.iter().enumerate() {
                    out.push_str(if i > 0 { &self.item } else { "" });
                    self.newline(out, depth + 1);
                    out.push_str(&serde_json::Value::from(key.to_string()).to_string());
                    out.push_str(&self.key);
                    self.write(&value.get_item(key)?, out, depth + 1)?;
                }
                if !keys.is_empty() {
                    self.newline(out, depth);
                }
                out.push('}');
            }
            ValueKind::Number => out.push_str(&value.to_string()),
            kind => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("tojson cannot write a value of type {kind}"),
                ));
            }
        }
        if out.len() > MAX_OUTPUT_BYTES {
            return Err(Error::new(ErrorKind::InvalidOperation, "the rendered prompt is too long"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn messages_reach_templates_as_transformers_gives_them() {
        let rendered = |message: serde_json::Value, source: &str| {
            let template = ChatTemplate::new(source.to_owned(), Vec::new()).unwrap();
            template.render(&[message], false, &Map::new()).unwrap()
        };
        // The expected texts were rendered with transformers 5.23.0.
        let null = "{% for m in messages %}{{ m.content }}|{{ 'content' in m }}|{{ m.content is none }}{% endfor %}";
        assert_eq!(rendered(json!({"role": "user", "content": null}), null), "|False|False");
        let whole = "{{ messages[0] | tojson }}";
        for (message, expected) in [
            (
                json!({"role": "a", "content": "c", "x": {"y": null}}),
                r#"{"role": "a", "content": "c", "x": {"y": null}}"#,
            ),
            (
                json!({"role": "a", "reasoning": "r"}),
                r#"{"thinking": "r", "role": "a", "reasoning": "r", "reasoning_content": "r"}"#,
            ),
            (
                json!({"role": "a", "thinking": "t", "reasoning": "r"}),
                r#"{"thinking": "t", "role": "a", "reasoning": "r", "reasoning_content": "t"}"#,
            ),
            (
                json!({"reasoning_content": "", "role": "a", "thinking": "t"}),
                r#"{"thinking": "t", "reasoning_content": "", "role": "a"}"#,
            ),
            (
                json!({"role": "a", "reasoning_content": null, "thinking": null, "reasoning": "r"}),
                r#"{"thinking": "r", "role": "a", "reasoning": "r", "reasoning_content": "r"}"#,
            ),
        ] {
            assert_eq!(rendered(message, whole), expected);
        }
    }
}
