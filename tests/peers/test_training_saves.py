"""Saves of training loaded by real megatron-core, and what it trained gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megtool import verify
from tests.support.peers.forked_worlds import run_forked
from tests.support.runs.train_runs import Trained
from tests.support.worlds.gloo_world import run_world

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.peers, pytest.mark.slow]

KINDS = ("fully_reshardable", "dp_reshardable", "legacy")
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {"tied": True},
    "experts": {"experts": 4, "layout": {"ep": 2}},
}
SAVES = [
    ({"dp": 2}, 2, "fully_reshardable"),
    ({"dp": 2, "zero": 3}, 2, "fully_reshardable"),
    ({"dp": 2, "zero": 3}, 2, "dp_reshardable"),
    ({"tp": 2}, 2, "fully_reshardable"),
    ({"dp": 2}, 2, "dp_reshardable"),
]
BUCKET = 4000


def megatron(action: str, **options: Any) -> str:
    return run_forked("trained_world.py", action, json.dumps(options))


@pytest.fixture(scope="module", params=MODELS)
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A state that megatron-core trained on two replicas, saved in all of its formats."""
    folder = tmp_path_factory.mktemp("trained")
    options = {"layout": {}, **MODELS[request.param]}
    megatron("train", saves=[[k, str(folder / k)] for k in KINDS], **options)
    return folder, options


def goes_on(
    rank: int,
    size: int,
    source: str,
    target: str,
    layout: dict[str, int],
    save: str,
    settings: dict[str, Any] | None = None,
) -> list[int]:
    """Resume what is in a folder, and save it at once; gradients are bf16 as there."""
    how = {"grad_reduce_in_bf16": True, **(settings or {})}
    sizes = {axis: n for axis, n in layout.items() if axis != "zero"}
    is_sharded = "zero" in layout
    run = Trained(Path(source), sizes, kind="bfloat16", settings=how, is_fully_sharded=is_sharded)
    try:
        found = run.resume()
        assert found.has_optimizer
        with run.saver(Path(target), save) as saver:
            run.save(saver, found.iteration)
        return [found.iteration, run.optimizer.num_steps]
    finally:
        run.groups.stop()


def test_every_format_resumes_with_the_same_bits(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = trained
    states = []
    for kind in KINDS:
        run = Trained(folder / kind, kind="bfloat16")
        found = run.resume()
        assert (found.iteration, run.optimizer.num_steps) == (7, 2), kind
        states.append(run.state())
    want, *others = states
    for kind, state in zip(KINDS[1:], others, strict=True):
        assert state.keys() == want.keys()
        for name, tensor in want.items():
            assert torch.equal(state[name], tensor), (kind, name)


@pytest.mark.parametrize(("layout", "size", "kind"), SAVES, ids=str)
def test_megatron_loads_what_a_run_saved(
    trained: tuple[Path, dict[str, Any]],
    layout: dict[str, int],
    size: int,
    kind: str,
    tmp_path: Path,
) -> None:
    folder, options = trained
    layout = layout | options["layout"]
    if "tp" in layout and "ep" in layout:
        layout["etp"] = 1  # the same two ranks
    # Its buckets say in which order its layers register their parameters; nothing else here does.
    source, saved, dump = str(folder / kind), str(tmp_path / "saved"), str(tmp_path / "dump")
    said = run_world(goes_on, size, source, saved, layout, kind)
    assert said == [[7, 2]] * size
    assert verify(saved, source).verdict == "equal"
    there = {k: v for k, v in layout.items() if k not in ("dp", "zero")}
    options = options | {"grads_in_fp32": "zero" in layout}  # as its buffers would be
    loaded = megatron("load", kind=kind, folder=saved, dump=dump, **(options | {"layout": there}))
    assert "loaded [2" in loaded, loaded
    assert verify(dump, source).verdict == "equal"
    # And at a layout that is none of theirs. Megatron has one optimizer more where experts are
    # spread, and loads no state of a chain of another length; `reshard` changes that.
    if kind == "fully_reshardable" and "ep" not in layout:
        other = {"pp": 2}
        megatron("load", kind=kind, folder=saved, dump=dump + "2", **(options | {"layout": other}))
        assert verify(dump + "2", source).verdict == "equal"


@pytest.mark.parametrize("in_fp32", [False, True])
def test_megatron_loads_buckets_that_a_run_cut(in_fp32: bool, tmp_path: Path) -> None:
    """The source was trained without buckets: they are the run's own.

    megatron-core 0.16.1 writes wrong `fully_reshardable` state of several buckets itself, so it
    dumps the format that it loads.
    """
    source, saved, dump = (str(tmp_path / n) for n in ("source", "saved", "dump"))
    megatron("train", saves=[["dp_reshardable", source]], layout={})
    settings = {
        "overlap_grad_reduce": True,
        "ddp_bucket_size": BUCKET,
        "grad_reduce_in_bf16": not in_fp32,
    }
    run_world(goes_on, 2, source, saved, {"dp": 2}, "dp_reshardable", settings)
    options = {"overlap": True, "bucket_size": BUCKET, "grads_in_fp32": in_fp32, "layout": {}}
    options |= {"kind": "dp_reshardable", "dump_kind": "dp_reshardable"}
    loaded = megatron("load", folder=saved, dump=dump, **options)
    assert "loaded [2" in loaded, loaded
    assert verify(dump, source).verdict == "equal"
