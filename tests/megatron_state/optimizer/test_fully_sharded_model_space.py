"""Optimizer state of older Megatron versions is read as the state it is, and refused when not."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megtool import reshard, verify
from megtool.errors import FormatError
from megtool.formats import open_checkpoint
from megtool.formats.torch_dist.gathered import COALESCED
from megtool.megatron_state.optimizer.fully_sharded_model_space import (
    has_flattened_cells,
    read_fully_sharded_model_space,
)
from megtool.options.layout import ParallelConfig
from megtool.source.open import open_source
from tests.support.checkpoints.old_formats import as_fragments, as_gathered
from tests.support.checkpoints.trained import config, write
from tests.support.errors import raises

MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {"tied_embeddings": True},
    "experts": {"num_experts": 4, "num_experts_per_token": 2, "moe_ffn_hidden_size": 8},
}
LAYOUTS = [ParallelConfig(), ParallelConfig(tp=2, pp=2), ParallelConfig(dp=4)]


def equal(a: Path, b: Path) -> None:
    report = verify(a, b)
    assert report.exit_status == 0, list(report.lines())


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=5, suppress_health_check=list(HealthCheck))
@given(
    parallel=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 1000),
    own_class=st.booleans(),
    prefix=st.sampled_from(["", "chained_0."]),
)
def test_fragments_are_the_state_they_are_cut_from(
    name: str,
    parallel: ParallelConfig,
    seed: int,
    own_class: bool,
    prefix: str,
    tmp_path_factory: pytest.TempPathFactory,
    materialize: Any,
) -> None:
    folder = tmp_path_factory.mktemp("old")
    write(folder / "new", config(**MODELS[name]), parallel, materialize)
    as_fragments(
        folder / "new", folder / "old", materialize, seed=seed, own_class=own_class, prefix=prefix
    )
    old = open_checkpoint(folder / "old")
    assert has_flattened_cells(old)
    read = read_fully_sharded_model_space(old)
    read.check()
    assert {t.name.replace("fp32_param", "param"): t.shape for t in read.tensors} == {
        t.name: t.shape for t in open_checkpoint(folder / "new").tensors
    }
    equal(folder / "new", folder / "old")


@pytest.mark.parametrize("optimizer", ["fully_reshardable", "dp_reshardable"])
def test_fragments_become_what_megatron_loads_today(
    optimizer: str, tmp_path: Path, materialize: Any
) -> None:
    write(tmp_path / "new", config(), ParallelConfig(tp=2), materialize)
    as_fragments(tmp_path / "new", tmp_path / "old", materialize)
    out = tmp_path / "out"
    reshard(
        tmp_path / "old", out, to="torch_dist", optimizer_format=optimizer, tp=1, pp=2, strict=True
    )
    equal(tmp_path / "new", out)
    found = open_checkpoint(out)
    assert found.metadata["content_metadata"]["distrib_optim_sharding_type"] == optimizer
    assert "mcore_data" not in found.metadata
    assert not any("fp32_param" in t.name for t in found.tensors)


def test_fragments_that_cannot_be(tmp_path: Path, materialize: Any) -> None:
    write(tmp_path / "new", config(), ParallelConfig(), materialize)
    as_fragments(tmp_path / "new", tmp_path / "old", materialize, own_class=False)
    path = tmp_path / "old" / "iter_0000007" / ".metadata"
    found = pickle.loads(path.read_bytes())
    name = "optimizer.state.exp_avg.output_layer.weight"
    for shape in (torch.Size([40, 15]), torch.Size([40]), (40, "16"), torch.Size([0, 16])):
        found.mcore_data[name] = {"nd_reformulated_orig_global_shape": shape}
        path.write_bytes(pickle.dumps(found))
        with raises(FormatError, match="it had", tensor=name):
            open_source(tmp_path / "old")
        open_source(tmp_path / "old", optimizer=False)
        assert name in open_source(tmp_path / "old", lenient=True).catalogue


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("overlaps", [False, True], ids=["one bucket", "many buckets"])
def test_gathered_state_is_that_of_its_buckets(
    name: str, overlaps: bool, tmp_path: Path, materialize: Any
) -> None:
    args = {"overlap_grad_reduce": overlaps, "ddp_bucket_size": 1000}
    write(tmp_path / "new", config(**MODELS[name]), ParallelConfig(tp=2), materialize, args=args)
    layout = {"tp": 2, "pp": 2, "dp": 2} | ({"ep": 2} if name == "experts" else {})
    reshard(tmp_path / "new", tmp_path / "buckets", optimizer_format="dp_reshardable", **layout)
    as_gathered(tmp_path / "buckets", tmp_path / "gathered", materialize)
    opened = open_checkpoint(tmp_path / "gathered")
    assert opened.metadata[COALESCED] is True
    assert not any("param_state" in name for name in opened.objects)
    opened.check()
    equal(tmp_path / "new", tmp_path / "gathered")
    reshard(
        tmp_path / "gathered", tmp_path / "out", optimizer_format="fully_reshardable", tp=1, pp=1
    )
    equal(tmp_path / "new", tmp_path / "out")
    reshard(tmp_path / "gathered", tmp_path / "bare", optimizer_format="none")
    assert not any("optim" in t.name for t in open_checkpoint(tmp_path / "bare").tensors)


def test_gathered_state_that_is_none(tmp_path: Path, materialize: Any) -> None:
    write(tmp_path / "new", config(), ParallelConfig(), materialize)
    reshard(tmp_path / "new", tmp_path / "buckets", optimizer_format="dp_reshardable")
    for number, (tree, says) in enumerate(
        (
            ({0: {"buckets": 1}}, "holds"),
            ({0: [1]}, "holds"),
            ("text", "holds"),
            ({0: {(torch.float32, torch.float32): {"param": torch.zeros(2, 2)}}}, "holds"),
            ({0: {(torch.float32, torch.float32): {"param": torch.zeros(8)[::2]}}}, "holds"),
        )
    ):
        target = tmp_path / f"gathered{number}"
        as_gathered(tmp_path / "buckets", target, materialize, tree=tree)
        with pytest.raises(FormatError, match=says) as e:
            open_checkpoint(target)
        assert "dp_group_idx_0" in str(e.value.tensor)
