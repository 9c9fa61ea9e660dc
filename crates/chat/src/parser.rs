//! Reads tool calls from the text of a turn, in the form of the model's family.

use aho_corasick::AhoCorasick;
use serde_json::{Map, Value};

use crate::parsers::{gemma, hermes, llama3, mistral, phi, qwen3_coder};
use crate::tools::{Tool, Tools};
use crate::turn::{ContentError, ContentErrorKind, Outcome, ToolCall, Turn, shortened};
use crate::{openai, schema};

/// Maximum number of calls of a turn: an answer to a step has at most as many messages.
const MAX_CALLS: usize = 64;
/// Maximum number of tools that an error message lists.
const MAX_LISTED: usize = 20;
/// The marks around reasoning: of most families, of Mistral's and of Gemma 4.
const REASONING: [(&str, &str); 3] =
    [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought\n", "<channel|>")];

/// The form in which a family of models writes tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ToolParser {
    /// Qwen2.5, Qwen3 and Hermes: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.
    Hermes,
    /// Qwen3-Coder, Qwen3.5 and Nemotron 3: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.
    Qwen3Coder,
    /// Llama 3.x: the whole answer is `{"name": …, "parameters": {…}}`, or `[f(a=1)]`.
    Llama3,
    /// Mistral: `[TOOL_CALLS][{…}]`, or `[TOOL_CALLS]NAME{…}`.
    Mistral,
    /// Gemma: up to 3 `[f(a=1)]` or JSON as the whole answer, from 4 `<|tool_call>call:NAME{…}<tool_call|>`.
    Gemma,
    /// Phi-4-mini: `functools[{…}]`, or `<|tool_call|>[{…}]<|/tool_call|>`.
    Phi,
    /// Text is never a call.
    None,
}

/// A parser that was chosen by a chat template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The parser that reads this template's calls.
    pub parser: ToolParser,
    /// The marks in the template that decided, in words for the plan of a job.
    pub because: &'static str,
}

/// The context in which a turn is read.
#[derive(Clone, Copy, Debug)]
pub struct ParseContext<'a> {
    /// The tools that the model may call.
    pub tools: &'a Tools,
    /// Number of the turn from 0, which is a part of the calls' ids.
    pub turn: usize,
    /// Whether the generation prompt has opened the reasoning, so that the text begins inside of it.
    pub opens_reasoning: bool,
}

impl ToolParser {
    /// All parsers with their names in job settings; Hermes has two.
    pub const NAMES: [(&'static str, ToolParser); 8] = [
        ("qwen", ToolParser::Hermes),
        ("hermes", ToolParser::Hermes),
        ("qwen3_coder", ToolParser::Qwen3Coder),
        ("llama3", ToolParser::Llama3),
        ("mistral", ToolParser::Mistral),
        ("gemma", ToolParser::Gemma),
        ("phi", ToolParser::Phi),
        ("none", ToolParser::None),
    ];

    /// The parser of this name, one of [`ToolParser::NAMES`].
    pub fn named(name: &str) -> Option<ToolParser> {
        Self::NAMES.iter().find(|(other, _)| *other == name).map(|(_, parser)| *parser)
    }

    /// The name of the parser in plans.
    pub fn name(self) -> &'static str {
        match self {
            ToolParser::Hermes => "hermes",
            ToolParser::Qwen3Coder => "qwen3_coder",
            ToolParser::Llama3 => "llama3",
            ToolParser::Mistral => "mistral",
            ToolParser::Gemma => "gemma",
            ToolParser::Phi => "phi",
            ToolParser::None => "none",
        }
    }

    /// Chooses the parser by the marks in the source of a chat template.
    pub fn by_template(source: &str) -> Choice {
        let has = |mark: &str| source.contains(mark);
        let choice = |parser, because| Choice { parser, because };
        // The form of GLM has the same outer mark.
        if has("<tool_call>") && has("<arg_key>") {
            return choice(ToolParser::None, "the template writes calls with <arg_key>, a form that is not known");
        }
        match () {
            () if has("<tool_call>") && has("<function=") => {
                choice(ToolParser::Qwen3Coder, "the template has <tool_call> and <function=")
            }
            () if has("<tool_call>") => choice(ToolParser::Hermes, "the template has <tool_call>"),
            () if has("[TOOL_CALLS]") => choice(ToolParser::Mistral, "the template has [TOOL_CALLS]"),
            () if has("<|tool_call>") => choice(ToolParser::Gemma, "the template has <|tool_call>"),
            () if has("functools") || has("<|tool|>") => {
                choice(ToolParser::Phi, "the template has <|tool|> or functools")
            }
            () if has("<|start_header_id|>") && has("\"parameters\"") => {
                choice(ToolParser::Llama3, "the template has \"parameters\" and <|start_header_id|>")
            }
            () => choice(ToolParser::None, "the template has no marks of a known form of tool calls"),
        }
    }

    /// Reads a turn. `text` is decoded with special tokens and ends before the token that ended the turn. Calls inside of reasoning
    /// are no calls. The whole turn is invalid if one of its calls is.
    pub fn parse(self, text: &str, context: &ParseContext<'_>) -> Turn {
        let mut scan = Scan::new(text);
        if context.opens_reasoning {
            scan.skip_opened_reasoning();
        }
        let calls = match self {
            ToolParser::Hermes => hermes::calls(&mut scan),
            ToolParser::Qwen3Coder => qwen3_coder::calls(&mut scan),
            ToolParser::Llama3 => llama3::calls(&mut scan, context.tools),
            ToolParser::Mistral => mistral::calls(&mut scan),
            ToolParser::Gemma => gemma::calls(&mut scan, context.tools),
            ToolParser::Phi => phi::calls(&mut scan),
            ToolParser::None => {
                scan.whole();
                Ok(Vec::new())
            }
        };
        let outcome = match calls.and_then(|calls| self.checked(calls, context)) {
            Ok(calls) if calls.is_empty() => Outcome::Answer,
            Ok(calls) => Outcome::Calls(calls),
            Err(error) => Outcome::Invalid(error),
        };
        scan.into_turn(outcome)
    }

    fn checked(self, calls: Vec<RawCall>, context: &ParseContext<'_>) -> Result<Vec<ToolCall>, ContentError> {
        if calls.len() > MAX_CALLS {
            let message = format!("the answer has {} tool calls: call at most {MAX_CALLS} tools at once", calls.len());
            return Err(ContentError::new(ContentErrorKind::TooManyCalls, None, message));
        }
        let mut checked: Vec<ToolCall> = Vec::with_capacity(calls.len());
        for (index, call) in calls.into_iter().enumerate() {
            let (name, arguments) = (call.name, call.arguments);
            let tool = context.tools.get(&name).ok_or_else(|| unknown(&name, context.tools))?;
            let arguments = arguments.typed(tool);
            tool.check(&arguments).map_err(|detail| {
                let message = format!("the call of '{name}' is not valid: {detail}");
                ContentError::new(ContentErrorKind::InvalidArguments, Some(&name), message)
            })?;
            let own = call.id.filter(|id| self.keeps(id) && checked.iter().all(|other| other.id != *id));
            let id = own.unwrap_or_else(|| self.call_id(context.turn, index));
            checked.push(ToolCall { id, name, arguments });
        }
        Ok(checked)
    }

    /// Whether an id that the model wrote is used: only where the template writes it into the results.
    fn keeps(self, id: &str) -> bool {
        self == ToolParser::Mistral && openai::is_short_id(id)
    }

    /// The id of call `index` of a turn, both from 0. Mistral's templates accept only ids of 9 letters and digits.
    pub fn call_id(self, turn: usize, index: usize) -> String {
        match self {
            ToolParser::Mistral => format!("{:09}", (turn % 1_000_000) * 1000 + index % 1000),
            _ => format!("call_{turn}_{index}"),
        }
    }
}

fn unknown(name: &str, tools: &Tools) -> ContentError {
    let listed: Vec<&str> = tools.names().take(MAX_LISTED).collect();
    let more = if tools.names().count() > MAX_LISTED { ", …" } else { "" };
    let known = match listed.as_slice() {
        [] => "there are no tools".to_owned(),
        names => format!("the tools are {}{more}", names.join(", ")),
    };
    let message = format!("there is no tool '{}': {known}", shortened(name));
    ContentError::new(ContentErrorKind::UnknownTool, Some(name), message)
}

/// A call as the model wrote it.
#[derive(Debug)]
pub(crate) struct RawCall {
    pub name: String,
    pub arguments: RawArguments,
    pub id: Option<String>,
}

/// The arguments of a call as the model wrote them.
#[derive(Debug)]
pub(crate) enum RawArguments {
    Values(Map<String, Value>),
    /// Plain texts, whose types the tool's schema tells.
    Texts(Vec<(String, String)>),
}

impl RawArguments {
    fn typed(self, tool: &Tool) -> Map<String, Value> {
        match self {
            RawArguments::Values(values) => values,
            RawArguments::Texts(texts) => {
                let typed = |(name, text): (String, String)| {
                    let value = schema::typed(tool.parameter(&name), &text);
                    (name, value)
                };
                texts.into_iter().map(typed).collect()
            }
        }
    }
}

impl RawCall {
    /// Reads `{"name": …, KEY: {…}}`, where KEY is one of `keys`. Arguments may also be a text that contains the object; without
    /// any, there are none.
    pub fn of_json(value: Value, keys: &[&str]) -> Result<RawCall, ContentError> {
        let form = format!("write {{\"name\": …, \"{}\": {{…}}}}", keys.first().copied().unwrap_or("arguments"));
        let Value::Object(mut fields) = value else {
            return Err(ContentError::malformed(format!("a tool call must be a JSON object: {form}")));
        };
        let Some(Value::String(name)) = fields.remove("name") else {
            return Err(ContentError::malformed(format!("the tool call has no name: {form}")));
        };
        let arguments = match keys.iter().find_map(|key| fields.remove(*key)) {
            None | Some(Value::Null) => Some(Map::new()),
            Some(Value::Object(arguments)) => Some(arguments),
            Some(Value::String(text)) => serde_json::from_str(&text).ok(),
            Some(_) => None,
        };
        let Some(arguments) = arguments else {
            let message = format!("the arguments of '{}' must be a JSON object: {form}", shortened(&name));
            return Err(ContentError::new(ContentErrorKind::Malformed, Some(&name), message));
        };
        let id = fields.remove("id").and_then(|id| id.as_str().map(str::to_owned));
        Ok(RawCall { name, arguments: RawArguments::Values(arguments), id })
    }
}

/// Reads the JSON value at the beginning of a text, and returns it with the rest of the text.
pub(crate) fn json_prefix(text: &str) -> Result<(Value, &str), ContentError> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    match values.next() {
        Some(Ok(value)) => Ok((value, text.get(values.byte_offset()..).unwrap_or_default())),
        Some(Err(error)) => Err(ContentError::malformed(format!("the tool call is not valid JSON: {error}"))),
        None => Err(ContentError::malformed("the tool call is empty: write a JSON object")),
    }
}

/// A position in the text of a turn, and what was read before it.
#[derive(Debug)]
pub(crate) struct Scan<'t> {
    rest: &'t str,
    content: String,
    reasoning: Option<String>,
}

impl<'t> Scan<'t> {
    fn new(text: &'t str) -> Scan<'t> {
        Scan { rest: text, content: String::new(), reasoning: None }
    }

    fn into_turn(self, outcome: Outcome) -> Turn {
        Turn { content: self.content.trim().to_owned(), reasoning_content: self.reasoning, outcome }
    }

    fn add_reasoning(&mut self, text: &str) {
        let text = text.trim();
        let reasoning = self.reasoning.get_or_insert_default();
        if !reasoning.is_empty() && !text.is_empty() {
            reasoning.push('\n');
        }
        reasoning.push_str(text);
    }

    /// Skips the reasoning that the generation prompt has opened.
    fn skip_opened_reasoning(&mut self) {
        let ends = REASONING.iter().filter_map(|(_, close)| self.rest.find(close).map(|at| (at, close.len())));
        let (at, length) = ends.min().unwrap_or((self.rest.len(), 0));
        self.add_reasoning(&self.rest[..at]);
        self.rest = &self.rest[at + length..];
    }

    /// Moves behind the next of the marks that is outside of reasoning, and returns its index. The text before it becomes content.
    pub fn next_mark(&mut self, marks: &[&str]) -> Option<usize> {
        let opening = REASONING.iter().map(|(open, _)| *open);
        // Cannot fail: the patterns are few and short.
        let finder = AhoCorasick::new(marks.iter().copied().chain(opening)).ok()?;
        while let Some(found) = finder.find(self.rest) {
            self.content.push_str(&self.rest[..found.start()]);
            self.rest = &self.rest[found.end()..];
            match REASONING.get(found.pattern().as_usize().wrapping_sub(marks.len())) {
                Some((_, close)) => self.skip_reasoning(close),
                None => return Some(found.pattern().as_usize()),
            }
        }
        self.content.push_str(self.rest);
        self.rest = "";
        None
    }

    /// Skips reasoning up to behind its closing mark, or to the end of the text.
    fn skip_reasoning(&mut self, close: &str) {
        let (thought, rest) = self.rest.split_once(close).unwrap_or((self.rest, ""));
        self.add_reasoning(thought);
        self.rest = rest;
    }

    /// Like [`Scan::next_mark`]; text between and behind calls is dropped.
    pub fn next_call(&mut self, marks: &[&str], is_first: bool) -> Option<usize> {
        let before = self.content.len();
        let found = self.next_mark(marks);
        if !is_first {
            self.content.truncate(before);
        }
        found
    }

    /// Takes the text up to the end as content, without the reasoning at its beginning, and returns it.
    pub fn whole(&mut self) -> &'t str {
        while let Some((rest, close)) =
            REASONING.iter().find_map(|(open, close)| Some((self.rest.trim_start().strip_prefix(open)?, close)))
        {
            self.rest = rest;
            self.skip_reasoning(close);
        }
        let text = std::mem::take(&mut self.rest);
        self.content.push_str(text);
        text.trim()
    }

    /// The text from the position on.
    pub fn rest(&self) -> &'t str {
        self.rest
    }

    /// Moves to a later part of the text.
    pub fn move_to(&mut self, rest: &'t str) {
        self.rest = rest;
    }

    /// Removes what was read as content, because it is a call.
    pub fn clear_content(&mut self) {
        self.content.clear();
    }

    /// Moves behind a mark that follows directly, but for white space, and returns whether there was one.
    pub fn take(&mut self, mark: &str) -> bool {
        let rest = self.rest.trim_start().strip_prefix(mark);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    /// Returns whether only white space is left.
    pub fn is_at_end(&self) -> bool {
        self.rest.trim().is_empty()
    }
}
