//! Reads the rotary position embedding from config.json, in the format of transformers 5 (`rope_parameters`)
//! or 4 (`rope_theta`, `rope_scaling`).

use serde_json::Value;

use super::Keys;
use crate::ModelCardError;

/// The parameters of a rotary position embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// The base of the frequencies (`rope_theta`).
    pub theta: f64,
    /// Number of columns of a head that rotate, from the first one on.
    pub rotary_dim: usize,
    /// The method that extends the context beyond the original length.
    pub kind: RopeKind,
}

impl Rope {
    /// Returns whether the angle at a position also depends on the length of the sequence.
    pub fn depends_on_length(&self) -> bool {
        matches!(self.kind, RopeKind::Dynamic { .. } | RopeKind::LongRope { .. })
    }
}

/// The supported values of `rope_type`: methods to extend the context.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeKind {
    /// The frequencies are not scaled.
    Default,
    /// Positions are divided by a factor.
    Linear {
        /// The divisor of all positions.
        factor: f64,
    },
    /// The base of the frequencies grows for sequences longer than the original context.
    Dynamic {
        /// The factor by which the base grows.
        factor: f64,
        /// The context length before scaling, in tokens.
        original_max_position_embeddings: f64,
    },
    /// YaRN (arXiv 2309.00071): interpolates low frequencies only.
    Yarn {
        /// Ratio of the new to the original context length.
        factor: f64,
        /// The context length before scaling, in tokens.
        original_max_position_embeddings: f64,
        /// A frequency with more rotations than this over the original context is kept.
        beta_fast: f64,
        /// A frequency with fewer rotations than this over the original context is interpolated.
        beta_slow: f64,
        /// Factor on the cosines and sines of the embedding.
        attention_factor: f64,
        /// Whether the bounds between kept and interpolated frequencies are rounded to whole dimensions.
        truncate: bool,
    },
    /// LongRoPE (arXiv 2402.13753): a divisor for each frequency.
    LongRope {
        /// Divisor of each frequency for sequences within the original context.
        short_factor: Vec<f64>,
        /// Divisor of each frequency for longer sequences.
        long_factor: Vec<f64>,
        /// The context length before scaling, in tokens.
        original_max_position_embeddings: f64,
        /// Factor on the cosines and sines of the embedding.
        attention_factor: f64,
    },
    /// Llama 3's method: low frequencies are divided by a factor, high ones are kept.
    Llama3 {
        /// The divisor of low frequencies.
        factor: f64,
        /// Wavelengths longer than the original context length divided by this number are scaled.
        low_freq_factor: f64,
        /// Wavelengths shorter than the original context length divided by this number are kept.
        high_freq_factor: f64,
        /// The context length before scaling, in tokens.
        original_max_position_embeddings: f64,
    },
}

/// Values of the model that are needed to read its rotary position embedding.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// Width of an attention head.
    pub(crate) head_dim: usize,
    /// The model's context length in config.json.
    pub(crate) max_position_embeddings: usize,
    /// True for Phi-3, where LongRoPE has other key names.
    pub(crate) is_phi3: bool,
    /// Default value of `partial_rotary_factor`; None if all columns of a head rotate in this family.
    pub(crate) rotary_factor: Option<f64>,
}

/// Reads the rotary position embedding that all layers share.
///
/// # Errors
/// Fails if a key cannot be parsed or is not supported.
pub(crate) fn rope(keys: &Keys<'_>, default_theta: f64, sizes: Sizes) -> Result<Rope, ModelCardError> {
    // `rope_theta` must be valid even if `rope_parameters` overrides it.
    let flat_theta = keys.number("rope_theta", Some(default_theta))?;
    let (name, parameters) = match keys.get("rope_parameters") {
        Some(value) => ("rope_parameters", Some(value)),
        None => ("rope_scaling", keys.get("rope_scaling")),
    };
    if let Some((layer_type, nested)) =
        parameters.and_then(Value::as_object).and_then(|o| o.iter().find(|(_, v)| v.is_object()))
    {
        return keys.refuse(
            &format!("{name}.{layer_type}"),
            nested,
            "different rotary position embeddings by layer type are not supported for this model_type",
        );
    }
    one(keys, (name, parameters), flat_theta, sizes)
}

/// Reads the rotary position embeddings of layers with full attention and of layers with a window. The base for layers with a
/// window is the value of the key that `local_theta` names, else the number in `local_theta`, else the base of the other layers.
///
/// # Errors
/// Fails for the same reasons as [`rope`].
pub(crate) fn ropes_by_layer_type(
    keys: &Keys<'_>,
    default_theta: f64,
    local_theta: (&str, Option<f64>),
    sizes: Sizes,
) -> Result<(Rope, Rope), ModelCardError> {
    let theta = keys.number("rope_theta", Some(default_theta))?;
    let (key, default) = local_theta;
    let local_theta = keys.number(key, Some(default.unwrap_or(theta)))?;
    let Some(parameters) = keys.get("rope_parameters") else {
        let local = one(keys, ("rope_scaling", None), local_theta, sizes)?;
        return Ok((one(keys, ("rope_scaling", keys.get("rope_scaling")), theta, sizes)?, local));
    };
    // If both layer types have an entry in `rope_parameters`, transformers 5 ignores all other keys.
    let of = |layer_type: &str, theta: f64| {
        let found = parameters.get(layer_type).filter(|value| !value.is_null());
        one(keys, (&format!("rope_parameters.{layer_type}"), found), theta, sizes)
    };
    Ok((of("full_attention", theta)?, of("sliding_attention", local_theta)?))
}

fn one(
    keys: &Keys<'_>,
    (name, parameters): (&str, Option<&Value>),
    flat_theta: f64,
    sizes: Sizes,
) -> Result<Rope, ModelCardError> {
    let Some(parameters) = parameters else {
        let rotary_dim = rotary_dim(keys, "partial_rotary_factor", keys.get("partial_rotary_factor"), sizes)?;
        return Ok(Rope { theta: flat_theta, rotary_dim, kind: RopeKind::Default });
    };
    if !parameters.is_object() {
        return keys.refuse(name, parameters, "the value must be an object");
    }
    let inner = Keys { file: keys.file, value: parameters };
    let theta = match inner.get("rope_theta") {
        Some(_) => inner.number("rope_theta", None)?,
        None => flat_theta,
    };
    let rotary_dim = match inner.get("partial_rotary_factor") {
        Some(value) => rotary_dim(keys, &format!("{name}.partial_rotary_factor"), Some(value), sizes)?,
        None => rotary_dim(keys, "partial_rotary_factor", keys.get("partial_rotary_factor"), sizes)?,
    };
    let rope_type = inner.get("rope_type").or_else(|| inner.get("type"));
    // `original_max_position_embeddings` is required here: transformers 4 derived a missing value from max_position_embeddings, in
    // ways that differ between its versions.
    let required = |key: &str| {
        inner.number(key, None).map_err(|error| ModelCardError { detail: format!("{name}.{}", error.detail), ..error })
    };
    let original = || required("original_max_position_embeddings");
    let kind = match rope_type.map(|t| t.as_str()) {
        None | Some(Some("default")) => RopeKind::Default,
        Some(Some("linear")) => RopeKind::Linear { factor: required("factor")? },
        Some(Some("dynamic")) => RopeKind::Dynamic {
            factor: required("factor")?,
            original_max_position_embeddings: sizes.max_position_embeddings as f64,
        },
        Some(Some("longrope")) => long_rope(keys, &inner, name, rotary_dim, sizes)?,
        // Phi-3's first checkpoints use these values of `rope_type` for LongRoPE.
        Some(Some("su" | "yarn")) if sizes.is_phi3 => long_rope(keys, &inner, name, rotary_dim, sizes)?,
        Some(Some("llama3")) => {
            let (low, high) = (required("low_freq_factor")?, required("high_freq_factor")?);
            if high <= low {
                return keys.refuse(
                    &format!("{name}.high_freq_factor"),
                    &high.into(),
                    "the value must be above low_freq_factor",
                );
            }
            RopeKind::Llama3 {
                factor: required("factor")?,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original()?,
            }
        }
        Some(Some("yarn")) => {
            let original = original()?;
            // If `factor` is null, it is the ratio of the two context lengths, as in transformers 5.
            let factor = match parameters.get("factor") {
                Some(Value::Null) => sizes.max_position_embeddings as f64 / original,
                Some(_) | None => required("factor")?,
            };
            yarn(&inner, factor, original)?
        }
        Some(_) => {
            let value = rope_type.unwrap_or(&Value::Null);
            let advice = "the supported values are default, linear, dynamic, yarn, longrope and llama3";
            return keys.refuse(&format!("{name}.rope_type"), value, advice);
        }
    };
    Ok(Rope { theta, rotary_dim, kind })
}

/// Reads how many columns of an attention head rotate.
fn rotary_dim(keys: &Keys<'_>, key: &str, factor: Option<&Value>, sizes: Sizes) -> Result<usize, ModelCardError> {
    let usual = sizes.rotary_factor.map(Value::from);
    let Some(value) = factor.or(usual.as_ref()) else { return Ok(sizes.head_dim) };
    let Some(factor) = value.as_f64().filter(|factor| *factor > 0.0 && *factor <= 1.0) else {
        return keys.refuse(key, value, "the value must be above 0 and at most 1");
    };
    if factor != 1.0 && sizes.rotary_factor.is_none() {
        return keys.refuse(key, value, "the only supported value for this model_type is 1");
    }
    let columns = (sizes.head_dim as f64 * factor) as usize;
    match columns.is_multiple_of(2) && columns > 0 {
        true => Ok(columns),
        false => keys.refuse(
            key,
            value,
            &format!("{columns} columns of an attention head would rotate; their number must be even"),
        ),
    }
}

fn long_rope(
    keys: &Keys<'_>,
    inner: &Keys<'_>,
    name: &str,
    rotary_dim: usize,
    sizes: Sizes,
) -> Result<RopeKind, ModelCardError> {
    let factors = |key: &str| {
        let value = inner.get(key).unwrap_or(&Value::Null);
        let list = value.as_array().and_then(|list| list.iter().map(Value::as_f64).collect::<Option<Vec<f64>>>());
        let is_right = |list: &Vec<f64>| list.len() == rotary_dim / 2 && list.iter().all(|f| f.is_finite() && *f > 0.0);
        match list.filter(is_right) {
            Some(list) => Ok(list),
            None => keys.refuse(
                &format!("{name}.{key}"),
                value,
                &format!("the value must be a list of {} positive numbers", rotary_dim / 2),
            ),
        }
    };
    let max = sizes.max_position_embeddings as f64;
    // Phi-3 has the key `partial_rotary_factor` outside of the rope parameters, and that value takes precedence.
    let original = match keys.get("original_max_position_embeddings") {
        Some(_) => keys.number("original_max_position_embeddings", None)?,
        None => inner.number("original_max_position_embeddings", Some(max))?,
    };
    let factor = inner.number("factor", Some(max / original))?;
    let usual = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original.ln()).sqrt() };
    Ok(RopeKind::LongRope {
        short_factor: factors("short_factor")?,
        long_factor: factors("long_factor")?,
        original_max_position_embeddings: original,
        attention_factor: inner.number("attention_factor", Some(usual))?,
    })
}

fn yarn(keys: &Keys<'_>, factor: f64, original: f64) -> Result<RopeKind, ModelCardError> {
    let scale = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
    let attention_factor = match (keys.get("attention_factor"), keys.get("mscale"), keys.get("mscale_all_dim")) {
        (Some(_), _, _) => keys.number("attention_factor", None)?,
        (None, Some(a), Some(b)) if a.as_f64() != Some(0.0) && b.as_f64() != Some(0.0) => {
            scale(keys.number("mscale", None)?) / scale(keys.number("mscale_all_dim", None)?)
        }
        _ => scale(1.0),
    };
    Ok(RopeKind::Yarn {
        factor,
        original_max_position_embeddings: original,
        beta_fast: keys.number("beta_fast", Some(32.0))?,
        beta_slow: keys.number("beta_slow", Some(1.0))?,
        attention_factor,
        truncate: keys.flag("truncate", true)?,
    })
}
