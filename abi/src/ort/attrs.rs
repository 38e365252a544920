//! A node's attributes.

use super::reader::{Reader, read_tensor};
use super::status::{ort, string_from};
use super::{Api, sys};
use crate::error::Result;
use crate::graph::Attr;
use std::collections::HashMap;

/// `OrtOpAttrType`'s numbers: integers here, since a newer runtime may know more than the enum.
mod kind {
    pub const INT: i32 = 1;
    pub const INTS: i32 = 2;
    pub const FLOAT: i32 = 3;
    pub const FLOATS: i32 = 4;
    pub const STRING: i32 = 5;
    pub const STRINGS: i32 = 6;
    pub const GRAPH: i32 = 7;
    pub const TENSOR: i32 = 8;
}

/// # Safety
/// `node` is live for the call.
pub(super) unsafe fn read_attrs(reader: &Reader, node: *const sys::OrtNode) -> Result<Vec<(String, Attr)>> {
    let api = reader.api;
    let mut count = 0usize;
    // SAFETY: the caller vouches for `node`, which owns its attributes.
    unsafe {
        ort!(api, Node_GetNumAttributes(node, &raw mut count))?;
        let mut attrs = vec![std::ptr::null(); count];
        if count > 0 {
            ort!(api, Node_GetAttributes(node, attrs.as_mut_ptr(), count))?;
        }
        let mut bodies = read_bodies(reader, node)?;
        let read = |attr: *const sys::OrtOpAttr| {
            let mut name = std::ptr::null();
            ort!(api, OpAttr_GetName(attr, &raw mut name))?;
            let name = string_from(name);
            let value = match bodies.remove(&name) {
                Some(body) => body,
                None => read_attr(api, attr)?,
            };
            Ok((name, value))
        };
        attrs.into_iter().filter(|attr| !attr.is_null()).map(read).collect()
    }
}

/// The bodies of control flow, by attribute name.
///
/// # Safety
/// `node` is live for the call.
unsafe fn read_bodies(reader: &Reader, node: *const sys::OrtNode) -> Result<HashMap<String, Attr>> {
    let api = reader.api;
    let mut count = 0usize;
    // SAFETY: the caller vouches for `node`, which owns its bodies.
    unsafe {
        ort!(api, Node_GetNumSubgraphs(node, &raw mut count))?;
        if count == 0 {
            return Ok(HashMap::new());
        }
        let (mut graphs, mut names) = (vec![std::ptr::null(); count], vec![std::ptr::null(); count]);
        ort!(api, Node_GetSubgraphs(node, graphs.as_mut_ptr(), count, names.as_mut_ptr()))?;
        let bodies = graphs.into_iter().zip(names);
        let read = |(graph, name)| {
            let body = Reader::read(api, graph, reader.depth, reader.nesting + 1)?;
            Ok((string_from(name), Attr::Graph(Box::new(body))))
        };
        bodies.map(read).collect()
    }
}

/// # Safety
/// `attr` is live for the call.
unsafe fn read_attr(api: Api, attr: *const sys::OrtOpAttr) -> Result<Attr> {
    let mut type_ = 0i32;
    // SAFETY: the caller vouches for `attr`; numbers are valid for every bit pattern.
    unsafe {
        if ort!(api, OpAttr_GetType(attr, (&raw mut type_).cast())).is_err() {
            // ORT refuses to name the kinds it cannot pass on.
            return Ok(Attr::Other);
        }
        Ok(match type_ {
            kind::INT => Attr::Int(read_one(api, attr, type_)?),
            kind::FLOAT => Attr::Float(read_one(api, attr, type_)?),
            kind::INTS => Attr::Ints(read_many(api, attr, type_)?),
            kind::FLOATS => Attr::Floats(read_many(api, attr, type_)?),
            kind::STRING => {
                let bytes: Vec<u8> = read_many(api, attr, type_)?;
                Attr::String(text(bytes.strip_suffix(&[0]).unwrap_or(&bytes)))
            }
            kind::STRINGS => {
                // Each string ends in a NUL.
                let bytes: Vec<u8> = read_many(api, attr, type_)?;
                let ended = bytes.strip_suffix(&[0]);
                Attr::Strings(ended.map_or(vec![], |all| all.split(|&b| b == 0).map(text).collect()))
            }
            kind::TENSOR => {
                let mut value = std::ptr::null_mut();
                ort!(api, OpAttr_GetTensorAttributeAsOrtValue(attr, &raw mut value))?;
                let tensor = read_tensor(api, value);
                ((*api.ort()).ReleaseValue)(value);
                tensor?.map_or(Attr::Other, Attr::Tensor)
            }
            // `GRAPH` without a body among the node's.
            kind::GRAPH => Attr::Other,
            _ => Attr::Other,
        })
    }
}

/// # Safety
/// `attr` is live for the call and holds one `T`, a number type.
unsafe fn read_one<T: Default + Copy>(api: Api, attr: *const sys::OrtOpAttr, type_: i32) -> Result<T> {
    let mut value = T::default();
    let mut used = 0usize;
    // SAFETY: the caller vouches for `attr` and `T`.
    unsafe {
        let data = (&raw mut value).cast();
        ort!(api, ReadOpAttr(attr, op_attr_type(type_), data, size_of::<T>(), &raw mut used))?;
    }
    Ok(value)
}

/// # Safety
/// `attr` is live for the call and holds a list of `T`, a number type.
unsafe fn read_many<T: Default + Copy>(api: Api, attr: *const sys::OrtOpAttr, type_: i32) -> Result<Vec<T>> {
    let type_ = op_attr_type(type_);
    let mut bytes = 0usize;
    // SAFETY: the caller vouches for `attr` and `T`. The first call has no room and fails, but tells the size.
    unsafe {
        let mut nothing = T::default();
        let probe = ort!(api, ReadOpAttr(attr, type_, (&raw mut nothing).cast(), 0, &raw mut bytes));
        if bytes == 0 {
            return probe.map(|()| Vec::new());
        }
        let mut values = vec![T::default(); bytes.div_ceil(size_of::<T>())];
        let room = values.len() * size_of::<T>();
        ort!(api, ReadOpAttr(attr, type_, values.as_mut_ptr().cast(), room, &raw mut bytes))?;
        values.truncate(bytes / size_of::<T>());
        Ok(values)
    }
}

fn op_attr_type(type_: i32) -> sys::OrtOpAttrType {
    use sys::OrtOpAttrType as T;
    match type_ {
        kind::INT => T::ORT_OP_ATTR_INT,
        kind::INTS => T::ORT_OP_ATTR_INTS,
        kind::FLOAT => T::ORT_OP_ATTR_FLOAT,
        kind::FLOATS => T::ORT_OP_ATTR_FLOATS,
        kind::STRING => T::ORT_OP_ATTR_STRING,
        kind::STRINGS => T::ORT_OP_ATTR_STRINGS,
        _ => T::ORT_OP_ATTR_UNDEFINED,
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
