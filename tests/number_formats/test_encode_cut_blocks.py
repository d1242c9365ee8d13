"""FP8 in blocks of 128 x 128 that do not divide a weight, as in DeepSeek-V3's checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megtool.number_formats.decode import CODES, SCALE, decode
from megtool.number_formats.encode import encode
from megtool.number_formats.layout import Style, layout
from megtool.quant.algorithms.weight_grid import make_grid
from megtool.quant.fake_quant.fake_quantize import fake_weight
from megtool.quant.qparams import WeightQParams
from megtool.quant.recipes.formats import RecipeFormat

PACKING, BLOCK = "fp8:128x128", 128
FORMAT = RecipeFormat(name="f", algo="FP8_PB_WO", group_size=BLOCK)

SHAPES = [
    (576, 7168),  # DeepSeek-V3's kv_a_proj_with_mqa
    (1536, 200),
    (129, 257),
    (128, 130),
    (300, 128),
    (64, 40),
    (1, 1),
]


def weight_of(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(shape[-1], generator=generator) * 3
    return (torch.randn(shape, generator=generator) * size).bfloat16()


def bits_of(weight: Tensor) -> np.ndarray[Any, Any]:
    return weight.view(torch.int16).numpy().view(np.uint16)


def reference(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales, block by block."""
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            index = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            block = weight[index].float()
            scales[i, j] = block.abs().max() / 448
            codes[index] = (block / scales[i, j]).to(torch.float8_e4m3fn)
    return codes, scales


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("style", ["modelopt", "compressed-tensors"])
def test_codes_and_scales_are_those_of_each_block(shape: tuple[int, int], style: Style) -> None:
    weight = weight_of(shape)
    parts = layout(PACKING, shape, style)
    stored = encode(PACKING, parts, bits_of(weight), "bfloat16", (0, 0), shape, style=style)
    codes, scales = reference(weight)
    counts = tuple(-(-n // BLOCK) for n in shape)
    assert stored[SCALE].shape == (counts if style != "modelopt" else (counts[0], 1, counts[1], 1))
    assert np.array_equal(stored[SCALE].reshape(counts), scales.numpy())
    assert np.array_equal(stored[CODES].view(np.uint8), codes.view(torch.uint8).numpy())


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_decodes_the_same_numbers(shape: tuple[int, int]) -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    weight = weight_of(shape)
    parts = layout(PACKING, shape, "compressed-tensors")
    stored = encode(PACKING, parts, bits_of(weight), "bfloat16", (0, 0), shape)
    codes = torch.from_numpy(stored[CODES].view(np.uint8)).view(torch.float8_e4m3fn)
    expected = fp8._dequantize_fp8_weight(
        codes, torch.from_numpy(stored[SCALE]), [BLOCK, BLOCK], torch.float32
    )
    assert np.array_equal(decode(PACKING, parts, stored, (0, 0), shape), expected.numpy())


@pytest.mark.parametrize("shape", SHAPES)
def test_torch_grids_and_fake_weights_are_the_same(shape: tuple[int, int]) -> None:
    weight = weight_of(shape)
    codes, scales = reference(weight)
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    expected = codes.float() * wide[: shape[0], : shape[1]]
    grid = make_grid(FORMAT)
    amax = grid.amax(weight.float())
    assert torch.equal(amax, scales * 448) or torch.allclose(amax, scales * 448)
    assert torch.equal(grid.fake_quantize(weight.float()), expected)
    for solved in (None, amax.numpy()):
        qparams = WeightQParams(module="m", format=FORMAT, amax=solved)
        assert torch.equal(fake_weight(weight, qparams, dtype="bfloat16"), expected)


def test_a_box_of_a_cut_tensor() -> None:
    """Boxes that end with the tensor, or at a block, are encoded and decoded alone."""
    shape = (576, 300)
    weight = weight_of(shape)
    parts = layout(PACKING, shape)
    whole = encode(PACKING, parts, bits_of(weight), "bfloat16", (0, 0), shape)
    values = decode(PACKING, parts, whole, (0, 0), shape)
    for lo, hi in [((512, 256), shape), ((0, 256), (128, 300)), ((384, 0), (576, 128))]:
        box = tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))
        bits = np.ascontiguousarray(bits_of(weight)[box])
        part = encode(PACKING, parts, bits, "bfloat16", lo, hi)
        assert np.array_equal(decode(PACKING, parts, part, lo, hi), values[box])
    lo, hi = (500, 130), (576, 299)  # decoding may begin and end anywhere
    windows = {}
    for p in parts:
        first, end = p.window(lo, hi)
        windows[p.role] = whole[p.role][tuple(map(slice, first, end))]
    assert np.array_equal(decode(PACKING, parts, windows, lo, hi), values[500:576, 130:299])


def test_stacked_weights_have_blocks_of_their_own() -> None:
    weight = weight_of((3, 200, 140))
    parts = layout(PACKING, (3, 200, 140))
    stored = encode(PACKING, parts, bits_of(weight), "bfloat16", (0, 0, 0), (3, 200, 140))
    values = decode(PACKING, parts, stored, (0, 0, 0), (3, 200, 140))
    for number in range(3):
        codes, scales = reference(weight[number])
        wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:200, :140]
        assert np.array_equal(values[number], (codes.float() * wide).numpy())
