//! Assembles a matrix in bitsandbytes' 4 bits from its tensors, and checks that they belong together.

use serde::Deserialize;

use crate::kernels::four_bit::{FourBit, Rounding, Scales};

/// The content of a matrix's tensors.
pub(super) struct Parts {
    pub(super) codes: Vec<u8>,
    pub(super) state: Vec<u8>,
    pub(super) table: Vec<f32>,
    pub(super) scales: Stored,
    /// The table of the scales' codes, and the scales of these codes.
    pub(super) nested: Option<(Vec<f32>, Vec<f32>)>,
}

/// The scales as stored.
pub(super) enum Stored {
    Values(Vec<f32>),
    Codes(Vec<u8>),
}

/// The JSON in `quant_state`.
#[derive(Deserialize)]
struct State {
    blocksize: usize,
    dtype: String,
    shape: Vec<usize>,
    #[serde(default)]
    nested_blocksize: Option<usize>,
    #[serde(default)]
    nested_dtype: Option<String>,
    #[serde(default)]
    nested_offset: Option<f64>,
}

/// Assembles a matrix of this shape.
///
/// # Errors
/// Fails if a part does not belong to the others, or has values that are not finite.
pub(super) fn assemble(parts: Parts, shape: &[usize]) -> Result<FourBit, String> {
    let Parts { codes, state, table, scales, nested } = parts;
    let state: State =
        serde_json::from_slice(&state).map_err(|error| format!("its quant_state cannot be parsed: {error}"))?;
    if state.shape != shape {
        return Err(format!("its quant_state has the shape {:?}, but config.json asks for {shape:?}", state.shape));
    }
    let len: usize = shape.iter().product();
    let block = state.blocksize;
    if block == 0 || codes.len() != len.div_ceil(2) {
        return Err(format!("it has {} bytes of codes in blocks of {block} for the shape {shape:?}", codes.len()));
    }
    let rounding = match state.dtype.as_str() {
        "bfloat16" => Rounding::Bf16,
        "float16" => Rounding::F16,
        "float32" => Rounding::F32,
        other => {
            return Err(format!(
                "its quant_state has the dtype {other:?}; supported are bfloat16, float16 and float32"
            ));
        }
    };
    let table: [f32; 16] =
        table.try_into().map_err(|table: Vec<f32>| format!("its quant_map has {} values, not 16", table.len()))?;
    let blocks = len.div_ceil(block);
    let scales = match (scales, nested) {
        (Stored::Codes(codes), Some((nested_table, nested_scales))) => {
            let nested_block = state.nested_blocksize.filter(|size| *size > 0);
            let (Some(nested_block), Some(offset)) = (nested_block, state.nested_offset) else {
                return Err("its quant_state lacks nested_blocksize or nested_offset".to_owned());
            };
            if let Some(dtype) = state.nested_dtype.filter(|dtype| dtype != "float32") {
                return Err(format!("its quant_state has the nested_dtype {dtype:?}; only float32 is supported"));
            }
            if nested_scales.len() != codes.len().div_ceil(nested_block) {
                return Err(format!("{} nested_absmax do not suffice for {} scales", nested_scales.len(), codes.len()));
            }
            let table = Box::<[f32; 256]>::try_from(nested_table)
                .map_err(|table| format!("its nested_quant_map has {} values, not 256", table.len()))?;
            // torch adds the offset as f32.
            Scales::Nested { codes, table, scales: nested_scales, block: nested_block, offset: offset as f32 }
        }
        (Stored::Values(values), None) => Scales::Plain(values),
        (Stored::Codes(_) | Stored::Values(_), _) => return Err("its scales are in an unknown format".to_owned()),
    };
    if scales.len() != blocks {
        return Err(format!("it has {} scales, but {blocks} blocks of {block} weights", scales.len()));
    }
    let matrix = FourBit { codes, len, table, block, scales, rounding };
    match (0..blocks).all(|block| matrix.values_of(block).iter().all(|value| value.is_finite())) {
        true => Ok(matrix),
        false => Err("its scales give NaN or infinite values".to_owned()),
    }
}
