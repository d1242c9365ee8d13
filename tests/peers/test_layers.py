"""Layers of a training state, which real megatron-core loads as a model of so many layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megtool import reshard
from tests.support.peers.run_trained import read_with_torch, run_world

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.peers, pytest.mark.slow]

LAYERS = (3, 0, 3)


@pytest.mark.parametrize("options", [{}, {"experts": 4}], ids=["dense", "experts"])
def test_megatron_loads_the_layers_that_were_chosen(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """A layer that is named twice included: weights, master weights and moments."""
    layout = {"ep": 2} if options else {}
    saves = [["dp_reshardable", str(tmp_path / "in")]]
    saves.append(["fully_reshardable", str(tmp_path / "truth")])
    run_world("train", saves=saves, layout=layout, **options)
    want = read_with_torch(tmp_path / "truth")
    for kind in ("fully_reshardable", "dp_reshardable", "legacy"):
        at = tmp_path / kind
        cut = {"tp": 1, "ep": 2} if options else {"tp": 2}
        reshard(
            tmp_path / "in",
            at / "out",
            to="megatron" if kind == "legacy" else "torch_dist",
            optimizer_format=kind,
            layers=",".join(map(str, LAYERS)),
            strict=kind != "legacy",
            **cut,
        )
        places = {"folder": str(at / "out"), "dump": str(at / "dump")}
        run_world("load", kind=kind, layout=cut, layers=len(LAYERS), **places, **options)
        found = read_with_torch(at / "dump")
        assert set(found) == set(want)
        for name, tensor in want.items():
            if ".layers." in name:
                tensor = tensor[list(LAYERS)]
            rows = min(len(found[name]), len(tensor))
            assert torch.equal(found[name][:rows], tensor[:rows]), name
