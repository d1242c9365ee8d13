"""What calibration settled against what was written: codes, scales, caches, factors of columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megtool.quantize.verification.verify_folder import FolderVerification, verify_folder
from tests.support.checkpoints.quantized_folder import (
    QuantizedFolder,
    Tensors,
    make_quantized,
    randomize,
)
from tests.support.models import tiny_models

Change = Callable[[Tensors], None]

K = "model.layers.1.self_attn.k_proj"
V = "model.layers.1.self_attn.v_proj"
O = "model.layers.1.self_attn.o_proj"  # noqa: E741
UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, QuantizedFolder]:
    """Folders, some of them with codes and scales of one weight settled, as by AWQ with GPTQ."""
    at = tmp_path_factory.mktemp("settled")
    dense = randomize(tiny_models.llama(at / "llama", num_hidden_layers=2))
    out = {
        "fp8": make_quantized(dense, at / "fp8", algos="FP8"),
        "sq": make_quantized(dense, at / "sq", algos="W8A8_SQ_PER_CHANNEL", smooth=True),
    }
    for algo in ("W4A16_AWQ", "W4A8_AWQ"):
        one = out[algo] = make_quantized(dense, at / algo, algos=algo, group=64, smooth=True)
        held = load_file(one.path / "model.safetensors")
        stored = held[f"{UP}.weight"].to(torch.int16)
        rows = torch.stack([stored & 15, stored >> 4], dim=1).reshape(-1, stored.shape[1])
        codes = torch.where(rows > 7, rows - 16, rows).to(torch.int8)
        amax = amax_of(held[f"{UP}.weight_scale"].numpy(), 7)
        settle(one, "layers.1.mlp.up", codes=codes.numpy(), amax=amax)
    return out


def amax_of(scale: np.ndarray, largest: float) -> np.ndarray:
    """Largest magnitudes whose scales are these, to the last bit."""
    out = (scale * np.float32(largest)).astype(np.float32)
    for end in (-np.inf, np.inf):
        near = np.nextafter(out, np.float32(end))
        out = np.where(out / np.float32(largest) == scale, out, near)
        out = np.where(out / np.float32(largest) == scale, out, scale * np.float32(largest))
    assert (out / np.float32(largest) == scale).all()
    return out.astype(np.float32)


def settle(one: QuantizedFolder, module: str, **more: Any) -> None:
    """Another treatment of one module."""
    treatments = dict(one.settlement.weights)
    treatments[module] = replace(treatments[module], **more)
    one.settlement = replace(one.settlement, weights=treatments)


def proof(one: QuantizedFolder) -> FolderVerification:
    return verify_folder(one.source, one.path, one.decisions, one.settlement, threads=1)


def found(one: QuantizedFolder) -> list[tuple[str, str]]:
    return [(f.id, f.module) for f in proof(one).findings if f.severity == "error"]


def edited(name: str, work: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors: tensors.update({name: work(tensors[name].clone())})


def put(*index: Any, by: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def work(t: torch.Tensor) -> torch.Tensor:
        t[index] = by(t[index])
        return t

    return work


def exchanged(one: str, other: str) -> Change:
    return lambda ts: ts.update({one: ts[other], other: ts[one]})


W, S = f"{UP}.weight", f"{UP}.weight_scale"
DAMAGE: dict[str, tuple[Change, str]] = {
    "rows of bytes exchanged": (edited(W, lambda w: w[[1, 0, *range(2, len(w))]]), "codes"),
    "columns exchanged": (edited(W, lambda w: w[:, [1, 0, *range(2, w.shape[1])]]), "codes"),
    "one byte inverted": (edited(W, put(3, 7, by=lambda b: ~b)), "codes"),
    "nibbles of a column": (
        edited(W, put(slice(None), 7, by=lambda b: (b << 4) | (b >> 4))),
        "codes",
    ),
    "all scales larger": (edited(S, lambda s: s * 1.3), "scales"),
    "one row of scales larger": (edited(S, put(3, by=lambda s: s * 1.25)), "scales"),
    "a scale off by its last bit": (
        edited(S, put(3, 0, by=lambda s: torch.nextafter(s, torch.tensor(9.0)))),
        "scales",
    ),
}


@pytest.mark.parametrize("which", ["fp8", "sq", "W4A16_AWQ", "W4A8_AWQ"])
def test_what_was_settled_gives_no_finding(which: str, made: dict[str, QuantizedFolder]) -> None:
    assert not proof(made[which]).findings


@pytest.mark.parametrize("algo", ["W4A16_AWQ", "W4A8_AWQ"])
@pytest.mark.parametrize("what", DAMAGE)
def test_what_was_chosen_for_outputs_is_what_was_settled(
    what: str, algo: str, made: dict[str, QuantizedFolder], tmp_path: Path
) -> None:
    work, check = DAMAGE[what]
    one = made[algo].copied(tmp_path / "broken")
    one.change(work)
    assert (check, "layers.1.mlp.up") in found(one)


def test_the_first_code_that_differs_is_named(
    made: dict[str, QuantizedFolder], tmp_path: Path
) -> None:
    one = made["W4A16_AWQ"].copied(tmp_path / "broken")
    one.change(edited(W, put(8, 5, by=lambda b: b ^ 1)))  # the low half is the row above
    (finding,) = [f for f in proof(one).findings if f.id == "codes"]
    assert finding.message == "1 codes differ from the calibrated ones, the first at [16, 5]"


@pytest.mark.parametrize("amax", [0.0, 3.5])
def test_a_second_scale_that_no_code_is_multiplied_by(
    amax: float, made: dict[str, QuantizedFolder], tmp_path: Path
) -> None:
    """It is that of what was settled, or of the weights themselves."""
    one, name = made["W4A8_AWQ"].copied(tmp_path / "broken"), f"{O}.weight_scale_2"
    if amax:
        settle(one, "layers.1.attn.o", global_amax=amax)
        one.change(lambda ts: ts.update({name: torch.tensor(amax / 448)}))
    assert not proof(one).findings
    one.change(edited(name, lambda s: s * 2))
    assert found(one) == [("weight-scale-2", "layers.1.attn.o")]


CACHES: dict[str, tuple[Change, str]] = {
    "keys' scale larger": (edited(f"{K}.k_scale", lambda s: s * 4), "kv-scale"),
    "values' scale smaller": (edited(f"{V}.v_scale", lambda s: s / 8), "kv-scale"),
    "exchanged": (exchanged(f"{K}.k_scale", f"{V}.v_scale"), "kv-scale"),
    "with a dimension": (edited(f"{K}.k_scale", lambda s: s.reshape(1)), "shape"),
    "in bfloat16": (edited(f"{K}.k_scale", lambda s: s.bfloat16()), "shape"),
}


@pytest.mark.parametrize("what", CACHES)
def test_scales_of_caches_are_those_that_were_settled(
    what: str, made: dict[str, QuantizedFolder], tmp_path: Path
) -> None:
    work, check = CACHES[what]
    one = made["fp8"].copied(tmp_path / "broken")
    one.change(work)
    assert (check, "layers.1.attn.kv") in found(one)


def test_factors_beside_a_weight_are_exact(
    made: dict[str, QuantizedFolder], tmp_path: Path
) -> None:
    one = made["W4A16_AWQ"].copied(tmp_path / "broken")
    one.change(edited(f"{O}.pre_quant_scale", lambda s: (s.float() * 1.005).bfloat16()))
    assert ("columns", "layers.1.attn.o") in found(one)


def test_a_norm_with_factors_feeds_nothing_that_is_kept(
    made: dict[str, QuantizedFolder], tmp_path: Path
) -> None:
    """The kept module is the source's bit for bit, and what it multiplies is not."""
    one = made["sq"].copied(tmp_path / "broken")
    before = load_file(one.source.path / "model.safetensors")[f"{V}.weight"]

    def kept(tensors: Tensors) -> None:
        del tensors[f"{V}.weight_scale"], tensors[f"{V}.input_scale"]
        tensors[f"{V}.weight"] = before

    one.change(kept)
    one.edit("hf_quant_config.json", lambda f: f["quantization"]["exclude_modules"].append(V))
    one.edit("config.json", lambda f: f["quantization_config"]["ignore"].append(V))
    one.decisions = [
        replace(d, format=None) if d.module.name == "layers.1.attn.v" else d for d in one.decisions
    ]
    treatments = {m: t for m, t in one.settlement.weights.items() if m != "layers.1.attn.v"}
    one.settlement = replace(one.settlement, weights=treatments)
    assert found(one) == [("norm-shared", "layers.1.attn.v")]
