"""`--optimizer-format none` and `--optimizer-only`: halves of a training state, in any format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megtool import reshard
from megtool.errors import CoverageError, UsageError
from megtool.formats import open_checkpoint
from megtool.options.layout import ParallelConfig
from tests.support.checkpoints.stored_arrays import stored_arrays
from tests.support.checkpoints.trained import config, write
from tests.support.errors import raises

SOURCES: dict[str, dict[str, Any]] = {
    "fully_reshardable": {"to": "torch_dist"},
    "dp_reshardable": {"to": "torch_dist", "dp": 2},
    "legacy": {"to": "megatron", "tp": 2, "pp": 2},
}


@pytest.fixture(params=SOURCES)
def trained(request: pytest.FixtureRequest, tmp_path: Path, materialize: Any) -> tuple[Path, Path]:
    """A training state, and the same in one of the optimizer formats."""
    kind = request.param
    write(tmp_path / "truth", config(), ParallelConfig(), materialize)
    reshard(tmp_path / "truth", tmp_path / "in", optimizer_format=kind, **SOURCES[kind])
    return tmp_path / "truth", tmp_path / "in"


@pytest.mark.parametrize("to", ["torch_dist", "megatron", "zarr"])
def test_weights_alone(to: str, trained: tuple[Path, Path], tmp_path: Path) -> None:
    truth, source = trained
    layout = {} if to == "zarr" else {"tp": 1, "pp": 1}
    report = reshard(
        source, tmp_path / "out", to=to, optimizer_format="none", strict=True, **layout
    )
    assert report.left_out
    assert any("that were not selected" in line for line in report.lines())
    found = open_checkpoint(tmp_path / "out")
    assert not any("optim/" in t.name or t.name.startswith("optimizer") for t in found.tensors)
    reshard(tmp_path / "out", tmp_path / "back", to="torch_dist", tp=1, pp=1)
    wanted = {
        n: a.tobytes() for n, a in stored_arrays(truth).items() if not n.startswith("optimizer.")
    }
    assert {n: a.tobytes() for n, a in stored_arrays(tmp_path / "back").items()} == wanted


def test_nothing_is_lost_of_a_run_whose_weights_alone_are_wanted(
    tmp_path: Path, materialize: Any
) -> None:
    """The format holds no iteration, which only a run needs that goes on."""
    source, out, to = tmp_path / "in", tmp_path / "out.safetensors", "safetensors"
    write(source, config(), ParallelConfig(), materialize)
    with raises(CoverageError, tensor="common state: iteration"):
        reshard(source, out, to=to, strict=True, fsync=False)
    for options in ({"optimizer_format": "none"}, {"exclude": ["optimizer.*"]}):
        report = reshard(source, out, to=to, strict=True, fsync=False, overwrite=True, **options)
        assert not any(d.is_lost for d in report.dropped)
    names = {d.name for d in report.dropped}
    assert "common state: iteration" in names


@pytest.mark.parametrize("to", ["torch_dist", "zarr"])
def test_state_alone(to: str, trained: tuple[Path, Path], tmp_path: Path) -> None:
    truth, source = trained
    layout = {} if to == "zarr" else {"tp": 1, "pp": 1}
    report = reshard(source, tmp_path / "out", to=to, optimizer_only=True, strict=True, **layout)
    assert report.left_out
    wanted = {n: a.tobytes() for n, a in stored_arrays(truth).items() if n.startswith("optimizer.")}
    found = {n: a.tobytes() for n, a in stored_arrays(tmp_path / "out").items()}
    assert found == wanted
    assert "optimizer" in open_checkpoint(tmp_path / "out").metadata["common"]
    again = {"to": "torch_dist", "optimizer_only": True}  # which lets the weights be missing
    reshard(tmp_path / "out", tmp_path / "two", tp=2, **again)  # type: ignore[arg-type]
    reshard(tmp_path / "two", tmp_path / "one", tp=1, **again)  # type: ignore[arg-type]
    assert {n: a.tobytes() for n, a in stored_arrays(tmp_path / "one").items()} == wanted


@pytest.mark.parametrize(
    "options",
    [
        {"to": "megatron"},
        {"to": "torch_dist", "optimizer_format": "dp_reshardable"},
        {"to": "torch_dist", "optimizer_format": "none"},
    ],
    ids=str,
)
def test_state_that_cannot_be_alone(
    options: dict[str, str], trained: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"needs the weights|nothing is left"):
        reshard(trained[1], tmp_path / "out", optimizer_only=True, **options)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
