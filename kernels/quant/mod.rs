//! Packed layouts of quantised weights, each with its scalar decode.

pub mod fragments;
pub mod nbits;
#[cfg(test)]
mod tests;
