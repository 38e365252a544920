"""Model generators for tests, the demo and the benchmark: numpy and onnx only, no torch, no transformers.

writer      streams a graph and its external data to a folder
weights     where weights come from: random int4 pools
decoder     the pieces that every decoder graph of onnxruntime-genai's exporter is made of
genai       genai_config.json and tokenizer files
dense       llama-style decoders of any size
qwen35      hybrid (gated delta rule + attention) decoders of any size
smollm2     an exact conversion of a real GGUF checkpoint
single_op   one-node models, for measuring a kernel alone
inventory   op inventories, to compare a generated graph with a real export
"""
