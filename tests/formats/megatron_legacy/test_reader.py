"""Megatron's per-rank folders are opened: every tensor, and all that lies beside them."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from megtool.formats import detect_format, open_checkpoint
from megtool.formats.megatron_legacy import reader as megatron_legacy
from megtool.formats.megatron_legacy.ranks import RankSizes, rank_folder_name
from megtool.formats.torch_dist import reader as torch_dist
from megtool.pickles import reader as pickle_reader
from megtool.pickles.zip_writer import encode_object
from tests.support.checkpoints import rank_folders as saved

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
MODEL = "mp_rank_00/model_optim_rng"


def model_tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors that belong into the catalogue, of a file whose optimizer has none."""
    found = dict(saved.leaves({"model": state["model"]}))
    return {k: v for k, v in found.items() if not k.endswith("_extra_state")}


def test_every_tensor_of_a_rank_is_found_where_it_lies(tmp_path: Path) -> None:
    folder = saved.save_all(tmp_path)
    c = open_checkpoint(tmp_path)
    assert c.format == "megatron"
    assert c.root == folder
    assert not c.extents.contained
    saved.check_against(c, MODEL, model_tensors(saved.rank_state()))
    saved.check_against(c, "mp_rank_00/distrib_optim", dict(saved.leaves(saved.buckets())))
    assert "mp_rank_00/distrib_optim/0/torch.bfloat16,torch.bfloat16/exp_avg" in c
    assert not c.warnings
    c.check_unchanged()


def test_what_lies_beside_the_tensors_is_told(tmp_path: Path) -> None:
    saved.save_all(tmp_path, tp=2, pp=2)
    m = open_checkpoint(tmp_path).metadata
    assert m["iteration"] == 7
    assert m["checkpoint_version"] == 3.0
    assert m["args"]["hidden_size"] == 8
    assert m["args"]["params_dtype"] == "torch.bfloat16"
    assert m["args"]["save"] == "/somewhere/save"
    assert m["ranks"] == {f"mp_rank_{t:02d}_{p:03d}": (t, p, None) for t in (0, 1) for p in (0, 1)}
    common = m["common"]
    assert list(common) == [
        "args",
        "checkpoint_version",
        "iteration",
        "optimizer",
        "opt_param_scheduler",
        "num_floating_point_operations_so_far",
    ]
    assert common["optimizer"]["optimizer"] == {"param_groups": [{"lr": 0.1, "step": 3}]}
    assert common["num_floating_point_operations_so_far"] == 1 << 70
    assert common["args"].state["hidden_size"] == 8
    assert list(m["rank_trees"]) == list(m["ranks"])
    again = torch.load(
        io.BytesIO(encode_object(m["rank_trees"]["mp_rank_01_001"])), weights_only=False
    )
    expected = saved.rank_state()
    extra = {k: v for k, v in expected["model"].items() if k.endswith("_extra_state")}
    assert list(again["model"]) == list(extra)
    assert again["model"]["decoder.layers.0.mlp.linear_fc2._extra_state"].tolist() == [*range(5)]
    state = again["rng_state"][0]
    assert state["random_rng_state"] == expected["rng_state"][0]["random_rng_state"]
    assert torch.equal(state["cuda_rng_state"], saved.random_state()[0]["cuda_rng_state"])
    assert np.array_equal(state["np_rng_state"][1], saved.random_state()[0]["np_rng_state"][1])
    assert torch.equal(again["optimizer"]["grad_scaler"]["scale"], torch.tensor([4.0]))


def test_optimizers_with_a_state_for_each_parameter(tmp_path: Path) -> None:
    state = saved.rank_state(use_distributed_optimizer=False)
    weights = [v for v in state["model"].values() if isinstance(v, torch.Tensor)]
    moments = {
        i: {"step": torch.tensor(3.0), "exp_avg": torch.randn(4, 2), "exp_avg_sq": torch.ones(4, 2)}
        for i in range(3)
    }
    state["optimizer"] = [
        {
            "optimizer": {"state": moments, "param_groups": [{"lr": torch.tensor(0.5)}]},
            "grad_scaler": {"scale": torch.ones(1)},
            "fp32_from_fp16_params": [[w.float() for w in weights[:2]], []],
            "fp32_from_fp32_params": [
                [],
                [state["model"]["decoder.layers.0.mlp.linear_fc2.weight"]],
            ],
        },
        {"optimizer": {"state": {}, "param_groups": []}},
    ]
    saved.save(tmp_path / "iter_0000007/mp_rank_00", model_optim_rng=state)
    c = open_checkpoint(tmp_path)
    at = "optimizer/0/optimizer/state"
    paths = {f"{at}/{i}/{k}" for i in range(3) for k in ("exp_avg", "exp_avg_sq")}
    paths |= {f"optimizer/0/fp32_from_fp16_params/0/{i}" for i in range(2)}
    found = dict(saved.leaves({"optimizer": state["optimizer"]}))
    saved.check_against(c, MODEL, model_tensors(state) | {p: found[p] for p in paths})
    alias = f"{MODEL}/optimizer/0/fp32_from_fp32_params/1/0"
    assert c.metadata["aliases"] == {alias: f"{MODEL}/model/decoder.layers.0.mlp.linear_fc2.weight"}
    kept = c.metadata["common"]["optimizer"][0]["optimizer"]["state"]
    assert {i: list(v) for i, v in kept.items()} == {i: ["step"] for i in range(3)}
    assert len(pickle_reader.find_references(kept)) == 3
    tree = c.metadata["trees"]["mp_rank_00/model_optim_rng.pt"]
    assert tree["optimizer"][0]["fp32_from_fp32_params"][1][0].name == c.metadata["aliases"][alias]


def test_views_ties_and_transposes(tmp_path: Path) -> None:
    state = saved.rank_state()
    base = torch.randn(6, 10)
    state["model"] = {
        "a": base[:2],
        "turned": base[2:].t(),
        "gappy": torch.randn(8, 9)[:, 2:5],
        "one": torch.nn.Parameter(torch.randn(3, 3)),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "fp8": torch.randn(5).to(torch.float8_e4m3fn),
        "bytes": torch.arange(6, dtype=torch.uint8),
    }
    state["model"]["tied"] = state["model"]["one"]
    saved.save(tmp_path / "mp_rank_00", model_optim_rng=state)
    c = open_checkpoint(tmp_path)
    assert c.extents.contained
    assert c.metadata["aliases"] == {f"{MODEL}/model/tied": f"{MODEL}/model/one"}
    wanted = {f"model/{k}": v for k, v in state["model"].items() if k != "tied"}
    saved.check_against(c, MODEL, wanted)
    rows = np.array([c.index[f"{MODEL}/model/{n}"] for n in ("turned", "a")])
    assert c.locate(rows).strides == {0: (1, 10)}
    chosen = c.select(lambda name: name.endswith(("turned", "fp8")))
    assert saved.stored(chosen)[f"{MODEL}/model/turned"] == saved.raw(base[2:].t())


def test_a_pipeline_in_parts_and_chained_buckets(tmp_path: Path) -> None:
    state = saved.rank_state()
    chunk = state.pop("model")
    state |= {"model0": chunk, "model1": saved.model(5)}
    optimizer = [saved.buckets(), None, saved.buckets(3)]
    saved.save(tmp_path / "mp_rank_00", model_optim_rng=state, distrib_optim=optimizer)
    c = open_checkpoint(tmp_path)
    wanted = dict(saved.leaves({"model0": chunk, "model1": state["model1"]}))
    saved.check_against(c, MODEL, {k: v for k, v in wanted.items() if "_extra" not in k})
    saved.check_against(c, "mp_rank_00/distrib_optim", dict(saved.leaves(optimizer)))


def test_an_old_checkpoint_of_nested_modules(tmp_path: Path) -> None:
    weight = torch.randn(4, 4)
    state = {
        "args": saved.args(model_parallel_size=1),
        "total_iters": 12,
        "model": {"language_model": {"embedding": {"word_embeddings": {"weight": weight}}}},
        "lr_scheduler": {"max_lr": 1.0},
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.get_rng_state(),
    }
    del state["args"].tensor_model_parallel_size
    saved.save(tmp_path / "release/mp_rank_00", model_optim_rng=state)
    c = open_checkpoint(tmp_path)
    name = "model/language_model/embedding/word_embeddings/weight"
    saved.check_against(c, MODEL, {name: weight})
    assert c.metadata["checkpoint_version"] == 0
    assert "iteration" not in c.metadata
    assert list(c.metadata["common"]) == ["args", "total_iters", "lr_scheduler"]
    folder = tmp_path / "iter_0000012"
    (tmp_path / "release").rename(folder)
    assert open_checkpoint(tmp_path).metadata["iteration"] == 12
    folder.rename(tmp_path / "iter_0000013")
    c = open_checkpoint(tmp_path)
    assert c.metadata["iteration"] == 12
    assert c.warnings[0] == "the files in iter_0000013 are of iteration 12"


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ({"tp": 2}, {"mp_rank_01": (1, None, None)}),
        ({"tp": 2, "pp": 2}, {"mp_rank_01_000": (1, 0, None)}),
        ({"tp": 2, "ep": 2}, {"mp_rank_00_001": (0, None, 1)}),
        ({"pp": 2, "ep": 2}, {"mp_rank_00_001_000": (0, 1, 0)}),
    ],
)
@pytest.mark.parametrize("has_args", [True, False])
def test_ranks_are_told_by_args_or_by_what_they_hold(
    tmp_path: Path, sizes: dict[str, int], ranks: dict[str, Any], has_args: bool
) -> None:
    folder = saved.save_all(tmp_path, **sizes)
    if not has_args:
        for file in folder.glob("*/model_optim_rng.pt"):
            state = torch.load(file, weights_only=False)
            del state["args"]
            torch.save(state, file)
    c = open_checkpoint(tmp_path)
    found = c.metadata["ranks"]
    assert len(found) == int(np.prod(list(sizes.values())))
    assert {k: found[k] for k in ranks} == ranks
    assert all(rank_folder_name(rank) == name for name, rank in found.items())
    assert ("args" in c.metadata) == has_args
    assert bool(c.warnings) != has_args


def test_experts_are_cut_by_tensors_of_their_own(tmp_path: Path) -> None:
    folder = saved.save_all(tmp_path, tp=2, ep=2, expert_tensor_parallel_size=1)
    for other in ("mp_rank_00_001", "mp_rank_01_000"):
        shutil.rmtree(folder / other)
    assert list(open_checkpoint(tmp_path).metadata["ranks"]) == ["mp_rank_00_000", "mp_rank_01_001"]
    # A rank that is only the first of its experts, in a stage without any, has no optimizer file.
    assert RankSizes(tp=1, pp=1, ep=2, etp=1).writing_ranks() == {
        (0, None, 0): True,
        (0, None, 1): False,
    }
    other = saved.save_all(tmp_path / "dense", ep=2)
    for file in other.glob("*/model_optim_rng.pt"):
        state = torch.load(file, weights_only=False)
        del state["model"]["decoder.layers.0.mlp.experts.linear_fc1.weight0"]
        torch.save(state, file)
    (other / "mp_rank_00_001/distrib_optim.pt").unlink()
    assert len(open_checkpoint(other).files) == 3


def test_save_folders_mix_formats(tmp_path: Path) -> None:
    saved.save_all(tmp_path, iteration=5)
    newer = tmp_path / "iter_0000006"
    (newer / "mp_rank_00").mkdir(parents=True)
    torch.save({}, newer / "mp_rank_00/train_dataloader_dprank000.pt")
    assert open_checkpoint(tmp_path).metadata["iteration"] == 5
    assert not megatron_legacy.detect(newer)
    dcp.save({"t": torch.ones(2)}, checkpoint_id=newer, no_dist=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("6")
    assert detect_format(tmp_path).names[0] == "torch_dist"
    assert not megatron_legacy.detect(tmp_path)
    c = open_checkpoint(tmp_path, iteration=5)
    assert c.format == "megatron"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    assert not torch_dist.detect(tmp_path)
    assert open_checkpoint(tmp_path).format == "megatron"
    assert open_checkpoint(tmp_path, iteration=6).format == "dcp"
    assert open_checkpoint(tmp_path / "iter_0000005", iteration=5).format == "megatron"


def test_opening_reads_no_tensor_data(tmp_path: Path) -> None:
    state = saved.rank_state()
    state["model"] = {f"w{i}": torch.zeros(1 << 19) for i in range(20)}
    saved.save(tmp_path / "mp_rank_00", model_optim_rng=state)
    small = sum(len(n.data or b"") for n in pickle_reader.find_references(_tree(tmp_path)))
    before = int(Path("/proc/self/io").read_text().split()[1])
    open_checkpoint(tmp_path)
    read = int(Path("/proc/self/io").read_text().split()[1]) - before
    assert read < small + 40_000 < os.stat(tmp_path / "mp_rank_00/model_optim_rng.pt").st_size / 100


def _tree(path: Path) -> Any:
    return open_checkpoint(path).metadata["rank_trees"]["mp_rank_00"]


def test_files_beside_the_ranks_travel(tmp_path: Path) -> None:
    folder = saved.save_all(tmp_path)
    (folder / "hf").mkdir()
    (folder / "hf/config.json").write_text("{}")
    torch.save({}, folder / "mp_rank_00/layer_wise_optimizer_0.pt")
    (folder / "mp_rank_x").mkdir()
    c = open_checkpoint(folder)
    assert list(c.auxiliary_files) == ["hf/config.json"]
    assert [w.split(" is ")[0] for w in c.warnings] == [
        "mp_rank_x",
        "mp_rank_00/layer_wise_optimizer_0.pt",
    ]
