"""genai_config.json and tokenizer files for a model folder that onnxruntime-genai loads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class GenaiModel:
    """What genai_config.json says of one decoder."""

    type: str
    vocab_size: int
    context_length: int
    hidden_size: int
    head_size: int
    heads: int
    kv_heads: int
    layers: int
    bos: int = 0
    eos: int | Sequence[int] = 2
    pad: int = 0
    hybrid: bool = False
    position_ids: bool = False
    provider_options: list[dict] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Write genai_config.json."""
        inputs = {"input_ids": "input_ids", "attention_mask": "attention_mask"}
        if self.position_ids:
            inputs["position_ids"] = "position_ids"
        inputs |= {"past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"}
        outputs = {"logits": "logits", "present_key_names": "present.%d.key", "present_value_names": "present.%d.value"}
        if self.hybrid:
            inputs |= {"past_conv_names": "past.%d.conv", "past_recurrent_names": "past.%d.recurrent"}
            outputs |= {"present_conv_names": "present.%d.conv", "present_recurrent_names": "present.%d.recurrent"}
        config = {
            "model": {
                "bos_token_id": self.bos,
                "context_length": self.context_length,
                "decoder": {
                    "session_options": {"log_id": "onnxruntime-genai", "provider_options": self.provider_options},
                    "filename": "model.onnx",
                    "head_size": self.head_size,
                    "hidden_size": self.hidden_size,
                    "inputs": inputs,
                    "outputs": outputs,
                    "num_attention_heads": self.heads,
                    "num_hidden_layers": self.layers,
                    "num_key_value_heads": self.kv_heads,
                },
                "eos_token_id": self.eos if isinstance(self.eos, int) else list(self.eos),
                "pad_token_id": self.pad,
                "type": self.type,
                "vocab_size": self.vocab_size,
            },
            "search": {"do_sample": False, "max_length": self.context_length, "past_present_share_buffer": True},
        }
        (folder / "genai_config.json").write_text(json.dumps(config, indent=4))


def byte_alphabet() -> list[str]:
    """The 256 printable characters that byte-level BPE writes bytes as, in byte order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def write_tokenizer(
    folder: Path,
    tokens: Sequence[str],
    merges: Sequence[str],
    special: Sequence[int],
    ids: tuple[int, int, int],
    chat_template: str | None = None,
    individual_digits: bool = False,
) -> None:
    """Write a byte-level BPE tokenizer.

    Args: `tokens` in id order; `merges` as "left right"; `special` the ids that are never split;
    `ids` = (bos, eos, pad); `individual_digits` splits numbers into digits before merging.
    """
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    added = [
        {
            "id": i,
            "content": tokens[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i in special
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]}
        if individual_digits
        else byte_level,
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": list(merges),
        },
    }
    bos, eos, pad = (tokens[i] for i in ids)
    config = {
        "add_prefix_space": False,
        "added_tokens_decoder": {str(item.pop("id")): item for item in (dict(a) for a in added)},
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "unk_token": tokens[special[0]],
        "model_max_length": 1 << 30,
        "tokenizer_class": "GPT2Tokenizer",
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
        (folder / "chat_template.jinja").write_text(chat_template)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False))


def write_byte_tokenizer(folder: Path) -> None:
    """A tokenizer of three special tokens and the 256 bytes, for models with random weights."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_alphabet()]
    write_tokenizer(folder, tokens, [], [0, 1, 2], (0, 2, 0))
