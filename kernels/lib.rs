//! What ONNX ops mean and how they run: op table, claim, partition, plan, kernels. No ORT types.

pub mod build;
pub mod cpu;
pub mod eval;
pub mod fact;
pub mod kernel;
pub mod op;
pub mod ops;
pub mod par;
pub mod settings;
pub mod weights;
