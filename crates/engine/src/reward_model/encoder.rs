//! Encoders on candle-transformers' backbones, with classification heads of our own: candle's ModernBERT
//! classifier applies a softmax (a single label would always score 1), and its heads read keys that transformers
//! 5 no longer writes.

use std::collections::HashMap;

use candle_core::{D, DType, Device, Tensor};
use candle_nn::{LayerNorm, Linear, Module, VarBuilder};
use candle_transformers::models::{debertav2, modernbert, xlm_roberta};

use crate::error::{EngineError, Result};
use crate::load::Weights;
use crate::modelcard::classifier::{Activation, DebertaV2, EncoderConfig, EncoderKind, ModernBert, Pooling};

/// Maximum number of tokens in one forward pass, padding included.
const BATCH_TOKENS: usize = 8192;
/// Maximum number of attention scores in memory for one layer: 64 Mi f32, which are 256 MiB.
const ATTENTION_SCORES: usize = 1 << 26;

/// An encoder with its classification head; f32 on the CPU.
pub struct Encoder {
    config: EncoderConfig,
    network: Network,
}

impl std::fmt::Debug for Encoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Encoder").field("config", &self.config).finish_non_exhaustive()
    }
}

enum Network {
    /// Head: dense layer on the first token, activation, classifier. candle's own complete model is not used, because
    /// it adds positions to one row only.
    DebertaV2 {
        embeddings: Box<debertav2::DebertaV2Embeddings>,
        encoder: Box<debertav2::DebertaV2Encoder>,
        dense: Linear,
        activation: Activation,
        classifier: Linear,
    },
    /// Head: dense layer on the first token, tanh, classifier.
    XlmRoberta { model: xlm_roberta::XLMRobertaModel, dense: Linear, classifier: Linear },
    /// Head: first token or mean, dense layer, GELU, norm, classifier.
    ModernBert { model: modernbert::ModernBert, pooling: Pooling, dense: Linear, norm: LayerNorm, classifier: Linear },
}

impl Encoder {
    /// Loads the encoder and its classification head.
    ///
    /// # Errors
    /// Fails if a tensor is missing or not finite.
    pub fn load(weights: &mut Weights, config: &EncoderConfig, labels: usize) -> Result<Encoder> {
        let mut tensors = HashMap::new();
        for name in weights.names() {
            let (values, shape) = weights.values(&name)?;
            tensors.insert(name, Tensor::from_vec(values, shape, &Device::Cpu)?);
        }
        let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
        let hidden = config.hidden_size;
        let network = match &config.kind {
            EncoderKind::DebertaV2(deberta) => {
                let (vb_model, model) = (vb.pp("deberta"), deberta_config(config, deberta));
                Network::DebertaV2 {
                    embeddings: Box::new(debertav2::DebertaV2Embeddings::load(vb_model.pp("embeddings"), &model)?),
                    encoder: Box::new(debertav2::DebertaV2Encoder::load(vb_model.pp("encoder"), &model)?),
                    dense: candle_nn::linear(hidden, hidden, vb.pp("pooler.dense"))?,
                    activation: deberta.pooler_activation,
                    classifier: candle_nn::linear(hidden, labels, vb.pp("classifier"))?,
                }
            }
            EncoderKind::XlmRoberta => Network::XlmRoberta {
                model: xlm_roberta::XLMRobertaModel::new(&roberta_config(config), vb.pp("roberta"))?,
                dense: candle_nn::linear(hidden, hidden, vb.pp("classifier.dense"))?,
                classifier: candle_nn::linear(hidden, labels, vb.pp("classifier.out_proj"))?,
            },
            EncoderKind::ModernBert(bert) => Network::ModernBert {
                model: modernbert::ModernBert::load(vb.clone(), &modernbert_config(config, bert))?,
                pooling: bert.pooling,
                dense: match bert.classifier_bias {
                    true => candle_nn::linear(hidden, hidden, vb.pp("head.dense"))?,
                    false => candle_nn::linear_no_bias(hidden, hidden, vb.pp("head.dense"))?,
                },
                norm: candle_nn::layer_norm_no_bias(hidden, config.layer_norm_eps, vb.pp("head.norm"))?,
                classifier: candle_nn::linear(hidden, labels, vb.pp("classifier"))?,
            },
        };
        Ok(Encoder { config: config.clone(), network })
    }

    /// Computes the raw logits of each sequence, one per label.
    ///
    /// # Errors
    /// Fails for ids that the model does not know.
    pub fn scores(&self, sequences: &[&[u32]]) -> Result<Vec<Vec<f32>>> {
        let vocab_size = self.config.vocab_size;
        if let Some(id) = sequences.iter().copied().flatten().find(|id| **id as usize >= vocab_size) {
            let detail = format!(
                "token id {id} is not below vocab_size {vocab_size}; the tokenizer does not belong to this model"
            );
            return Err(EngineError::Input(detail));
        }
        // Sequences of similar length are batched together, which saves padding.
        let mut order: Vec<usize> = (0..sequences.len()).collect();
        order.sort_by_key(|index| sequences[*index].len());
        let mut scores = vec![Vec::new(); sequences.len()];
        let mut rest = order.as_slice();
        while !rest.is_empty() {
            // Sequences are sorted by length, so the last one of a batch is its longest.
            let fits = |rows: usize| {
                let width = sequences[rest[rows - 1]].len();
                let attention = rows * self.config.num_attention_heads * width * width;
                rows == 1 || rows * width <= BATCH_TOKENS && attention <= ATTENTION_SCORES
            };
            let rows = (1..=rest.len()).take_while(|rows| fits(*rows)).last().unwrap_or(1);
            let (batch, after) = rest.split_at(rows);
            let ids: Vec<&[u32]> = batch.iter().map(|index| sequences[*index]).collect();
            for (index, row) in batch.iter().zip(self.forward(&ids)?) {
                scores[*index] = row;
            }
            rest = after;
        }
        Ok(scores)
    }

    fn forward(&self, sequences: &[&[u32]]) -> Result<Vec<Vec<f32>>> {
        let width = sequences.iter().map(|ids| ids.len()).max().unwrap_or(0);
        let shape = (sequences.len(), width);
        let (mut ids, mut mask) = (Vec::with_capacity(shape.0 * width), Vec::with_capacity(shape.0 * width));
        for sequence in sequences {
            ids.extend(
                sequence.iter().copied().chain(std::iter::repeat_n(self.config.pad_token_id, width - sequence.len())),
            );
            mask.extend((0..width).map(|position| u32::from(position < sequence.len())));
        }
        let ids = Tensor::from_vec(ids, shape, &Device::Cpu)?;
        let mask = Tensor::from_vec(mask, shape, &Device::Cpu)?;
        let logits = match &self.network {
            Network::DebertaV2 { embeddings, encoder, dense, activation, classifier } => {
                let mask = mask.to_dtype(DType::F32)?;
                let types = ids.zeros_like()?;
                let positions = Tensor::arange(0, width as u32, &Device::Cpu)?.broadcast_as(shape)?.contiguous()?;
                let embedded = embeddings.forward(Some(&ids), Some(&types), Some(&positions), Some(&mask), None)?;
                let hidden = encoder.forward(&embedded, &mask, None, None)?;
                let pooled = dense.forward(&first(&hidden)?)?;
                let pooled = match activation {
                    Activation::Gelu => pooled.gelu_erf()?,
                    Activation::GeluTanh => pooled.gelu()?,
                    Activation::Relu => pooled.relu()?,
                    Activation::Tanh => pooled.tanh()?,
                };
                classifier.forward(&pooled)?
            }
            Network::XlmRoberta { model, dense, classifier } => {
                let types = ids.zeros_like()?;
                let hidden = model.forward(&ids, &mask, &types, None, None, None)?;
                classifier.forward(&dense.forward(&first(&hidden)?)?.tanh()?)?
            }
            Network::ModernBert { model, pooling, dense, norm, classifier } => {
                let hidden = model.forward(&ids, &mask)?;
                let pooled = match pooling {
                    Pooling::Cls => first(&hidden)?,
                    Pooling::Mean => {
                        let mask = mask.to_dtype(DType::F32)?;
                        let sum = hidden.broadcast_mul(&mask.unsqueeze(D::Minus1)?)?.sum(1)?;
                        sum.broadcast_div(&mask.sum_keepdim(1)?)?
                    }
                };
                classifier.forward(&norm.forward(&dense.forward(&pooled)?.gelu_erf()?)?)?
            }
        };
        Ok(logits.to_vec2()?)
    }
}

/// The hidden state of each row's first token, `[rows, hidden_size]`.
fn first(hidden: &Tensor) -> Result<Tensor> {
    Ok(hidden.narrow(1, 0, 1)?.squeeze(1)?.contiguous()?)
}

fn deberta_config(config: &EncoderConfig, deberta: &DebertaV2) -> debertav2::Config {
    debertav2::Config {
        vocab_size: config.vocab_size,
        hidden_size: config.hidden_size,
        num_hidden_layers: config.num_hidden_layers,
        num_attention_heads: config.num_attention_heads,
        intermediate_size: config.intermediate_size,
        hidden_act: match config.activation {
            Activation::Gelu | Activation::Tanh => debertav2::HiddenAct::Gelu,
            Activation::GeluTanh => debertav2::HiddenAct::GeluApproximate,
            Activation::Relu => debertav2::HiddenAct::Relu,
        },
        hidden_dropout_prob: 0.0,
        attention_probs_dropout_prob: 0.0,
        max_position_embeddings: config.max_position_embeddings,
        type_vocab_size: config.type_vocab_size,
        initializer_range: 0.0,
        layer_norm_eps: config.layer_norm_eps,
        relative_attention: deberta.relative_attention,
        max_relative_positions: deberta.max_relative_positions as isize,
        pad_token_id: Some(config.pad_token_id as usize),
        position_biased_input: deberta.position_biased_input,
        pos_att_type: deberta.pos_att_type.clone(),
        position_buckets: Some(deberta.position_buckets as isize),
        share_att_key: Some(deberta.share_att_key),
        attention_head_size: None,
        embedding_size: Some(deberta.embedding_size),
        norm_rel_ebd: deberta.norm_rel_ebd.then(|| "layer_norm".to_owned()),
        conv_kernel_size: None,
        conv_groups: None,
        conv_act: None,
        id2label: None,
        label2id: None,
        pooler_dropout: None,
        pooler_hidden_act: None,
        pooler_hidden_size: None,
        cls_dropout: None,
    }
}

fn roberta_config(config: &EncoderConfig) -> xlm_roberta::Config {
    xlm_roberta::Config {
        hidden_size: config.hidden_size,
        layer_norm_eps: config.layer_norm_eps,
        attention_probs_dropout_prob: 0.0,
        hidden_dropout_prob: 0.0,
        num_attention_heads: config.num_attention_heads,
        position_embedding_type: "absolute".to_owned(),
        intermediate_size: config.intermediate_size,
        hidden_act: match config.activation {
            Activation::Gelu | Activation::Tanh => candle_nn::Activation::Gelu,
            Activation::GeluTanh => candle_nn::Activation::NewGelu,
            Activation::Relu => candle_nn::Activation::Relu,
        },
        num_hidden_layers: config.num_hidden_layers,
        vocab_size: config.vocab_size,
        max_position_embeddings: config.max_position_embeddings,
        type_vocab_size: config.type_vocab_size,
        pad_token_id: config.pad_token_id,
    }
}

fn modernbert_config(config: &EncoderConfig, bert: &ModernBert) -> modernbert::Config {
    modernbert::Config {
        vocab_size: config.vocab_size,
        hidden_size: config.hidden_size,
        num_hidden_layers: config.num_hidden_layers,
        num_attention_heads: config.num_attention_heads,
        intermediate_size: config.intermediate_size,
        max_position_embeddings: config.max_position_embeddings,
        layer_norm_eps: config.layer_norm_eps,
        pad_token_id: config.pad_token_id,
        global_attn_every_n_layers: bert.global_attn_every_n_layers,
        global_rope_theta: bert.global_rope_theta,
        local_attention: bert.local_attention,
        local_rope_theta: bert.local_rope_theta,
        classifier_config: None,
    }
}
