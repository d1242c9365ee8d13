"""Weights are quantized by numpy alone, with the bytes they have where torch is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megtool import quantize
from tests.support.folders import contents
from tests.support.models import family_models, tiny_models

ALONE = """
import sys
from pathlib import Path
from megtool import quantize
quantize(Path(sys.argv[1]), Path(sys.argv[2]), recipe=sys.argv[3], fsync=False)
sys.exit("torch" in sys.modules)
"""


@pytest.mark.parametrize(
    "recipe",
    [
        "fp8_per_channel",
        "fp8_block128",
        "int8_weight_only",
        "int4_weight_only",
        "mxfp8",
        "mxfp4",
        "mxfp4_experts",
    ],
)
def test_the_same_bytes(tmp_path: Path, recipe: str) -> None:
    assert torch.float8_e4m3fn  # loaded here
    if recipe == "mxfp4_experts":
        pytest.importorskip("transformers")
        source = family_models.save("gpt_oss", tmp_path / "source")
    else:
        source = tiny_models.llama(tmp_path / "source", num_hidden_layers=2)
    quantize(source, tmp_path / "with", recipe=recipe, fsync=False)
    told = [str(source), str(tmp_path / "without"), recipe]
    done = subprocess.run([sys.executable, "-c", ALONE, *told], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or "torch was imported"
    assert contents(tmp_path / "without") == contents(tmp_path / "with")
