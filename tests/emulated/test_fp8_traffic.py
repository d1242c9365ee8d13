"""Launches and bytes of an FP8 linear layer on the emulated GPU are those that the model counts."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megtool.kernels import launch
from tests.support.emulated.device import build

TOKENS, INPUTS, OUTPUTS = 384, 256, 512  # as in the script that is measured
PASSES = {
    "_amax": "amax",
    "_cast_both": "cast",
    "_quantize_both": "cast",
    "_quantize_squares": "cast",
    "_scaled_mm": "product",
    "add_": "sum",
    "copy_": "sum",
}
SMALL = {"_scale", "_record"}


@pytest.fixture(scope="module")
def model(checkout: Path) -> ModuleType:
    path = checkout / "examples" / "benchmarks" / "fp8_traffic.py"
    spec = importlib.util.spec_from_file_location("fp8_traffic", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["fp8_traffic"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def measured(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None or not launch.is_installed():
        pytest.skip("no C++ compiler to build the emulated GPU with, or no Triton")
    if torch.version.cuda is not None:
        pytest.skip("a torch with CUDA cannot be given another device")
    library = build(tmp_path_factory.mktemp("device"), compiler)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.emulated.fp8_traffic", str(library)],
        cwd=checkout,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr[-5000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def kind(name: str) -> str:
    """What a pass of the model is among the measured ones."""
    first = name.partition(" ")[0]
    return {"wgrad": "product", "dgrad": "product"}.get(first, first)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_the_counts_are_those_of_the_model(
    measured: list[dict[str, Any]], model: ModuleType, recipe: str
) -> None:
    shape = model.Shape(tokens=TOKENS, inputs=INPUTS, outputs=OUTPUTS)
    lines = [line for line in measured if line["recipe"] == recipe]
    assert len(lines) == 4
    has_products = recipe in ("delayed", "tensorwise")
    for line in lines:
        expected = model.passes(shape, "megtool", recipe, is_first=line["first"])[line["part"]]
        wanted = [(kind(p.name), p.moved) for p in expected if p.moved]
        launches = line["launches"]
        if not has_products:  # those are in bfloat16 there
            wanted = [w for w in wanted if w[0] != "product"]
            launches = [pair for pair in launches if pair[0] in PASSES]
        large = [(PASSES[name], moved) for name, moved in launches if name in PASSES]
        assert [name for name, _ in large] == [name for name, _ in wanted]
        for (_, got), (_, want) in zip(large, wanted, strict=True):
            # Scales come on top: four bytes for each 32 elements with mxfp8.
            assert want <= got <= 1.07 * want
        small = [name for name, _ in launches if name not in PASSES]
        assert set(small) <= SMALL
        if has_products:
            assert len(small) == sum(not p.moved for p in expected)


def test_weights_are_cast_in_the_first_micro_batch_alone(model: ModuleType) -> None:
    shape = model.Shape(tokens=TOKENS, inputs=INPUTS, outputs=OUTPUTS)
    for recipe in model.RECIPES:
        first, later = (
            [p.name for p in model.passes(shape, "megtool", recipe, is_first=is_first)["forward"]]
            for is_first in (True, False)
        )
        assert "cast of weight" in first
        assert "cast of weight" not in later


def test_fp8_pays_where_products_are_large(model: ModuleType) -> None:
    """The conclusion that the page states."""
    for recipe, gpu in (("delayed", model.H100), ("blockwise", model.H100), ("mxfp8", model.B200)):
        gains = []
        for tokens, size in ((512, 2048), (8192, 8192)):
            shape = model.Shape(tokens=tokens, inputs=size, outputs=size)
            plain, ours = (
                model.step_seconds(shape, engine, recipe, gpu, micro_batches=4)
                for engine in ("bf16", "megtool")
            )
            gains.append(plain / ours)
        assert gains[0] < 1 < 1.3 < gains[1]
