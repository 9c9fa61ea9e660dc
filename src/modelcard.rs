//! What can be known of a model without tensors: config.json, safetensors headers, tokenizer, chat template, memory estimate.
