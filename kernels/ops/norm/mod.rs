//! Norms over rows: RMS, layer, skip, gated and Lp.

mod cuda;
pub mod gated;
pub mod layer;
pub mod lp;
mod rows;
pub mod skip;
#[cfg(test)]
mod tests;
