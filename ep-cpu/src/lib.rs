//! ONNX Runtime plugin execution provider for CPUs.
