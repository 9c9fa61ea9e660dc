//! Reads tool calls from the text of a turn, in the form of the model's family.

use crate::parsers::{gemma, hermes, llama3, mistral, phi, qwen3_coder};
use crate::scan::{RawCall, Scan};
use crate::tools::Tools;
use crate::turn::{ContentError, ContentErrorKind, Outcome, ToolCall, Turn, is_short_id, shortened};

/// Maximum number of calls of a turn: an answer to a step has at most as many messages.
const MAX_CALLS: usize = 64;
/// Maximum number of tools that an error message lists.
const MAX_LISTED: usize = 20;

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
        self == ToolParser::Mistral && is_short_id(id)
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
