//! HF model directories: config.json, safetensors, single or sharded.
