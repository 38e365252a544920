//! Packed layouts of quantised weights, each with its scalar decode.

pub mod nbits;
#[cfg(test)]
mod tests;
