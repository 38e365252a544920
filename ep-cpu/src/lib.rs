//! ONNX Runtime plugin execution provider for CPUs: claims whole decoder graphs and runs each as one node.

mod ep;
mod factory;
pub mod options;
mod run;

abi::export_factory!(factory::create);
