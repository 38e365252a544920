//! What ONNX ops mean and how they run: op table, claim, partition, plan, kernels. No ORT types.
