//! Templates over one sample, for requests to services and for the texts that graders compare: Jinja in the sandbox of
//! [`crate::jinja`]. A variable that does not exist is an error, never an empty text.

use std::sync::LazyLock;

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, Output, State, UndefinedBehavior, Value};
use serde_json::{Map, json};

use crate::jinja::{
    NULL_IN_TEXT, Ordered, Template, charge, environment, refuse_nulls, to_json, to_json_value, to_value,
};
use crate::rollout::RewardSample;

/// Maximum number of instructions per rendering. A typical rendering takes tens.
const MAX_INSTRUCTIONS: u64 = 1_000_000;
/// Maximum length of a rendered text, in bytes.
const MAX_OUTPUT_BYTES: usize = 4 << 20;
/// Maximum number of bytes that one rendering may allocate.
const MAX_ALLOCATED_BYTES: u64 = 64 << 20;

static ENVIRONMENT: LazyLock<Environment<'static>> = LazyLock::new(sandbox);

/// The environment of templates over a dataset's rows, whose texts are stored: a null never becomes the text `None`.
static ROWS: LazyLock<Environment<'static>> = LazyLock::new(|| {
    let mut environment = sandbox();
    refuse_nulls(&mut environment);
    environment
});

fn sandbox() -> Environment<'static> {
    let mut environment = environment(MAX_INSTRUCTIONS);
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_formatter(write);
    let syntax = SyntaxConfig::builder().keep_trailing_newline(true).build();
    environment.set_syntax(syntax.expect("Jinja's standard delimiters are valid"));
    environment
}

/// A template that was compiled successfully.
///
/// Its variables: `prompt`, `completion`, `question` (the last user message, or the prompt), `messages` (the chat with the
/// completion as its last message), `columns` (also `item`), `sample` (`output_text`, and `output_json` if the completion is JSON,
/// as in OpenAI's graders), `finish_reason`, `num_tokens`.
#[derive(Debug)]
pub struct SampleTemplate {
    template: Template,
    /// The compiled expression and its source, if the template is a single `{{ expression }}`.
    expression: Option<(Template, String)>,
    /// Whether the variables are the columns of a dataset's row.
    is_of_rows: bool,
}

impl SampleTemplate {
    /// A part of the error of a template that makes a text of null.
    pub const NULL_IN_TEXT: &'static str = NULL_IN_TEXT;

    /// Compiles a template. The error message is for the user who wrote it.
    pub fn new(source: &str) -> Result<Self, String> {
        let template =
            Template::new(&ENVIRONMENT, "template", source.to_owned()).map_err(|error| describe_error(&error))?;
        let inside = source.trim().strip_prefix("{{").and_then(|rest| rest.strip_suffix("}}"));
        let compiled =
            inside.and_then(|inside| Some((Template::expression(inside.to_owned()).ok()?, inside.to_owned())));
        Ok(Self { template, expression: compiled, is_of_rows: false })
    }

    /// Compiles a template over the columns of a dataset's rows: a null as a part of a text is an error.
    pub fn of_rows(source: &str) -> Result<Self, String> {
        Ok(Self { is_of_rows: true, ..Self::new(source)? })
    }

    /// Compiles an expression over the columns of a dataset's rows, for [`SampleTemplate::value`].
    pub fn condition_of_rows(source: &str) -> Result<Self, String> {
        Ok(Self { is_of_rows: true, ..Self::expression(source)? })
    }

    fn environment(&self) -> &'static Environment<'static> {
        if self.is_of_rows { &ROWS } else { &ENVIRONMENT }
    }

    /// Compiles an expression alone, for [`SampleTemplate::value`].
    pub fn expression(source: &str) -> Result<Self, String> {
        let expression = Template::expression(source.to_owned()).map_err(|error| describe_error(&error))?;
        Ok(Self { expression: Some((expression, source.to_owned())), ..Self::new("")? })
    }

    /// Renders the template's text for these variables.
    pub fn render(&self, variables: &Value) -> Result<String, String> {
        let text = self.template.render(self.environment(), variables.clone(), MAX_ALLOCATED_BYTES, MAX_OUTPUT_BYTES);
        text.map_err(|error| describe_error(&error))
    }

    /// Returns the expression's value if the template is a single `{{ expression }}`, otherwise the rendered text.
    pub fn value(&self, variables: &Value) -> Result<serde_json::Value, String> {
        let Some((expression, written)) = &self.expression else { return Ok(self.render(variables)?.into()) };
        let value = expression.eval(self.environment(), variables.clone(), MAX_ALLOCATED_BYTES, |value| {
            if value.is_undefined() {
                let text = format!("'{}' is undefined", written.trim());
                return Err(Error::new(ErrorKind::UndefinedError, text));
            }
            to_json_value(&value)
        });
        value.map_err(|error| describe_error(&error))
    }

    /// Returns the variables of a sample.
    pub fn variables(sample: &RewardSample) -> Value {
        let mut messages = match &sample.messages {
            Some(serde_json::Value::Array(messages)) => messages.clone(),
            _ => vec![json!({"role": "user", "content": sample.prompt})],
        };
        let question = messages.iter().rev().find(|message| message["role"] == "user");
        let question = question.and_then(|message| message["content"].as_str()).unwrap_or(&sample.prompt).to_owned();
        messages.push(json!({"role": "assistant", "content": sample.completion}));
        let columns = to_value(&serde_json::Value::Object(sample.columns.clone()));
        let mut output = Map::new();
        output.insert("output_text".to_owned(), json!(sample.completion));
        if let Ok(parsed) = serde_json::from_str(sample.completion.trim()) {
            output.insert("output_json".to_owned(), parsed);
        }
        Value::from_object(Ordered(vec![
            ("prompt".to_owned(), Value::from(sample.prompt.as_str())),
            ("completion".to_owned(), Value::from(sample.completion.as_str())),
            ("question".to_owned(), Value::from(question)),
            ("messages".to_owned(), messages.iter().map(to_value).collect()),
            ("item".to_owned(), columns.clone()),
            ("columns".to_owned(), columns),
            ("sample".to_owned(), to_value(&output.into())),
            ("finish_reason".to_owned(), to_value(&json!(sample.finish_reason))),
            ("num_tokens".to_owned(), Value::from(sample.num_tokens)),
        ]))
    }

    /// Converts variables that were stored as JSON.
    pub fn json_variables(json: &serde_json::Value) -> Value {
        to_value(json)
    }

    /// Returns the variables of a template in a dataset's mapping: the row's columns.
    pub fn row_variables(row: &Map<String, serde_json::Value>) -> Value {
        Value::from_object(Ordered(row.iter().map(|(name, value)| (name.clone(), to_value(value))).collect()))
    }

    /// Returns the variables of a template for a request with several samples: `samples`.
    pub fn batch_variables(samples: impl Iterator<Item = Value>) -> Value {
        Value::from_object(Ordered(vec![("samples".to_owned(), samples.collect())]))
    }
}

fn describe_error(error: &Error) -> String {
    let mut text = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    if let Some(line) = error.line().filter(|line| *line > 1) {
        text = format!("{text} (line {line})");
    }
    text
}

/// Writes texts as they are and everything else as JSON. Null is an error, because a service should never be sent
/// the text "none" by accident.
fn write(out: &mut Output, _: &mut State, value: &Value) -> Result<(), Error> {
    if value.is_undefined() || value.is_none() {
        return Err(Error::new(ErrorKind::InvalidOperation, "a value that the template writes is null or undefined"));
    }
    match value.as_str() {
        Some(text) => {
            charge(text.len() as u64)?;
            out.write_str(text).map_err(Error::from)
        }
        None => out.write_str(&to_json(value)?).map_err(Error::from),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::FinishReason;

    fn sample() -> RewardSample {
        RewardSample {
            sample_id: "s_0".into(),
            group_id: "g_0".into(),
            prompt_id: "row_0".into(),
            source: None,
            prompt: "<user>2+2?<assistant>".into(),
            messages: Some(json!([{"role": "system", "content": "Sum."}, {"role": "user", "content": "2+2?"}])),
            completion: "{\"sum\": 4}".into(),
            finish_reason: FinishReason::Stop,
            num_tokens: 6,
            completion_ids: None,
            columns: Map::from_iter([
                ("answer".to_owned(), json!(4)),
                ("none".to_owned(), json!(null)),
                ("tags".to_owned(), json!(["a", {"b": 1}])),
            ]),
            episode: None,
        }
    }

    fn rendered(source: &str) -> Result<String, String> {
        SampleTemplate::new(source)?.render(&SampleTemplate::variables(&sample()))
    }

    #[test]
    fn templates_see_the_sample_as_graders_and_chat_templates_do() {
        for (source, expected) in [
            ("{{ prompt }}{{ completion }}", "<user>2+2?<assistant>{\"sum\": 4}"),
            ("{{ question }}|{{ item.answer }}|{{ columns.answer + 1 }}", "2+2?|4|5"),
            ("{{ sample.output_text }}|{{ sample.output_json.sum }}", "{\"sum\": 4}|4"),
            (
                "{% for m in messages %}[{{ m['role'] }}:{{ m.content.strip() }}]{% endfor %}",
                "[system:Sum.][user:2+2?][assistant:{\"sum\": 4}]",
            ),
            ("{{ item.tags }} {{ finish_reason }} {{ num_tokens }}\n", "[\"a\",{\"b\":1}] stop 6\n"),
            ("no variables", "no variables"),
        ] {
            assert_eq!(rendered(source).unwrap(), expected, "{source}");
        }
    }

    #[test]
    fn an_undefined_variable_is_an_error_and_never_an_empty_text() {
        for source in [
            "{{ item.other }}",
            "{{ item.none }}",
            "{{ nothing }}",
            "{{ 'a' * 9999999999 }}",
            "{% for i in range(10000000) %}x{% endfor %}",
        ] {
            assert!(rendered(source).is_err(), "{source}");
        }
        for source in ["{{ prompt", "{% if %}", "{{ 1 + }}"] {
            assert!(SampleTemplate::new(source).is_err(), "{source}");
        }
    }

    #[test]
    fn a_null_becomes_no_text_of_a_row() {
        let row = json!({"null": null, "text": " a ", "list": ["b", null], "zero": 0});
        let variables = SampleTemplate::row_variables(row.as_object().unwrap());
        for source in [
            "{{ null | trim }}",
            "{{ null | upper }}",
            "{{ null | string }}",
            "{{ null | replace('a', 'b') }}",
            "{{ text | replace('a', null) }}",
            "{{ null | split(',') | first }}",
            "{{ null ~ text }}",
            "{{ text ~ null }}",
            "{{ '%s' | format(null) }}",
            "{{ '{}'.format(null) }}",
            "{{ list | join(', ') }}",
            "{{ ', '.join(list) }}",
            "{% filter upper %}{{ null }}{% endfilter %}",
            "{{ null }}",
        ] {
            let error = SampleTemplate::of_rows(source).unwrap().render(&variables).expect_err(source);
            assert!(error.contains("null"), "{source}: {error}");
        }
        for (source, expected) in [
            ("{{ null | default('', true) | trim }}", ""),
            ("{{ text | trim ~ zero }}", "a0"),
            ("{{ text.strip() }}{{ list[0] }}{{ [text, 1] | join('-') }}", "ab a -1"),
            ("{{ text | split | first }}{{ text | split(none) | first }}", "aa"),
            ("{% if null %}x{% endif %}{{ null is none }}{{ null | tojson }}", "truenull"),
        ] {
            assert_eq!(SampleTemplate::of_rows(source).unwrap().render(&variables).unwrap(), expected, "{source}");
        }
        let holds = |source: &str| SampleTemplate::condition_of_rows(source).unwrap().value(&variables);
        assert_eq!(holds("null == 'a' or text | trim == 'a'"), Ok(json!(true)));
        assert!(holds("null | trim == ''").is_err());
        // Elsewhere templates write null as Jinja does.
        assert_eq!(SampleTemplate::new("{{ null ~ text }}").unwrap().render(&variables).unwrap(), "None a ");
    }

    #[test]
    fn a_single_expression_keeps_its_type() {
        let value = |source: &str| SampleTemplate::new(source).unwrap().value(&SampleTemplate::variables(&sample()));
        assert_eq!(value("{{ item.answer }}").unwrap(), json!(4));
        assert_eq!(value("{{ item.tags }}").unwrap(), json!(["a", {"b": 1}]));
        assert_eq!(value("{{ item.none }}").unwrap(), json!(null));
        assert_eq!(value(" {{ prompt }} ").unwrap(), json!("<user>2+2?<assistant>"));
        assert_eq!(value("{{ prompt }}: {{ item.answer }}").unwrap(), json!("<user>2+2?<assistant>: 4"));
        assert!(value("{{ item.other }}").is_err());
    }

    #[test]
    fn questions_to_the_budget_change_nothing_that_is_small() {
        // Plain minijinja 3.0.5 gives the same texts and errors.
        for (source, expected) in [
            (
                "{% for x in [3, 1, 2] if x != 1 %}{{ loop.index }}{{ x }}{% if not loop.last %},{% endif %}{% else %}no\
                 {% endfor %}",
                "13,22",
            ),
            (
                "{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% if x > 2 %}{% break %}\
                 {% endif %}{% endfor %}",
                "13",
            ),
            (
                "{% set ns = namespace(n=0, t='') %}{% for i in range(4) %}{% set ns.n = ns.n + i * 2 %}\
                 {% set ns.t = ns.t ~ i %}{% endfor %}{{ ns.n }}{{ ns.t }}",
                "120123",
            ),
            (
                "{{ 1 < 2 < 3 }}{{ 1 < 2 > 3 }}{{ 1 in [1, 2] }}{{ 'a' not in 'bcd' }}{{ 2 in (1, 2) }}{{ 'k' in {'k': 1} }}",
                "truefalsetruetruetruetrue",
            ),
            (
                "{{ [1, 2] + [3] }}{{ ([1, 2] + [3])[1:] }}{{ 'abcdef'[1:4:2] }}{{ 'abc'[::-1] }}{{ [1] * 3 }}{{ 'ab' * 2 }}",
                "[1,2,3][2,3]bdcba[1,1,1]abab",
            ),
            (
                "{{ 'a' ~ 1 ~ none ~ [1, 'x'] ~ {'k': true} ~ (1, 2) }}{{ 'x' ~ ('y' if false) }}",
                "a1None[1, 'x']{'k': True}(1, 2)x",
            ),
            (
                "{% for i in [1, [2, [3]]] recursive %}{% if i is iterable %}({{ loop(i) }}){% else %}{{ i }}{% endif %}\
                 {% endfor %}",
                "1(2(3))",
            ),
            (
                "{% set a, b = [1, 2] %}{% set c %}{{ a }}-{{ b }}{% endset %}{{ c|upper }}{% filter replace('x', 'y') %}axb\
                 {% endfilter %}{% with d = a %}{{ d }}{% endwith %}",
                "1-2ayb1",
            ),
            (
                "{{ [{'a': 1}, {'a': 2}]|map(attribute='a')|list }}{{ [1, 2, 3]|select('gt', 1)|list }}{{ [1, 2]|sum }}\
                 {{ ['a', 'A']|unique|list }}{{ [1, 2, 3]|batch(2, 0)|list }}{{ [1, 2]|max }}",
                "[1,2][2,3]3[\"a\"][[1,2],[3,0]]2",
            ),
            (
                "{% for i in [1, 1, 2] %}{{ loop.changed(i) }}{{ loop.cycle('a', 'b') }}{{ loop.previtem|default('-') }}\
                 {% endfor %}",
                "truea-falseb1truea1",
            ),
        ] {
            assert_eq!(rendered(source).unwrap(), expected, "{source}");
        }
        for (source, expected) in [
            ("{{ nothing ~ 'a' }}", "undefined"),
            ("{{ nothing == 1 }}", "undefined"),
            ("{{ nothing + 1 }}", "tried to use + operator on unsupported types undefined and number"),
            ("a\nb{{ [1] + 1 }}", "tried to use + operator on unsupported types sequence and number (line 2)"),
            ("{{ 'a' * -1 }}", "strings can only be multiplied with integers"),
        ] {
            // The error has more lines in builds with debug assertions.
            let error = rendered(source).unwrap_err();
            assert!(error.contains(expected), "{source}: {error}");
        }
    }

    #[test]
    fn no_template_takes_all_memory_stack_or_time() {
        rlood_test_support::templates::every_costly_template_fails_soon(rendered, true);
    }
}
