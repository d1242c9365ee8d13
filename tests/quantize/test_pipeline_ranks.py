"""`quantize` under torchrun: what the processes share, what the first does, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megtool import quantize
from megtool.quant.calibration.calibration_file import CalibrationFile
from megtool.quantize.report import QuantizeReport
from tests.support.models import tiny_text
from tests.support.worlds.torchrun import torchrun

pytestmark = pytest.mark.slow
TOLD = ("--samples", "5", "--seq-length", "24", "--device", "cpu", "-q", "--json", "--no-fsync")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    folder = tiny_text.save_wide(tmp_path_factory.mktemp("ranks") / "hf", num_layers=2)
    (folder.parent / "text.txt").write_text("The rain fell in torrents, except at intervals. " * 8)
    return folder


def ran(source: Path, at: Path, *more: str) -> dict[str, Any]:
    done = torchrun(2, "quantize", str(source), str(at), *more, *TOLD)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize("axes", [[], ["--tp", "2"]], ids=str)
def test_formats_are_chosen_and_measured(folder: Path, tmp_path: Path, axes: list[str]) -> None:
    recipe = ("--recipe", "auto_nvfp4_fp8", "--bits", "7")
    text, kept = str(folder.parent / "text.txt"), tmp_path / "kept"
    evaluated = ("--eval-data", text, "--eval-tokens", "64", "--save-calibration", str(kept))
    found = ran(folder, tmp_path / "out", *recipe, *evaluated, *axes)
    alone = quantize(
        *(folder, tmp_path / "alone"),
        **{"recipe": "auto_nvfp4_fp8", "bits": 7, "samples": 5, "seq_length": 24, "device": "cpu"},
        **{"eval_data": text, "eval_tokens": 64, "fsync": False},
    )
    assert isinstance(alone, QuantizeReport)
    wanted = alone.to_json()
    assert [f["modules"] for f in found["formats"]] == [f["modules"] for f in wanted["formats"]]
    assert found["auto"]["chosen"] == pytest.approx(wanted["auto"]["chosen"], rel=1e-3)
    after = found["evaluation"]["perplexity_after"]
    assert after == pytest.approx(wanted["evaluation"]["perplexity_after"], rel=1e-3)
    assert CalibrationFile.load(kept).sensitivities is not None
    assert not list(tmp_path.glob(".out*")), "nothing of the work is left"


def test_processes_with_nothing_to_share_are_refused(folder: Path, tmp_path: Path) -> None:
    line = ["quantize", str(folder), str(tmp_path / "out"), "--recipe", "fp8_per_channel", "-q"]
    done = torchrun(2, *line, "--tp", "2")
    assert done.returncode
    assert done.stderr.count("2 processes, and the recipe needs no data") == 1
    assert not list(tmp_path.iterdir())


def test_stages_are_refused_before_any_work(folder: Path, tmp_path: Path) -> None:
    line = ["quantize", str(folder), str(tmp_path / "out"), "--recipe", "auto_nvfp4_fp8"]
    for more in ([], ["--dry-run"]):
        done = torchrun(2, *line, "--pp", "2", "-q", *more)
        assert done.returncode
        assert done.stderr.count("by kl_div cannot be measured with --pp 2") == 1
        assert not list(tmp_path.iterdir())


@pytest.mark.peers
@pytest.mark.parametrize("axes", [["--tp", "2"], ["--pp", "2"]], ids=str)
def test_modelopt_calibrates_in_a_layout(folder: Path, tmp_path: Path, axes: list[str]) -> None:
    """Weights and their scales are those of one process, byte for byte; inputs' nearly."""
    recipe = ("--recipe", "fp8", "--backend", "modelopt", "--offload-activations")
    found = ran(folder, tmp_path / "out", *recipe, *axes)
    alone = quantize(
        *(folder, tmp_path / "alone"),
        **{"recipe": "fp8", "backend": "modelopt", "samples": 5, "seq_length": 24},
        **{"device": "cpu", "fsync": False},
    )
    assert isinstance(alone, QuantizeReport)
    assert "by ModelOpt" in found["calibration"]["data"]
    tensors, wanted = (load_file(tmp_path / n / "model.safetensors") for n in ("out", "alone"))
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if name.endswith("input_scale"):
            torch.testing.assert_close(tensors[name], tensor, rtol=1e-5, atol=0)
        else:
            bits = [t.reshape(-1).view(torch.uint8) for t in (tensors[name], tensor)]
            assert torch.equal(*bits), name
