//! ONNX Runtime's C ABI.
