//! A byte-level BPE tokenizer in the HF format: digits one token each, the wordings' words one token each.

use std::error::Error;

use serde_json::{Value, json};
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, DecoderWrapper, ModelWrapper, PreTokenizerWrapper, SplitDelimiterBehavior, Tokenizer};

/// Padding, id 0.
pub const PAD: &str = "<|pad|>";
/// End of a turn, and so the EOS token, id 1.
pub const END: &str = "<|end|>";
const ROLES: [&str; 3] = ["<|system|>", "<|user|>", "<|assistant|>"];

/// Digits alone; a word or punctuation with the space before it; white space.
const PATTERN: &str = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+";

const CHAT_TEMPLATE: &str = "{%- for message in messages -%}\
    {{- '<|' + message.role + '|>' + message.content + '<|end|>' -}}\
    {%- endfor -%}\
    {%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}";

/// The prompt of one user message, as the chat template renders it.
pub fn prompt(question: &str) -> String {
    format!("<|user|>{question}{END}<|assistant|>")
}

/// Trains the tokenizer on the wordings: every word of theirs becomes one token, every other byte stays a token.
pub fn train(lines: &[String]) -> Result<Tokenizer, Box<dyn Error + Send + Sync>> {
    let mut tokenizer = Tokenizer::new(ModelWrapper::BPE(BPE::default()));
    tokenizer
        .with_pre_tokenizer(Some(PreTokenizerWrapper::Sequence(Sequence::new(vec![
            PreTokenizerWrapper::Split(Split::new(
                SplitPattern::Regex(PATTERN.to_string()),
                SplitDelimiterBehavior::Isolated,
                false,
            )?),
            PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, false)),
        ]))))
        .with_decoder(Some(DecoderWrapper::ByteLevel(ByteLevel::new(false, true, false))));
    let special = [PAD, END].into_iter().chain(ROLES).map(|token| AddedToken::from(token, true));
    let trainer = BpeTrainerBuilder::new()
        .vocab_size(512)
        .min_frequency(1)
        .show_progress(false)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .special_tokens(special.collect())
        .build();
    let mut trainer = tokenizers::models::TrainerWrapper::BpeTrainer(trainer);
    tokenizer.train(&mut trainer, lines.iter())?;
    Ok(tokenizer)
}

/// tokenizer_config.json, with the chat template.
pub fn tokenizer_config(max_length: usize) -> Value {
    json!({
        "backend": "tokenizers",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": false,
        "eos_token": END,
        "extra_special_tokens": ROLES,
        "model_max_length": max_length,
        "pad_token": PAD,
        "padding_side": "left",
        "tokenizer_class": "PreTrainedTokenizerFast",
    })
}
