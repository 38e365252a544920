//! Number formats as the device code names them.

use abi::DType;

/// The code of a type of [`crate::cpu::number::ANY`] in kernel parameters, as `number.cuh` has it. Panics for others,
/// which the claims keep out.
pub fn code(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::BF16 => 2,
        DType::F64 => 3,
        DType::I8 => 4,
        DType::I16 => 5,
        DType::I32 => 6,
        DType::I64 => 7,
        DType::U8 => 8,
        DType::U16 => 9,
        DType::U32 => 10,
        DType::U64 => 11,
        DType::Bool => 12,
        other => unreachable!("the claim admits only numbers and bool, not {other}"),
    }
}

/// Bytes of an element of a type of [`crate::cpu::number::MOVABLE`].
pub fn size(dtype: DType) -> usize {
    dtype.bits().expect("the claim admits only elements of whole bytes") / 8
}
