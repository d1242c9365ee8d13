"""The cast of MXFP4 to NVFP4: every value is kept, or the weight is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megtool import quantize
from megtool.errors import CalibrationError
from megtool.quant.algorithms.mxfp4_cast import find_exponents, solve_cast
from megtool.quant.algorithms.weight_grid import make_grid
from megtool.quant.recipes.formats import RecipeFormat
from megtool.quantize.report import QuantizeReport
from tests.support.errors import raises
from tests.support.models import tiny_models
from tests.support.quant.write_runs import canonical_values

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
MXFP4 = make_grid(RecipeFormat(name="m", algo="MXFP4", group_size=32))
GRIDS = {
    f"{algo}:{group}": make_grid(RecipeFormat(name="f", algo=algo, group_size=group))
    for algo, group in (
        ("NVFP4", 16),
        ("W4A16_NVFP4", 16),
        ("W4A16_NVFP4", 32),
        ("W4A8_NVFP4_FP8", 32),
    )
}


def blocks(exponents: list[int], *, seed: int = 0) -> Tensor:
    """`[8, 32 * len(exponents)]` in MXFP4, with the largest code in every block."""
    of = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 8, (8, len(exponents), 32), generator=of)
    codes[:, :, [0, 16]] = 7
    signs = torch.randint(0, 2, codes.shape, generator=of) * 2 - 1
    scale = torch.tensor([2.0**e for e in exponents])[:, None]
    return (FP4[codes] * signs * scale).reshape(8, -1)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=list(GRIDS))
@pytest.mark.parametrize("top", [-100, -6, 0, 90])
def test_every_value_is_kept(grid: object, top: int) -> None:
    span = 15 if grid.algo == "W4A8_NVFP4_FP8" else 17  # type: ignore[attr-defined]
    one, other = blocks([top - span, top - 3, top]), blocks([top - 5, top - span + 1], seed=1)
    one[2, 32:64] = 0
    second, amaxes = solve_cast({"one": one, "other": other}, grid)  # type: ignore[arg-type]
    for name, weight in (("one", one), ("other", other)):
        got = grid.fake_quantize(weight, amaxes[name], second)  # type: ignore[attr-defined]
        assert torch.equal(got, weight)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=list(GRIDS))
def test_a_span_that_does_not_fit_is_refused(grid: object) -> None:
    span = 15 if grid.algo == "W4A8_NVFP4_FP8" else 17  # type: ignore[attr-defined]
    weight = blocks([-span - 1, 0])
    with raises(CalibrationError, hint="keep this module") as caught:
        solve_cast({"a.up": weight}, grid)  # type: ignore[arg-type]
    assert (caught.value.tensor, caught.value.error_id) == ("a.up.weight", "inexact-cast")
    assert f"2^-{span + 1}" in caught.value.message
    # Codes that all can be halved fit under the next larger scale.
    weight[:, :32] = torch.where(torch.arange(32) % 2 == 0, 2.0, -4.0) * 2.0 ** (-span - 1)
    second, amaxes = solve_cast({"a": weight}, grid)  # type: ignore[arg-type]
    assert torch.equal(grid.fake_quantize(weight, amaxes["a"], second), weight)  # type: ignore[attr-defined]


def test_what_is_not_mxfp4_is_refused() -> None:
    weight = blocks([0, 1])
    weight[3, 40] = 1.01
    with raises(CalibrationError, hint="cast") as caught:
        solve_cast({"a": weight}, GRIDS["NVFP4:16"])
    assert caught.value.message.startswith("1 of 32 blocks are not MXFP4 numbers")


def test_exponents_of_a_block() -> None:
    rows = torch.zeros(4, 16)
    rows[0, :2] = torch.tensor([6.0, 0.5])
    rows[1, :2] = torch.tensor([4.0, 2.0])  # 4, 2; 2, 1; 1, 0.5
    rows[2, :2] = torch.tensor([1.5, -3.0])  # 3, 6; 1.5, 3
    low, high, is_exact = find_exponents(rows, 16)
    assert bool(is_exact.all())
    assert low[:3, 0].tolist() == [0, 0, -1]
    assert high[:3, 0].tolist() == [0, 2, 0]
    assert int(high[3]) < int(low[3])


def test_no_worse_than_modelopts_cast() -> None:
    """Where ModelOpt's cast is lossless, ours takes the weight; its global scale, if blocks use
    the whole range of codes."""
    pytest.importorskip("modelopt")
    from modelopt.torch.quantization.utils.numeric_utils import mxfp4_to_nvfp4_global_amax

    exponents = [-9, -3, 2, 8]
    weight = blocks(exponents)
    bits = torch.tensor([127 + e for e in exponents], dtype=torch.uint8).repeat(8, 1)
    theirs, told = mxfp4_to_nvfp4_global_amax(bits)
    assert told["pct_lossless"] == 100.0
    ours, _ = solve_cast({"a": weight}, GRIDS["NVFP4:16"])
    assert ours == theirs


def test_a_checkpoint_in_mxfp4_becomes_nvfp4(tmp_path: Path) -> None:
    source = tiny_models.llama(tmp_path / "plain", num_hidden_layers=1)
    quantize(source, tmp_path / "mxfp4", recipe="mxfp4", threads=1, fsync=False)
    out = tmp_path / "nvfp4"
    report = quantize(
        tmp_path / "mxfp4",
        out,
        recipe="nvfp4_from_mxfp4",
        synthetic=True,
        samples=2,
        seq_length=16,
        threads=1,
        fsync=False,
    )
    assert isinstance(report, QuantizeReport)
    assert report.proof is not None
    want, got = canonical_values(tmp_path / "mxfp4"), canonical_values(out)
    assert want.keys() == got.keys()
    assert all((want[n] == got[n]).all() for n in want)
    with raises(CalibrationError, hint="cast") as caught:
        quantize(
            source,
            tmp_path / "no",
            recipe="nvfp4_from_mxfp4",
            synthetic=True,
            samples=2,
            seq_length=16,
            threads=1,
            fsync=False,
        )
    assert caught.value.tensor is not None
    assert not (tmp_path / "no").exists()
