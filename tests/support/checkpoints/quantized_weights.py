"""Weights quantized by other projects' code, and what that code decodes them to."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Quantized:
    """One weight: `stored` tensors by what follows the module's name, and what they decode to."""

    stored: Tensors
    decoded: torch.Tensor
    config: dict[str, Any]


def _compressed(
    weights: Mapping[str, Any], form: str, weight: torch.Tensor, *, scale: torch.dtype | None = None
) -> Quantized:
    """What compressed-tensors stores of a weight, and reads again."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    rows, cols = weight.shape
    per = {
        "tensor": (rows, cols),
        "channel": (1, cols),
        "group": (1, args.group_size),
        "tensor_group": (1, args.group_size),
        "block": tuple(args.block_structure or (1, 1)),
    }[_strategy(args)]
    nr, nc = -(-rows // per[0]), -(-cols // per[1])
    padded = torch.nn.functional.pad(weight.float(), (0, nc * per[1] - cols, 0, nr * per[0] - rows))
    blocks = padded.reshape(nr, per[0], nc, per[1])
    low, high = blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))
    more: dict[str, Any] = {}
    if _strategy(args) == "tensor_group":
        more["global_scale"] = (448.0 * 6.0 / weight.float().abs().max()).reshape(1)
    by, zero = calculate_qparams(low, high, args, **more)
    by = by.to(scale or by.dtype)
    state = {"weight": weight, "weight_scale": by, "weight_zero_point": zero}
    if _strategy(args) == "tensor":
        state["weight_scale"], state["weight_zero_point"] = by.reshape(1), zero.reshape(1)
    if more:
        state["weight_global_scale"] = more["global_scale"]
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(state, scheme)
    decoded = compressor.decompress(dict(stored), scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": json.loads(args.model_dump_json())}
        },
        "ignore": ["lm_head"],
    }
    return Quantized(stored, decoded, config)


def _strategy(args: Any) -> str:
    return str(getattr(args.strategy, "value", args.strategy))


def _ct(form: str, **weights: Any) -> Callable[[torch.Tensor], Quantized]:
    return lambda w: _compressed(weights, form, w)


def _deepseek(weight: torch.Tensor) -> Quantized:
    """128 x 128 blocks, as in the kernel published with DeepSeek-V3: ragged at the edges."""
    rows, cols = weight.shape
    nr, nc = -(-rows // 128), -(-cols // 128)
    wide = torch.zeros(nr * 128, nc * 128)
    wide[:rows, :cols] = weight.float()
    blocks = wide.reshape(nr, 128, nc, 128)
    by = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / 448.0
    codes = (blocks / by[:, None, :, None]).to(torch.float8_e4m3fn)
    decoded = (codes.float() * by[:, None, :, None]).to(torch.bfloat16)
    stored = {
        "weight": codes.reshape(nr * 128, nc * 128)[:rows, :cols].contiguous(),
        "weight_scale_inv": by,
    }
    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    return Quantized(stored, decoded.reshape(nr * 128, nc * 128)[:rows, :cols], config)


def _modelopt(kind: str) -> Callable[[torch.Tensor], Quantized]:
    def make(weight: torch.Tensor) -> Quantized:
        pytest.importorskip("modelopt")
        return {
            "fp8": _modelopt_fp8,
            "channel": _modelopt_channel,
            "blocks": _modelopt_blocks,
            "int8": _modelopt_int8,
            "int4": _modelopt_int4,
            "nvfp4": _modelopt_nvfp4,
            "svdquant": _modelopt_svdquant,
            "mxfp8": _modelopt_mxfp8,
            "mxfp4": _modelopt_mxfp4,
        }[kind](weight)

    return make


def _modelopt_config(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **more}


def _modelopt_fp8(weight: torch.Tensor) -> Quantized:
    from modelopt.torch.export.quant_utils import from_quantized_weight, to_quantized_weight

    by = weight.float().abs().max() / 448.0
    codes = to_quantized_weight(weight, by, "fp8")
    decoded = from_quantized_weight(codes, by, "fp8", torch.float32)
    stored = {"weight": codes, "weight_scale": by, "input_scale": torch.tensor(0.5)}
    return Quantized(stored, decoded, _modelopt_config("FP8"))


def _modelopt_channel(weight: torch.Tensor) -> Quantized:
    from modelopt.torch.export.quant_utils import to_quantized_weight

    by = weight.float().abs().amax(dim=1) / 448.0
    codes = to_quantized_weight(weight, by, "fp8_pc_pt")
    stored = {"weight": codes, "weight_scale": by}
    config = _modelopt_config("FP8_PER_CHANNEL_PER_TOKEN")
    return Quantized(stored, codes.float() * by[:, None], config)


def _modelopt_blocks(weight: torch.Tensor) -> Quantized:
    from modelopt.torch.quantization.qtensor import FP8QTensor

    nr, nc = weight.shape[0] // 128, weight.shape[1] // 128
    sizes = {-1: 128, -2: 128}
    by = weight.float().reshape(nr, 128, nc, 128).abs().amax(dim=(1, 3)) / 448.0
    made, _ = FP8QTensor.quantize(weight, by, block_sizes=sizes)
    decoded = made.dequantize(torch.float32, scale=by, block_sizes=sizes)
    stored = {"weight": made._quantized_data, "weight_scale": by[:, None, :, None].contiguous()}
    return Quantized(stored, decoded, _modelopt_config("fp8_pb_wo"))


def _modelopt_int8(weight: torch.Tensor) -> Quantized:
    from modelopt.torch.export.quant_utils import from_quantized_weight, to_quantized_weight

    by = weight.float().abs().amax(dim=1) / 127.0
    codes = to_quantized_weight(weight, by, "int8_sq")
    columns = torch.rand(weight.shape[1]).add(0.5).to(torch.bfloat16)
    decoded = from_quantized_weight(codes, by, "int8_sq", torch.float32) * columns.float()
    stored = {
        "weight": codes,
        "weight_scale": by,
        "input_scale": torch.tensor(0.5),
        "pre_quant_scale": columns,
    }
    return Quantized(stored, decoded, _modelopt_config("W8A8_SQ_PER_CHANNEL"))


def _modelopt_int4(weight: torch.Tensor) -> Quantized:
    from modelopt.torch.export.quant_utils import to_quantized_weight

    rows, cols = weight.shape
    by = weight.float().reshape(rows, cols // 128, 128).abs().amax(dim=2) / 7.0
    packed = to_quantized_weight(weight, by, "int4_awq", block_size=128)
    spread = by.repeat_interleave(128, dim=1)
    codes = (weight / spread).round().clamp(-8, 7).to(torch.int8)
    columns = torch.rand(cols).add(0.5).to(torch.bfloat16)
    stored = {
        "weight": packed,
        "weight_scale": by,
        "weight_scale_2": torch.tensor(0.25),
        "pre_quant_scale": columns,
    }
    config = _modelopt_config("W4A8_AWQ", group_size=128)
    return Quantized(stored, codes * spread * columns.float(), config)


def _modelopt_nvfp4(weight: torch.Tensor) -> Quantized:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    made, by, second = NVFP4QTensor.quantize(weight, 16)
    decoded = made.dequantize(torch.bfloat16, scale=by, double_scale=second, block_sizes={-1: 16})
    stored = {"weight": made._quantized_data, "weight_scale": by, "weight_scale_2": second}
    return Quantized(stored, decoded, _modelopt_config("NVFP4", group_size=16))


def _modelopt_svdquant(weight: torch.Tensor) -> Quantized:
    """As transformers' models are exported, with the branch as ModelOpt's `fold_weight` adds it."""
    from modelopt.torch.quantization.model_calib import svd

    columns = torch.linspace(0.5, 2, weight.shape[1]).bfloat16()
    up, down = svd((weight / columns).bfloat16(), 5)
    made = _modelopt_nvfp4((weight / columns - up @ down).bfloat16())
    codes, scale = made.stored["weight"], made.stored["weight_scale"].float()
    low_high = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat((values, -values))[low_high.int()]
    residual = values * (scale * made.stored["weight_scale_2"]).repeat_interleave(16, 1)
    product = (up.double() @ down.double()).float()
    stored = made.stored | {
        "weight_quantizer._svdquant_lora_a": down,
        "weight_quantizer._svdquant_lora_b": up,
        "pre_quant_scale": columns,
    }
    config = _modelopt_config("NVFP4_SVD", group_size=16)
    return Quantized(stored, ((residual + product) * columns.float()).bfloat16(), config)


def _modelopt_mxfp8(weight: torch.Tensor) -> Quantized:
    from modelopt.torch.quantization.qtensor import MXFP8QTensor

    made, by = MXFP8QTensor.quantize(weight)
    decoded = made.dequantize(torch.bfloat16, scale=by)
    stored = {"weight": made._quantized_data, "weight_scale": by}
    return Quantized(stored, decoded, _modelopt_config("MXFP8", group_size=32))


def _modelopt_mxfp4(weight: torch.Tensor) -> Quantized:
    from modelopt.torch.quantization.qtensor import MXFP4QTensor

    made, by = MXFP4QTensor.quantize(weight, block_size=32)
    decoded = made.dequantize(torch.bfloat16, scale=by, block_sizes={-1: 32})
    stored = {"weight": made._quantized_data, "weight_scale": by.reshape(weight.shape[0], -1)}
    return Quantized(stored, decoded, _modelopt_config("mxfp4", group_size=32))


def gpt_oss(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What transformers decodes gpt-oss's experts to."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    decoded: torch.Tensor = convert_moe_packed_tensors(blocks, scales)
    return decoded


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
MAKERS: dict[str, Callable[[torch.Tensor], Quantized]] = {
    "deepseek": _deepseek,
    "fp8 tensor": _ct("float-quantized", num_bits=8, type="float", strategy="tensor"),
    "fp8 channel": _ct("float-quantized", num_bits=8, type="float", strategy="channel"),
    "fp8 block": _ct(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[64, 32]
    ),
    "int8 channel": _ct("int-quantized", num_bits=8, type="int", strategy="channel"),
    "int8 tensor": _ct("int-quantized", num_bits=8, type="int", strategy="tensor"),
    "int8 uneven": _ct(
        "int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False
    ),
    "int4 group": _ct("pack-quantized", **_INT4),
    "int4 uneven": _ct("pack-quantized", **_INT4, symmetric=False),
    "int4 channel": _ct("pack-quantized", num_bits=4, type="int", strategy="channel"),
    "int8 words": _ct("pack-quantized", **{**_INT4, "num_bits": 8}, symmetric=False),
    "nvfp4": _ct(
        "nvfp4-pack-quantized",
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
        scale_dtype="torch.float8_e4m3fn",
        zp_dtype="torch.float8_e4m3fn",
    ),
    "mxfp4": _ct(
        "mxfp4-pack-quantized",
        num_bits=4,
        type="float",
        strategy="group",
        group_size=32,
        scale_dtype="torch.uint8",
        zp_dtype="torch.uint8",
    ),
    "mxfp8": _ct(
        "mxfp8-quantized",
        num_bits=8,
        type="float",
        strategy="group",
        group_size=32,
        scale_dtype="torch.uint8",
        zp_dtype="torch.uint8",
    ),
    "modelopt fp8": _modelopt("fp8"),
    "modelopt fp8 channel": _modelopt("channel"),
    "modelopt fp8 blocks": _modelopt("blocks"),
    "modelopt int8": _modelopt("int8"),
    "modelopt int4": _modelopt("int4"),
    "modelopt nvfp4": _modelopt("nvfp4"),
    "modelopt svdquant": _modelopt("svdquant"),
    "modelopt mxfp8": _modelopt("mxfp8"),
    "modelopt mxfp4": _modelopt("mxfp4"),
}
"""Ways to quantize a matrix; those of modelopt need rows and columns of whole blocks of 128."""


def write(
    folder: Path, tensors: Tensors, quantization: Any, *, parts: int = 1, **more: Any
) -> Path:
    """A Hugging Face folder, its tensors dealt to `parts` files in turn."""
    folder.mkdir(parents=True)
    config = {"torch_dtype": "bfloat16", "quantization_config": quantization, **more}
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    for i in range(parts):
        some = {n: tensors[n].contiguous() for n in names[i::parts]}
        save_file(some, folder / f"model-{i + 1:05d}-of-{parts:05d}.safetensors")
    return folder
