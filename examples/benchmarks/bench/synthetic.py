"""Synthetic: Hugging Face folders of Llama's shapes, as large as asked, of random bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megtool.dtypes import dtype as named_dtype
from megtool.formats.safetensors.reader import plan_safetensors_layout
from megtool.tensors.sharded import GlobalTensor

ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "norm", "lm_head")
"""Parts of the names of tensors that tensor parallelism leaves whole, or cuts in the first dim."""

COLUMNS = ("o_proj", "down_proj")
"""Those that it cuts in the second dimension: every row in pieces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Llama's dimensions."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int


LARGE = Shape(hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=32768)
LARGER = Shape(hidden=8192, ffn=28672, heads=64, kv_heads=8, vocab=32768)
SMALL = Shape(hidden=1024, ffn=3584, heads=16, kv_heads=4, vocab=4096)
SMOLLM2 = Shape(hidden=576, ffn=1536, heads=9, kv_heads=3, vocab=49152)


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """A checkpoint on disk: its folder, its dimensions, and the bytes of its tensors."""

    folder: Path
    shape: Shape
    num_layers: int
    num_bytes: int
    num_files: int


def llama(
    folder: Path,
    gib: float,
    *,
    dtype: str = "bfloat16",
    only: tuple[str, ...] = ("",),
    sparse: bool = False,
    num_files: int = 4,
    shape: Shape | None = None,
    finite: bool = False,
    seed: int = 0,
) -> Synthetic:
    """Write a Llama of about `gib` GiB with megtool's own layout (tensors start on pages).

    Below 1 GiB its dimensions are smaller, so that it has layers still, an even number of them,
    unless `shape` gives them. `only` keeps the tensors whose names hold one of these; with `sparse`
    all data are holes; with `finite` they are bfloat16 numbers that a model can compute with, drawn
    by `seed`.
    """
    if shape is None:
        shape = LARGE if gib >= 1 else SMALL
    kind = named_dtype(dtype)
    wanted = int(gib * 2**30)
    layers = 0
    tensors: list[GlobalTensor] = []
    while not layers or sum(t.num_bytes for t in tensors) < wanted:
        layers += 2
        tensors = [
            GlobalTensor(name=name, shape=size, dtype=kind)
            for name, size in shapes(shape, layers)
            if any(part in name for part in only)
        ]
    num_bytes = sum(t.num_bytes for t in tensors)
    laid = plan_safetensors_layout(
        tensors,
        max_shard_bytes=num_bytes // num_files + max(t.num_bytes for t in tensors),
        small_files={"config.json": configuration(shape, layers, dtype)},
    )
    folder.mkdir(parents=True)
    block = np.random.default_rng(0).integers(0, 256, (8 << 20) + 4099, np.uint8).data
    if finite:
        normal = np.random.default_rng(seed).standard_normal((4 << 20) + 2049, np.float32) * 0.02
        block = (normal.view("<u4") >> 16).astype("<u2").view(np.uint8).data
    for file in laid.catalogue.files:
        with (folder / file.path).open("wb") as out:
            for start in range(0, 0 if sparse else file.size, len(block)):
                out.write(block[: file.size - start])
            out.truncate(file.size)
    for number, offset, data in laid.fragments:
        with (folder / laid.catalogue.files[number].path).open("r+b") as out:
            out.seek(offset)
            out.write(data)
    for name, data in laid.iter_small_files():
        (folder / name).write_bytes(data)
    os.sync()
    return Synthetic(
        folder=folder,
        shape=shape,
        num_layers=layers,
        num_bytes=num_bytes,
        num_files=len(laid.catalogue.files),
    )


def without_config(made: Synthetic, folder: Path) -> Path:
    """The same tensors in a folder that does not say what model they are: hard links."""
    folder.mkdir()
    for path in made.folder.iterdir():
        if path.name != "config.json":
            os.link(path, folder / path.name)
    return folder


def shapes(shape: Shape, layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a Llama's tensors."""
    hidden, ffn = shape.hidden, shape.ffn
    kv = hidden // shape.heads * shape.kv_heads
    yield "model.embed_tokens.weight", (shape.vocab, hidden)
    for layer in range(layers):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", (hidden,)
        yield at + "self_attn.q_proj.weight", (hidden, hidden)
        yield at + "self_attn.k_proj.weight", (kv, hidden)
        yield at + "self_attn.v_proj.weight", (kv, hidden)
        yield at + "self_attn.o_proj.weight", (hidden, hidden)
        yield at + "post_attention_layernorm.weight", (hidden,)
        yield at + "mlp.gate_proj.weight", (ffn, hidden)
        yield at + "mlp.up_proj.weight", (ffn, hidden)
        yield at + "mlp.down_proj.weight", (hidden, ffn)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (shape.vocab, hidden)


def configuration(shape: Shape, layers: int, dtype: str) -> bytes:
    """Its config.json."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
    }
    return json.dumps(config, indent=2).encode()
