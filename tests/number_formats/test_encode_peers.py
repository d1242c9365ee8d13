"""Encoded weights and scales beside other projects' own: equal in every byte."""

from __future__ import annotations

import copy
import functools
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megtool.number_formats.decode import CODES, DIVISOR, SCALE, SCALE_2
from megtool.number_formats.encode import encode
from megtool.number_formats.layout import layout

pytestmark = pytest.mark.peers

PRESETS = {
    "fp8:tensor": "FP8_DEFAULT_CFG",
    "fp8:channel": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "fp8:128x128": "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    "int8:channel": "INT8_WEIGHT_ONLY_CFG",
    "int4rows:128": "INT4_BLOCKWISE_WEIGHT_ONLY_CFG",
    "mxfp8:32": "MXFP8_DEFAULT_CFG",
    "mxfp4:32": "MXFP4_DEFAULT_CFG",
    "nvfp4:16": "W4A16_NVFP4_CFG",
}
SUFFIX = {CODES: "weight", SCALE: "weight_scale", SCALE_2: "weight_scale_2"}


def _bits(t: torch.Tensor) -> np.ndarray:
    """A tensor as `DType.view` holds it."""
    if t.dtype == torch.bfloat16:
        return t.contiguous().view(torch.uint16).numpy()
    if t.itemsize == 1 and t.dtype != torch.int8:
        return t.contiguous().view(torch.uint8).numpy()
    return t.contiguous().numpy()


def _odd_rows(weight: torch.Tensor) -> None:
    """Rows that are zero, minus zero, tiny, large and on the borders of rounding."""
    weight[0] = 0
    weight[1] = -0.0
    weight[2] *= 2.0**-20 if weight.dtype != torch.float16 else 2.0**-8  # it keeps above 2^-14
    weight[3, ::5] *= 64
    weight[4] = torch.arange(weight.shape[1]) % 57 * 0.25 - 7
    weight[5, 128:] = 0


@functools.cache
def _exported(preset: str, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Any]]:
    """A tiny model's weights, and what modelopt's export made of them."""
    pytest.importorskip("modelopt")
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        architectures=["LlamaForCausalLM"],
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(dtype)
    for name in ("self_attn.o_proj", "mlp.down_proj", "mlp.up_proj"):
        _odd_rows(model.model.layers[0].get_submodule(name).weight.data)
    plain = {k: v.clone() for k, v in model.state_dict().items()}
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        tokens = torch.arange(16)[None]
        loop = (lambda m: m(tokens)) if preset[:2] in ("FP", "IN") else None
        mtq.quantize(model, copy.deepcopy(getattr(mtq, preset)), loop)
        export_hf_checkpoint(model, dtype=dtype, export_dir=folder)
        return plain, load_file(Path(folder) / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("packing", PRESETS)
def test_as_modelopt_exports(packing: str, dtype: torch.dtype) -> None:
    plain, exported = _exported(PRESETS[packing], dtype)
    compared = 0
    for name, weight in plain.items():
        if "_proj.weight" not in name:
            continue
        base, shape = name.removesuffix("weight"), tuple(weight.shape)
        parts = layout(packing, shape)
        want = {p.role: exported[base + SUFFIX[p.role]] for p in parts}
        # Fused siblings (q, k, v; gate, up) share the largest of what has one value a tensor.
        given = {}
        if "o_proj" not in name and "down_proj" not in name:
            given = {r: _bits(want[r]) for r in (SCALE, SCALE_2) if r in want and not want[r].ndim}
        kind = str(dtype).removeprefix("torch.")
        box: Any = (_bits(weight), kind, (0, 0), shape)
        found = encode(packing, parts, *box, scales=given, twice=True)
        assert set(found) == set(want)
        for p in parts:
            array = _bits(want[p.role])
            assert found[p.role].shape == array.shape == p.shape
            assert found[p.role].tobytes() == array.tobytes(), (name, p.role)
        compared += 1
    assert compared == 7


FORMATS = {
    "int8:tensor": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor"}),
    "int8:channel": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "fp8:tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8:channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8:128x128": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    ),
    "int4:channel": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}),
    "int4:128": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
    ),
    "int8words:32": (
        "pack-quantized",
        {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32},
    ),
    "nvfp4:16": (
        "nvfp4-pack-quantized",
        {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": torch.float8_e4m3fn,
        },
    ),
    "mxfp4:32": (
        "mxfp4-pack-quantized",
        {
            "num_bits": 4,
            "type": "float",
            "strategy": "group",
            "group_size": 32,
            "scale_dtype": torch.uint8,
        },
    ),
    "mxfp8:32": (
        "mxfp8-quantized",
        {
            "num_bits": 8,
            "type": "float",
            "strategy": "group",
            "group_size": 32,
            "scale_dtype": torch.uint8,
        },
    ),
}


def _compressed(packing: str, weight: torch.Tensor, kind: torch.dtype) -> dict[str, torch.Tensor]:
    """What compressed-tensors makes of a weight: its scales (in `kind`), its compressor."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    form, args = FORMATS[packing]
    given = QuantizationArgs(symmetric=True, **args)
    scheme = QuantizationScheme(targets=["Linear"], weights=given)
    rows, columns = weight.shape
    per = args.get("group_size", columns)
    grouped = weight.to(kind).reshape(rows, columns // per, per)
    low, high = grouped.amin(-1), grouped.amax(-1)
    if args["strategy"] == "tensor":
        low, high = grouped.amin(), grouped.amax()
    elif args["strategy"] == "block":
        blocks = weight.to(kind).reshape(rows // 128, 128, columns // 128, 128)
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    state = {"weight": weight}
    whole = None
    if packing.startswith("nvfp4"):
        whole = generate_gparam(grouped.amin(), grouped.amax())
        state["weight_global_scale"] = whole
    state["weight_scale"], _ = calculate_qparams(low, high, given, global_scale=whole)
    return BaseCompressor.load_from_registry(form).compress(state, scheme)


TYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
)


@pytest.mark.parametrize(
    ("packing", "dtype", "kind"),
    [(p, *pair) for p in FORMATS for pair in TYPES[: 2 if p[:2] in ("nv", "mx") else 4]],
    ids=str,
)
def test_as_compressed_tensors_compresses(
    packing: str, dtype: torch.dtype, kind: torch.dtype
) -> None:
    torch.manual_seed(1)
    columns = 370 if packing == "int4:channel" else 384
    weight = (torch.randn(256, columns) * 0.02).to(dtype)
    _odd_rows(weight)
    made = _compressed(packing, weight, kind)
    names = [str(t).removeprefix("torch.") for t in (dtype, kind)]
    parts = layout(packing, tuple(weight.shape), "compressed-tensors", scale=names[1])
    found = encode(
        packing,
        parts,
        _bits(weight),
        names[0],
        (0, 0),
        tuple(weight.shape),
        style="compressed-tensors",
        twice=True,
    )
    want = {
        CODES: made["weight_packed"] if "weight_packed" in made else made["weight"],
        SCALE: made["weight_scale"],
        DIVISOR: made.get("weight_global_scale"),
    }
    for p in parts:
        array = _bits(want[p.role])
        assert found[p.role].shape == array.shape == p.shape
        assert found[p.role].tobytes() == array.tobytes(), p.role
