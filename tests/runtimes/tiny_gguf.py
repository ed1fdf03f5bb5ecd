"""A language model of one layer, written as a GGUF file: what llama.cpp loads, and small enough to make in a test."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

WIDTH, FEED_FORWARD, HEADS, CONTEXT = 32, 64, 2, 512
VOCABULARY = "a the one sea lighthouse light keeper night ship sails home"
WORDS = tuple(f"\u2581{word}" for word in VOCABULARY.split())  # as a tokenizer marks the space before a word
_UNKNOWN, _CONTROL, _NORMAL, _BYTE = 2, 3, 1, 6
_U32, _I32, _F32, _STRING, _ARRAY = 4, 5, 6, 8, 9
_ALIGNMENT = 32


def write_tiny_gguf(path: Path, *, seed: int = 1) -> None:
    """A llama with random weights that says words: nothing but they has weights towards the output."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    kinds = [_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 256, *[_NORMAL] * len(WORDS)]
    facts: list[tuple[str, int, Any]] = [
        ("general.architecture", _STRING, "llama"),
        ("general.name", _STRING, "tiny"),
        ("llama.context_length", _U32, CONTEXT),
        ("llama.embedding_length", _U32, WIDTH),
        ("llama.block_count", _U32, 1),
        ("llama.feed_forward_length", _U32, FEED_FORWARD),
        ("llama.attention.head_count", _U32, HEADS),
        ("llama.attention.head_count_kv", _U32, HEADS),
        ("llama.attention.layer_norm_rms_epsilon", _F32, 1e-5),
        ("llama.rope.dimension_count", _U32, WIDTH // HEADS),
        ("llama.vocab_size", _U32, len(pieces)),
        ("tokenizer.ggml.model", _STRING, "llama"),
        ("tokenizer.ggml.tokens", _STRING, pieces),
        ("tokenizer.ggml.scores", _F32, [-float(n) for n in range(len(pieces))]),
        ("tokenizer.ggml.token_type", _I32, kinds),
        ("tokenizer.ggml.unknown_token_id", _U32, 0),
        ("tokenizer.ggml.bos_token_id", _U32, 1),
        ("tokenizer.ggml.eos_token_id", _U32, 2),
    ]
    shapes = {
        "token_embd.weight": (WIDTH, len(pieces)),
        "output_norm.weight": (WIDTH,),
        "output.weight": (WIDTH, len(pieces)),
        "blk.0.attn_norm.weight": (WIDTH,),
        "blk.0.attn_q.weight": (WIDTH, WIDTH),
        "blk.0.attn_k.weight": (WIDTH, WIDTH),
        "blk.0.attn_v.weight": (WIDTH, WIDTH),
        "blk.0.attn_output.weight": (WIDTH, WIDTH),
        "blk.0.ffn_norm.weight": (WIDTH,),
        "blk.0.ffn_gate.weight": (WIDTH, FEED_FORWARD),
        "blk.0.ffn_up.weight": (WIDTH, FEED_FORWARD),
        "blk.0.ffn_down.weight": (FEED_FORWARD, WIDTH),
    }
    dice = random.Random(seed)
    tables, data = [], b""
    for name, shape in shapes.items():
        rows = shape[1] if len(shape) == 2 else 1
        silent = rows - len(WORDS) if name == "output.weight" else 0
        values = [
            1.0 if "norm" in name else 0.0 if row < silent else dice.gauss(0, 1)
            for row in range(rows)
            for _ in range(shape[0])
        ]
        tables.append(_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, len(data)))
        data += _padded(struct.pack(f"<{len(values)}f", *values))
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(facts))
    head += b"".join(_text(name) + _value(kind, value) for name, kind, value in facts) + b"".join(tables)
    path.write_bytes(_padded(head) + data)


def _value(kind: int, value: Any) -> bytes:
    if isinstance(value, list):
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + b"".join(_scalar(kind, item) for item in value)
    return struct.pack("<I", kind) + _scalar(kind, value)


def _scalar(kind: int, value: Any) -> bytes:
    return _text(value) if kind == _STRING else struct.pack({_U32: "<I", _I32: "<i", _F32: "<f"}[kind], value)


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % _ALIGNMENT)
