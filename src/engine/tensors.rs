//! safetensors files written as a stream, so that no copy of what they hold is made (format: 8 bytes of header length,
//! a JSON header padded to 8 bytes, then the tensors one after the other).

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use serde_json::{Map, json};

use super::error::{EngineError, Result};

/// One tensor's bytes.
#[derive(Debug, Clone, Copy)]
pub enum Data<'a> {
    /// `F32`
    F32(&'a [f32]),
    /// `U8`
    U8(&'a [u8]),
}

impl Data<'_> {
    fn size_bytes(&self) -> usize {
        match self {
            Data::F32(values) => size_of_val(*values),
            Data::U8(values) => values.len(),
        }
    }

    fn dtype(&self) -> &'static str {
        match self {
            Data::F32(_) => "F32",
            Data::U8(_) => "U8",
        }
    }
}

/// A tensor to write.
#[derive(Debug, Clone, Copy)]
pub struct Tensor<'a> {
    /// Its name in the file.
    pub name: &'a str,
    /// Its dimensions.
    pub shape: &'a [usize],
    /// As many values as the shape says, row-major.
    pub data: Data<'a>,
}

/// Write and sync a file.
pub fn write(path: &Path, tensors: &[Tensor<'_>]) -> Result<()> {
    write_to(path, tensors).map_err(|source| EngineError::Io { path: path.to_path_buf(), source })
}

fn write_to(path: &Path, tensors: &[Tensor<'_>]) -> std::io::Result<()> {
    // F32 before U8: every tensor begins where its type may.
    let mut ordered: Vec<&Tensor<'_>> = tensors.iter().collect();
    ordered.sort_by_key(|tensor| matches!(tensor.data, Data::U8(_)));
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut end = 0;
    for Tensor { name, shape, data } in ordered.iter().copied() {
        let begin = end;
        end += data.size_bytes();
        header.insert((*name).to_owned(), json!({"dtype": data.dtype(), "shape": shape, "data_offsets": [begin, end]}));
    }
    let mut header = serde_json::to_vec(&header)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    for tensor in ordered {
        match tensor.data {
            Data::U8(bytes) => file.write_all(bytes)?,
            Data::F32(values) => {
                let mut bytes = [0u8; 4096];
                for values in values.chunks(bytes.len() / 4) {
                    for (bytes, value) in bytes.chunks_exact_mut(4).zip(values) {
                        bytes.copy_from_slice(&value.to_le_bytes());
                    }
                    file.write_all(&bytes[..values.len() * 4])?;
                }
            }
        }
    }
    file.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::{Dtype, SafeTensors};

    #[test]
    fn the_safetensors_crate_reads_what_is_written() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("t.safetensors");
        let values: Vec<f32> = (0..3000).map(|i| i as f32 / 7.0).collect();
        let tensors = [
            Tensor { name: "codes", shape: &[3], data: Data::U8(&[1, 2, 3]) },
            Tensor { name: "values", shape: &[3, 1000], data: Data::F32(&values) },
            Tensor { name: "none", shape: &[0], data: Data::F32(&[]) },
        ];
        write(&path, &tensors).expect("written");
        let bytes = std::fs::read(&path).expect("bytes");
        let read = SafeTensors::deserialize(&bytes).expect("a safetensors file");
        let tensor = read.tensor("values").expect("values");
        assert_eq!((tensor.dtype(), tensor.shape()), (Dtype::F32, &[3, 1000][..]));
        assert!(tensor.data().chunks_exact(4).zip(&values).all(|(b, v)| b == v.to_le_bytes()));
        assert_eq!(read.tensor("codes").expect("codes").data(), [1, 2, 3]);
        assert_eq!(read.tensor("none").expect("none").shape(), [0]);
    }
}
