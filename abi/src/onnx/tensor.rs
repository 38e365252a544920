//! `TensorProto` -> [`Initializer`], with every size checked.

use super::model_error;
use super::proto::TensorProto;
use crate::tensor::{DType, HostTensor};
use crate::{Initializer, InitializerData, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};

/// Tensors of at most this many elements are read: shape arithmetic and attributes-as-inputs are that small.
pub const READ_LIMIT: usize = 4096;

/// What a tensor states of itself, checked.
struct Header {
    place: String,
    dtype: DType,
    shape: Vec<usize>,
    elements: usize,
    /// `None` for strings.
    bytes: Option<usize>,
}

impl Header {
    fn read(tensor: &TensorProto, place: String) -> Result<Self> {
        let fail = |problem: String| Err(model_error(&place, problem));
        let Some(dtype) = DType::from_onnx(tensor.data_type) else {
            return fail(format!("unknown element type {}", tensor.data_type));
        };
        let shape: Option<Vec<usize>> = tensor.dims.iter().map(|&d| d.try_into().ok()).collect();
        let Some(shape) = shape else {
            return fail(format!("negative dimension in {:?}", tensor.dims));
        };
        let elements = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        let Some(elements) = elements.filter(|&n| n < isize::MAX as usize / 16) else {
            return fail(format!("{shape:?} holds more elements than can be addressed"));
        };
        let bytes = dtype.bytes(elements);
        Ok(Self { place, dtype, shape, elements, bytes })
    }

    fn size_error<T>(&self, got: impl std::fmt::Display) -> Result<T> {
        let expected = self.bytes.unwrap_or(0);
        let Self { dtype, shape, .. } = self;
        let problem = format!("holds {got}, but {dtype}{shape:?} takes {expected} bytes");
        Err(model_error(&self.place, problem))
    }

    fn host(&self, bytes: &[u8]) -> Result<HostTensor> {
        HostTensor::from_bytes(self.dtype, &self.shape, bytes)
            .map_or_else(|| self.size_error(format_args!("{} bytes", bytes.len())), Ok)
    }
}

/// Reads an initializer. `folder` is where external data lies; `None` when the model came as bytes.
pub fn initializer(tensor: &TensorProto, place: String, folder: Option<&Path>) -> Result<Initializer> {
    let header = Header::read(tensor, place)?;
    let small = header.elements <= READ_LIMIT && header.bytes.is_some();
    let data = if tensor.data_location == 1 {
        external(tensor, &header, folder, small)?
    } else {
        let size = check_size(tensor, &header)?;
        match small {
            true => InitializerData::Inline(header.host(&inline_bytes(tensor, &header, size))?),
            false => InitializerData::Unread,
        }
    };
    Ok(Initializer { dtype: header.dtype, shape: header.shape, data })
}

/// An initializer of the tensor's type and shape whose data are not looked at.
pub fn unread(tensor: &TensorProto, place: String) -> Result<Initializer> {
    let Header { dtype, shape, .. } = Header::read(tensor, place)?;
    let data = InitializerData::Unread;
    Ok(Initializer { dtype, shape, data })
}

/// Reads a tensor attribute, whatever its size; `None` for strings and external data.
pub fn attribute(tensor: &TensorProto, place: String) -> Result<Option<HostTensor>> {
    let header = Header::read(tensor, place)?;
    if tensor.data_location == 1 || header.bytes.is_none() {
        return Ok(None);
    }
    let size = check_size(tensor, &header)?;
    Ok(Some(header.host(&inline_bytes(tensor, &header, size))?))
}

/// Bytes that the tensor's own data take; an error when the shape asks for another number.
fn check_size(tensor: &TensorProto, header: &Header) -> Result<usize> {
    let Some(expected) = header.bytes else { return Ok(0) };
    if let Some(raw) = &tensor.raw_data {
        return match raw.len() == expected {
            true => Ok(expected),
            false => header.size_error(format_args!("{} bytes", raw.len())),
        };
    }
    let bits = header.dtype.bits().unwrap_or(8);
    let (items, per_item) = match header.dtype {
        DType::F32 | DType::C64 => (tensor.float_data.len(), 4),
        DType::F64 | DType::C128 => (tensor.double_data.len(), 8),
        DType::I64 => (tensor.int64_data.len(), 8),
        DType::U64 | DType::U32 => (tensor.uint64_data.len(), bits / 8),
        // Sub-byte types are packed into bytes first, and each byte takes an item.
        _ => (tensor.int32_data.len(), bits.div_ceil(8)),
    };
    match items.checked_mul(per_item) == Some(expected) {
        true => Ok(expected),
        false => header.size_error(format_args!("{items} items of {per_item} bytes")),
    }
}

/// The tensor's data as little-endian bytes; `check_size` has passed and gave `size`.
fn inline_bytes(tensor: &TensorProto, header: &Header, size: usize) -> Vec<u8> {
    if let Some(raw) = &tensor.raw_data {
        return raw.to_vec();
    }
    fn join<T, const N: usize>(items: &[T], bytes: impl Fn(&T) -> [u8; N]) -> Vec<u8> {
        items.iter().flat_map(bytes).collect()
    }
    match header.dtype {
        DType::F32 | DType::C64 => join(&tensor.float_data, |v| v.to_le_bytes()),
        DType::F64 | DType::C128 => join(&tensor.double_data, |v| v.to_le_bytes()),
        DType::I64 => join(&tensor.int64_data, |v| v.to_le_bytes()),
        DType::U64 => join(&tensor.uint64_data, |v| v.to_le_bytes()),
        DType::U32 => join(&tensor.uint64_data, |v| (*v as u32).to_le_bytes()),
        _ => {
            // Each int32 holds one element (or packed byte) in its low bytes.
            let width = size.checked_div(tensor.int32_data.len()).unwrap_or(1);
            let low = |v: &i32| v.to_le_bytes().into_iter().take(width);
            tensor.int32_data.iter().flat_map(low).collect()
        }
    }
}

/// Finds external data, and reads it if `small`.
fn external(tensor: &TensorProto, header: &Header, folder: Option<&Path>, small: bool) -> Result<InitializerData> {
    let error = |problem: String| model_error(&header.place, problem);
    let entry = |key: &str| {
        let found = tensor.external_data.iter().find(|e| e.key == key);
        found.map(|e| e.value.as_str())
    };
    let number = |key: &str| match entry(key).map(str::parse::<u64>) {
        None => Ok(None),
        Some(Ok(n)) => Ok(Some(n)),
        Some(Err(_)) => Err(error(format!("external data: {key} '{}' is no number", entry(key).unwrap_or("")))),
    };
    let Some(expected) = header.bytes else {
        return Err(error("external data cannot hold strings".into()));
    };
    let location = entry("location").unwrap_or("");
    let Some(location) = inside(location) else {
        return Err(error(format!("external data lies in '{location}', which is not inside the model's folder")));
    };
    let offset = number("offset")?.unwrap_or(0);
    let len = number("length")?.unwrap_or(expected as u64);
    if len != expected as u64 {
        return header.size_error(format_args!("{len} bytes of external data"));
    }
    let Some(end) = offset.checked_add(len).filter(|&end| end <= i64::MAX as u64) else {
        return Err(error(format!("external data at {offset} of {len} bytes lies beyond any file")));
    };
    let Some(folder) = folder else { return Ok(InitializerData::Unread) };
    let path = folder.join(location);
    match std::fs::metadata(&path) {
        Ok(meta) if meta.len() < end => {
            let (shown, have) = (path.display(), meta.len());
            return Err(error(format!("external data ends at byte {end} of '{shown}', which has {have}")));
        }
        Err(io) if small => {
            return Err(error(format!("external data '{}' cannot be read: {io}", path.display())));
        }
        // Weights are not needed here: their file may be elsewhere.
        _ => {}
    }
    if !small {
        let len = expected;
        return Ok(InitializerData::External { path, offset, len });
    }
    let mut bytes = vec![0; expected];
    let read = File::open(&path).and_then(|f| f.read_exact_at(&mut bytes, offset));
    if let Err(io) = read {
        return Err(error(format!("external data '{}' cannot be read: {io}", path.display())));
    }
    Ok(InitializerData::Inline(header.host(&bytes)?))
}

/// `location` as a path that stays below the model's folder, or `None`. Links are followed: model hubs keep
/// their files behind them, and only the machine's owner can make them.
fn inside(location: &str) -> Option<PathBuf> {
    let path = Path::new(location);
    let stays = |c: Component<'_>| matches!(c, Component::Normal(_) | Component::CurDir);
    let names_file = path.file_name().is_some() && !location.contains('\0');
    (names_file && path.components().all(stays)).then(|| path.to_path_buf())
}
