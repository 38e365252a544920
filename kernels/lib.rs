//! What ONNX ops mean and how they run: op table, claim, partition, plan, kernels. No ORT types.

pub mod arena;
pub mod build;
pub mod claim;
pub mod cpu;
pub mod cuda;
pub mod eval;
pub mod experts;
pub mod explain;
pub mod fact;
pub mod fuse;
pub mod instance;
pub mod kernel;
pub mod op;
pub mod ops;
pub mod par;
pub mod plan;
pub mod quant;
pub mod settings;
mod shape_program;
pub mod shapes;
#[cfg(test)]
mod testing;
pub mod weights;
