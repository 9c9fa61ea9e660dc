//! The tokenizer of a model, with its chat template and EOS ids.

use std::path::Path;
use std::sync::OnceLock;

use serde::Deserialize;
use serde_json::{Map, Value};
use tokenizers::{EncodeInput, Tokenizer, TruncationDirection, TruncationParams, TruncationStrategy};

use rlood_types::dataset::Answered;

use super::template::{ChatTemplate, TemplateError};
use super::{ModelCardError, read_json, read_text};

/// The reason why a text could not be tokenized, decoded or rendered.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The model's tokenizer files are missing or damaged.
    #[error(transparent)]
    Files(#[from] ModelCardError),
    /// The tokenizer failed on a text or on token ids.
    #[error("the tokenizer failed: {0}")]
    Tokenizer(String),
    /// A prompt is neither a string nor a list of chat messages.
    #[error("a prompt must be a string or a list of chat messages {{\"role\": …, \"content\": …}}")]
    Prompt,
    /// The prompt is a chat, but the model has no chat template.
    #[error(
        "the prompt is a list of chat messages, but the model has no chat template; send the prompt as a string, or add \
         chat_template.jinja to the model"
    )]
    NoChatTemplate,
    /// A row with an answer cannot be used: the text that the chat template renders before the answer differs from the
    /// prompt of a rollout.
    #[error(
        "the chat template does not continue its own generation prompt: what it writes before the assistant's last turn differs \
         from the prompt of a rollout, so the turn cannot be learned from"
    )]
    NotAPrefix,
    /// The chat template raised an error for the messages.
    #[error(transparent)]
    Template(#[from] TemplateError),
}

/// A prompt in a request or dataset.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Plain text, tokenized with the tokenizer's default special tokens.
    Text(String),
    /// Chat messages, rendered by the chat template with a generation prompt.
    Chat(Vec<Value>),
}

impl Prompt {
    /// Parses a dataset's `prompt`: a string, or a list of chat messages.
    pub fn from_value(value: &Value) -> Result<Prompt, TextError> {
        match value {
            Value::String(text) => Ok(Prompt::Text(text.clone())),
            Value::Array(messages) if messages.iter().all(|m| m.get("role").is_some_and(Value::is_string)) => {
                Ok(Prompt::Chat(messages.clone()))
            }
            _ => Err(TextError::Prompt),
        }
    }
}

/// A tokenizer with its chat template.
#[derive(Debug)]
pub struct Text {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    eos_token_ids: Vec<u32>,
    /// The special tokens (`bos_token`, `eos_token` …) and their texts.
    special_tokens: Vec<(String, String)>,
    /// The same tokenizer, but it encodes the texts of special tokens as ordinary text. Created on first use, because most texts
    /// contain none and a large vocabulary takes tens of MiB.
    plain: OnceLock<Tokenizer>,
}

/// A token that the tokenizer marks as special, such as the one that ends a turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecialToken {
    /// Id of the token.
    pub id: u32,
    /// Text of the token.
    pub text: String,
    /// Whether the token takes the white space before it.
    pub takes_left: bool,
    /// Whether the token takes the white space after it.
    pub takes_right: bool,
}

impl Text {
    /// Loads the tokenizer of a language model's directory, whatever its architecture. Takes up to a second for a large vocabulary.
    pub fn load(dir: &Path) -> Result<Text, TextError> {
        let eos_token_ids = super::eos_token_ids_of(dir)?;
        Ok(Text { eos_token_ids, ..Text::load_classifier(dir)? })
    }

    /// Loads the tokenizer of a sequence-classification model, like [`Text::load`]; such a model has no EOS ids.
    pub fn load_classifier(dir: &Path) -> Result<Text, TextError> {
        let bytes = read_text(dir, TOKENIZER, MAX_TOKENIZER_BYTES)?;
        let mut tokenizer = Tokenizer::from_bytes(bytes)
            .map_err(|e| ModelCardError::new(TOKENIZER, format!("is not a tokenizer ({e}); copy the file again")))?;
        // Truncation and padding in tokenizer.json are turned off, because transformers does neither by default.
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|e| TextError::Tokenizer(e.to_string()))?;
        let info = TokenizerInfo::read(dir)?;
        let template = match info.chat_template {
            Some(source) => Some(ChatTemplate::new(source, info.special_tokens.clone())?),
            None => None,
        };
        Ok(Text {
            tokenizer,
            template,
            eos_token_ids: Vec::new(),
            special_tokens: info.special_tokens,
            plain: OnceLock::new(),
        })
    }

    /// Encodes a text to token ids. `add_special_tokens` adds the special tokens that the tokenizer puts around a
    /// text, such as BOS.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TextError> {
        let encoding =
            self.tokenizer.encode_fast(text, add_special_tokens).map_err(|e| TextError::Tokenizer(e.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Encodes a text of a stranger to token ids: the texts of special tokens in it become ordinary tokens, so that it cannot end a
    /// turn or begin one. Adds no special tokens.
    ///
    /// # Errors
    /// Fails if the tokenizer fails.
    pub fn encode_as_text(&self, text: &str) -> Result<Vec<u32>, TextError> {
        let encoding = self.plain().encode_fast(text, false).map_err(|e| TextError::Tokenizer(e.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Returns the byte at which the first `max_tokens` tokens of a text end, or None if the text has no more tokens than that. The
    /// texts of special tokens count as ordinary text.
    ///
    /// # Errors
    /// Fails if the tokenizer fails.
    pub fn end_of_tokens(&self, text: &str, max_tokens: usize) -> Result<Option<usize>, TextError> {
        let encoding = self.plain().encode(text, false).map_err(|e| TextError::Tokenizer(e.to_string()))?;
        // All tokens of a character have its place, so the first token that is left out gives a boundary of characters.
        Ok(encoding.get_offsets().get(max_tokens).map(|(begin, _)| text.floor_char_boundary(*begin)))
    }

    fn plain(&self) -> &Tokenizer {
        self.plain.get_or_init(|| {
            let mut plain = self.tokenizer.clone();
            plain.set_encode_special_tokens(true);
            plain
        })
    }

    /// The tokens that the tokenizer marks as special, by id.
    pub fn marked_special(&self) -> Vec<SpecialToken> {
        let added = self.tokenizer.get_added_tokens_decoder();
        let mut tokens: Vec<SpecialToken> = added
            .iter()
            .filter(|(_, token)| token.special)
            .map(|(id, token)| SpecialToken {
                id: *id,
                text: token.content.clone(),
                takes_left: token.lstrip,
                takes_right: token.rstrip,
            })
            .collect();
        tokens.sort_by_key(|token| token.id);
        tokens
    }

    /// Sets the maximum number of tokens, including special ones, for all further calls of [`Text::encode_cut`]: tokens are
    /// dropped from the start, and in a pair from the longer text.
    pub fn truncate_left(&mut self, max_tokens: usize) -> Result<(), TextError> {
        let params = TruncationParams {
            direction: TruncationDirection::Left,
            max_length: max_tokens,
            strategy: TruncationStrategy::LongestFirst,
            stride: 0,
        };
        self.tokenizer.with_truncation(Some(params)).map_err(|e| TextError::Tokenizer(e.to_string()))?;
        Ok(())
    }

    /// Encodes a text or a pair of texts to token ids, and returns whether tokens were dropped because of [`Text::truncate_left`].
    pub fn encode_cut(
        &self,
        text: &str,
        pair: Option<&str>,
        add_special_tokens: bool,
    ) -> Result<(Vec<u32>, bool), TextError> {
        let input: EncodeInput<'_> = match pair {
            Some(pair) => (text, pair).into(),
            None => text.into(),
        };
        let encoding =
            self.tokenizer.encode_fast(input, add_special_tokens).map_err(|e| TextError::Tokenizer(e.to_string()))?;
        Ok((encoding.get_ids().to_vec(), !encoding.get_overflowing().is_empty()))
    }

    /// Returns whether the model has a chat template.
    pub fn has_chat_template(&self) -> bool {
        self.template.is_some()
    }

    /// The Jinja source of the model's chat template.
    pub fn chat_template(&self) -> Option<&str> {
        self.template.as_ref().map(ChatTemplate::source)
    }

    /// Decodes token ids to text.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, TextError> {
        self.tokenizer.decode(ids, skip_special_tokens).map_err(|e| TextError::Tokenizer(e.to_string()))
    }

    /// Renders chat messages to text with the chat template. `kwargs` are further variables for the
    /// template, such as `enable_thinking`.
    pub fn render_chat(
        &self,
        messages: &[Value],
        add_generation_prompt: bool,
        kwargs: &Map<String, Value>,
    ) -> Result<String, TextError> {
        self.render_chat_with_tools(messages, &[], add_generation_prompt, kwargs)
    }

    /// Renders chat messages and function schemas to text, like [`Text::render_chat`].
    ///
    /// # Errors
    /// Fails if the model has no chat template, if the template fails, or if `kwargs` contains `tools`.
    pub fn render_chat_with_tools(
        &self,
        messages: &[Value],
        tools: &[Value],
        add_generation_prompt: bool,
        kwargs: &Map<String, Value>,
    ) -> Result<String, TextError> {
        let template = self.template.as_ref().ok_or(TextError::NoChatTemplate)?;
        Ok(template.render_with_tools(messages, tools, add_generation_prompt, kwargs)?)
    }

    /// Encodes a prompt to token ids. Special tokens are added once: to a text by the tokenizer, to a chat by the template.
    pub fn prompt_ids(&self, prompt: &Prompt, kwargs: &Map<String, Value>) -> Result<Vec<u32>, TextError> {
        match prompt {
            Prompt::Text(text) => self.encode(text, true),
            Prompt::Chat(messages) => self.encode(&self.render_chat(messages, true, kwargs)?, false),
        }
    }

    /// Encodes a row of supervised training: the prompt as in a rollout, and the answer with its EOS token.
    ///
    /// In a chat, the answer is the text that the template renders after the prompt and its generation prompt.
    /// The answer ends with its first EOS token, as a completion does. If neither the template nor the text has
    /// one, it is added.
    pub fn answered_ids(&self, row: &Answered, kwargs: &Map<String, Value>) -> Result<(Vec<u32>, Vec<u32>), TextError> {
        let (prompt, whole, special) = match row {
            Answered::Text { prompt, completion } => (prompt.clone(), format!("{prompt}{completion}"), true),
            Answered::Chat(messages) => {
                let before = messages.get(..messages.len().saturating_sub(1)).unwrap_or_default();
                let rendered = |messages: &[Value], open: bool| self.render_chat(messages, open, kwargs);
                (rendered(before, true)?, rendered(messages, false)?, false)
            }
        };
        let Some(answer) = whole.strip_prefix(&prompt) else { return Err(TextError::NotAPrefix) };
        let prompt_ids = self.encode(&prompt, special)?;
        // Prompt and answer are encoded separately: the tokenizer might merge characters across their border, but a rollout starts
        // after the tokens of the prompt alone.
        let mut ids = match self.encode(&whole, special)?.strip_prefix(prompt_ids.as_slice()) {
            Some(rest) => rest.to_vec(),
            None => self.encode(answer, false)?,
        };
        match ids.iter().position(|id| self.eos_token_ids.contains(id)) {
            Some(end) => ids.truncate(end + 1),
            None => ids.extend(self.eos_token_ids.first()),
        }
        Ok((prompt_ids, ids))
    }

    /// The ids of all tokens that end a completion: the tokenizer's EOS, and those of generation_config.json or, if that
    /// file is missing, config.json.
    pub fn eos_token_ids(&self) -> &[u32] {
        &self.eos_token_ids
    }

    /// Returns the text of a special token by its name in tokenizer_config.json, such as `eos_token`.
    pub fn special_token(&self, name: &str) -> Option<&str> {
        self.special_tokens.iter().find(|(other, _)| other == name).map(|(_, text)| text.as_str())
    }

    /// Returns the bytes of a token, which may be a part of a character. Unknown ids have none.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        let text = self.tokenizer.decode(&[id], false).unwrap_or_default();
        let Some(piece) = self.tokenizer.id_to_token(id) else { return text.into_bytes() };
        // SentencePiece marks a space before a word, which a decoder drops at the beginning of a text.
        if piece.starts_with(SPACE_MARK) && !text.starts_with(' ') {
            return piece.replace(SPACE_MARK, " ").into_bytes();
        }
        if !text.contains(char::REPLACEMENT_CHARACTER) {
            return text.into_bytes();
        }
        let byte = piece.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
        if let Some(byte) = byte.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            return vec![byte];
        }
        piece.chars().map(byte_of_char).collect::<Option<Vec<u8>>>().unwrap_or_else(|| text.into_bytes())
    }

    /// Returns the id of the token with exactly this text.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }
}

/// The character for a space in pieces of SentencePiece.
const SPACE_MARK: char = '\u{2581}';

/// The byte that a character of a byte-level vocabulary stands for (`bytes_to_unicode` of GPT-2): printable bytes stand for
/// themselves, the others follow from U+0100 on.
fn byte_of_char(c: char) -> Option<u8> {
    let is_printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let code = u32::from(c);
    match u8::try_from(code) {
        Ok(byte) => is_printable(byte).then_some(byte),
        Err(_) => (0..=u8::MAX).filter(|byte| !is_printable(*byte)).nth(code.checked_sub(0x100)? as usize),
    }
}

/// Name of the file with the tokenizer.
pub const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
pub(crate) const MAX_TOKENIZER_BYTES: u64 = 256 << 20;
const MAX_TEMPLATE_BYTES: u64 = 1 << 20;

/// The content of tokenizer_config.json and related files, without the vocabulary.
#[derive(Debug)]
pub(crate) struct TokenizerInfo {
    /// The model's chat template, as Jinja source.
    pub chat_template: Option<String>,
    /// The special tokens (`bos_token`, `eos_token` …) and their texts, as chat templates see them.
    pub special_tokens: Vec<(String, String)>,
    /// The id of the tokenizer's `eos_token`.
    pub eos_token_id: Option<u32>,
}

#[derive(Deserialize)]
struct TokenizerFile {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    model: ModelPart,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
}

#[derive(Deserialize)]
struct ModelPart {}

impl TokenizerInfo {
    pub(crate) fn read(dir: &Path) -> Result<TokenizerInfo, ModelCardError> {
        if !dir.join(TOKENIZER).exists() {
            let detail =
                "is missing; save the tokenizer into the model directory with save_pretrained (fast tokenizer)";
            return Err(ModelCardError::new(TOKENIZER, detail));
        }
        let text = read_text(dir, TOKENIZER, MAX_TOKENIZER_BYTES)?;
        let file: TokenizerFile = serde_json::from_str(&text)
            .map_err(|e| ModelCardError::new(TOKENIZER, format!("is not a tokenizer ({e}); copy the file again")))?;
        let ModelPart {} = file.model;

        let config = match dir.join(TOKENIZER_CONFIG).exists() {
            true => read_json(dir, TOKENIZER_CONFIG, MAX_TOKENIZER_BYTES)?,
            false => Value::Object(Map::new()),
        };
        let map = match dir.join("special_tokens_map.json").exists() {
            true => read_json(dir, "special_tokens_map.json", MAX_TOKENIZER_BYTES)?,
            false => Value::Object(Map::new()),
        };
        let mut special_tokens = Vec::new();
        for name in ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"] {
            let content = [&config, &map].into_iter().find_map(|source| match source.get(name) {
                Some(Value::String(content)) => Some(content.clone()),
                Some(Value::Object(token)) => token.get("content").and_then(Value::as_str).map(str::to_owned),
                _ => None,
            });
            special_tokens.extend(content.map(|c| (name.to_owned(), c)));
        }
        let eos = special_tokens.iter().find(|(name, _)| name == "eos_token").map(|(_, content)| content.as_str());
        let eos_token_id = eos.and_then(|eos| file.added_tokens.iter().find(|t| t.content == eos)).map(|t| t.id);
        Ok(TokenizerInfo { chat_template: chat_template(dir, &config)?, special_tokens, eos_token_id })
    }
}

/// Reads the chat template: chat_template.jinja takes precedence over `chat_template` in tokenizer_config.json (a
/// string, or a list with a `default`).
fn chat_template(dir: &Path, config: &Value) -> Result<Option<String>, ModelCardError> {
    let file = "chat_template.jinja";
    if dir.join(file).exists() {
        return read_text(dir, file, MAX_TEMPLATE_BYTES).map(Some);
    }
    let wrong = |value: &Value| {
        let detail =
            format!("chat_template is {}; it must be a string, or a list with a \"default\"", super::brief(value));
        Err(ModelCardError::new(TOKENIZER_CONFIG, detail))
    };
    match config.get("chat_template") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(source)) if source.len() as u64 <= MAX_TEMPLATE_BYTES => Ok(Some(source.clone())),
        Some(Value::Array(list)) => {
            let default = list.iter().find(|t| t.get("name").and_then(Value::as_str) == Some("default"));
            match default.and_then(|t| t.get("template")).and_then(Value::as_str) {
                Some(source) => Ok(Some(source.to_owned())),
                None => wrong(&Value::Array(list.clone())),
            }
        }
        Some(other) => wrong(other),
    }
}
