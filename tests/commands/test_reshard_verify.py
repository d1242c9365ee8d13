"""`reshard --verify`: the result is read back before it is put in place, and has to be the source.

Every kind of target is read back as any checkpoint is; a byte that the disk changed is an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megtool import quantize, reshard
from megtool.commands.options.reshard import ReshardOptions
from megtool.commands.reshard import reshard as reshard_with
from megtool.errors import DigestError, UsageError
from megtool.options.config_file import build_options
from megtool.options.layout import ParallelConfig
from megtool.storage.files import Files
from tests.support.checkpoints import fp8_trained, trained
from tests.support.checkpoints.optimizer_saves import EXPERTS
from tests.support.errors import raises
from tests.support.folders import stored_tensors
from tests.support.models import tiny_llama

FORMATS = ("hf", "safetensors", "dcp", "torch_dist", "megatron", "zarr", "tensorstore", "ocdbt")


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return tiny_llama.save(tmp_path / "hf")


@pytest.mark.parametrize("dtype", [None, "float16"])
@pytest.mark.parametrize("to", FORMATS)
def test_every_format_is_read_back(tmp_path: Path, hf: Path, to: str, dtype: str | None) -> None:
    count = len(stored_tensors(hf))
    there = reshard(hf, tmp_path / "a", to=to, dtype=dtype, verify=True, fsync=False)
    back = reshard(tmp_path / "a", tmp_path / "b", to="hf", verify=True, fsync=False)
    assert (there.verified, back.verified) == (count, count)
    assert reshard(hf, tmp_path / "c", to=to, fsync=False).verified is None


def test_the_report_says_so(tmp_path: Path, hf: Path) -> None:
    report = reshard(hf, tmp_path / "a", verify=True, fsync=False)
    (line,) = [text for text in report.lines() if text.split()[:1] == ["verified"]]
    assert f"{len(stored_tensors(hf))} tensors" in line
    assert report.to_json()["verified"] == len(stored_tensors(hf))


@pytest.mark.parametrize(
    "options",
    [
        {"to": "torch_dist", "tp": 2, "pp": 2},
        {"to": "megatron", "tp": 2, "pp": 2},
        {"to": "megatron", "tp": 2, "layers": "1,1"},
        {"layers": "1,0,1"},
        {"to": "torch_dist", "select": ["*norm*"]},
        {"to": "safetensors", "rename": ["model.*=x.*"]},
    ],
    ids=str,
)
def test_every_layout_and_selection(tmp_path: Path, hf: Path, options: dict[str, Any]) -> None:
    report = reshard(hf, tmp_path / "out", verify=True, fsync=False, **options)
    assert report.verified


@pytest.mark.parametrize("to", ["hf", "torch_dist", "megatron"])
def test_means_and_decoded_weights(tmp_path: Path, hf: Path, to: str) -> None:
    other = tiny_llama.save(tmp_path / "other", seed=3, dtype="float32")
    mean = reshard(
        hf,
        tmp_path / "mean",
        to=to,
        average=[other],
        average_weights="0.3,0.7",
        verify=True,
        fsync=False,
    )
    assert mean.verified == len(stored_tensors(hf))
    quantize(hf, tmp_path / "fp8", recipe="fp8_per_channel", fsync=False)
    decoded = reshard(
        tmp_path / "fp8", tmp_path / "out", to=to, dtype="bfloat16", verify=True, fsync=False
    )
    assert decoded.verified == len(stored_tensors(hf))


@pytest.mark.parametrize("model", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("optimizer", ["fully_reshardable", "dp_reshardable", "legacy", "none"])
def test_optimizer_states(
    tmp_path: Path, materialize: Any, optimizer: str, model: dict[str, Any]
) -> None:
    trained.write(tmp_path / "in", trained.config(**model), ParallelConfig(), materialize)
    to = "megatron" if optimizer == "legacy" else "torch_dist"
    report = reshard(
        tmp_path / "in",
        tmp_path / "out",
        to=to,
        optimizer_format=optimizer,
        tp=2,
        verify=True,
        fsync=False,
    )
    back = reshard(tmp_path / "out", tmp_path / "back", tp=1, verify=True, fsync=False)
    assert back.verified == report.verified


@pytest.mark.parametrize("te_version", [None, "1"])
def test_scaling_state_of_fp8(tmp_path: Path, te_version: str | None) -> None:
    ranks = fp8_trained.rank_files(tmp_path)
    report = reshard(
        ranks, tmp_path / "out", to="torch_dist", te_version=te_version, verify=True, fsync=False
    )
    assert report.verified


class ChangingFiles(Files):
    """A disk that changes one byte of a staged file whenever the file is closed."""

    def __init__(self, name: str, offset: int) -> None:
        super().__init__()
        self.name, self.offset = name, offset
        self.wrong: int | None = None

    def system(self, function: Callable[..., Any], /, *args: Any) -> Any:
        if function is os.fsync:
            return None
        if function is os.close:
            path = Path(os.readlink(f"/proc/self/fd/{args[0]}"))
            if path.name == self.name and ".megtool" in str(path):
                self.change(path)
        return super().system(function, *args)

    def change(self, path: Path) -> None:
        data = bytearray(path.read_bytes())
        if len(data) > self.offset and data[self.offset] != self.wrong:
            self.wrong = data[self.offset] ^ 1
            data[self.offset] = self.wrong
            path.write_bytes(data)


@pytest.mark.parametrize(
    ("to", "name", "offset"),
    [
        ("hf", "model.safetensors", 9000),
        ("hf", "config.json", 32),
        ("hf", "tokenizer.json", 13),
        ("torch_dist", "__0_0.distcp", 30000),
    ],
)
def test_a_byte_that_the_disk_changes_is_an_error(
    tmp_path: Path, hf: Path, to: str, name: str, offset: int
) -> None:
    def run(**more: bool) -> object:
        files = ChangingFiles(name, offset)
        options = build_options(
            ReshardOptions, {"source": hf, "destination": tmp_path / "out", "to": to, **more}
        )
        try:
            return reshard_with(options, files=files)
        finally:
            assert files.wrong is not None

    with raises(DigestError, hint="nothing was put in place"):
        run(verify=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]
    run()  # without it nothing tells


def test_a_dry_run_has_nothing_to_read_back(tmp_path: Path, hf: Path) -> None:
    with raises(UsageError, "--verify", hint=True):
        reshard(hf, tmp_path / "out", verify=True, dry_run=True)
