"""Real megatron-core: what it saves we open, what we write it loads under other layouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megtool.formats.torch_dist.layout import MegatronSave, plan_torch_dist_layout
from megtool.formats.torch_dist.reader import open_checkpoint
from megtool.tensors.box import split
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.sharded import Shards, widest
from tests.support.peers.forked_worlds import run_forked
from tests.support.peers.megatron_world import expected
from tests.support.worlds.gloo_world import WorldError

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.peers


def run_world(action: str, folder: Path, **options: Any) -> str:
    return run_forked("megatron_world.py", action, str(folder), json.dumps(options))


def known(c: Catalogue) -> dict[str, np.ndarray]:
    """What every tensor must hold, by its key."""
    return {t.name: expected(t.name, t.shape, torch.float32).numpy() for t in c.tensors}


def contents(c: Catalogue) -> dict[str, np.ndarray]:
    out = {t.name: np.zeros(t.shape, t.dtype.view) for t in c.tensors}
    located = c.locate(np.arange(len(c.shards)))
    assert not located.strides
    for row, t in enumerate(c.shards.tensor.tolist()):
        array = out[c.tensors[t].name]
        lo, hi = c.shards.boxes.lo[row], c.shards.boxes.hi[row]
        box = tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))[: array.ndim]
        with c.path(int(c.extents.file[row])).open("rb") as f:
            f.seek(int(located.offset[row]))
            array[box] = np.frombuffer(f.read(array[box].nbytes), array.dtype).reshape(
                array[box].shape
            )
    return out


@pytest.fixture(scope="module", params=[{}, {"experts": 4}], ids=["dense", "moe"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint of two tensor-parallel (or expert-parallel) ranks, and the model's options."""
    folder = tmp_path_factory.mktemp("megatron") / "save"
    layout = {"ep": 2} if request.param else {"tp": 2}
    run_world("save", folder, layouts=[layout], **request.param)
    return folder, request.param


def test_what_megatron_saves_we_open(saved: Any) -> None:
    c = open_checkpoint(saved[0])
    assert c.format == "torch_dist"
    assert c.metadata["iteration"] == 7
    assert c.metadata["args"]["num_layers"] == 4
    assert c.metadata["args"]["params_dtype"] == "torch.float32"
    assert c.metadata["content_metadata"]["singleton_local_shards"] is False
    found, want = contents(c), known(c)
    assert found.keys() == want.keys()
    for name in want:
        assert np.array_equal(found[name], want[name]), name


def recut(c: Catalogue, ranks: int) -> Shards:
    """Boxes that no Megatron layout has: along the last dimension, unevenly."""
    rows = []
    for number, t in enumerate(c.tensors):
        for rank, (a, b) in enumerate(split(t.shape[-1], ranks)):
            lo, hi = [0] * len(t.shape), list(t.shape)
            lo[-1], hi[-1] = a, b
            rows.append((number, lo, hi, rank))
    return Shards.build(rows, widest(c.tensors))


def write(
    c: Catalogue, root: Path, objects: dict[str, Any], materialize: Callable[..., None]
) -> None:
    laid = plan_torch_dist_layout(
        c.tensors,
        recut(c, 3),
        num_files=3,
        objects=objects,
        megatron=MegatronSave(common=c.metadata["common"], iteration=7),
    )
    materialize(laid, root, contents(c))


def item_bytes(c: Catalogue, name: str) -> bytes:
    number, offset, length = c.objects[name].extent or (0, 0, 0)
    return c.path(number).read_bytes()[offset : offset + length]


def test_what_we_write_megatron_loads_under_other_layouts(
    saved: Any, tmp_path: Path, materialize: Callable[..., None]
) -> None:
    c, options = open_checkpoint(saved[0]), saved[1]
    objects: dict[str, Any] = {n: item_bytes(c, n) for n in c.objects}
    write(c, tmp_path, objects, materialize)
    layouts: list[dict[str, int]] = [{"tp": 2}, {"pp": 2}]
    layouts += [{"ep": 2}] if options else [{"pp": 2, "vpp": 2}]
    out = run_world("load", tmp_path, layouts=layouts, strict="raise_all", **options)
    assert out.count("loaded") == 3
    assert open_checkpoint(tmp_path).metadata["args"]["num_layers"] == 4


def test_extra_state_is_asked_for_by_default(
    saved: Any, tmp_path: Path, materialize: Callable[..., None]
) -> None:
    """Objects written as values, None as local layers have it, satisfy the default strictness."""
    c, options = open_checkpoint(saved[0]), saved[1]
    extra = [n for n in c.objects if "_extra_state/" in n]
    assert extra
    write(c, tmp_path / "with", dict.fromkeys(extra), materialize)
    run_world("load", tmp_path / "with", layouts=[{"tp": 2}], **options)
    write(c, tmp_path / "without", {}, materialize)
    with pytest.raises(WorldError, match="_extra_state"):
        run_world("load", tmp_path / "without", layouts=[{"tp": 2}], **options)
    run_world("load", tmp_path / "without", layouts=[{"tp": 2}], strict="log_unexpected", **options)
