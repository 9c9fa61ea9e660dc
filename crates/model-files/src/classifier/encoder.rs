//! Bidirectional encoders for reward models: reads config.json and lists the tensors that an encoder needs.

use serde_json::Value;

use crate::ModelCardError;
use crate::config::Keys;

/// Maximum context length that is accepted, because position tables of this size are allocated.
const MAX_POSITIONS: usize = 1 << 20;

/// Everything in config.json that defines an encoder's computation.
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderConfig {
    /// The encoder's family, with the settings that only this family has.
    pub kind: EncoderKind,
    /// Number of rows of the token embedding.
    pub vocab_size: usize,
    /// Width of the hidden states.
    pub hidden_size: usize,
    /// Number of encoder layers.
    pub num_hidden_layers: usize,
    /// Number of attention heads per layer.
    pub num_attention_heads: usize,
    /// Inner width of the MLP.
    pub intermediate_size: usize,
    /// Number of positions that the model supports.
    pub max_position_embeddings: usize,
    /// Number of token types; 0 = the model has none.
    pub type_vocab_size: usize,
    /// The epsilon added to the variance in LayerNorm.
    pub layer_norm_eps: f64,
    /// Activation function of the MLP.
    pub activation: Activation,
    /// Token id that fills up shorter sequences of a batch.
    pub pad_token_id: u32,
}

/// The supported encoder families.
#[derive(Clone, Debug, PartialEq)]
pub enum EncoderKind {
    /// The family of DeBERTa-v2 and DeBERTa-v3.
    DebertaV2(DebertaV2),
    /// The family of RoBERTa and XLM-RoBERTa.
    XlmRoberta,
    /// The family of ModernBERT.
    ModernBert(ModernBert),
}

/// Settings that only DeBERTa-v2 has.
#[derive(Clone, Debug, PartialEq)]
pub struct DebertaV2 {
    /// Whether attention scores have separate terms for relative positions (disentangled attention).
    pub relative_attention: bool,
    /// Maximum relative distance between two tokens; if below 1, `max_position_embeddings` applies.
    pub max_relative_positions: i64,
    /// Whether embeddings of absolute positions are added to the token embeddings too.
    pub position_biased_input: bool,
    /// The terms for relative positions in attention: any of `c2p` (content to position) and `p2c` (position to content).
    pub pos_att_type: Vec<String>,
    /// Number of logarithmic buckets for relative distances; if below 1, distances are not bucketed.
    pub position_buckets: i64,
    /// Whether relative positions use the same query and key projections as tokens.
    pub share_att_key: bool,
    /// Width of the token embedding before the projection to `hidden_size`.
    pub embedding_size: usize,
    /// Whether the embeddings of relative positions go through LayerNorm.
    pub norm_rel_ebd: bool,
    /// Activation function of the pooler in the classification head.
    pub pooler_activation: Activation,
}

/// Settings that only ModernBERT has.
#[derive(Clone, Debug, PartialEq)]
pub struct ModernBert {
    /// Interval of layers with global attention: every n-th layer, starting with the first.
    pub global_attn_every_n_layers: usize,
    /// Base of the rotary position embedding in layers with global attention.
    pub global_rope_theta: f64,
    /// Base of the rotary position embedding in layers with local attention.
    pub local_rope_theta: f64,
    /// Number of tokens in the attention window of layers with local attention.
    pub local_attention: usize,
    /// The hidden state that the classification head scores.
    pub pooling: Pooling,
    /// Whether the dense layer of the classification head has a bias.
    pub classifier_bias: bool,
}

/// The hidden state that ModernBERT's classification head scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// The hidden state of the first token.
    Cls,
    /// The mean of all hidden states.
    Mean,
}

/// The supported activation functions of encoders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// GELU computed with the error function.
    Gelu,
    /// GELU approximated with the hyperbolic tangent.
    GeluTanh,
    /// Rectified linear unit: max(0, x).
    Relu,
    /// The hyperbolic tangent function.
    Tanh,
}

/// Checks the keys of config.json that only RoBERTa and XLM-RoBERTa have.
fn check_roberta(
    keys: &Keys,
    max_position_embeddings: usize,
    pad_token_id: u32,
    type_vocab_size: usize,
) -> Result<(), ModelCardError> {
    let positions = keys.get("position_embedding_type");
    if let Some(value) = positions.filter(|value| value.as_str() != Some("absolute")) {
        return keys.refuse("position_embedding_type", value, "the only supported value is \"absolute\"");
    }
    if max_position_embeddings <= pad_token_id as usize + 1 {
        return keys.refuse(
            "max_position_embeddings",
            &max_position_embeddings.into(),
            "the value must be larger, because positions start after pad_token_id",
        );
    }
    if type_vocab_size == 0 {
        return keys.refuse("type_vocab_size", &0.into(), "the value must be at least 1");
    }
    Ok(())
}

impl EncoderConfig {
    /// Reads the config.json of an encoder with this `model_type`. Returns None if the type is not an encoder.
    pub(super) fn read(keys: &Keys, model_type: &str) -> Result<Option<EncoderConfig>, ModelCardError> {
        let (act, eps, eps_default) = match model_type {
            "deberta-v2" => ("hidden_act", "layer_norm_eps", 1e-7),
            "xlm-roberta" | "roberta" => ("hidden_act", "layer_norm_eps", 1e-12),
            "modernbert" => ("hidden_activation", "norm_eps", 1e-5),
            _ => return Ok(None),
        };
        let (type_vocab_size, pad_token_id) = match model_type {
            "deberta-v2" => (count(keys, "type_vocab_size", 0)?, 0),
            "modernbert" => (0, 0),
            _ => (count(keys, "type_vocab_size", 2)?, 1),
        };
        for key in ["quantization_config", "is_decoder", "add_cross_attention"] {
            if let Some(value) = keys.get(key).filter(|value| **value != Value::Bool(false)) {
                return keys.refuse(key, value, "this setting is not supported; use a model without it");
            }
        }
        let (hidden_size, num_attention_heads) =
            (keys.size("hidden_size", None)?, keys.size("num_attention_heads", None)?);
        if hidden_size % num_attention_heads != 0 {
            return keys.refuse(
                "num_attention_heads",
                &num_attention_heads.into(),
                "the value must divide hidden_size",
            );
        }
        let max_position_embeddings = keys.size("max_position_embeddings", None)?;
        if max_position_embeddings > MAX_POSITIONS {
            return keys.refuse(
                "max_position_embeddings",
                &max_position_embeddings.into(),
                &format!("at most {MAX_POSITIONS} positions are supported"),
            );
        }
        let num_hidden_layers = keys.size("num_hidden_layers", None)?;
        if num_hidden_layers > 10_000 {
            return keys.refuse("num_hidden_layers", &num_hidden_layers.into(), "at most 10000 layers are supported");
        }
        let vocab_size = keys.size("vocab_size", None)?;
        let pad_token_id = super::pad_token_id(keys)?.unwrap_or(pad_token_id);
        if pad_token_id as usize >= vocab_size {
            return keys.refuse("pad_token_id", &pad_token_id.into(), "the value must be below vocab_size");
        }
        let activation_of_mlp = activation(keys, act, Activation::Gelu)?;
        if activation_of_mlp == Activation::Tanh {
            return keys.refuse(
                act,
                &"tanh".into(),
                "the supported values are gelu, gelu_new, gelu_pytorch_tanh and relu",
            );
        }
        let kind = match model_type {
            "deberta-v2" => EncoderKind::DebertaV2(deberta(keys, hidden_size, num_attention_heads)?),
            "modernbert" => EncoderKind::ModernBert(modernbert(keys, num_hidden_layers)?),
            _ => {
                check_roberta(keys, max_position_embeddings, pad_token_id, type_vocab_size)?;
                EncoderKind::XlmRoberta
            }
        };
        Ok(Some(EncoderConfig {
            kind,
            vocab_size,
            hidden_size,
            num_hidden_layers,
            num_attention_heads,
            intermediate_size: keys.size("intermediate_size", None)?,
            max_position_embeddings,
            type_vocab_size,
            layer_norm_eps: keys.number(eps, Some(eps_default))?,
            activation: activation_of_mlp,
            pad_token_id,
        }))
    }

    /// Returns the length of the longest supported sequence in tokens. (XLM-RoBERTa's positions start after the padding id.)
    pub(super) fn max_tokens(&self) -> usize {
        match &self.kind {
            EncoderKind::XlmRoberta => self.max_position_embeddings - self.pad_token_id as usize - 1,
            EncoderKind::DebertaV2(_) | EncoderKind::ModernBert(_) => self.max_position_embeddings,
        }
    }

    /// Lists every tensor of the encoder and its classification head, with its shape.
    pub(super) fn tensors(&self, labels: usize) -> Vec<(String, Vec<usize>)> {
        let (hidden, inter) = (self.hidden_size, self.intermediate_size);
        let mut list = List(Vec::new());
        match &self.kind {
            EncoderKind::ModernBert(modernbert) => {
                list.add("model.embeddings.tok_embeddings.weight", vec![self.vocab_size, hidden]);
                list.add("model.embeddings.norm.weight", vec![hidden]);
                for layer in 0..self.num_hidden_layers {
                    let prefix = format!("model.layers.{layer}");
                    if layer > 0 {
                        list.add(format!("{prefix}.attn_norm.weight"), vec![hidden]);
                    }
                    list.add(format!("{prefix}.attn.Wqkv.weight"), vec![3 * hidden, hidden]);
                    list.add(format!("{prefix}.attn.Wo.weight"), vec![hidden, hidden]);
                    list.add(format!("{prefix}.mlp_norm.weight"), vec![hidden]);
                    list.add(format!("{prefix}.mlp.Wi.weight"), vec![2 * inter, hidden]);
                    list.add(format!("{prefix}.mlp.Wo.weight"), vec![hidden, inter]);
                }
                list.add("model.final_norm.weight", vec![hidden]);
                list.add("head.dense.weight", vec![hidden, hidden]);
                if modernbert.classifier_bias {
                    list.add("head.dense.bias", vec![hidden]);
                }
                list.add("head.norm.weight", vec![hidden]);
                list.linear("classifier", labels, hidden);
            }
            EncoderKind::DebertaV2(deberta) => {
                let width = deberta.embedding_size;
                list.add("deberta.embeddings.word_embeddings.weight", vec![self.vocab_size, width]);
                if deberta.position_biased_input {
                    let shape = vec![self.max_position_embeddings, width];
                    list.add("deberta.embeddings.position_embeddings.weight", shape);
                }
                if self.type_vocab_size > 0 {
                    list.add("deberta.embeddings.token_type_embeddings.weight", vec![self.type_vocab_size, width]);
                }
                if width != hidden {
                    list.add("deberta.embeddings.embed_proj.weight", vec![hidden, width]);
                }
                list.norm("deberta.embeddings.LayerNorm", hidden);
                if deberta.relative_attention {
                    let rows = 2 * deberta.span(self.max_position_embeddings);
                    list.add("deberta.encoder.rel_embeddings.weight", vec![rows, hidden]);
                    if deberta.norm_rel_ebd {
                        list.norm("deberta.encoder.LayerNorm", hidden);
                    }
                }
                let mut projections = vec!["query_proj", "key_proj", "value_proj"];
                if deberta.relative_attention && !deberta.share_att_key {
                    let with = |name: &str| deberta.pos_att_type.iter().any(|known| known == name);
                    projections.extend(with("c2p").then_some("pos_key_proj"));
                    projections.extend(with("p2c").then_some("pos_query_proj"));
                }
                self.bert_layers(&mut list, "deberta", &projections);
                list.linear("pooler.dense", hidden, hidden);
                list.linear("classifier", labels, hidden);
            }
            EncoderKind::XlmRoberta => {
                list.add("roberta.embeddings.word_embeddings.weight", vec![self.vocab_size, hidden]);
                let positions = vec![self.max_position_embeddings, hidden];
                list.add("roberta.embeddings.position_embeddings.weight", positions);
                list.add("roberta.embeddings.token_type_embeddings.weight", vec![self.type_vocab_size, hidden]);
                list.norm("roberta.embeddings.LayerNorm", hidden);
                self.bert_layers(&mut list, "roberta", &["query", "key", "value"]);
                list.linear("classifier.dense", hidden, hidden);
                list.linear("classifier.out_proj", labels, hidden);
            }
        }
        list.0
    }

    fn bert_layers(&self, list: &mut List, model: &str, projections: &[&str]) {
        let (hidden, inter) = (self.hidden_size, self.intermediate_size);
        for layer in 0..self.num_hidden_layers {
            let prefix = format!("{model}.encoder.layer.{layer}");
            for projection in projections {
                list.linear(&format!("{prefix}.attention.self.{projection}"), hidden, hidden);
            }
            list.linear(&format!("{prefix}.attention.output.dense"), hidden, hidden);
            list.norm(&format!("{prefix}.attention.output.LayerNorm"), hidden);
            list.linear(&format!("{prefix}.intermediate.dense"), inter, hidden);
            list.linear(&format!("{prefix}.output.dense"), hidden, inter);
            list.norm(&format!("{prefix}.output.LayerNorm"), hidden);
        }
    }
}

impl DebertaV2 {
    /// Returns the number of relative distances to each side that have an embedding of their own.
    fn span(&self, max_position_embeddings: usize) -> usize {
        let positive = |value: i64| usize::try_from(value).ok().filter(|value| *value > 0);
        positive(self.position_buckets)
            .or_else(|| positive(self.max_relative_positions))
            .unwrap_or(max_position_embeddings)
    }
}

struct List(Vec<(String, Vec<usize>)>);

impl List {
    fn add(&mut self, name: impl Into<String>, shape: Vec<usize>) {
        self.0.push((name.into(), shape));
    }

    fn linear(&mut self, prefix: &str, out: usize, input: usize) {
        self.add(format!("{prefix}.weight"), vec![out, input]);
        self.add(format!("{prefix}.bias"), vec![out]);
    }

    fn norm(&mut self, prefix: &str, width: usize) {
        self.add(format!("{prefix}.weight"), vec![width]);
        self.add(format!("{prefix}.bias"), vec![width]);
    }
}

fn count(keys: &Keys, key: &str, default: usize) -> Result<usize, ModelCardError> {
    match keys.get(key) {
        Some(value) if value.as_u64() == Some(0) => Ok(0),
        Some(_) => keys.size(key, None),
        None => Ok(default),
    }
}

fn whole(keys: &Keys, key: &str, default: i64) -> Result<i64, ModelCardError> {
    match keys.get(key) {
        None => Ok(default),
        Some(value) => match value.as_i64().filter(|n| n.unsigned_abs() <= MAX_POSITIONS as u64) {
            Some(n) => Ok(n),
            None => keys.refuse(key, value, &format!("the value must be a whole number, at most {MAX_POSITIONS}")),
        },
    }
}

fn activation(keys: &Keys, key: &str, default: Activation) -> Result<Activation, ModelCardError> {
    let Some(value) = keys.get(key) else { return Ok(default) };
    match value.as_str() {
        Some("gelu") => Ok(Activation::Gelu),
        Some("gelu_new" | "gelu_pytorch_tanh") => Ok(Activation::GeluTanh),
        Some("relu") => Ok(Activation::Relu),
        Some("tanh") => Ok(Activation::Tanh),
        _ => keys.refuse(key, value, "the supported values are gelu, gelu_new, gelu_pytorch_tanh and relu"),
    }
}

fn deberta(keys: &Keys, hidden_size: usize, num_attention_heads: usize) -> Result<DebertaV2, ModelCardError> {
    if let Some(value) = keys.get("conv_kernel_size").filter(|value| value.as_u64() != Some(0)) {
        return keys.refuse(
            "conv_kernel_size",
            value,
            "DeBERTa's convolution is not supported; use a model without it",
        );
    }
    for (key, only) in [("attention_head_size", hidden_size / num_attention_heads), ("pooler_hidden_size", hidden_size)]
    {
        if let Some(value) = keys.get(key).filter(|value| value.as_u64() != Some(only as u64)) {
            return keys.refuse(key, value, &format!("this model_type supports only {only}"));
        }
    }
    let pos_att_type: Vec<String> = match keys.get("pos_att_type") {
        None => Vec::new(),
        Some(Value::String(text)) => text.split('|').map(|part| part.trim().to_owned()).collect(),
        Some(Value::Array(list)) => list.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
        Some(other) => return keys.refuse("pos_att_type", other, "the value must be a list of c2p and p2c"),
    };
    if let Some(other) = pos_att_type.iter().find(|name| !matches!(name.as_str(), "c2p" | "p2c")) {
        return keys.refuse("pos_att_type", &other.as_str().into(), "the supported values are c2p and p2c");
    }
    let embedding_size = keys.size("embedding_size", Some(hidden_size))?;
    if embedding_size != hidden_size && count(keys, "type_vocab_size", 0)? > 0 {
        return keys.refuse(
            "embedding_size",
            &embedding_size.into(),
            "in a model with token types the only supported value is hidden_size",
        );
    }
    let norm_rel_ebd = match keys.get("norm_rel_ebd").map(|value| (value, value.as_str())) {
        None | Some((_, Some("none"))) => false,
        Some((_, Some("layer_norm"))) => true,
        Some((other, _)) => return keys.refuse("norm_rel_ebd", other, "the supported values are none and layer_norm"),
    };
    Ok(DebertaV2 {
        relative_attention: keys.flag("relative_attention", false)?,
        max_relative_positions: whole(keys, "max_relative_positions", -1)?,
        position_biased_input: keys.flag("position_biased_input", true)?,
        pos_att_type,
        position_buckets: whole(keys, "position_buckets", -1)?,
        share_att_key: keys.flag("share_att_key", false)?,
        embedding_size,
        norm_rel_ebd,
        pooler_activation: activation(keys, "pooler_hidden_act", Activation::Gelu)?,
    })
}

fn modernbert(keys: &Keys, num_hidden_layers: usize) -> Result<ModernBert, ModelCardError> {
    for key in ["attention_bias", "mlp_bias", "norm_bias"] {
        if keys.flag(key, false)? {
            return keys.refuse(
                key,
                &true.into(),
                "biases in these layers are not supported; use a model without them",
            );
        }
    }
    if activation(keys, "classifier_activation", Activation::Gelu)? != Activation::Gelu {
        let value = keys.get("classifier_activation").unwrap_or(&Value::Null);
        return keys.refuse("classifier_activation", value, "the only supported value is \"gelu\"");
    }
    if activation(keys, "hidden_activation", Activation::Gelu)? != Activation::Gelu {
        let value = keys.get("hidden_activation").unwrap_or(&Value::Null);
        return keys.refuse("hidden_activation", value, "the only supported value is \"gelu\"");
    }
    let pooling = match keys.get("classifier_pooling").map(|value| (value, value.as_str())) {
        None | Some((_, Some("cls"))) => Pooling::Cls,
        Some((_, Some("mean"))) => Pooling::Mean,
        Some((other, _)) => return keys.refuse("classifier_pooling", other, "the supported values are cls and mean"),
    };
    let every = global_every(keys, num_hidden_layers)?;
    Ok(ModernBert {
        global_attn_every_n_layers: every,
        global_rope_theta: theta(keys, "full_attention", "global_rope_theta", 160_000.0)?,
        local_rope_theta: theta(keys, "sliding_attention", "local_rope_theta", 10_000.0)?,
        local_attention: keys.size("local_attention", Some(128))?,
        pooling,
        classifier_bias: keys.flag("classifier_bias", false)?,
    })
}

/// Reads the interval of layers with global attention. transformers 5 also writes `layer_types`, which must
/// agree with that interval.
fn global_every(keys: &Keys, num_hidden_layers: usize) -> Result<usize, ModelCardError> {
    let Some(value) = keys.get("layer_types") else { return keys.size("global_attn_every_n_layers", Some(3)) };
    let full: Option<Vec<bool>> = value.as_array().and_then(|list| {
        let full = list.iter().map(|name| match name.as_str() {
            Some("full_attention") => Some(true),
            Some("sliding_attention") => Some(false),
            _ => None,
        });
        full.collect()
    });
    let full = full.filter(|full| full.len() == num_hidden_layers);
    let advice = "the value must name full_attention for every n-th layer from the first on, and sliding_attention for the others";
    let Some(full) = full else { return keys.refuse("layer_types", value, advice) };
    let every = (1..full.len()).find(|layer| full[*layer]).unwrap_or(full.len());
    match (0..full.len()).all(|layer| full[layer] == (layer % every == 0)) {
        true => Ok(every),
        false => keys.refuse("layer_types", value, advice),
    }
}

/// Reads the base of a rotary position embedding: `rope_parameters.{layer type}.rope_theta` in transformers 5, a
/// top-level key in 4.
fn theta(keys: &Keys, layer_type: &str, flat: &str, default: f64) -> Result<f64, ModelCardError> {
    let Some(nested) = keys.get("rope_parameters").and_then(|all| all.get(layer_type)) else {
        return keys.number(flat, Some(default));
    };
    let inner = Keys { file: keys.file, value: nested };
    if let Some(kind) = inner.get("rope_type").filter(|kind| kind.as_str() != Some("default")) {
        return keys.refuse(
            &format!("rope_parameters.{layer_type}.rope_type"),
            kind,
            "the only supported value is \"default\"",
        );
    }
    inner.number("rope_theta", Some(default))
}
