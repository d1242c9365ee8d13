"""Buckets that are missing, do not add up or are not those of the args: refused with the reason."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megtool import reshard, verify
from megtool.convert.megatron.names import BUCKET
from megtool.dtypes import dtype
from megtool.errors import FormatError, LayoutError, UsageError
from megtool.formats import open_checkpoint
from megtool.formats.torch_dist.layout import MegatronSave, plan_torch_dist_layout
from megtool.megatron_state.optimizer.dp_reshardable import find_buffers
from megtool.options.layout import ParallelConfig
from megtool.source.open import open_source
from megtool.tensors.sharded import GlobalTensor, Shards, widest
from tests.support.checkpoints.old_formats import stored_arrays
from tests.support.checkpoints.optimizer_saves import EXPERTS, save
from tests.support.checkpoints.trained import config, write
from tests.support.errors import raises

Tensors = dict[str, np.ndarray[Any, Any]]
GROUP = "optimizer.distributed.dp_group_idx_"


def rewritten(
    source: Path,
    target: Path,
    materialize: Any,
    change: Callable[[Tensors, dict[str, Any]], None],
    kinds: dict[str, str] | None = None,
) -> Path:
    """The checkpoint with other tensors and objects: `change` alters both (values, lists)."""
    c = open_checkpoint(source)
    arrays = stored_arrays(c)
    objects: dict[str, Any] = {}
    for name, held in c.objects.items():
        assert held.extent is not None
        file, at, length = held.extent
        raw = c.path(file).read_bytes()[at : at + length]
        objects[name] = torch.load(io.BytesIO(raw), weights_only=False)
    change(arrays, objects)
    packed = {}
    for name, value in objects.items():
        item = io.BytesIO()
        torch.save(value, item)
        packed[name] = item.getvalue()
    known = {t.name: t.dtype for t in c.tensors}
    tensors = []
    for name, array in arrays.items():
        kind = dtype((kinds or {}).get(name.rpartition(".")[2], "float32"))
        kind = known[name] if name in known and not (kinds and BUCKET.fullmatch(name)) else kind
        tensors.append(GlobalTensor(name=name, shape=array.shape, dtype=kind))
    rows = [(i, [0] * len(t.shape), list(t.shape), 0) for i, t in enumerate(tensors)]
    laid = plan_torch_dist_layout(
        tensors,
        Shards.build(rows, widest(tensors)),
        num_files=1,
        objects=packed,
        megatron=MegatronSave(common=c.metadata["common"], iteration=7),
    )
    materialize(laid, target, arrays)
    return target


def refused(folder: Path, says: str) -> FormatError:
    with pytest.raises(FormatError, match=says) as e:
        open_source(folder)
    assert e.value.file is not None
    assert e.value.tensor is not None
    assert "--optimizer-format none" in str(e.value.hint) or "missing" in str(e.value.hint)
    open_source(folder, optimizer=False)
    return e.value


def test_as_it_was(tmp_path: Path, materialize: Any) -> None:
    out = save(tmp_path, materialize, tp=2)
    same = rewritten(out, tmp_path / "same", materialize, lambda a, o: None)
    assert verify(tmp_path / "in", same).exit_status == 0


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, materialize: Any) -> Path:
    return save(tmp_path_factory.mktemp("sound"), materialize, tp=2, pp=2)


def first(arrays: Tensors, pattern: str) -> str:
    return next(n for n in sorted(arrays) if re.search(pattern, n))


def test_sizes_that_objects_deny(sound: Path, tmp_path: Path, materialize: Any) -> None:
    name = f"{GROUP}1.per_bucket_numel_unpadded/shard_0_1"

    def change(arrays: Tensors, objects: dict[str, Any]) -> None:
        ((((sizes,),),),) = [[[list(x.values())] for x in v] for v in objects[name]]
        sizes[0] += 64

    e = refused(rewritten(sound, tmp_path / "out", materialize, change), "by this object")
    assert e.tensor == name


@pytest.mark.parametrize("states", [("param", "exp_avg", "exp_avg_sq"), ("exp_avg",)])
def test_buckets_cut_short(
    states: tuple[str, ...], sound: Path, tmp_path: Path, materialize: Any
) -> None:
    def change(arrays: Tensors, objects: dict[str, Any]) -> None:
        for state in states:
            name = first(arrays, rf"dp_group_idx_1\..*\.{state}$")
            arrays[name] = arrays[name][:-16]

    says = "by this object" if len(states) > 1 else "differ in size"
    refused(rewritten(sound, tmp_path / "out", materialize, change), says)


def test_buckets_and_sizes_cut_short(sound: Path, tmp_path: Path, materialize: Any) -> None:
    def change(arrays: Tensors, objects: dict[str, Any]) -> None:
        for name in [n for n in arrays if "dp_group_idx_1." in n]:
            arrays[name] = arrays[name][:-16]
        for name in [n for n in objects if "per_bucket" in n]:
            del objects[name]

    target = rewritten(sound, tmp_path / "out", materialize, change)
    with pytest.raises(FormatError, match=r"do not fit.*dp_group_idx_1.*parameters"):
        open_source(target)


@pytest.mark.parametrize("group", [0, 3])
def test_a_group_is_missing(group: int, sound: Path, tmp_path: Path, materialize: Any) -> None:
    def change(arrays: Tensors, objects: dict[str, Any]) -> None:
        for found in (arrays, objects):
            for name in [n for n in found if f"dp_group_idx_{group}." in n]:
                del found[name]  # type: ignore[attr-defined]

    e = refused(rewritten(sound, tmp_path / "out", materialize, change), "3 data-parallel groups")
    assert f"dp_group_idx_{group}" in str(e.hint)


def test_a_group_too_many(sound: Path, tmp_path: Path, materialize: Any) -> None:
    def change(arrays: Tensors, objects: dict[str, Any]) -> None:
        for name in [n for n in arrays if "dp_group_idx_3." in n]:
            arrays[name.replace("_3.", "_4.")] = arrays[name].copy()

    refused(rewritten(sound, tmp_path / "out", materialize, change), "dp_group_idx_4")


def test_a_bucket_is_missing(tmp_path: Path, materialize: Any) -> None:
    args = {"overlap_grad_reduce": True, "ddp_bucket_size": 1000}
    write(tmp_path / "in", config(), ParallelConfig(), materialize, args=args)
    reshard(tmp_path / "in", tmp_path / "buckets", optimizer_format="dp_reshardable", fsync=False)

    def change(arrays: Tensors, objects: dict[str, Any]) -> None:
        for name in [n for n in arrays if "bucket_idx_1." in n]:
            del arrays[name]

    e = refused(
        rewritten(tmp_path / "buckets", tmp_path / "out", materialize, change), "bucket 1 of"
    )
    assert "bucket_idx_1" in str(e.tensor)


def test_states_that_others_have(sound: Path, tmp_path: Path, materialize: Any) -> None:
    def lose_one(arrays: Tensors, objects: dict[str, Any]) -> None:
        del arrays[first(arrays, r"dp_group_idx_2\..*\.exp_avg_sq$")]

    def lose_main(arrays: Tensors, objects: dict[str, Any]) -> None:
        for name in [n for n in arrays if BUCKET.fullmatch(n) and n.endswith(".param")]:
            del arrays[name]

    refused(rewritten(sound, tmp_path / "one", materialize, lose_one), "no 'exp_avg_sq'")
    refused(rewritten(sound, tmp_path / "main", materialize, lose_main), "no master weights")


def test_states_of_other_dtypes(sound: Path, tmp_path: Path, materialize: Any) -> None:
    def moments(arrays: Tensors, objects: dict[str, Any]) -> None:
        for name in [n for n in arrays if BUCKET.fullmatch(n) and ".exp_avg" in n]:
            arrays[name] = (arrays[name].view("<u4") >> 16).astype("<u2")

    def remainders(arrays: Tensors, objects: dict[str, Any]) -> None:
        for name in [n for n in arrays if BUCKET.fullmatch(n) and n.endswith(".param")]:
            arrays[name] = arrays[name].view("<u4").astype("<i2")

    kinds = {"exp_avg": "bfloat16", "exp_avg_sq": "bfloat16"}
    out = rewritten(sound, tmp_path / "bf16", materialize, moments, kinds)
    found = {t.dtype.name for t in open_source(out).catalogue.tensors if ".exp_avg." in t.name}
    assert found == {"bfloat16"}
    out = rewritten(sound, tmp_path / "int16", materialize, remainders, {"param": "int16"})
    refused(out, "int16 remainders")


def test_lion_has_one_moment(sound: Path, tmp_path: Path, materialize: Any) -> None:
    def change(arrays: Tensors, objects: dict[str, Any]) -> None:
        for name in [n for n in arrays if n.endswith(".exp_avg_sq")]:
            del arrays[name]

    out = rewritten(sound, tmp_path / "lion", materialize, change)
    assert open_source(out).view.states.keys() == {"main", "exp_avg"}
    reshard(out, tmp_path / "there", optimizer_format="fully_reshardable", tp=1, pp=1, fsync=False)
    reshard(tmp_path / "there", tmp_path / "again", optimizer_format="dp_reshardable", fsync=False)
    assert verify(out, tmp_path / "again").exit_status == 0


@pytest.mark.parametrize(("ep", "chain"), [(1, 0), (1, 1), (2, 2)])
def test_optimizers_of_a_chain(ep: int, chain: int, tmp_path: Path, materialize: Any) -> None:
    """A single optimizer may be called the first of a chain; a further one belongs to experts."""
    out = save(tmp_path, materialize, model=EXPERTS, ep=ep, dp=ep)

    def change(arrays: Tensors, objects: dict[str, Any]) -> None:
        for name in [n for n in arrays if BUCKET.fullmatch(n)]:
            rest = name.partition("optimizer.")[2]
            arrays[f"chained_{chain}.optimizer.{rest}"] = arrays.pop(name)
        for name in [n for n in objects if "per_bucket" in n]:
            del objects[name]

    if ep > 1:
        with pytest.raises(FormatError):
            open_source(rewritten(out, tmp_path / "chained", materialize, change))
        return
    chained = rewritten(out, tmp_path / "chained", materialize, change)
    if chain:
        refused(chained, "data-parallel groups")
    else:
        assert verify(tmp_path / "in", chained).exit_status == 0


def test_buffers_are_numbered_over_chunks_that_have_any(tmp_path: Path, materialize: Any) -> None:
    """A virtual stage without experts has no buffer of experts."""
    model = {**EXPERTS, "num_layers": 4, "moe_layer_freq": (0, 0, 1, 1)}
    for optimizer in ("dp_reshardable", "legacy"):
        root = tmp_path / optimizer
        out = save(root, materialize, optimizer, model=model, pp=2, vpp=2, ep=2, dp=2)
        assert verify(root / "in", out).exit_status == 0
        if optimizer == "legacy":
            continue
        found = {
            (b.chain, b.group): b.number for b in find_buffers(open_checkpoint(out)) if b.chain
        }
        assert found == {(1, g): 0 for g in range(4)}


def test_a_sharding_type_that_nobody_knows(sound: Path, tmp_path: Path, materialize: Any) -> None:
    write(tmp_path / "in", config(), ParallelConfig(), materialize)
    c = open_checkpoint(tmp_path / "in")
    common = {**c.metadata["common"], "content_metadata": {"distrib_optim_sharding_type": "odd"}}
    tensors = [
        replace(t, name=t.name.replace("optimizer.state.", "optimizer.odd.")) for t in c.tensors
    ]
    laid = plan_torch_dist_layout(
        tensors,
        Shards(c.shards.tensor, c.shards.boxes, np.zeros_like(c.shards.owner)),
        num_files=1,
        megatron=MegatronSave(common=common, iteration=7),
    )
    arrays = stored_arrays(c)
    renamed = {n.replace("optimizer.state.", "optimizer.odd."): a for n, a in arrays.items()}
    materialize(laid, tmp_path / "odd", renamed)
    e = refused(tmp_path / "odd", "'odd'")
    assert "dp_reshardable" in str(e.message) + str(e.hint)


# ---- impossible targets


@pytest.mark.parametrize(
    ("options", "says", "possible"),
    [
        ({"tp": 3}, "tp=3", "1, 2, 4"),
        ({"pp": 3}, "pp=3", ""),
        ({"ep": 2}, "ep=2", ""),
        ({"pp": 2, "vpp": 3}, "vpp=3|3", ""),
        ({"tp": 8}, "tp=8", "1, 2, 4"),
    ],
    ids=str,
)
@pytest.mark.parametrize("optimizer", ["dp_reshardable", "legacy"])
def test_layouts_that_cannot_be(
    options: dict[str, int], says: str, possible: str, optimizer: str, sound: Path, tmp_path: Path
) -> None:
    to = "megatron" if optimizer == "legacy" else "torch_dist"
    layout = {"tp": 1, "pp": 1, **options}
    with raises(LayoutError, match=says, hint=True) as e:
        reshard(sound, tmp_path / "out", to=to, optimizer_format=optimizer, **layout)
    assert possible in e.value.hint
    assert not (tmp_path / "out").exists()


def test_formats_that_cannot_be(sound: Path, tmp_path: Path) -> None:
    for options, says in (
        ({"optimizer_format": "zero"}, "--optimizer-format is 'zero'"),
        ({"to": "megatron", "optimizer_format": "dp_reshardable"}, "belongs to --to torch_dist"),
        ({"to": "torch_dist", "optimizer_format": "legacy"}, "belongs to --to megatron"),
    ):
        with raises(UsageError, match=says, hint=True):
            reshard(sound, tmp_path / "out", **options)


@pytest.mark.parametrize("version", [2, "1", None])
def test_a_version_of_the_back_end_that_is_not_known(
    version: Any, sound: Path, tmp_path: Path
) -> None:
    shutil.copytree(sound, tmp_path / "out")
    file = tmp_path / "out" / "iter_0000007" / "metadata.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "sharded_backend_version": version})
    )
    with raises(FormatError, match="version", file=file, hint=True):
        open_source(tmp_path / "out")
