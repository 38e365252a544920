//! ONNX Runtime plugin execution provider for CUDA GPUs: claims whole decoder graphs and runs each as one node.

mod budget;
mod pool;
mod timeline;
