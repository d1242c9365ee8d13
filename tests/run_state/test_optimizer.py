"""A training state through every format and layout comes back as it was, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megtool import reshard, verify
from megtool.errors import FormatError, LayoutError, UsageError
from megtool.formats import open_checkpoint
from megtool.options.layout import ParallelConfig
from megtool.storage.files import Files
from megtool.transport.reading.reader import CheckpointReader
from tests.support.checkpoints.trained import config, write
from tests.support.checkpoints.trained_models import MODELS
from tests.support.errors import raises

HOPS = {
    "torch_dist": ("fully_reshardable", "dp_reshardable"),
    "megatron": ("legacy",),
    "zarr": (None,),
}


@st.composite
def hops(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Formats and layouts to go through."""
    out = []
    for _ in range(draw(st.integers(1, 3))):
        to = draw(st.sampled_from(sorted(HOPS)))
        if to == "zarr":
            out.append({"to": to})
            continue
        pp = draw(st.sampled_from([1, 2, 3, 4]))
        uneven = {"first_stage_layers": 2} if pp == 3 else {}
        out.append(
            uneven
            | {
                "to": to,
                "optimizer_format": draw(st.sampled_from(HOPS[to])),
                "tp": draw(st.sampled_from([1, 2])),
                "pp": pp,
                "vpp": draw(st.sampled_from([1, 2])) if pp == 2 else None,
                "ep": draw(st.sampled_from([1, 2, 4])),
                "dp": 4,
            }
        )
    return out


def content(folder: Path) -> dict[str, bytes]:
    """All tensors of a checkpoint in model space as Megatron stores them, as bytes."""
    found = open_checkpoint(folder)
    with CheckpointReader(found, Files()) as reader:
        views = {t.name: reader.open_stored(t.name) for t in found.tensors}
        return {name: np.ascontiguousarray(view.read()).tobytes() for name, view in views.items()}


@pytest.mark.parametrize(
    "name",
    [n if n in ("dense", "experts") else pytest.param(n, marks=pytest.mark.slow) for n in MODELS],
)
@settings(
    max_examples=4,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(path=hops(), overlaps=st.booleans())
def test_training_state_returns_as_it_was(
    name: str,
    path: list[dict[str, Any]],
    overlaps: bool,
    tmp_path_factory: pytest.TempPathFactory,
    materialize: Any,
) -> None:
    model = config(**MODELS[name])
    folder = tmp_path_factory.mktemp("trip")
    args = {"overlap_grad_reduce": overlaps, "ddp_bucket_size": 1000}
    write(folder / "0", model, ParallelConfig(), materialize, args=args)
    for number, hop in enumerate(path):
        if not model.moe.num_experts and "ep" in hop:
            hop = {**hop, "ep": 1}
        reshard(folder / str(number), folder / str(number + 1), fsync=False, strict=True, **hop)
        report = verify(folder / "0", folder / str(number + 1))
        assert report.exit_status == 0, list(report.lines())
    last = folder / "back"
    reshard(
        folder / str(len(path)),
        last,
        to="torch_dist",
        optimizer_format="fully_reshardable",
        tp=1,
        pp=1,
        vpp=1,
        ep=1,
        fsync=False,
        strict=True,
    )
    assert content(last) == content(folder / "0")


def test_what_buckets_keep_beside_them_is_no_loss_in_rank_files(
    tmp_path: Path, materialize: Any
) -> None:
    write(tmp_path / "a", config(), ParallelConfig(), materialize)
    reshard(
        tmp_path / "a", tmp_path / "b", optimizer_format="dp_reshardable", fsync=False, strict=True
    )
    report = reshard(tmp_path / "b", tmp_path / "c", to="megatron", fsync=False, strict=True)
    small = "optimizer.distributed.dp_group_idx_0."
    assert {n for n in report.derived["objects"] if n.startswith(small)} >= {
        f"{small}optimizer/shard_0_1",
        f"{small}per_bucket_numel/shard_0_1",
    }
    assert verify(tmp_path / "a", tmp_path / "c").exit_status == 0


def test_layouts_that_cannot_hold_the_experts(tmp_path: Path, materialize: Any) -> None:
    model = config(num_experts=4, num_experts_per_token=2, moe_ffn_hidden_size=8)
    write(tmp_path / "a", model, ParallelConfig(), materialize)
    with raises(LayoutError, "etp=2", "tp=1", "ep=1"):
        reshard(
            tmp_path / "a", tmp_path / "b", optimizer_format="dp_reshardable", etp=2, fsync=False
        )
    with raises(LayoutError, "etp=2", "tp=1", "ep=2"):
        reshard(tmp_path / "a", tmp_path / "b", to="megatron", etp=2, ep=2, fsync=False)


@pytest.mark.parametrize(
    ("lie", "said"),
    [({"num_layers": 2}, "a layer 3"), ({"num_experts": 2}, "an expert 3")],
)
def test_args_of_a_smaller_model(
    lie: dict[str, int], said: str, tmp_path: Path, materialize: Any
) -> None:
    model = config(num_experts=4, num_experts_per_token=2, moe_ffn_hidden_size=8)
    write(tmp_path / "a", model, ParallelConfig(), materialize)
    reshard(tmp_path / "a", tmp_path / "b", optimizer_format="dp_reshardable", fsync=False)
    (common,) = tmp_path.glob("b/iter_*/common.pt")
    tree = torch.load(common, weights_only=False)
    vars(tree["args"]).update(lie)
    torch.save(tree, common)
    with pytest.raises(FormatError, match=said):
        reshard(tmp_path / "b", tmp_path / "c", tp=2, fsync=False)


@pytest.mark.parametrize("to", ["megatron", "zarr", "dcp"])
def test_what_is_said_of_another_format_is_refused(
    to: str, tmp_path: Path, materialize: Any
) -> None:
    write(tmp_path / "a", config(), ParallelConfig(), materialize)
    options: list[dict[str, Any]] = [{"bridge": True}, {"core_version": "0.16"}]
    for option in options:
        with pytest.raises(UsageError, match=f"has no effect with --to {to}"):
            reshard(tmp_path / "a", tmp_path / "b", to=to, **option)
