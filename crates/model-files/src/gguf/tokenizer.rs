//! The vocabulary of a byte-level BPE tokenizer as llama.cpp reads it.
//!
//! llama.cpp splits a text by a fixed rule that the key `tokenizer.ggml.pre` names, so the rule of tokenizer.json must be one of those
//! that were compared: 200 texts gave the same ids (tests/gguf). Every other tokenizer is refused.

use std::collections::HashMap;
use std::path::Path;

use serde_json::Value as Json;

use super::{Refused, Value};
use crate::ModelCard;
use crate::text::{MAX_TOKENIZER_BYTES, TOKENIZER, TokenizerInfo};

/// The rules of splitting a text, by the regular expression of tokenizer.json: Qwen 2 and later, and Llama 3.
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// `tokenizer.ggml.token_type`.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

fn refused<T>(why: impl AsRef<str>) -> Result<T, Refused> {
    let why = why.as_ref();
    Err(Refused(format!(
        "tokenizer.json: {why}; export the merged model, and convert it with llama.cpp's convert_hf_to_gguf.py"
    )))
}

/// The keys of a model's tokenizer.
///
/// # Errors
/// Fails for a tokenizer whose ids were not compared with llama.cpp's, or one that cannot be read.
pub fn keys(dir: &Path, card: &ModelCard) -> Result<Vec<(String, Value)>, Refused> {
    let of_file = |error: crate::ModelCardError| Refused(error.to_string());
    let json = crate::read_json(dir, TOKENIZER, MAX_TOKENIZER_BYTES).map_err(of_file)?;
    let info = TokenizerInfo::read(dir).map_err(of_file)?;
    let pre = pre_tokenizer(&json)?;
    let (tokens, types) = vocabulary(&json, card.config.vocab_size)?;
    let ids: HashMap<&str, u32> = tokens.iter().enumerate().map(|(id, token)| (token.as_str(), id as u32)).collect();
    let around = around(&json["post_processor"]);
    let special =
        |name: &str| info.special_tokens.iter().find(|(known, _)| known == name).map(|(_, text)| text.as_str());
    let id_of = |name: &str| special(name).and_then(|text| ids.get(text).copied());
    let mut keys = vec![
        ("model", Value::String("gpt2".into())),
        ("pre", Value::String(pre.into())),
        ("token_type", Value::I32s(types)),
        ("merges", Value::Strings(merges(&json)?)),
        ("add_bos_token", Value::Bool(around.before.is_some())),
        ("add_eos_token", Value::Bool(around.after.is_some())),
    ];
    if let Some(bos) = around.before.as_deref().and_then(|text| ids.get(text).copied()).or_else(|| id_of("bos_token")) {
        keys.push(("bos_token_id", Value::U32(bos)));
    }
    let mut ends = card.eos_token_ids.iter().copied();
    if let Some(eos) = ends.next() {
        keys.push(("eos_token_id", Value::U32(eos)));
    }
    if let Some(other) = ends.next() {
        keys.push(("eot_token_id", Value::U32(other)));
    }
    if let Some(pad) = id_of("pad_token") {
        keys.push(("padding_token_id", Value::U32(pad)));
    }
    let mut keys: Vec<_> = keys.into_iter().map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)).collect();
    keys.push(("tokenizer.ggml.tokens".to_owned(), Value::Strings(tokens)));
    if let Some(template) = info.chat_template {
        keys.push(("tokenizer.chat_template".to_owned(), Value::String(template)));
    }
    Ok(keys)
}

/// llama.cpp's name of the rule by which the tokenizer splits texts.
fn pre_tokenizer(json: &Json) -> Result<&'static str, Refused> {
    let model = &json["model"];
    if model["type"] != "BPE" || model["byte_fallback"] == true {
        return refused("only byte-level BPE is written as GGUF");
    }
    // transformers normalizes Qwen's texts to NFC and llama.cpp does not: the ids are the same for texts that are NFC already.
    let normalizer = &json["normalizer"];
    if !(normalizer.is_null() || normalizer["type"] == "NFC") {
        return refused(format!(
            "the normalizer {} has no counterpart in llama.cpp",
            crate::brief(&normalizer["type"])
        ));
    }
    let ignores_merges = model["ignore_merges"] == true;
    let pre = &json["pre_tokenizer"];
    let steps: Vec<&Json> = match pre["type"].as_str() {
        Some("Sequence") => pre["pretokenizers"].as_array().into_iter().flatten().collect(),
        _ => vec![pre],
    };
    let plain = |step: &Json, regex: bool| {
        step["type"] == "ByteLevel"
            && step["use_regex"].as_bool().unwrap_or(true) == regex
            && step["add_prefix_space"] != true
    };
    let rule = match steps[..] {
        [one] if plain(one, true) => Some("gpt-2"),
        // Of SmolLM: every digit is a piece of its own.
        [digits, bytes] if digits["type"] == "Digits" && digits["individual_digits"] == true && plain(bytes, true) => {
            Some("smollm")
        }
        [split, bytes] if plain(bytes, false) => match splits(split) {
            Some(QWEN2) => Some("qwen2"),
            Some(LLAMA3) if ignores_merges => Some("llama-bpe"),
            // The same rule, for tokenizers that always merge.
            Some(LLAMA3) => Some("dbrx"),
            _ => None,
        },
        _ => None,
    };
    match rule {
        Some(rule) if ignores_merges && rule != "llama-bpe" => {
            refused(format!("ignore_merges is true, which llama.cpp does not do with the rule '{rule}'"))
        }
        Some(rule) => Ok(rule),
        None => refused(
            "its pre_tokenizer was not compared with llama.cpp; those of GPT-2, SmolLM, Qwen 2 and Llama 3 were",
        ),
    }
}

/// The regular expression by which a step splits a text into pieces.
fn splits(step: &Json) -> Option<&str> {
    let is_split = step["type"] == "Split" && step["behavior"] == "Isolated" && step["invert"] != true;
    step["pattern"]["Regex"].as_str().filter(|_| is_split)
}

/// All tokens by id, and their types. Ids that the tokenizer does not use are padded.
fn vocabulary(json: &Json, size: usize) -> Result<(Vec<String>, Vec<i32>), Refused> {
    let mut tokens: Vec<String> = (0..size).map(|id| format!("[PAD{id}]")).collect();
    let mut types = vec![UNUSED; size];
    let mut set = |token: &str, id: Option<u64>, kind: i32| match id.map(|id| id as usize).filter(|id| *id < size) {
        Some(id) => {
            token.clone_into(&mut tokens[id]);
            types[id] = kind;
            Ok(())
        }
        None => refused(format!("the token {token:?} has no id below the model's vocab_size {size}")),
    };
    for (token, id) in json["model"]["vocab"].as_object().into_iter().flatten() {
        set(token, id.as_u64(), NORMAL)?;
    }
    for added in json["added_tokens"].as_array().into_iter().flatten() {
        let kind = if added["special"] == true { CONTROL } else { USER_DEFINED };
        set(added["content"].as_str().unwrap_or_default(), added["id"].as_u64(), kind)?;
    }
    Ok((tokens, types))
}

/// The merges as llama.cpp has them: two tokens with a space between.
fn merges(json: &Json) -> Result<Vec<String>, Refused> {
    let merges = json["model"]["merges"].as_array().into_iter().flatten();
    let read = merges.map(|merge| match merge {
        Json::String(text) => Some(text.clone()),
        pair => match (pair[0].as_str(), pair[1].as_str()) {
            (Some(left), Some(right)) if !left.contains(' ') && !right.contains(' ') => Some(format!("{left} {right}")),
            _ => None,
        },
    });
    read.collect::<Option<Vec<String>>>().map_or_else(|| refused("a merge is not a pair of tokens"), Ok)
}

/// The special tokens that the tokenizer puts around a text.
#[derive(Default)]
struct Around {
    before: Option<String>,
    after: Option<String>,
}

fn around(post_processor: &Json) -> Around {
    if let Some(steps) = post_processor["processors"].as_array() {
        return steps.iter().map(around).find(|one| one.before.is_some() || one.after.is_some()).unwrap_or_default();
    }
    let single = post_processor["single"].as_array().map_or(&[][..], Vec::as_slice);
    let special =
        |piece: Option<&Json>| piece.and_then(|piece| piece["SpecialToken"]["id"].as_str()).map(str::to_owned);
    Around { before: special(single.first()), after: special(single.last()) }
}
