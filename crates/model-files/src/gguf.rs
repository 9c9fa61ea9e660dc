//! Writes GGUF, the file format of llama.cpp: models and LoRA adapters.
//!
//! The format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>, version 3. All sizes are known before the first tensor, so
//! a file is written front to back, and only a part of one tensor is in memory ([`Writer`]). [`model`] says which keys and
//! tensors a model has, [`tokenizer`] writes its vocabulary. A family, a tokenizer or a context without a proof that llama.cpp
//! computes the same is refused by name ([`Refused`]).

pub mod model;
pub mod tokenizer;

use std::io::{self, Write};

use half::{bf16, f16};

/// Why a model or an adapter cannot be written as GGUF: the key, its value, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Refused(pub String);

/// Value of a key.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    U32(u32),
    F32(f32),
    Bool(bool),
    String(String),
    Strings(Vec<String>),
    I32s(Vec<i32>),
}

/// Storage format of a tensor's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    F32,
    F16,
    Bf16,
    /// Blocks of 32 values: a scale in f16, then 32 signed bytes.
    Q8_0,
}

/// Number of values in a block of [`Kind::Q8_0`].
const BLOCK: usize = 32;
/// Data of each tensor begins at a multiple of this number of bytes.
const ALIGNMENT: u64 = 32;

impl Kind {
    /// The number of the format in a tensor's entry (`ggml_type`).
    fn id(self) -> u32 {
        match self {
            Kind::F32 => 0,
            Kind::F16 => 1,
            Kind::Q8_0 => 8,
            Kind::Bf16 => 30,
        }
    }

    /// The number of the format of most tensors of a file (`general.file_type`).
    pub fn file_type(self) -> u32 {
        match self {
            Kind::F32 => 0,
            Kind::F16 => 1,
            Kind::Q8_0 => 7,
            Kind::Bf16 => 32,
        }
    }

    /// The format of a tensor in a file of this kind: vectors are f32, and rows without whole blocks f16.
    pub fn of_tensor(self, shape: &[usize]) -> Kind {
        match (self, shape) {
            (_, [_]) => Kind::F32,
            (Kind::Q8_0, [.., width]) if width % BLOCK != 0 => Kind::F16,
            (kind, _) => kind,
        }
    }

    /// Rounds whole rows of values to this format, as storing and reading them does.
    pub fn round(self, values: &mut [f32]) {
        match self {
            Kind::F32 => {}
            Kind::F16 => values.iter_mut().for_each(|value| *value = f16::from_f32(*value).to_f32()),
            Kind::Bf16 => values.iter_mut().for_each(|value| *value = bf16::from_f32(*value).to_f32()),
            Kind::Q8_0 => values.chunks_exact_mut(BLOCK).for_each(|block| {
                let (scale, inverse) = scale_of(block);
                let stored = f16::from_f32(scale).to_f32();
                block.iter_mut().for_each(|value| *value = (*value * inverse).round() * stored);
            }),
        }
    }

    fn size_bytes(self, values: u64) -> u64 {
        match self {
            Kind::F32 => 4 * values,
            Kind::F16 | Kind::Bf16 => 2 * values,
            Kind::Q8_0 => values / BLOCK as u64 * (2 + BLOCK as u64),
        }
    }

    fn append(self, values: &[f32], bytes: &mut Vec<u8>) {
        match self {
            Kind::F32 => values.iter().for_each(|value| bytes.extend(value.to_le_bytes())),
            Kind::F16 => values.iter().for_each(|value| bytes.extend(f16::from_f32(*value).to_le_bytes())),
            Kind::Bf16 => values.iter().for_each(|value| bytes.extend(bf16::from_f32(*value).to_le_bytes())),
            Kind::Q8_0 => values.chunks_exact(BLOCK).for_each(|block| {
                let (scale, inverse) = scale_of(block);
                bytes.extend(f16::from_f32(scale).to_le_bytes());
                bytes.extend(block.iter().map(|value| ((value * inverse).round() as i8).to_le_bytes()[0]));
            }),
        }
    }
}

/// The scale of a block of [`Kind::Q8_0`], and its inverse. As in ggml's quantize_row_q8_0_ref, codes are rounded with the scale in f32, half
/// away from zero; it is stored in f16.
fn scale_of(block: &[f32]) -> (f32, f32) {
    let scale = block.iter().fold(0.0f32, |most, value| most.max(value.abs())) / 127.0;
    (scale, if scale == 0.0 { 0.0 } else { 1.0 / scale })
}

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// llama.cpp's name.
    pub name: String,
    /// Sizes, outermost first, as in safetensors.
    pub shape: Vec<usize>,
    pub kind: Kind,
}

impl Tensor {
    fn size_bytes(&self) -> u64 {
        self.kind.size_bytes(self.shape.iter().product::<usize>() as u64)
    }
}

/// A file that is being written: header first, then the values of each tensor in the order of the header.
#[derive(Debug)]
pub struct Writer<W: Write> {
    to: W,
    tensors: std::vec::IntoIter<Tensor>,
    /// The tensor whose values come next, and the number of its values that are still missing.
    current: Option<(Tensor, u64)>,
    bytes: Vec<u8>,
}

impl<W: Write> Writer<W> {
    /// Writes the header: all keys, and where each tensor is.
    ///
    /// # Errors
    /// Fails when the output cannot be written.
    pub fn new(mut to: W, keys: &[(String, Value)], tensors: Vec<Tensor>) -> io::Result<Writer<W>> {
        let mut header = b"GGUF".to_vec();
        header.extend(3u32.to_le_bytes());
        header.extend((tensors.len() as u64).to_le_bytes());
        header.extend((keys.len() as u64).to_le_bytes());
        for (key, value) in keys {
            string(&mut header, key);
            append(&mut header, value);
        }
        let mut offset = 0u64;
        for tensor in &tensors {
            string(&mut header, &tensor.name);
            header.extend((tensor.shape.len() as u32).to_le_bytes());
            for size in tensor.shape.iter().rev() {
                header.extend((*size as u64).to_le_bytes());
            }
            header.extend(tensor.kind.id().to_le_bytes());
            header.extend(offset.to_le_bytes());
            offset = (offset + tensor.size_bytes()).next_multiple_of(ALIGNMENT);
        }
        header.resize((header.len() as u64).next_multiple_of(ALIGNMENT) as usize, 0);
        to.write_all(&header)?;
        let mut writer = Writer { to, tensors: tensors.into_iter(), current: None, bytes: Vec::new() };
        writer.next_tensor();
        Ok(writer)
    }

    fn next_tensor(&mut self) {
        self.current = self.tensors.next().map(|tensor| {
            let values = tensor.shape.iter().product::<usize>() as u64;
            (tensor, values)
        });
    }

    /// Writes the next values of the current tensor: whole rows, row-major. After its last value the next tensor begins.
    ///
    /// # Errors
    /// Fails when the output cannot be written, or there are more values than the header announced.
    pub fn write(&mut self, values: &[f32]) -> io::Result<()> {
        let Some((tensor, missing)) = &mut self.current else {
            return Err(io::Error::other("more values than the GGUF header announced"));
        };
        let left = missing
            .checked_sub(values.len() as u64)
            .ok_or_else(|| io::Error::other(format!("tensor {} has more values than its shape", tensor.name)))?;
        *missing = left;
        self.bytes.clear();
        tensor.kind.append(values, &mut self.bytes);
        if left == 0 {
            let size = tensor.size_bytes();
            self.bytes.resize(self.bytes.len() + (size.next_multiple_of(ALIGNMENT) - size) as usize, 0);
            self.next_tensor();
        }
        self.to.write_all(&self.bytes)
    }

    /// Returns the output.
    ///
    /// # Errors
    /// Fails when values are missing.
    pub fn finish(self) -> io::Result<W> {
        match self.current {
            None => Ok(self.to),
            Some((tensor, missing)) => Err(io::Error::other(format!("tensor {} lacks {missing} values", tensor.name))),
        }
    }
}

fn string(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

fn append(bytes: &mut Vec<u8>, value: &Value) {
    const U32: u32 = 4;
    const I32: u32 = 5;
    const F32: u32 = 6;
    const BOOL: u32 = 7;
    const STRING: u32 = 8;
    const ARRAY: u32 = 9;
    let mut array = |kind: u32, count: usize| {
        bytes.extend(ARRAY.to_le_bytes());
        bytes.extend(kind.to_le_bytes());
        bytes.extend((count as u64).to_le_bytes());
    };
    match value {
        Value::U32(value) => bytes.extend([U32.to_le_bytes(), value.to_le_bytes()].concat()),
        Value::F32(value) => bytes.extend([F32.to_le_bytes(), value.to_le_bytes()].concat()),
        Value::Bool(value) => {
            bytes.extend(BOOL.to_le_bytes());
            bytes.push((*value).into());
        }
        Value::String(text) => {
            bytes.extend(STRING.to_le_bytes());
            string(bytes, text);
        }
        Value::Strings(texts) => {
            array(STRING, texts.len());
            texts.iter().for_each(|text| string(bytes, text));
        }
        Value::I32s(values) => {
            array(I32, values.len());
            values.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_the_bytes_of_the_format() {
        let tensors = vec![
            Tensor { name: "a".into(), shape: vec![2, 3], kind: Kind::F16 },
            Tensor { name: "b".into(), shape: vec![1, 32], kind: Kind::Q8_0 },
        ];
        let keys = [("k".to_owned(), Value::Strings(vec!["x".into(), "yz".into()])), ("b".into(), Value::Bool(true))];
        let mut writer = Writer::new(Vec::new(), &keys, tensors).unwrap();
        writer.write(&[1.0, -2.0, 0.5]).unwrap();
        writer.write(&[0.0, 1.0, 2.0]).unwrap();
        let row: Vec<f32> = (0..32).map(|i| i as f32 - 16.0).collect();
        writer.write(&row).unwrap();
        assert!(writer.write(&[1.0]).is_err());
        let bytes = writer.finish().unwrap();
        assert_eq!(&bytes[..4], b"GGUF");
        assert_eq!(
            bytes[4..24],
            [[3, 0, 0, 0, 2, 0, 0, 0, 0, 0].as_slice(), &[0, 0, 2, 0, 0, 0, 0, 0, 0, 0]].concat()[..]
        );
        let data = bytes.len() - 32 - 64;
        assert_eq!(data % 32, 0);
        assert_eq!(
            bytes[data..data + 12],
            [1.0, -2.0, 0.5, 0.0, 1.0, 2.0].map(|v| f16::from_f32(v).to_le_bytes()).concat()[..]
        );
        let block = &bytes[data + 32..];
        assert_eq!(block[..2], f16::from_f32(16.0 / 127.0).to_le_bytes());
        assert_eq!((block[2] as i8, block[18] as i8, block[17] as i8), (-127, 0, -8));
        assert!(block[34..].iter().all(|byte| *byte == 0));
        let short =
            Writer::new(Vec::new(), &[], vec![Tensor { name: "a".into(), shape: vec![2], kind: Kind::F32 }]).unwrap();
        assert!(short.finish().unwrap_err().to_string().contains("lacks 2 values"));
    }
}
