"""The written checkpoint, decoded, gives the logits of the model that was simulated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megtool import quantize
from megtool.inference.load import load
from megtool.model.batch import Batch
from megtool.quant.calibration.calibration_file import CalibrationFile
from megtool.quant.fake_quant.fake_quant_model import FakeQuantModel, StoredQuantization
from megtool.quant.qparams import QParams
from tests.support.quant.loaded import open_model_source, stored_quantization
from tests.support.quant.quantize_sizes import save_llama

TOKENS = torch.arange(48).view(2, 24) * 37 % 128


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("same") / "llama"
    return save_llama(folder)


def simulated(folder: Path, quantization: QParams | StoredQuantization) -> Tensor:
    source, _, points = open_model_source(folder)
    decoder = load(source, dtype="float32")
    with (
        FakeQuantModel(decoder, points, quantization, dtype="bfloat16"),
        torch.inference_mode(),
    ):
        return decoder(Batch(tokens_BS=TOKENS))


@pytest.mark.parametrize(
    "recipe",
    [
        *("fp8", "int8_sq", "int4_awq", "int4_gptq", "w4a8_awq"),
        *("nvfp4", "nvfp4_awq", "nvfp4_gptq", "mxfp4_gptq"),
    ],
)
def test_as_simulated(llama: Path, tmp_path: Path, recipe: str) -> None:
    out, kept = tmp_path / "out", tmp_path / "kept.safetensors"
    quantize(
        llama,
        out,
        recipe=recipe,
        samples=4,
        seq_length=32,
        save_calibration=kept,
        fsync=False,
        threads=1,
        device="cpu",
    )
    settlement = CalibrationFile.load(kept).qparams
    want = simulated(llama, settlement)
    got = simulated(out, stored_quantization(out, settlement))
    error = float((got - want).norm() / want.norm())
    assert error < 2e-5, error
