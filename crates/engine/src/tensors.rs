//! Writes safetensors files as a stream and reads them tensor by tensor, without an additional copy of the data
//! (format: 8 bytes of header length, a JSON header padded to 8 bytes, then the tensors one after another).

use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use safetensors::tensor::{Dtype, Metadata};
use serde_json::{Map, json};

use super::error::{EngineError, Result};
use super::load::read_values;
use crate::modelcard::{TensorDtype, TensorLocation};

/// Maximum length of a header, in bytes.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Minimum number of values that one thread checks for NaN and infinity.
const CHUNK: usize = 1 << 16;

/// The data of one tensor.
#[derive(Debug, Clone, Copy)]
pub enum Data<'a> {
    /// Values of type `F32`.
    F32(&'a [f32]),
    /// Bytes of type `U8`.
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
    /// The tensor's name in the file.
    pub name: &'a str,
    /// The size of each dimension.
    pub shape: &'a [usize],
    /// The values, row-major; their number must match the shape.
    pub data: Data<'a>,
}

/// Writes a safetensors file and syncs it to disk.
pub fn write(path: &Path, tensors: &[Tensor<'_>]) -> Result<()> {
    write_to(path, tensors).map_err(|source| EngineError::Io { path: path.to_path_buf(), source })
}

/// Writes and syncs a safetensors file with state that a run resumes from: every value must be finite.
pub fn write_finite(path: &Path, tensors: &[Tensor<'_>]) -> Result<()> {
    let is_finite = |tensor: &&Tensor<'_>| match tensor.data {
        Data::F32(values) => values.par_iter().with_min_len(CHUNK).all(|value| value.is_finite()),
        Data::U8(_) => true,
    };
    match tensors.iter().find(|tensor| !is_finite(tensor)) {
        Some(tensor) => Err(EngineError::StateNotFinite { what: format!("the tensor {}", tensor.name) }),
        None => write(path, tensors),
    }
}

fn write_to(path: &Path, tensors: &[Tensor<'_>]) -> std::io::Result<()> {
    // F32 tensors come before U8, so that every tensor is aligned.
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

/// A safetensors file whose tensors are read one by one.
#[derive(Debug)]
pub struct Reader {
    path: PathBuf,
    file: File,
    header: Metadata,
    /// Offset of the first tensor in the file.
    begin: u64,
}

impl Reader {
    /// Opens a safetensors file and reads its header.
    pub fn open(path: &Path) -> Result<Self> {
        let io = |source| EngineError::Io { path: path.to_path_buf(), source };
        let damaged = |why: String| EngineError::Checkpoint(format!("{}: {why}", name(path)));
        let file = File::open(path).map_err(io)?;
        let length = file.metadata().map_err(io)?.len();
        let mut size = [0; 8];
        file.read_exact_at(&mut size, 0).map_err(io)?;
        let size = u64::from_le_bytes(size);
        if size > MAX_HEADER_BYTES || size + 8 > length {
            return Err(damaged(format!("the file's header claims a length of {size} bytes")));
        }
        let mut header = vec![0; size as usize];
        file.read_exact_at(&mut header, 8).map_err(io)?;
        let header: Metadata = serde_json::from_slice(&header).map_err(|why| damaged(why.to_string()))?;
        let begin = 8 + size;
        if begin + header.data_len() as u64 != length {
            return Err(damaged(format!(
                "the file has {length} bytes, but its header says {}",
                begin + header.data_len() as u64
            )));
        }
        Ok(Self { path: path.to_path_buf(), file, header, begin })
    }

    /// Reads a tensor's values; `None` if there is no F32 tensor of that name.
    pub fn f32s(&self, tensor: &str) -> Result<Option<Vec<f32>>> {
        let Some((begin, length)) = self.place(tensor, Dtype::F32, 4)? else { return Ok(None) };
        let location = TensorLocation {
            name: tensor.to_owned(),
            file: name(&self.path),
            dtype: TensorDtype::F32,
            shape: vec![length],
            offset_bytes: begin,
            scale: None,
            four_bit: None,
        };
        read_values(&self.file, &location).map(Some).map_err(|source| self.io(source))
    }

    /// Reads a tensor's bytes; `None` if there is no U8 tensor of that name.
    pub fn u8s(&self, tensor: &str) -> Result<Option<Vec<u8>>> {
        let Some((begin, length)) = self.place(tensor, Dtype::U8, 1)? else { return Ok(None) };
        let mut bytes = vec![0; length];
        self.file.read_exact_at(&mut bytes, begin).map_err(|source| self.io(source))?;
        Ok(Some(bytes))
    }

    /// Offset of a tensor in the file, and its number of values of `size` bytes each.
    fn place(&self, tensor: &str, dtype: Dtype, size: usize) -> Result<Option<(u64, usize)>> {
        let Some(info) = self.header.info(tensor).filter(|info| info.dtype == dtype) else { return Ok(None) };
        let (begin, end) = info.data_offsets;
        let length = info.shape.iter().try_fold(1_usize, |all, of| all.checked_mul(*of));
        match length.filter(|length| length.checked_mul(size) == end.checked_sub(begin)) {
            Some(length) if end <= self.header.data_len() => Ok(Some((self.begin + begin as u64, length))),
            Some(_) | None => {
                let why = format!(
                    "{}: the shape of the tensor {tensor} does not match the place of its data in the file",
                    name(&self.path)
                );
                Err(EngineError::Checkpoint(why))
            }
        }
    }

    fn io(&self, source: std::io::Error) -> EngineError {
        EngineError::Io { path: self.path.clone(), source }
    }
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::SafeTensors;

    #[test]
    fn a_tensor_is_read_exactly_and_the_rest_of_its_file_is_not() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("t.safetensors");
        let values: Vec<f32> = (0..3_000_000).map(|i| f32::from_bits(i * 1_431 + 7)).chain([f32::NAN]).collect();
        // A sparse file of 64 GiB: far too large to hold in memory or to read within the test.
        let (hole, small) = (64_usize << 30, values.len() * 4);
        let header = json!({
            "values": {"dtype": "F32", "shape": [values.len()], "data_offsets": [0, small]},
            "codes": {"dtype": "U8", "shape": [3], "data_offsets": [small, small + 3]},
            "hole": {"dtype": "U8", "shape": [hole], "data_offsets": [small + 3, small + 3 + hole]},
        });
        let header = header.to_string();
        let mut file = File::create(&path).expect("a file");
        file.write_all(&(header.len() as u64).to_le_bytes()).expect("written");
        file.write_all(header.as_bytes()).expect("written");
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).chain([1, 2, 3]).collect();
        file.write_all(&bytes).expect("written");
        file.set_len((8 + header.len() + small + 3 + hole) as u64).expect("a hole");

        let reader = Reader::open(&path).expect("a header");
        let read = reader.f32s("values").expect("readable").expect("there");
        assert!(read.len() == values.len() && read.iter().zip(&values).all(|(a, b)| a.to_bits() == b.to_bits()));
        assert_eq!(reader.u8s("codes").expect("readable"), Some(vec![1, 2, 3]));
        assert_eq!((reader.f32s("codes").expect("readable"), reader.f32s("none").expect("readable")), (None, None));
        file.set_len(100).expect("cut");
        assert!(Reader::open(&path).expect_err("cut").to_string().contains("header claims"));
    }

    #[test]
    fn values_that_are_not_finite_are_named_and_not_written() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("t.safetensors");
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let tensors = [
                Tensor { name: "good", shape: &[1], data: Data::F32(&[0.0]) },
                Tensor { name: "bad", shape: &[2], data: Data::F32(&[0.0, bad]) },
            ];
            let error = write_finite(&path, &tensors).expect_err("not finite");
            assert!(matches!(&error, EngineError::StateNotFinite { what } if what == "the tensor bad"), "{error}");
            assert!(!path.exists());
        }
        write_finite(&path, &[Tensor { name: "good", shape: &[1], data: Data::F32(&[f32::MAX]) }]).expect("written");
    }

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
