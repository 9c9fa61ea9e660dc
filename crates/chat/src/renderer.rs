//! The token ids of a conversation: its first prompt, and what follows each turn of the model.
//!
//! What follows a turn is cut out of a small rendering of its own: `[user "x", assistant SENTINEL, the new messages]` with the
//! generation prompt and without tools. The text behind the sentinel is the end of the turn, the new messages and the opening of
//! the next turn. What stood before makes no difference to it in the templates of the known families.

use rlood_model_files::text::{SpecialToken, Text, TextError};
use serde_json::{Map, Value, json};

use crate::escape::Specials;
use crate::tools::Tools;

/// The user's message in the small rendering.
const DUMMY: &str = "x";
/// The beginning of the assistant's text in the small rendering; a number follows.
const SENTINEL: &str = "rloodTurn";
/// Number of the placeholders for observations when a template is tried.
const TRIED: usize = 2;

/// The reason why a conversation cannot be rendered.
#[derive(Debug, thiserror::Error)]
pub enum RenderError {
    /// The tokenizer or the template failed.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The template shows no messages of this role behind a turn of the assistant.
    #[error("the chat template cannot show a message of role '{role}' behind a turn of the assistant: {why}")]
    NoRule {
        /// The role that was tried, `tool` or `user`.
        role: &'static str,
        /// The reason, in the template's words if it raised an error.
        why: String,
    },
    /// The turn does not end with a token that ends turns, because it was cut by its length. Nothing may be appended to it.
    #[error("the turn does not end with an EOS token, so nothing can follow it")]
    NoEndOfTurn,
    /// The text that ends a turn is not one token, so the tokens behind it cannot be separated.
    #[error("the tokenizer does not encode the end of a turn ('{0}') as one token")]
    EndOfTurn(String),
    /// A message is not an observation.
    #[error("message {index}: {detail}")]
    Message {
        /// Index of the message.
        index: usize,
        /// The error, and how to fix it.
        detail: String,
    },
    /// The messages contain every character that could mark escaped texts.
    #[error(
        "the messages contain every character of a plane for private use, so special tokens in them cannot be escaped"
    )]
    NoMark,
}

/// How a template shows the results of tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolRole {
    /// Results are messages of role `tool`.
    Tool,
    /// Results are joined to one message of role `user`, because the template has no role for results.
    User,
}

/// The prompt of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FirstTurn {
    /// Token ids of the prompt, with the generation prompt.
    pub ids: Vec<u32>,
    /// Number of texts of special tokens in untrusted messages and tools that were encoded as ordinary text.
    pub special_tokens_escaped: usize,
}

/// The tokens that follow a turn of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Suffix {
    /// Token ids to append to the sampled ones: observations and generation prompt. None of them is an action of the model.
    pub ids: Vec<u32>,
    /// Number of texts of special tokens in observations that were encoded as ordinary text.
    pub special_tokens_escaped: usize,
    /// Number of observations that were cut at the limit.
    pub observations_cut: usize,
}

/// A way to show messages behind a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rule {
    form: Form,
    /// Whether the template wants contents as lists of parts.
    in_parts: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// Results follow a plain text of the assistant.
    BehindText,
    /// Results follow calls of the assistant, for templates that show results with the calls they belong to.
    BehindCalls,
    /// Results are joined to one message of the user.
    AsUser,
}

/// The text behind a turn.
struct Tail {
    /// The token with which the template ends the turn, if it has one.
    end: Option<SpecialToken>,
    text: String,
}

impl Tail {
    /// The text with the token that ended the turn before it. In templates that do not end turns, the model may end its turn with the
    /// token that opens the next message, which then stands there once.
    fn behind(&self, end: &SpecialToken) -> String {
        match (&self.end, self.text.trim_start().strip_prefix(&end.text)) {
            (None, Some(rest)) => format!("{}{rest}", end.text),
            _ => format!("{}{}", end.text, self.text),
        }
    }
}

/// Renders conversations for one model with one set of template variables.
#[derive(Debug)]
pub struct TurnRenderer<'a> {
    text: &'a Text,
    kwargs: Map<String, Value>,
    specials: Specials,
    tool_rule: Result<Rule, String>,
    user_rule: Result<Rule, String>,
}

impl<'a> TurnRenderer<'a> {
    /// Tries out how the model's chat template shows the results of tools and further messages of the user.
    ///
    /// # Errors
    /// Fails if the model has no chat template, or if the template shows neither.
    pub fn new(text: &'a Text, kwargs: &Map<String, Value>) -> Result<TurnRenderer<'a>, RenderError> {
        if !text.has_chat_template() {
            return Err(TextError::NoChatTemplate.into());
        }
        let specials = Specials::new(text)?;
        let unknown = || Err(String::new());
        let mut renderer =
            TurnRenderer { text, kwargs: kwargs.clone(), specials, tool_rule: unknown(), user_rule: unknown() };
        renderer.tool_rule = renderer.find_rule("tool", &[Form::BehindText, Form::BehindCalls, Form::AsUser]);
        renderer.user_rule = renderer.find_rule("user", &[Form::BehindText]);
        match (&renderer.tool_rule, &renderer.user_rule) {
            (Err(why), Err(_)) => Err(RenderError::NoRule { role: "tool", why: why.clone() }),
            _ => Ok(renderer),
        }
    }

    /// How the results of tools are shown.
    ///
    /// # Errors
    /// Fails if the template cannot show any.
    pub fn tool_role(&self) -> Result<ToolRole, RenderError> {
        match &self.tool_rule {
            Ok(Rule { form: Form::BehindText | Form::BehindCalls, .. }) => Ok(ToolRole::Tool),
            Ok(Rule { form: Form::AsUser, .. }) => Ok(ToolRole::User),
            Err(why) => Err(RenderError::NoRule { role: "tool", why: why.clone() }),
        }
    }

    /// Checks that a message of the user can follow a turn.
    ///
    /// # Errors
    /// Fails if the template cannot show any.
    pub fn check_user_messages(&self) -> Result<(), RenderError> {
        match &self.user_rule {
            Ok(_) => Ok(()),
            Err(why) => Err(RenderError::NoRule { role: "user", why: why.clone() }),
        }
    }

    /// Returns whether the template removes the reasoning of a turn when a message of the user follows. Trained with such messages,
    /// the model sees reasoning in its history that it does not see when served.
    pub fn drops_reasoning(&self) -> bool {
        let thought = "rloodThought";
        let messages = [
            json!({"role": "user", "content": DUMMY}),
            json!({"role": "assistant", "content": format!("<think>\n{thought}\n</think>\n\n{SENTINEL}")}),
            json!({"role": "user", "content": DUMMY}),
        ];
        let rendered = self.text.render_chat(&messages, true, &self.kwargs);
        rendered.is_ok_and(|text| text.contains(SENTINEL) && !text.contains(thought))
    }

    /// Returns whether the generation prompt opens the reasoning, so that the sampled text begins inside of it.
    pub fn opens_reasoning(&self) -> bool {
        let messages = [json!({"role": "user", "content": DUMMY})];
        self.text.render_chat(&messages, true, &self.kwargs).is_ok_and(|text| text.trim_end().ends_with("<think>"))
    }

    /// Renders the prompt of a conversation. The messages from index `untrusted_from` on and the tools are untrusted.
    ///
    /// # Errors
    /// Fails if the template or the tokenizer fails.
    pub fn first(&self, messages: &[Value], untrusted_from: usize, tools: &Tools) -> Result<FirstTurn, RenderError> {
        let render =
            |messages: &[Value], tools: &[Value]| self.text.render_chat_with_tools(messages, tools, true, &self.kwargs);
        let (trusted, strange) = messages.split_at(untrusted_from.min(messages.len()));
        if !strange.iter().chain(tools.schemas()).any(|value| self.specials.occur_in(value)) {
            let ids = self.text.encode(&render(messages, tools.schemas())?, false)?;
            return Ok(FirstTurn { ids, special_tokens_escaped: 0 });
        }
        let (mut strange, mut schemas) = (strange.to_vec(), tools.schemas().to_vec());
        let mut values: Vec<&mut Value> = strange.iter_mut().chain(schemas.iter_mut()).collect();
        let others: Vec<&Value> = trusted.iter().collect();
        let escaped = self.specials.escape(&mut values, &others).ok_or(RenderError::NoMark)?;
        let rendered = render(&[trusted, strange.as_slice()].concat(), &schemas)?;
        let ids = self.specials.encode(self.text, &rendered, &escaped)?;
        Ok(FirstTurn { ids, special_tokens_escaped: escaped.count })
    }

    /// Returns the text of a turn with special tokens, up to the token that ended it.
    ///
    /// # Errors
    /// Fails if no token ended the turn.
    pub fn turn_text(&self, sampled: &[u32]) -> Result<String, RenderError> {
        match sampled.split_last() {
            Some((end, ids)) if self.text.eos_token_ids().contains(end) => Ok(self.text.decode(ids, false)?),
            _ => Err(RenderError::NoEndOfTurn),
        }
    }

    /// Returns the ids that follow a turn: `messages` of role `tool` or `user`, and the opening of the next turn. `sampled` are the
    /// ids of the turn with the one that ended it, which is kept even if the template ends turns with another one. An observation
    /// of more than `max_observation_tokens` tokens is cut there.
    ///
    /// # Errors
    /// Fails if no EOS token ended the turn, and if the template cannot show the messages.
    pub fn next(
        &self,
        sampled: &[u32],
        messages: &[Value],
        max_observation_tokens: usize,
    ) -> Result<Suffix, RenderError> {
        let last =
            sampled.last().filter(|id| self.text.eos_token_ids().contains(id)).ok_or(RenderError::NoEndOfTurn)?;
        let (rule, mut messages) = self.rule_for(messages)?;
        let mut observations_cut = 0;
        for (index, message) in messages.iter_mut().enumerate() {
            let content = message.get("content").and_then(Value::as_str);
            let content = content.ok_or_else(|| wrong(index, "the content must be a text"))?;
            if let Some(cut) = self.cut(content, max_observation_tokens)? {
                message["content"] = json!(cut);
                observations_cut += 1;
            }
        }
        let (ids, special_tokens_escaped) = self.suffix_ids(*last, &messages, rule)?;
        Ok(Suffix { ids, special_tokens_escaped, observations_cut })
    }

    /// Checks the messages, and returns the rule by which the template shows them.
    fn rule_for(&self, messages: &[Value]) -> Result<(Rule, Vec<Value>), RenderError> {
        let mut has = [false; 2];
        for (index, message) in messages.iter().enumerate() {
            match message.get("role").and_then(Value::as_str) {
                Some("tool") if !has[1] => has[0] = true,
                Some("tool") => return Err(wrong(index, "the results of tools must come before messages of the user")),
                Some("user") => has[1] = true,
                _ => return Err(wrong(index, "the role must be 'tool' or 'user'")),
            }
        }
        let of = |rule: &Result<Rule, String>, role| match rule {
            Ok(rule) => Ok(*rule),
            Err(why) => Err(RenderError::NoRule { role, why: why.clone() }),
        };
        match has {
            [false, false] => Err(wrong(0, "at least one message is required")),
            [true, false] => Ok((of(&self.tool_rule, "tool")?, messages.to_vec())),
            [false, true] => Ok((of(&self.user_rule, "user")?, messages.to_vec())),
            [true, true] => {
                self.check_user_messages()?;
                Ok((of(&self.tool_rule, "tool")?, messages.to_vec()))
            }
        }
    }

    /// Encodes the text behind a turn that the token `last` ended. Returns the ids, and how many texts of special tokens were escaped.
    fn suffix_ids(&self, last: u32, messages: &[Value], rule: Rule) -> Result<(Vec<u32>, usize), RenderError> {
        let tail = self.tail_of(messages, rule)?;
        // The token that ended the turn stands before the text while it is encoded, so that the tokenizer does not treat the text as
        // the beginning of another one.
        let end = tail.end.clone().map_or_else(|| self.token(last), Ok)?;
        let is_clean = !messages.iter().any(|message| self.specials.occur_in(message));
        if is_clean {
            let ids = self.text.encode(&tail.behind(&end), false)?;
            // Texts of a stranger could also form a special token together with those of the template.
            if self.specials.count(&ids) <= self.baseline(&end, messages, rule)? {
                return Ok((behind(&end, ids)?, 0));
            }
        }
        let mut escaped_messages = messages.to_vec();
        let mut values: Vec<&mut Value> = escaped_messages.iter_mut().collect();
        let escaped = self.specials.escape(&mut values, &[]).ok_or(RenderError::NoMark)?;
        for message in escaped_messages.iter_mut().filter(|_| is_clean) {
            let content = message.get("content").and_then(Value::as_str).unwrap_or_default();
            message["content"] = json!(escaped.fenced(content));
        }
        let tail = self.tail_of(&escaped_messages, rule)?;
        let ids = self.specials.encode(self.text, &tail.behind(&end), &escaped)?;
        Ok((behind(&end, ids)?, escaped.count))
    }

    /// Number of special tokens in the rendering of the same messages with a harmless content.
    fn baseline(&self, end: &SpecialToken, messages: &[Value], rule: Rule) -> Result<usize, RenderError> {
        let mut harmless = messages.to_vec();
        harmless.iter_mut().for_each(|message| message["content"] = json!(DUMMY));
        let tail = self.tail_of(&harmless, rule)?;
        Ok(self.specials.count(&self.text.encode(&tail.behind(end), false)?))
    }

    fn token(&self, id: u32) -> Result<SpecialToken, RenderError> {
        let text = self.text.decode(&[id], false)?;
        let token = self.specials.of_text(&text).cloned();
        Ok(token.unwrap_or(SpecialToken { id, text, takes_left: false, takes_right: false }))
    }

    /// The first rule by which the template shows messages of this role whole and in order, or the reason why there is none.
    fn find_rule(&self, role: &str, forms: &[Form]) -> Result<Rule, String> {
        let marks: Vec<String> = (0..TRIED).map(|index| format!("rloodSeen{index}")).collect();
        let number = if role == "user" { 1 } else { TRIED };
        let message = |(index, mark): (usize, &String)| match role {
            "user" => json!({"role": role, "content": mark}),
            _ => json!({"role": role, "tool_call_id": format!("{index:09}"), "name": "tool", "content": mark}),
        };
        let messages: Vec<Value> = marks.iter().take(number).enumerate().map(message).collect();
        let mut why = None;
        for form in forms {
            for in_parts in [false, true] {
                let rule = Rule { form: *form, in_parts };
                match self.tail(&messages, rule) {
                    Ok(tail) if shows(&tail.text, &marks[..number]) => return Ok(rule),
                    Ok(_) => drop(why.get_or_insert_with(|| "it leaves out the content".to_owned())),
                    Err(error) => drop(why.get_or_insert(error)),
                }
            }
        }
        Err(why.unwrap_or_default())
    }

    fn tail_of(&self, messages: &[Value], rule: Rule) -> Result<Tail, RenderError> {
        let has_results = messages.iter().any(|message| message["role"] == "tool");
        let role = if has_results { "tool" } else { "user" };
        self.tail(messages, rule).map_err(|why| RenderError::NoRule { role, why })
    }

    /// Renders the messages behind a turn, and returns what stands behind it.
    fn tail(&self, messages: &[Value], rule: Rule) -> Result<Tail, String> {
        match rule.form {
            Form::BehindText => self.tail_behind_text(messages, rule),
            Form::BehindCalls => self.tail_behind_calls(messages, rule),
            Form::AsUser => self.tail_behind_text(&as_user(messages), rule),
        }
    }

    fn tail_behind_text(&self, messages: &[Value], rule: Rule) -> Result<Tail, String> {
        let sentinel = unused(SENTINEL, messages);
        let turn = [json!({"role": "user", "content": DUMMY}), json!({"role": "assistant", "content": sentinel})];
        let behind = |messages: &[Value], opens: bool| {
            let rendered = self.render(messages, opens, rule)?;
            let mut pieces = rendered.split(&sentinel);
            match (pieces.next(), pieces.next(), pieces.next()) {
                (Some(_), Some(behind), None) => Ok(behind.to_owned()),
                _ => Err("it does not show a plain text of the assistant exactly once".to_owned()),
            }
        };
        let text = behind(&[&turn, messages].concat(), true)?;
        // Templates of Mistral put a space before the token.
        let trimmed = text.trim_start();
        let Some(first) = self.specials.at_start(trimmed) else { return Ok(Tail { end: None, text }) };
        // A special token may also open the next message, in templates that do not end turns.
        let ends = match behind(&turn, false) {
            Ok(alone) => alone.trim_start().starts_with(&first.text),
            Err(_) => self.text.eos_token_ids().contains(&first.id),
        };
        match ends {
            true => Ok(Tail { end: Some(first.clone()), text: trimmed[first.text.len()..].to_owned() }),
            false => Ok(Tail { end: None, text }),
        }
    }

    /// The rule of TRL: what a rendering with the results has more than one without them, from the token on that ends the calls.
    fn tail_behind_calls(&self, messages: &[Value], rule: Rule) -> Result<Tail, String> {
        let call = |(index, message): (usize, &Value)| {
            let id = message.get("tool_call_id").cloned().unwrap_or_else(|| json!(format!("{index:09}")));
            let name = message.get("name").cloned().unwrap_or_else(|| json!("tool"));
            json!({"id": id, "type": "function", "function": {"name": name, "arguments": {}}})
        };
        let results = messages.iter().filter(|message| message["role"] == "tool").enumerate();
        let calls: Vec<Value> = results.map(call).collect();
        let turn = [
            json!({"role": "user", "content": DUMMY}),
            json!({"role": "assistant", "content": "", "tool_calls": calls}),
        ];
        let alone = self.render(&turn, false, rule)?;
        let whole = self.render(&[&turn, messages].concat(), true, rule)?;
        let shared = alone.bytes().zip(whole.bytes()).take_while(|(a, b)| a == b).count();
        let shared = &whole[..whole.floor_char_boundary(shared)];
        let ends = self.text.eos_token_ids().iter().filter_map(|id| {
            let end = self.token(*id).ok()?;
            Some((shared.rfind(&end.text)? + end.text.len(), end))
        });
        let (at, end) = ends
            .max_by_key(|(at, _)| *at)
            .ok_or_else(|| "it does not end a turn with calls by an EOS token".to_owned())?;
        Ok(Tail { end: Some(end), text: whole[at..].to_owned() })
    }

    fn render(&self, messages: &[Value], opens: bool, rule: Rule) -> Result<String, String> {
        let rendered = match rule.in_parts {
            false => self.text.render_chat(messages, opens, &self.kwargs),
            true => {
                let messages: Vec<Value> = messages.iter().map(in_parts).collect();
                self.text.render_chat(&messages, opens, &self.kwargs)
            }
        };
        rendered.map_err(|error| error.to_string())
    }

    /// Cuts a text that has more tokens than allowed, and notes that at its end; the note's tokens count. A short text gives None.
    fn cut(&self, content: &str, max_tokens: usize) -> Result<Option<String>, RenderError> {
        if self.text.end_of_tokens(content, max_tokens)?.is_none() {
            return Ok(None);
        }
        let note = format!("\n[cut: longer than {max_tokens} tokens]");
        let note = if self.text.end_of_tokens(&note, max_tokens / 2)?.is_none() { note } else { String::new() };
        let mut kept = max_tokens.saturating_sub(self.text.encode_as_text(&note)?.len());
        // Around the note, and at the place of the cut, the tokens may be others than in the parts: then a few less are kept.
        loop {
            let end = self.text.end_of_tokens(content, kept)?.unwrap_or(content.len());
            let cut = format!("{}{note}", &content[..end]);
            if kept == 0 || self.text.end_of_tokens(&cut, max_tokens)?.is_none() {
                return Ok(Some(cut));
            }
            kept -= 1;
        }
    }
}

fn wrong(index: usize, detail: &str) -> RenderError {
    RenderError::Message { index, detail: detail.to_owned() }
}

/// Removes the token that ended the turn from the beginning of the ids.
fn behind(end: &SpecialToken, ids: Vec<u32>) -> Result<Vec<u32>, RenderError> {
    match ids.split_first() {
        Some((first, rest)) if *first == end.id => Ok(rest.to_vec()),
        _ => Err(RenderError::EndOfTurn(end.text.clone())),
    }
}

/// Whether a text contains each of these marks exactly once, in order.
fn shows(text: &str, marks: &[String]) -> bool {
    let places: Vec<Option<usize>> = marks.iter().map(|mark| text.find(mark)).collect();
    places.is_sorted() && places.iter().all(Option::is_some) && marks.iter().all(|mark| text.matches(mark).count() == 1)
}

/// The sentinel with a number that makes it differ from all texts of the messages.
fn unused(sentinel: &str, messages: &[Value]) -> String {
    let texts: Vec<String> = messages.iter().map(Value::to_string).collect();
    let name = |number: usize| format!("{sentinel}{number}e");
    let numbers = 0..;
    numbers.map(name).find(|name| !texts.iter().any(|text| text.contains(name))).unwrap_or_default()
}

/// Joins the contents of messages to one message of the user.
fn as_user(messages: &[Value]) -> Vec<Value> {
    let contents: Vec<&str> = messages.iter().filter_map(|message| message.get("content")?.as_str()).collect();
    vec![json!({"role": "user", "content": contents.join("\n")})]
}

/// A message whose content is a list of one part.
fn in_parts(message: &Value) -> Value {
    let mut message = message.clone();
    if let Some(Value::String(content)) = message.get("content") {
        message["content"] = json!([{"type": "text", "text": content}]);
    }
    message
}
