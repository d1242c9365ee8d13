"""Weights inside fused and cut parameters are those of the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megtool.errors import MappingError
from megtool.inference.load import load
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import ProcessGroups
from megtool.quant.calibration.canonical_weights import CanonicalWeights
from megtool.quant.fake_quant.weight_views import WeightViews
from tests.support.models import tiny_models
from tests.support.quant.loaded import open_model_source, randomize
from tests.support.worlds.gloo_world import run_world


@pytest.fixture(scope="module", params=["llama", "moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = getattr(tiny_models, request.param)(tmp_path_factory.mktemp("views") / request.param)
    return randomize(made)


def checked(folder: Path, groups: ProcessGroups, seen: list[str]) -> int:
    """Every weight that is here is read as the file has it, and written."""
    source, _, _ = open_model_source(folder)
    decoder = load(source, groups=groups, dtype="float32")
    views = WeightViews(decoder, seen)
    with CanonicalWeights(source) as weights:
        for name in views.parts:
            assert torch.equal(views.read(name), weights(name)), name
        untouched = {n: p.clone() for n, p in decoder.named_parameters()}
        for name in views.parts:
            views.write(name, 2 * weights(name))
        for name in views.parts:
            assert torch.equal(views.read(name), 2 * weights(name)), name
    changed = set(views.parameters(views.parts))
    for name, p in decoder.named_parameters():
        fully = name in changed
        assert torch.equal(p, 2 * untouched[name] if fully else untouched[name]), name
    return len(views.parts)


def test_alone(folder: Path) -> None:
    linear = [m.name for m in open_model_source(folder)[1] if m.kind == "linear"]
    assert checked(folder, ProcessGroups.alone(), linear) == len(linear)
    some = [n for n in linear if n.startswith("layers.2.")]
    assert checked(folder, ProcessGroups.alone(), some) == len(some)
    assert checked(folder, ProcessGroups.alone(), ["head"]) == 1
    assert checked(folder, ProcessGroups.alone(), []) == 0


def on_rank(rank: int, size: int, folder: str, more: dict[str, int]) -> int:
    torch.set_num_threads(1)
    groups = ProcessGroups.start(ParallelConfig(**more), device="cpu")
    try:
        linear = [m.name for m in open_model_source(Path(folder))[1] if m.kind == "linear"]
        return checked(Path(folder), groups, linear)
    finally:
        groups.stop()


@pytest.mark.parametrize("more", [{"tp": 2}, {"pp": 2}])
def test_on_two_ranks(folder: Path, more: dict[str, int]) -> None:
    linear = [m.name for m in open_model_source(folder)[1] if m.kind == "linear"]
    found = run_world(on_rank, 2, str(folder), more)
    assert found == [len(linear)] * 2 if "tp" in more else sum(found) == len(linear)


def test_experts_on_their_ranks(tmp_path: Path) -> None:
    folder = randomize(tiny_models.moe(tmp_path / "moe"))
    names = [m.name for m in open_model_source(folder)[1] if m.kind == "linear"]
    here = len([n for n in names if ".experts." not in n])
    held = here + (len(names) - here) // 2
    assert run_world(on_rank, 2, str(folder), {"tp": 2, "ep": 2, "etp": 1}) == [held] * 2


def test_a_weight_that_is_not_there(folder: Path) -> None:
    decoder = load(open_model_source(folder)[0])
    with pytest.raises(MappingError, match=r"no weight 'layers\.1\.mlp\.side\.weight'"):
        WeightViews(decoder, ["layers.1.mlp.side"])
