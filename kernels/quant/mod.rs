//! Packed layouts of quantised weights, each with its scalar decode.

pub mod nbits;
