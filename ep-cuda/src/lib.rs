//! ONNX Runtime plugin execution provider for CUDA GPUs: claims whole decoder graphs and runs each as one node.

mod budget;
mod counters;
mod ep;
mod factory;
mod gpu;
mod graphs;
mod memory;
pub mod options;
mod pool;
mod replay;
mod run;
mod staging;
mod stream;
mod timeline;
mod transfer;

abi::export_factory!(factory::create);
