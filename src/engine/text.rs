//! tokenizer.json, chat template, EOS ids.
